"""add_rms_norm.cu, compiled by PyTorch on first use: a CUDA version of the Triton kernel in
`lpkit.kernels.norm`.

It needs a GPU, nvcc and a C++ compiler; `why_not()` names what is missing. `cuda_on_cpu` runs the
same source on a CPU. On an H200, Triton's forward is 1.13 to 1.18 times as fast
(data/measured/kernels-nvidia-h200-one-round.json), so runs do not offer this kernel.
"""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.files import own_cache, private_folder, resource
from lpkit.kernels import norm
from lpkit.kernels.kernel import row_length

# in the package; a learner's copy of the lessons has only Python modules
SOURCE = resource("notebooks") / "lessons" / "add_rms_norm.cu"
SHARED_BYTES = 48 * 1024        # shared memory that a block gets without an opt-in
VECTOR_BYTES = 16               # a thread loads and stores 16 bytes at a time
COMPILERS = ("c++", "g++", "clang++")


def why_not() -> str:
    """Return in one clause why the kernel cannot be compiled or run on this machine; "" if it
    can."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None or not shutil.which("nvcc", path=os.path.join(home, "bin")):
        return ("there is no nvcc, which is part of the CUDA toolkit; the Triton kernel needs "
                "none")
    if not any(map(shutil.which, COMPILERS)):
        return f"there is no C++ compiler ({', '.join(COMPILERS)})"
    return ""


@functools.cache
def _library() -> Any:
    """Compile the kernel (once per version of PyTorch; the result is cached on disk) and return
    its module, with the function `forward`. Raises ConfigError where `why_not` has a reason."""
    if why := why_not():
        raise ConfigError(f"the CUDA kernel cannot be compiled: {why}")
    from torch.utils import cpp_extension

    folder = private_folder(own_cache(f"cuda-{torch.__version__}"))
    return cpp_extension.load(
        name="lpkit_add_rms_norm", sources=[str(SOURCE)], build_directory=str(folder),
        extra_cuda_cflags=["-O3", "-DLPKIT_WITH_ATEN"])


def row_of_vectors(x: Tensor, delta: Tensor) -> int:
    """Return the number of elements N of a row of x (..., N) and `delta` (the same shape). Raises
    ConfigError for rows that the kernel cannot hold in shared memory as float32, or whose bytes are
    not a multiple of VECTOR_BYTES."""
    N = row_length(x, delta)
    if 4 * N > SHARED_BYTES or N * x.itemsize % VECTOR_BYTES:
        raise ConfigError(f"the CUDA kernel takes rows of at most {SHARED_BYTES // 4:,} elements "
                          f"whose size is a multiple of {VECTOR_BYTES} bytes; got rows of {N:,} "
                          f"elements of {x.dtype}; use the Triton kernel")
    return N


class _AddRMSNorm(torch.autograd.Function):
    """s = x + delta; y = s / rms(s) * w. Forward is the CUDA kernel; backward is the Triton kernel
    of `lpkit.kernels.norm`."""

    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return s = x + delta and y = RMSNorm of s times w, (..., N) each."""
        x, delta, w = x.contiguous(), delta.contiguous(), w.float().contiguous()
        row_of_vectors(x, delta)
        s, y, r = _library().forward(x, delta, w, eps)
        ctx.save_for_backward(s, w, r)
        return s, y

    @staticmethod
    def backward(ctx, ds: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients of x, delta, w and eps, given those of s and y."""
        s, w, r = ctx.saved_tensors         # r: 1 / rms of each row of s
        dx, dw, _ = norm.backward(s, w, dy.contiguous(), ds.contiguous(), r.new_empty(0), r, False,
                                  False)
        return dx, dx, dw, None     # x and delta have equal gradients: s is their sum


def add_rms_norm(x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, its RMSNorm times w), as `norm.add_rms_norm` does. Shapes: x and delta
    (..., N), w (N,). Raises ConfigError as `row_of_vectors` does."""
    return _AddRMSNorm.apply(x, delta, w, eps)


ADD_RMS_NORM = replace(norm.ADD_RMS_NORM, versions={**norm.ADD_RMS_NORM.versions,
                                                    "cuda": add_rms_norm})
