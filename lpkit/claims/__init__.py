"""Is X better than Y? A file says beforehand what will be compared (`protocol`), runs are made
(`runs`), and a referee says what was seen and what could not have been (`referee`, `settle`)."""
