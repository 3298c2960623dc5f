"""What is proved of a kernel of the kit beside its numbers: the machine code that a compiler makes
of it, and the bytes that it must move. `tests.pages.kernels` compiles the builds, benches time the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lpkit.contracts import IGNORED
from lpkit.kernels import (
    amax,
    cross_entropy,
    flash_attention,
    fused_cast,
    norm,
    rotary,
    swiglu,
)
from lpkit.kernels.jit import tl, triton
from lpkit.kernels.rounding import plan
from lpkit.nn.attention import CAUSAL
from lpkit.optim import one_pass
from lpkit.predict.recipes import scale_bytes
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.recipes import MX_BLOCK, SCALES, Cast

# What torch 2.11 brings. It keeps 8 bytes of a thread in memory in some builds (docs/gpu.md).
BY_TRITON_3_6 = triton is not None and triton.__version__.startswith("3.6.")


@dataclass(frozen=True, kw_only=True)
class Build:
    """A Triton kernel compiled ahead of time. `signature`: the types of its arguments in Triton's
    words, "*bf16", "i32", by name; `constants`: its constexpr arguments by name; `way`: what else
    is asked of it, in words."""

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
    return Build(kernel=kernel, signature=signature, constants=constants, warps=shape["num_warps"])


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
    flags = {"CENTRED": centred, "BIAS": bias, "ADD": add, "BLOCK": 4096}
    forward = dict.fromkeys(("x", "s", "y", "delta"), "*bf16") | dict.fromkeys(
        ("w", "b", "mean", "r"), "*fp32") | {"N": "i32", "eps": "fp32"}
    backward = dict.fromkeys(("s", "dy", "ds", "dx"), "*bf16") | dict.fromkeys(
        ("w", "mean", "r", "dw", "db"), "*fp32") | {"M": "i32", "N": "i32"}
    return (Build(kernel=norm._forward, signature=forward, constants=flags, warps=8,
                  unaligned=("eps",)),
            Build(kernel=norm._backward, signature=backward, constants=flags, warps=8,
                  unaligned=("M",)))


def _norm(*, bias: bool, add: bool) -> Proof:
    return Proof(moved_bytes=_norm_bytes, typical=lambda: {"": _norm_typical(add, bias)},
                 builds=_norm_builds(centred=bias, bias=bias, add=add))


# Attention

# what else a program is given
WAYS = {"": (), "window": ("window",), "documents": ("documents", "bound"),
        "blocks": ("tiles", "counts", "table"), "cap, sinks": ("cap", "sinks")}


def _attention_typical() -> tuple:
    q, *others = (torch.empty(4, heads, 4096, 128, dtype=torch.bfloat16, device="meta")
                  for heads in (32, 8, 8))
    return q, *others, None, None, CAUSAL


def _attention_build(kernel: Any, which: str, E: int, way: str) -> Build:
    counts = ("T", "H", "repeats", "window", "global_tokens", "block", "across", "listed")
    floats, more = ("scale", "cap", "slope"), set().union(*WAYS.values())
    strides = [f"{name}_{axis}" for name in "qkv" for axis in "bht"]
    types = {**dict.fromkeys(("q", "k", "v", "out", "d_out", "dq", "dk", "dv"), "*bf16"),
             **dict.fromkeys(("lse", "deltas", "sinks"), "*fp32"), "documents": "*i64",
             **dict.fromkeys(("bound", "tiles", "counts"), "*i32"), "table": "*u8",
             **dict.fromkeys((*strides, *counts), "i32"), **dict.fromkeys(floats, "fp32")}
    shape = flash_attention._shape(which, E, narrower=bool({"documents", "table"} & {*WAYS[way]}))
    constants = {**dict.fromkeys(more - {*WAYS[way]}), "E": E, **shape}
    return Build(kernel=kernel, way=way, warps=shape["num_warps"], stages=shape["num_stages"],
                 signature={name: types[name] for name in kernel.arg_names
                            if name in types and name not in constants},
                 constants={name: constants[name] for name in kernel.arg_names
                            if name in constants},
                 unaligned=(*counts, *floats))


def _attention_builds(*ways: str, heads: tuple[int, ...] = (64, 128, 256)) -> tuple[Build, ...]:
    kernels = {"forward": flash_attention._forward, "queries": flash_attention._backward_queries,
               "keys": flash_attention._backward_keys}
    return tuple(_attention_build(kernel, which, E, way) for E in heads for way in ways
                 for which, kernel in kernels.items() if triton is not None)


# Casts

E4M3, FP4 = Cast(format="e4m3fn"), Cast(format="e2m1", scale="e4m3")
ROWS_UP = Cast(format="e4m3fn", block=fused_cast.ROW, scale="power-of-two")


def _cast_build(function: Any, shape: Mapping[str, int], cast: Cast, *, rows: bool = False,
                columns: bool = False, swizzled: bool = False, history: bool = False,
                noise: bool = False) -> Build:
    to = plan(cast.words, rows, columns, swizzled, history, noise)
    values, scales = {"e4m3fn": "*fp8e4nv", "e2m1": "*u8"}[cast.format], "*fp32"
    if function is fused_cast._sixteen_columns:
        values = "*i64"
    if to.mx:
        scales = "*u8"
    elif cast.bits == 4:
        scales = "*fp8e4nv"
    types = {"x": "*bf16", "stats": "*i64", "tops": "*i32", "M": "i32", "G": "i32", "N": "i32",
             **dict.fromkeys(["rows"] * rows + ["columns"] * columns, values),
             **dict.fromkeys(["row_scale"] * rows + ["column_scale"] * columns, scales),
             **dict.fromkeys(["history"] * history, "*fp32"),
             **dict.fromkeys(["words"] * noise, "*i64")}
    pointers = function.arg_names[:function.arg_names.index("words") + 1]
    none = {name: None for name in pointers if name not in types}
    blocks = f"{cast.block[0]} x {cast.block[1]}" if cast.block[1] else ""
    on = [key for key in ("mix", "rows", "columns", "swizzled", "history", "noise")
          if getattr(to, key)]
    return replace(build(function, types, shape, **none, TO=to),
                   way=", ".join(filter(None, [blocks, *on])))


def _cast_bytes(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                history: Tensor | None, noise: Tensor | None) -> int:
    down, across = cast.block
    again, scales = SCALES[cast.scale].levels == 2, 0       # a read for the amax; elements' scales
    if cast.block == fused_cast.WHOLE:
        again = history is None
    elif cast.block == fused_cast.ROW:
        again, scales = columns, x.shape[columns]
    else:
        scales = x.numel() // (across * (1 if again else down))
    each = x.numel() * cast.bits // 8 + scales * scale_bytes(cast)
    return x.nbytes * (1 + again) + (rows + columns) * each


def _casts() -> dict[str, tuple[Build, ...]]:
    f, make = fused_cast, _cast_build
    row, line, square = (replace(E4M3, block=block) for block in (f.ROW, f.BLOCK, f.SQUARE))
    mx = replace(E4M3, block=MX_BLOCK, scale="power-of-two")
    four, four_square = (replace(FP4, block=block) for block in (f.NVFP4, f.NVFP4_SQUARE))
    mixed = replace(four, transform="hadamard")
    both = {"rows": True, "columns": True}
    return {
        "cast-tensor": tuple(make(f._cast, f.TILE, E4M3, **both, **how)
                             for how in ({}, {"history": True}, {"noise": True})),
        "cast-rows": (
            *(make(f._rows, f.row_shape(N), row, rows=True) for N in (4096, 16384, f.HOLDS + 1)),
            make(f._rows, f.row_shape(4096), row, rows=True, noise=True),
            make(f._column_amax, f.TALL, row, columns=True),
            make(f._columns, f.TILE, row, columns=True),
            make(f._columns, f.TILE, row, columns=True, noise=True)),
        "cast-blocks": (
            make(f._blocks, f.WIDE, line, rows=True), make(f._blocks, f.BOTH, line, **both),
            make(f._blocks, f.WIDE, line, rows=True, noise=True),
            make(f._blocks, f.NARROW, line, columns=True, noise=True),
            make(f._square, f.BOTH, square, **both)),
        "cast-mx": (
            make(f._blocks, f.WIDE, mx, rows=True, swizzled=True),
            make(f._blocks, f.SMALL, mx, **both, swizzled=True),
            make(f._blocks, f.WIDE, mx, rows=True, swizzled=True, noise=True),
            make(f._blocks, f.NARROW, mx, columns=True, swizzled=True, noise=True)),
        "cast-nvfp4": (
            *(make(f._tiles, f.WIDE, four, rows=True, swizzled=True, noise=noise)
              for noise in (False, True)),
            make(f._tiles, f.SMALL, four_square, **both, swizzled=True),
            make(f._mixed_amax, f.SIXTEENS, mixed, columns=True, swizzled=True),
            *(make(f._sixteen_columns, f.SIXTEENS_CAST, mixed, columns=True, swizzled=True,
                   noise=noise)
              for noise in (False, True))),
    }


def _cast_proof(name: str, typical: Mapping[str, tuple[Cast, bool, bool]]) -> Proof:
    """`typical`: casts and ways, by what they stand for."""
    return Proof(moved_bytes=_cast_bytes, builds=_CASTS[name], typical=lambda: {
        case: (matrix(), *asked, True, None, None) for case, asked in typical.items()})


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
        typical=lambda: {"": rule.arguments(matrix())},
        builds=tuple(Build(
            kernel=one_pass._pass, warps=one_pass.WARPS,
            signature=types | dict.fromkeys(("w", "g", "new_w"), of),
            constants={"RULE": rule.function, "SECOND": rule.slots == 2, "DRAWN": of == "*bf16",
                       "CUT": one_pass.MASK, "BLOCK": one_pass.BLOCK})
            for of in ("*fp32", "*bf16")))


_CASTS = dict.fromkeys(KERNELS, ()) if tl is None else _casts()
PROOFS: dict[str, Proof] = {
    "rms-norm": _norm(bias=False, add=False), "layer-norm": _norm(bias=True, add=False),
    "add-rms-norm": _norm(bias=False, add=True), "add-layer-norm": _norm(bias=True, add=True),
    "swiglu": Proof(
        typical=lambda: {"": (matrix(),)}, moved_bytes=lambda x: 3 * x.nbytes // 2,
        builds=tuple(Build(kernel=kernel, constants={"BLOCK": swiglu.BLOCK}, warps=swiglu.WARPS,
                           signature=dict.fromkeys(("x", "y", "dy", "dx"), "*bf16") | {"N": "i32"})
                     for kernel in (swiglu._forward, swiglu._backward))),
    "rotary": Proof(
        typical=lambda: {"": (matrix().view(4, 32, 4096, 128), *[matrix(4096, 128)] * 2)},
        moved_bytes=lambda x, cos, sin: 2 * x.nbytes + cos.nbytes // 2 + sin.nbytes // 2,
        builds=(Build(kernel=rotary._rotate,
                      constants={"SIGN": 1, "E": 128, "HALF": 64, "ROWS": rotary.ROWS},
                      signature={**dict.fromkeys(("x", "cos", "sin", "y"), "*bf16"),
                                 "rows": "i32", "T": "i32"}),)),
    "cross-entropy": Proof(
        typical=lambda: {"": (matrix(), torch.empty(16384, dtype=torch.int64, device="meta"))},
        moved_bytes=lambda logits, targets, *_: (2 * logits.nbytes + targets.nbytes
                                                 + 4 * len(logits)),
        builds=(Build(kernel=cross_entropy._in_place,
                      constants={"IGNORED": IGNORED, "WEIGHTED": True,
                                 "PIECE": cross_entropy.PIECE},
                      warps=cross_entropy.WARPS,
                      signature={"logits": "*bf16", "targets": "*i64", "weights": "*fp32",
                                 "nats": "*fp32", "V": "i32"}),)),
    "flash-attention": Proof(
        typical=lambda: {"8 groups of 4 heads": _attention_typical()},
        moved_bytes=lambda q, k, v, *_: 2 * q.nbytes + k.nbytes + v.nbytes + 4 * q[..., 0].numel(),
        builds=_attention_builds("", heads=(128, 256)),
        more_builds=_attention_builds("", heads=(64,)) + _attention_builds(*list(WAYS)[1:])),
    "amax": Proof(
        typical=lambda: {"": (matrix(),)}, moved_bytes=lambda x: x.nbytes,
        builds=(Build(kernel=amax._amax, warps=amax.WARPS,
                      constants={"HISTORY": False, "BLOCK": amax.BLOCK},
                      signature={"x": "*bf16", "history": "*fp32", "stats": "*i64", "n": "i32",
                                 "blocks": "i32"}, unaligned=("blocks",)),)),
    "cast-tensor": Proof(
        typical=lambda: {f"{which} scaling": (matrix(), E4M3, True, True, True, history, None)
                         for which, history in (("current", None), ("delayed", matrix(1, 1)))},
        moved_bytes=_cast_bytes, builds=_CASTS["cast-tensor"]),
    "cast-rows": _cast_proof("cast-rows",
                             {"rows": (ROWS_UP, True, False),
                              "rows of x.T": (ROWS_UP, False, True)}),
    "cast-blocks": _cast_proof("cast-blocks", {
        f"{rows} x 128, both ways": (replace(E4M3, block=(rows, 128)), True, True)
        for rows in (1, 128)}),
    "cast-mx": _cast_proof("cast-mx", {
        "1 x 32, both ways": (replace(E4M3, block=MX_BLOCK, scale="power-of-two"), True, True)}),
    "cast-nvfp4": _cast_proof("cast-nvfp4", {
        "1 x 16": (replace(FP4, block=fused_cast.NVFP4), True, False),
        "1 x 16 of x.T, transformed": (replace(FP4, block=fused_cast.NVFP4, transform="hadamard"),
                                       False, True),
        "16 x 16, both ways": (replace(FP4, block=fused_cast.NVFP4_SQUARE), True, True)}),
    "adamw": _update("adamw"), "lion": _update("lion"),
}
