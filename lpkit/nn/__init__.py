"""The model: layers, attention, Transformer."""

# Increase this number when the same config and weights compute another function. A run records it.
VERSION = 1
