"""Trains a Config to a Run: builds the model, updates, evaluates, saves and resumes."""
