"""The model: layers, attention, Transformer."""

# Raised when the same config and the same weights give another function: a run says which it has.
VERSION = 1
