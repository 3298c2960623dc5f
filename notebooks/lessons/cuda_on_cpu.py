"""add_rms_norm.cu without a GPU: a C++ compiler compiles the same source with the header
cuda_on_cpu.h, which runs each thread of a block as a thread of the CPU."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lessons.cuda_norm import COMPILERS, SHARED_BYTES, SOURCE, row_of_vectors
from lpkit.errors import ConfigError
from lpkit.files import own_cache, private_folder

# the C++ program; its two placeholders are the floats of shared memory and the text of SOURCE
TEXT = """
#include "cuda_on_cpu.h"
static float row[%d];
%s
#define FOR(name, T) extern "C" void name(const T* x, const T* delta, const float* w, T* s, T* y, \\
                                          float* r, int M, int N, float eps) \\
{ launch(M, 64, [&] { add_rms_norm<T>(x, delta, w, s, y, r, N, eps); }); }
FOR(float32, float)
FOR(bfloat16, bits16)
"""
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")


@functools.cache
def for_cpu() -> tuple[Callable[..., tuple[Tensor, ...]] | None, str]:
    """Compile the forward kernel for the CPU. Return the function (x, delta, w, eps) ->
    (s = x + delta, y = RMSNorm of s times w, 1 / rms of each row) and a clause about how it was
    compiled; or None and a clause about why it cannot be compiled."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None, f"there is no C++ compiler ({', '.join(COMPILERS)})"
    # TEXT declares the shared memory as a global array, so its declaration in the kernel is removed
    kernel = SOURCE.read_text().replace("extern __shared__ float row[];", "")
    try:
        cache = private_folder(own_cache())
    except (OSError, ConfigError) as error:
        return None, str(error)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        path = Path(folder, "norm.so")
        command = [compiler, *FLAGS, f"-I{SOURCE.parent}", "-x", "c++", "-", "-o", str(path)]
        done = subprocess.run(command, input=TEXT % (SHARED_BYTES // 4, kernel), text=True,
                              capture_output=True)
        if done.returncode:
            return None, f"{Path(compiler).name} cannot compile threads of C++20"
        library = ctypes.CDLL(str(path))

    def run(x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        N, w = row_of_vectors(x, delta), w.float().contiguous()
        s, y, r = torch.empty_like(x), torch.empty_like(x), w.new_empty(x.shape[:-1])
        pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, delta, w, s, y, r))
        library[str(x.dtype).removeprefix("torch.")](*pointers, r.numel(), N, ctypes.c_float(eps))
        return s, y, r

    return run, f"compiled by {Path(compiler).name}; each thread of a block is a CPU thread"
