"""Training makes a Run of a Config: it builds, updates, evaluates, saves and goes on."""
