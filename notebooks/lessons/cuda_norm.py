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

SOURCE = resource("notebooks") / "lessons" / "add_rms_norm.cu"     # not in copies of the course
SHARED_BYTES = 48 * 1024        # shared memory of a block, without requesting more
VECTOR_BYTES = 16
COMPILERS = ("c++", "g++", "clang++")


def why_not() -> str:
    """Return in one clause why it cannot be compiled or run here; empty if it can."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME
    if home is None or not shutil.which("nvcc", path=os.path.join(home, "bin")):
        return "there is no nvcc here (CUDA's toolkit brings it; Triton's twin does without)"
    if not any(map(shutil.which, COMPILERS)):
        return "there is no C++ compiler here"
    return ""


@functools.cache
def _library() -> Any:
    if why := why_not():
        raise ConfigError(f"the CUDA kernel cannot be compiled: {why}")
    from torch.utils import cpp_extension

    folder = private_folder(own_cache(f"cuda-{torch.__version__}"))
    return cpp_extension.load(
        name="lpkit_add_rms_norm", sources=[str(SOURCE)], build_directory=str(folder),
        extra_cuda_cflags=["-O3", "-DLPKIT_WITH_ATEN"])


def row_of_vectors(x: Tensor, delta: Tensor) -> int:
    """Return the elements of a row. Raises ConfigError for rows that the kernel cannot hold."""
    N = row_length(x, delta)
    if 4 * N > SHARED_BYTES or N * x.itemsize % VECTOR_BYTES:
        raise ConfigError(f"the CUDA kernel holds rows of whole 16 bytes and at most "
                          f"{SHARED_BYTES // 4:,} elements; got {N:,} of {x.dtype}")
    return N


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, delta, w = x.contiguous(), delta.contiguous(), w.float().contiguous()
        row_of_vectors(x, delta)
        s, y, r = _library().forward(x, delta, w, eps)
        ctx.save_for_backward(s, w, r)
        return s, y

    @staticmethod
    def backward(ctx, ds: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        s, w, r = ctx.saved_tensors         # backward is Triton's
        dx, dw, _ = norm.backward(s, w, dy.contiguous(), ds.contiguous(), r.new_empty(0), r, False,
                                  False)
        return dx, dx, dw, None


def add_rms_norm(x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`norm.add_rms_norm`; rejects rows whose size is not a multiple of 16 bytes."""
    return _AddRMSNorm.apply(x, delta, w, eps)


ADD_RMS_NORM = replace(norm.ADD_RMS_NORM, versions={**norm.ADD_RMS_NORM.versions,
                                                    "cuda": add_rms_norm})
