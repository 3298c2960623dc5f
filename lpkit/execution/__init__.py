"""Choices that a machine makes for a run: its kernels, its attention, and what is compiled."""
