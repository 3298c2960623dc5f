"""Techniques decide what a step keeps, where and in how many bits: one file per family of
techniques, one row per name of `MemoryConfig`.

Each leaves the gradient as it was, bit for bit or within the error that docs/memory.md states, and
takes or moves bytes.
"""
