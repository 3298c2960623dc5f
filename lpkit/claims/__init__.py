"""Test whether X is better than Y. A file fixes the comparison beforehand (`protocol`), `runs`
makes the runs, and a referee (`referee`, `settle`) says what was measured and what the test could
not have detected."""
