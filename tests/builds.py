"""What is proved of a kernel of the kit beside its numbers: the machine code that a compiler makes of
it, and the bytes that it must move. `tests.pages.kernels` compiles the builds, benches time the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpkit.kernels import (
    amax,
    cast_blocks,
    cast_nvfp4,
    cast_rows,
    cast_tensor,
    cross_entropy,
    flash_attention,
    norm,
    rotary,
    swiglu,
)
from lpkit.kernels.cast_blocks import BOTH, BOTH_MX, MX_SIDE, ONE, WHOLE
from lpkit.kernels.jit import tl, triton
from lpkit.kernels.rounding import grid
from lpkit.nn.attention import CAUSAL
from lpkit.optim import one_pass
from lpkit.techniques.kernels import KERNELS


@dataclass(frozen=True, kw_only=True)
class Build:
    """A Triton kernel compiled ahead of time. `signature`: the types of its arguments in Triton's
    words, "*bf16", "i32", by name; `constants`: its constexpr arguments by name; `way`: what else is
    asked of it, in words."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    way: str = ""
    warps: int = 4
    stages: int = 3                     # of a loop whose loads go ahead
    unaligned: tuple[str, ...] = ()     # arguments that need not be multiples of 16


@dataclass(frozen=True, kw_only=True)
class Proof:
    """moved_bytes: that any version must read and write, for given arguments, forward.
    typical:     arguments of a training step's size, on the meta device, by what they stand for.
    builds:      what the tests compile for GPUs; more_builds: what the page has besides.
    """

    moved_bytes: Callable[..., int]
    typical: Callable[[], Mapping[str, tuple]] = dict
    builds: tuple[Build, ...] = ()
    more_builds: tuple[Build, ...] = ()


def build(kernel: Any, types: Mapping[str, str], shape: Mapping[str, int],
          **constants: Any) -> Build:
    """With those of the types and constants that are its arguments. `shape`: of a program, its
    constants and `num_warps`."""
    constants = {name: value for name, value in {**constants, **shape}.items()
                 if name in kernel.arg_names}
    signature = {name: types[name] for name in types if name in kernel.arg_names}
    return Build(kernel=kernel, signature=signature, constants=constants, unaligned=("count",),
                 warps=shape["num_warps"])


