"""From a Config to a Run: build, update, evaluate, save, go on."""
