"""What PyTorch and cuBLASLt refuse on a GPU, on a CPU: `strict(major)` puts it under
torch._scaled_mm, F.scaled_mm and torch._int_mm.

A CPU takes almost any layout; CUDA does not. Each rule here is one of CUDA's checks, and what
passes is multiplied in float64, so a scale in the wrong place is a wrong number. On fake tensors
the checks alone run.

Source, read at pytorch/pytorch commit 0174dfab (after 2.13),
https://github.com/pytorch/pytorch/blob/main/:
    aten/src/ATen/native/cuda/ScaledBlas.cpp        get_joint_scaling, _scaled_mm_out_cuda,
    _scaled_gemm, _scaled_mm_cuda_v2_out,
                                                    _check_deepseek_support,
                                                    _scaled_block1x128_block128x128,
                                                    check_swizzle_lengths
    aten/src/ATen/native/ScaledBlasUtils.cpp        which lists of scales, ways and dtypes are a
    recipe (check_*_recipe) aten/src/ATen/native/cuda/RowwiseScaledMM.cu    check_inputs, of
    CUTLASS, which has rows where cuBLASLt has none aten/src/ATen/native/cuda/cuBlasCommonArgs.h
    prepare_matrix_for_cublas: what counts as row-major aten/src/ATen/native/cuda/Blas.cpp
    _int_mm_out_cuda
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

FLOAT8, FLOAT4 = (torch.float8_e4m3fn, torch.float8_e5m2), torch.float4_e2m1fn_x2
E2M1 = [0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6]


class RefusedError(RuntimeError):
    """In place of the RuntimeError or ValueError of TORCH_CHECK, or of a status of cuBLASLt."""


class Product(NamedTuple):
    kind: str
    M: int
    K: int
    N: int
    fast: bool


def need(holds: bool, *words: object) -> None:
    if not holds:
        raise RefusedError(" ".join(map(str, words)))


def blocks(size: int, of: int) -> int:
    return -(-size // of)


def up(size: int, to: int) -> int:
    return blocks(size, to) * to


# ---- what scales mean

def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """(R, K), a scale for each value of (R, K) data; its last blocks may be cut."""
    return scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def unswizzled(scale: Tensor, rows: int, columns: int) -> Tensor:
    """(rows, columns) bytes from cuBLASLt's tiles of 128 x 4 ("1D block scaling factors
    layout")."""
    R, C = up(rows, 128) // 128, up(columns, 4) // 4
    # tile row, tile column, r % 32, r // 32, c
    tiles = scale.view(torch.uint8).view(R, C, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(R * 128, C * 4)[:rows, :columns]


def e8m0(scale: Tensor) -> Tensor:
    return torch.exp2(scale.double() - 127)


def nibbles(packed: Tensor) -> Tensor:
    """(R, K) from two to a byte, the first in the low half."""
    codes = packed.view(torch.uint8)
    return torch.tensor(E2M1, dtype=torch.float64)[torch.stack((codes & 15, codes >> 4),
        -1).flatten(-2).long()]


# ---- the checks

@dataclass
class StrictCUDA:
    major: int                  # of the compute capability: 9 is Hopper, 10 Blackwell
    # False: neither cuBLASLt (Hopper alone has it there) nor CUTLASS was built for it
    rowwise: bool = True
    seen: list[Product] = field(default_factory=list)

    def operands(self, a: Tensor, b: Tensor, bias: Tensor | None, dtype: torch.dtype | None,
                 fast: bool) -> tuple[int, int, int]:
        """_scaled_mm_out_cuda and _scaled_mm_cuda_v2_out, before they look at scales. M, K, N."""
        need(a.dim() == 2 and b.dim() == 2 and a.shape[1] == b.shape[0],
             "shapes cannot be multiplied", a.shape, b.shape)
        need(a.dtype in (*FLOAT8, FLOAT4) and b.dtype in (*FLOAT8, FLOAT4),
             "Expected Float8 or Float4_x2, got", a.dtype, b.dtype)
        packed = 2 if a.dtype == FLOAT4 else 1
        need(packed * a.shape[1] % 16 == 0,
             "Expected trailing dimension of mat1 to be divisible by 16, got", a.shape)
        need(packed * b.shape[0] % 16 == 0 and b.shape[1] % 16 == 0,
             "mat2 must be divisible by 16, got", b.shape)
        need({a.dtype, b.dtype} != {torch.float8_e5m2},
             "Multiplication of two Float8_e5m2 matrices is not supported")
        need(not (fast and FLOAT4 in (a.dtype, b.dtype)),
             "use_fast_accum is not supported for Float4_e2m1fn_x2")
        need(dtype == torch.bfloat16, "the kit asks for bf16, got", dtype)
        if bias is not None:
            need(bias.dtype == torch.bfloat16 and bias.numel() == b.shape[1],
                 "Bias must be BFloat16 of", b.shape[1], "got", bias.dtype, bias.shape)
            need(bias.is_contiguous(), "cuBLASLt reads a bias where it begins")
        # _scaled_gemm: args.transa == 't' && args.transb == 'n'. Blackwell takes other orders of 8
        # bits, FP4 is TN everywhere
        if self.major == 9 or a.dtype == FLOAT4:
            need(a.is_contiguous() and b.T.is_contiguous(),
                "Only multiplication of row-major and column-major matrices is supported by "
                "cuBLASLt, got", a.stride(), b.stride())
        return a.shape[0], a.shape[1] * packed, b.shape[1]

    def saw(self, *product: object) -> None:
        if not torch.compiler.is_compiling():       # a graph keeps no lists
            self.seen.append(Product(*product))

    def done(self, kind: str, M: int, K: int, N: int, fast: bool, y: Tensor,
             bias: Tensor | None) -> Tensor:
        self.saw(kind, M, K, N, fast)
        return (y if bias is None else y + bias.double()).to(torch.bfloat16)

    def scaled_mm_v1(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor,
                     bias: Tensor | None = None,
                     scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None,
                     use_fast_accum: bool = False) -> Tensor:
        """torch._scaled_mm. get_joint_scaling reads the kind off the scales' shapes, the simplest
        first."""
        M, K, N = self.operands(a, b, bias, out_dtype, use_fast_accum)
        eight = a.dtype in FLOAT8 and b.dtype in FLOAT8
        float32 = scale_a.dtype == scale_b.dtype == torch.float32
        rows = (scale_a.shape == (M, 1) and scale_b.shape == (1, N) and scale_a.is_contiguous()
                and scale_b.T.is_contiguous())
        mx = (scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu and scale_a.is_contiguous()
              and scale_b.is_contiguous())
        done = lambda kind, y: self.done(kind, M, K, N, use_fast_accum, y, bias)
        if eight and float32 and scale_a.numel() == scale_b.numel() == 1:
            # a graph has no numbers for offsets
            # seen on an H200 under CUDA 13.0, where 16 and 32 were taken
            for scale in () if torch.compiler.is_compiling() else (scale_a, scale_b):
                need(not scale.storage_offset() * 4 % 16,
                     "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul: a scale",
                     4 * scale.storage_offset(), "bytes into a tensor")
            return done("tensor", a.double() @ b.double() * scale_a.double().reshape(())
                        * scale_b.double().reshape(()))
        if eight and float32 and rows:
            need(self.rowwise, "CUBLAS_STATUS_NOT_SUPPORTED when calling "
                               "cublasLtMatmulAlgoGetHeuristic")
            if self.major > 9:          # CUTLASS, check_inputs
                need(b.dtype == torch.float8_e4m3fn, "b.dtype() == at::kFloat8_e4m3fn")
                need(a.stride(1) == 1 and a.stride(0) >= K and b.stride(0) == 1
                     and b.stride(1) >= K,
                     "strides of a and b", a.stride(), b.stride())
                need(scale_a.stride(0) == 1 and scale_b.stride(1) == 1, "strides of the scales",
                     scale_a.stride(), scale_b.stride())
            return done("rows", a.double() @ b.double() * scale_a.double() * scale_b.double())
        if (eight and mx and (scale_a.numel(), scale_b.numel())
            == tuple(up(rows, 128) * up(blocks(K, 32), 4) for rows in (M, N))):
            need(self.major >= 10, "E8M0 scales need compute capability 10.0")
            left, right = (t.double() * spread(e8m0(unswizzled(s, len(t), K // 32)), 1, 32)
                           for t, s in ((a, scale_a), (b.T, scale_b)))
            return done("1x32", left @ right.T)
        raise RefusedError(f"Invalid scaling configuration: {a.dtype} {tuple(a.shape)}, {b.dtype} "
                           f"{tuple(b.shape)}, scales {scale_a.dtype} "
                      f"{tuple(scale_a.shape)} {scale_a.stride()}, {scale_b.dtype} "
                      f"{tuple(scale_b.shape)} {scale_b.stride()}")

    def scaled_mm_v2(self, a: Tensor, b: Tensor, scale_a, kind_a, scale_b, kind_b, swizzle_a=None,
                     swizzle_b=None, bias: Tensor | None = None,
                     output_dtype: torch.dtype | None = torch.bfloat16,
                     contraction_dim: tuple[int, ...] = (),
                     use_fast_accum: bool = False) -> Tensor:
        """F.scaled_mm, which is aten._scaled_mm_v2. The caller names the kinds."""
        M, K, N = self.operands(a, b, bias, output_dtype, use_fast_accum)
        kinds = tuple(kind if isinstance(kind, list) else [kind] for kind in (kind_a, kind_b))
        scales = tuple(scale if isinstance(scale, list) else [scale]
                       for scale in (scale_a, scale_b))
        done = lambda kind, y: self.done(kind, M, K, N, use_fast_accum, y, bias)
        if kinds == ([ScalingType.BlockWise1x16, ScalingType.TensorWise],) * 2:
            return done("1x16", self.nvfp4(a, b, scales, (swizzle_a, swizzle_b)))
        need(kinds[0] == [ScalingType.BlockWise1x128], "no product of", *kinds)
        need(a.dtype == b.dtype == torch.float8_e4m3fn, "check_deepseek_recipe: E4M3 alone, got",
             a.dtype, b.dtype)
        need(self.major == 9, "DeepSeek style (1x128, 128x128) scaling only supported in CUDA for "
                              "SM90")
        left = a.double() * self.outer_major(scales[0][0], M, K, "scale_a")
        if kinds[1] == [ScalingType.BlockWise1x128]:
            return done("1x128", left @ (b.T.double() * self.outer_major(scales[1][0], N, K,
                "scale_b")).T)
        need(kinds[1] == [ScalingType.BlockWise128x128], "no product of", *kinds)
        (scale,), padded = scales[1], up(blocks(K, 128), 4)
        need(tuple(scale.shape) == (padded, blocks(N, 128)) and scale.dtype == torch.float32,
             "scale_b must have shape", padded, blocks(N, 128), "got", scale.shape)
        self.strides(scale, padded, "scale_b")
        return done("128x128", left @ (b.T.double() * spread(scale[:blocks(K, 128)].T, 128, 128)[:N,
            :K]).T)

    def outer_major(self, scale: Tensor, rows: int, K: int, name: str) -> Tensor:
        """Scales of 1x128, (rows, K / 128), that lie column by column. cuBLASLt wants each column
        at a multiple of 16 bytes: Transformer Engine pads the rows to a multiple of 4
        (Float8BlockQuantizer.get_scale_shape, v2.18), and PyTorch leaves no room for padding."""
        need(tuple(scale.shape) == (rows, blocks(K, 128)) and scale.dtype == torch.float32, name,
             "must have shape", rows, blocks(K, 128))
        self.strides(scale, rows, name)
        need(rows % 4 == 0, "CUBLAS_STATUS_NOT_SUPPORTED: columns of", rows, "scales")
        return spread(scale, 1, 128)[:, :K]

    def strides(self, scale: Tensor, column: int, name: str) -> None:
        single_column = scale.shape[1] == 1 and scale.stride(1) == 1
        need(scale.stride(0) == 1 and (scale.stride(1) == column or single_column), name,
             "strides must be", (1, column), "got", scale.stride())

    def nvfp4(self, a: Tensor, b: Tensor, scales: tuple[list[Tensor], ...],
              swizzles: tuple[list[SwizzleType], ...]) -> Tensor:
        need(self.major >= 10, "E4M3 scales per 16 need compute capability 10.0")
        need(a.dtype == b.dtype == FLOAT4, "mat_a and mat_b must be fp4 types, got", a.dtype,
             b.dtype)
        operands = []
        for t, (block, tensor), swizzle in zip((a, b.T), scales, swizzles, strict=True):
            need(len(swizzle) == 2 and swizzle[0] == SwizzleType.SWIZZLE_32_4_4,
                 "two swizzles, the first SWIZZLE_32_4_4, got", swizzle)
            need(block.dtype == torch.float8_e4m3fn and tensor.dtype == torch.float32,
                 "dtypes of scales", block.dtype, tensor.dtype)
            rows, columns = t.shape[0], t.shape[1] * 2 // 16
            need(block.numel() == up(rows, 128) * up(columns, 4) and block.is_contiguous()
                 and tensor.numel() == 1, "scales of", t.shape)
            each = unswizzled(block, rows, columns).contiguous().view(torch.float8_e4m3fn)
            operands.append(nibbles(t.contiguous()) * spread(each, 1,
                16) * tensor.double().reshape(()))
        return operands[0] @ operands[1].T

    def int_mm(self, a: Tensor, b: Tensor) -> Tensor:
        """torch._int_mm: _int_mm_out_cuda."""
        need(a.dtype == b.dtype == torch.int8 and a.dim() == b.dim() == 2
             and a.shape[1] == b.shape[0], "int8 matrices that fit")
        need(a.shape[0] > 16, "self.size(0) needs to be greater than 16, but got", a.shape[0])
        need(a.shape[1] > 0 and a.shape[1] % 8 == 0,
             "self.size(1) needs to be greater than 0 and a multiple of 8, but got", a.shape[1])
        need(b.shape[1] > 0 and b.shape[1] % 8 == 0,
             "mat2.size(1) needs to be greater than 0 and a multiple of 8, but got", b.shape[1])
        self.saw("int8", *a.shape, b.shape[1], False)
        return (a.double() @ b.double()).int()


@contextmanager
def strict(major: int, **what: bool) -> Iterator[StrictCUDA]:
    """Inside, products are those of a GPU of compute capability `major`.0."""
    gpu = StrictCUDA(major, **what)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", gpu.scaled_mm_v1)
        patch.setattr(F, "scaled_mm", gpu.scaled_mm_v2)
        patch.setattr(torch, "_int_mm", gpu.int_mm)
        yield gpu