def matrix(M: int = 16384, N: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On the meta device: shapes without memory."""
    return torch.empty(M, N, dtype=dtype, device="meta")


# Norms

def _norm_typical(add: bool, bias: bool) -> tuple:
    w = matrix(1, 4096, torch.float32)[0]
    return matrix(), *([matrix()] if add else []), w, *([w] if bias else []), 1e-5


def _norm_bytes(x: Tensor, *others: Tensor | float | None) -> int:
    tensors = [t for t in (x, *others) if torch.is_tensor(t)]
    written = sum(t.nbytes for t in tensors if t.shape == x.shape)  # y, and s beside a delta
    return sum(t.nbytes for t in tensors) + written


def _norm_builds(centred: bool, bias: bool, add: bool) -> tuple[Build, ...]:
    said = {"CENTRED": centred, "BIAS": bias, "ADD": add, "BLOCK": 4096}
    forward = dict.fromkeys(("x", "s", "y", "delta"), "*bf16") | dict.fromkeys(
        ("w", "b", "mean", "r"), "*fp32") | {"N": "i32", "eps": "fp32"}
    backward = dict.fromkeys(("s", "dy", "ds", "dx"), "*bf16") | dict.fromkeys(
        ("w", "mean", "r", "dw", "db"), "*fp32") | {"M": "i32", "N": "i32"}
    return (Build(kernel=norm._forward, signature=forward, constants=said, warps=8, unaligned=("eps",)),
            Build(kernel=norm._backward, signature=backward, constants=said, warps=8, unaligned=("M",)))


def _norm(*, bias: bool, add: bool) -> Proof:
    return Proof(moved_bytes=_norm_bytes, typical=lambda: {"": _norm_typical(add, bias)},
                 builds=_norm_builds(centred=bias, bias=bias, add=add))


# Attention

WAYS = {"": (), "window": ("window",), "documents": ("documents", "bound"),     # what else a program is given
        "blocks": ("tiles", "counts", "table"), "cap, sinks": ("cap", "sinks")}


def _attention_typical() -> tuple:
    q, *others = (torch.empty(4, heads, 4096, 128, dtype=torch.bfloat16, device="meta")
                  for heads in (32, 8, 8))
    return q, *others, None, None, CAUSAL


def _attention_build(kernel: Any, which: str, E: int, way: str) -> Build:
    counts = ("T", "H", "repeats", "window", "global_tokens", "block", "across", "listed")
    floats, more = ("scale", "cap", "slope"), set().union(*WAYS.values())
    types = dict.fromkeys(("q", "k", "v", "out", "d_out", "dq", "dk", "dv"), "*bf16") \
        | dict.fromkeys(("lse", "deltas", "sinks"), "*fp32") \
        | dict.fromkeys(("bound", "tiles", "counts"), "*i32") | {"documents": "*i64", "table": "*u8"} \
        | dict.fromkeys([f"{name}_{axis}" for name in "qkv" for axis in "bht"] + [*counts], "i32") \
        | dict.fromkeys(floats, "fp32")
    shape = flash_attention._shape(which, E, narrower=bool({"documents", "table"} & {*WAYS[way]}))
    constants = {**dict.fromkeys(more - {*WAYS[way]}), "E": E, **shape}
    return Build(kernel=kernel, way=way, warps=shape["num_warps"], stages=shape["num_stages"],
                 signature={name: types[name] for name in kernel.arg_names
                            if name in types and name not in constants},
                 constants={name: constants[name] for name in kernel.arg_names if name in constants},
                 unaligned=(*counts, *floats))


def _attention_builds(*ways: str) -> tuple[Build, ...]:
    """For heads of 64, 128 and 256."""
    kernels = {"forward": flash_attention._forward, "queries": flash_attention._backward_queries,
               "keys": flash_attention._backward_keys}
    return tuple(_attention_build(kernel, which, E, way) for E in (64, 128, 256) for way in ways
                 for which, kernel in kernels.items() if triton is not None)


# Casts

_TENSOR = {"x": "*bf16", "history": "*fp32", "state": "*i32", "count": "*i64", "words": "*i64",
           "rows": "*fp8e4nv", "columns": "*fp8e4nv", "M": "i32", "N": "i32"}
_ROWS = {"x": "*bf16", "data": "*fp8e4nv", "scale": "*fp32", "count": "*i64", "tops": "*i32",
         "words": "*i64", "M": "i32", "K": "i32", "N": "i32"}
_BLOCKS = {"x": "*bf16", "rows": "*fp8e4nv", "row_scale": "*fp32", "columns": "*fp8e4nv",
           "column_scale": "*fp32", "count": "*i64", "words": "*i64", "M": "i32", "N": "i32"}
_MX = {**_BLOCKS, "row_scale": "*u8", "column_scale": "*u8"}
_NVFP4 = {"x": "*bf16", "state": "*i32", "words": "*i64", "rows": "*u8", "row_scale": "*fp8e4nv",
          "columns": "*u8", "column_scale": "*fp8e4nv", "tensor": "*fp32", "M": "i32", "N": "i32",
          "G": "i32", "data": "*i64", "scale": "*fp8e4nv", "count": "*i64"}


def _tensor_build(**how: bool) -> Build:
    return build(cast_tensor._cast, _TENSOR, cast_tensor.TILE, TO=grid("e4m3fn", "float32"),
                 ROWS=True, COLUMNS=True, **how)


def _rows_build(function: Any, shape: dict[str, int], *, NOISE: bool = False) -> Build:
    return build(function, _ROWS, shape, TO=grid("e4m3fn", "float32"), NOISE=NOISE)


def _blocks_build(function: Any, shape: dict[str, int] = ONE, **how: Any) -> Build:
    how = {"TO": grid("e4m3fn", "float32"), "ROWS": True, "COLUMNS": False, "NOISE": False,
           "MX": False, "SWIZZLED": False, "SIDE": 128, **how}
    return build(function, _MX if how["MX"] else _BLOCKS, shape, **how)


def _nvfp4_build(function: Any, shape: dict[str, int], **how: Any) -> Build:
    how = {"TO": grid("e2m1", "e4m3"), "SQUARE": False, "ROWS": True, "COLUMNS": False, "MIX": True,
           "NEGATIVE": cast_nvfp4.NEGATIVE, "SWIZZLED": True, "NOISE": False, **how}
    return build(function, _NVFP4, shape, **how)


def _blocks_bytes(x: Tensor, fmt: str, rule: str, side: int, square: bool, rows: bool,
                  columns: bool, *_: Any) -> int:
    scale = x.numel() // (side * side if square else side) * (1 if side == MX_SIDE else 4)
    return x.nbytes + (rows + columns) * (x.numel() + scale)


def _casts() -> dict[str, tuple[Build, ...]]:
    rows, blocks, nvfp4 = cast_rows, cast_blocks._blocks, cast_nvfp4
    mx = {"SIDE": MX_SIDE, "MX": True, "SWIZZLED": True, "TO": grid("e4m3fn", "power-of-two")}
    turned = {"NOISE": True, "ROWS": False, "COLUMNS": True}
    return {
        "cast-tensor": (_tensor_build(HISTORY=False, NOISE=False), _tensor_build(HISTORY=True, NOISE=False),
                        _tensor_build(HISTORY=False, NOISE=True)),
        "cast-rows": (
            _rows_build(rows._rows, rows._shape(4096)), _rows_build(rows._rows, rows._shape(16384)),
            _rows_build(rows._rows, rows._shape(rows.HOLDS + 1)), _rows_build(rows._rows, rows._shape(4096), NOISE=True),
            _rows_build(rows._column_amax, rows.TALL), _rows_build(rows._columns, rows.TILE),
            _rows_build(rows._columns, rows.TILE, NOISE=True)),
        "cast-blocks": (
            _blocks_build(blocks), _blocks_build(blocks, BOTH, COLUMNS=True), _blocks_build(blocks, NOISE=True),
            _blocks_build(blocks, **turned), _blocks_build(cast_blocks._square, WHOLE, COLUMNS=True)),
        "cast-mx": tuple(_blocks_build(blocks, shape, **mx, **how) for shape, how in (
            (ONE, {}), (BOTH_MX, {"COLUMNS": True}), (ONE, {"NOISE": True}), (ONE, turned))),
        "cast-nvfp4": (
            _nvfp4_build(nvfp4._tiles, nvfp4.WIDE), _nvfp4_build(nvfp4._tiles, nvfp4.WIDE, NOISE=True),
            _nvfp4_build(nvfp4._tiles, nvfp4.TWO_WAYS, SQUARE=True, COLUMNS=True),
            _nvfp4_build(nvfp4._mixed_amax, nvfp4.TALL), _nvfp4_build(nvfp4._columns, nvfp4.TALL_CAST),
            _nvfp4_build(nvfp4._columns, nvfp4.TALL_CAST, NOISE=True)),
    }


# Updates

def _update_bytes(w: Tensor, g: Tensor, *rest: Any) -> int:
    *slots, bits, _, _ = rest
    read = g.nbytes + (0 if bits is None else bits.nbytes)
    return read + 2 * sum(t.nbytes for t in (w, *slots))


def _update(name: str) -> Proof:
    rule = one_pass.RULES[name]
    types = {**dict.fromkeys(("m", "v", "new_m", "new_v"), "*fp32"), "bits": "*i32",
             "n": "i32", **dict.fromkeys(("decay", *"abcde"), "fp32")}
    return Proof(
        moved_bytes=_update_bytes,
        typical=lambda: {"": rule.arguments(matrix(), matrix(dtype=torch.float32))},
        builds=tuple(Build(
            kernel=one_pass._pass, warps=one_pass.WARPS,
            signature=types | dict.fromkeys(("w", "g", "new_w"), of),
            constants={"RULE": rule.function, "SECOND": rule.slots == 2, "DRAWN": of == "*bf16",
                       "CUT": one_pass.MASK, "BLOCK": one_pass.BLOCK}) for of in ("*fp32", "*bf16")))


_CASTS = dict.fromkeys(KERNELS, ()) if tl is None else _casts()
PROOFS: dict[str, Proof] = {
    "rms-norm": _norm(bias=False, add=False), "layer-norm": _norm(bias=True, add=False),
    "add-rms-norm": _norm(bias=False, add=True), "add-layer-norm": _norm(bias=True, add=True),
    "swiglu": Proof(
        typical=lambda: {"": (matrix(),)}, moved_bytes=lambda x: 3 * x.nbytes // 2,
        builds=tuple(Build(kernel=one, signature=dict.fromkeys(("x", "y", "dy", "dx"), "*bf16") | {"N": "i32"},
                           constants={"BLOCK": swiglu.BLOCK}, warps=swiglu.WARPS)
                     for one in (swiglu._forward, swiglu._backward))),
    "rotary": Proof(
        typical=lambda: {"": (matrix().view(4, 32, 4096, 128), *[matrix(4096, 128)] * 2)},
        moved_bytes=lambda x, cos, sin: 2 * x.nbytes + cos.nbytes // 2 + sin.nbytes // 2,
        builds=(Build(kernel=rotary._rotate, constants={"SIGN": 1, "E": 128, "HALF": 64, "ROWS": rotary.ROWS},
                      signature=dict.fromkeys(("x", "cos", "sin", "y"), "*bf16") | {"rows": "i32", "T": "i32"}),)),
    "cross-entropy": Proof(
        typical=lambda: {"": (matrix(), torch.empty(16384, dtype=torch.int64, device="meta"))},
        moved_bytes=lambda logits, targets, *_: 2 * logits.nbytes + targets.nbytes + 4 * len(logits),
        builds=(Build(kernel=cross_entropy._in_place, constants={"WEIGHTED": True, "PIECE": cross_entropy.PIECE},
                      warps=cross_entropy.WARPS,
                      signature={"logits": "*bf16", "targets": "*i64", "weights": "*fp32", "nats": "*fp32", "V": "i32"}),)),
    "flash-attention": Proof(
        typical=lambda: {"8 groups of 4 heads": _attention_typical()},
        moved_bytes=lambda q, k, v, *_: 2 * q.nbytes + k.nbytes + v.nbytes + 4 * q[..., 0].numel(),
        builds=_attention_builds(""), more_builds=_attention_builds(*list(WAYS)[1:])),
    "amax": Proof(
        typical=lambda: {"": (matrix(),)}, moved_bytes=lambda x: x.nbytes,
        builds=(Build(kernel=amax._amax, warps=amax.WARPS, constants={"HISTORY": False, "BLOCK": amax.BLOCK},
                      signature={"x": "*bf16", "history": "*fp32", "state": "*i32", "count": "*i64", "n": "i32",
                                 "blocks": "i32"}, unaligned=("count", "blocks")),)),
    "cast-tensor": Proof(
        typical=lambda: {"current scaling": (matrix(), "e4m3fn", "float32", True, True, None, None),
                         "delayed scaling": (matrix(), "e4m3fn", "float32", True, True, matrix(1, 1), None)},
        moved_bytes=lambda x, fmt, rule, rows, columns, history, noise: (
            x.nbytes * (1 + (history is None)) + x.numel() * (rows + columns)),
        builds=_CASTS["cast-tensor"]),
    "cast-rows": Proof(
        typical=lambda: {"rows": (matrix(), "e4m3fn", "power-of-two", False, None),
                         "rows of x.T": (matrix(), "e4m3fn", "power-of-two", True, None)},
        moved_bytes=lambda x, fmt, rule, columns, noise: x.nbytes * (1 + columns) + x.numel() + 4 * x.shape[columns],
        builds=_CASTS["cast-rows"]),
    "cast-blocks": Proof(
        typical=lambda: {f"{rows} x 128, both ways": (matrix(), "e4m3fn", "float32", 128, rows > 1, True, True,
                                                      False, None) for rows in (1, 128)},
        moved_bytes=_blocks_bytes, builds=_CASTS["cast-blocks"]),
    "cast-mx": Proof(
        typical=lambda: {"1 x 32, both ways": (matrix(), "e4m3fn", "power-of-two", MX_SIDE, False, True, True,
                                               True, None)},
        moved_bytes=_blocks_bytes, builds=_CASTS["cast-mx"]),
    "cast-nvfp4": Proof(
        typical=lambda: {"1 x 16": (matrix(), "e4m3", False, True, False, False, True, None),
                         "1 x 16 of x.T, transformed": (matrix(), "e4m3", False, False, True, True, True, None),
                         "16 x 16, both ways": (matrix(), "e4m3", True, True, True, False, True, None)},
        moved_bytes=lambda x, rule, square, rows, columns, *_: (
            2 * x.nbytes + (rows + columns) * (x.numel() // 2 + x.numel() // 16)),
        builds=_CASTS["cast-nvfp4"]),
    "adamw": _update("adamw"), "lion": _update("lion"),
}
