"""Techniques that reduce or move the memory of a training step: which tensors are kept, where, and
in how many bits. A file has one family of techniques, one field of `MemoryConfig`.

The gradients stay the same, bit for bit or within the error that docs/memory.md states.
"""
