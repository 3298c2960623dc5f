"""Choices that are made on the machine: a run's kernels, its attention, and what is compiled."""
