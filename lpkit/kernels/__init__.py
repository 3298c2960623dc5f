"""One kernel per file: `reference` in plain PyTorch, the fast one, tested against each other.

`kernel` says what a kernel is, `choose` which version runs, `pytorch` what stands in layers until
one was chosen. Kernels are operators, so that torch.compile and a trace see them. On a CPU some are
C (`rows.c`, `cast.c`, by `compile_c`). `tests/pages/kernels.py` compiles every Triton kernel for
four generations of GPUs without one: tests hold them to no spills, no calls, wide accesses and the
shared memory there is.
"""
