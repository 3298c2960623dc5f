"""The model: layers, attention, Transformer."""

# Raised when the same config and weights compute another function. A run records its version.
VERSION = 1
