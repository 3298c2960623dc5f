"""Chooses, on the machine of a run, its kernels, its attention, and what is compiled."""
