"""Corrects Triton's interpreter (3.6 to 3.9), which runs kernels on a CPU in tests.

What the interpreter does wrong:
- Conversions truncate where hardware rounds to nearest-even. float32 to bf16 loses half a bit. FP8
  loses a carry, so that 127.4 becomes 64 in E4M3. `mend` replaces its conversions by PyTorch's.
- `tl.dot` multiplies and adds the bit patterns of bf16 numbers. `mend` converts them first.
- `tl.fma` rounds twice. `mend` computes it in float64.
- At every function call in a kernel, it searches for functions to replace, which is slow.
  `mend_calls` searches once.
- From numpy 2.4 on, Triton 3.6 does not accept a number of a kernel as the bound of a loop
  (triton-lang/triton#9171). `mend_calls` makes it accept such numbers.
- It does not detect stores out of bounds. This is not corrected.
"""

from functools import cache

import numpy as np
import torch
import triton.language as tl


@cache
def mend_calls() -> None:
    """Correct the interpreter's loops and calls, once in this process. This changes no result."""
    from triton.runtime import interpreter

    builtins: dict[object, list[str]] = {}
    plain_tensor = interpreter._patch_lang_tensor

    def patch(owner, made_by, scope):
        if owner not in builtins:
            builtins[owner] = [name for name in dir(owner)
                               if tl.core.is_builtin(getattr(owner, name, None))]
        for name in builtins[owner]:
            member = getattr(owner, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(owner, name, member, made_by, scope)

    def patch_tensor(tensor, scope):
        plain_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_builtin, interpreter._patch_lang_tensor = patch, patch_tensor


@cache
def mend() -> None:
    """Correct everything, once in this process. A conversion to FP8 then saturates, like the
    hardware's instruction `cvt.rn.satfinite`."""
    from triton.runtime import interpreter

    mend_calls()
    dtypes = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32,
              tl.float64: torch.float64, tl.float8e4nv: torch.float8_e4m3fn,
              tl.float8e5: torch.float8_e5m2}
    builder, numpy_dtype = interpreter.InterpreterBuilder, interpreter._get_np_dtype
    plain_cast, plain_dot = builder.cast_impl, builder.create_dot

    def tensor(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        data = np.ascontiguousarray(data).reshape(np.shape(data))
        whole = {1: np.uint8, 2: np.int16, 4: np.float32, 8: np.float64}[dtype.itemsize]
        return torch.from_numpy(data.view(whole).copy()).view(dtype)

    def cast(self, source, kind, *_):
        ours, theirs = dtypes.get(source.dtype.scalar), dtypes.get(kind.scalar)
        if ours is None and theirs is None:
            return plain_cast(self, source, kind)
        if ours is None:        # an integer or a boolean
            values = torch.from_numpy(np.asarray(source.data).astype(np.float64))
        else:
            values = tensor(source.data, ours)
        if theirs is None:
            converted = values.double().nan_to_num(0.0).numpy().astype(numpy_dtype(kind))
        else:
            if theirs.itemsize == 1:
                values = values.float().clamp(-torch.finfo(theirs).max, torch.finfo(theirs).max)
                values[values.isnan()] = torch.nan      # a GPU's NaN has no sign
            whole = {1: torch.uint8, 2: torch.int16}.get(theirs.itemsize, theirs)
            converted = values.to(theirs).view(whole).numpy().view(numpy_dtype(kind))
        return interpreter.TensorHandle(converted.reshape(np.shape(source.data)), kind.scalar)

    def dot(self, a, b, total, *how):
        return plain_dot(self, *(cast(self, matrix, tl.float32) for matrix in (a, b)), total, *how)

    def fma(self, x, y, z):     # float64 represents the product of two float32 numbers exactly
        with np.errstate(all="ignore"):
            total = np.asarray(x.data.astype(np.float64) * y.data + z.data).astype(z.data.dtype)
        return interpreter.TensorHandle(np.where(np.isnan(total), np.float32(np.nan), total),
                                        z.dtype.scalar)

    builder.cast_impl = builder.create_fp_to_fp = cast
    builder.create_fma = fma
    builder.create_dot = dot
