"""Kernels, one per file: a `reference` in plain PyTorch and a fast version, tested against each
other.

`kernel` defines what a kernel is, `choose` decides which version runs, and `pytorch` has the
versions that layers use until another one is chosen. Kernels are operators, so that torch.compile
and a trace see them. On a CPU some are C (`rows.c`, `cast.c`, by `compile_c`).
`tests/pages/kernels.py` compiles every Triton kernel for four generations of GPUs without having a
GPU; tests check that there are no spills and no calls, that accesses are wide, and that shared
memory suffices.
"""
