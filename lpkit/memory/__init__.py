"""Techniques that decide what a step keeps, where and in how many bits: one file per family of
techniques, one row per name of `MemoryConfig`.

Each technique takes or moves bytes. The gradient stays the same, bit for bit or within the error
that docs/memory.md states.
"""
