"""MXFP8 and NVFP4 quantise-dequantise on a CPU, beside torchao's eager path. The values are compared bit for bit first."""

import torch
from torch import Tensor

from lpkit.bench.harness import ROUNDS, Result, race
from lpkit.bench.qdq import rotating, same_bits
from lpkit.kernels import cast
from lpkit.techniques.formats import FORMATS

SHAPE = (1024, 4096)
BUFFERS = 4             # of inputs and of outputs each: 128 MiB pass by before one comes back
TARGET = 6.0


def run(rounds: int = ROUNDS) -> list[Result]:
    return _race("MXFP8, E4M3 elements, floor rule", _mxfp8, _torchao_mxfp8, rounds) \
        + _race("NVFP4 with a tensor scale", _nvfp4, _torchao_nvfp4, rounds)


def _mxfp8(x: Tensor, out: Tensor) -> Tensor:
    return cast.mx(x, FORMATS["e4m3fn"], out=out).values


def _nvfp4(x: Tensor, out: Tensor) -> Tensor:
    return cast.nvfp4(x, FORMATS["e2m1"], FORMATS["e4m3fn"], out=out).values


def _torchao_mxfp8(x: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    scales, codes = to_mx(x, torch.float8_e4m3fn, cast.MX_BLOCK)
    return to_dtype(codes, scales, torch.float8_e4m3fn, cast.MX_BLOCK, x.dtype)


def _torchao_nvfp4(x: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax())).dequantize()


def _race(case: str, ours, theirs, rounds: int) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator) for _ in range(BUFFERS)]
    outputs = [torch.empty(SHAPE) for _ in range(BUFFERS)]

    def check() -> None:
        same_bits(case, ours(inputs[0], outputs[0]), theirs(inputs[0]))

    return race("mx-qdq", ours=rotating(ours, inputs, outputs), check=check, target=TARGET, rounds=rounds,
                peers={"torchao eager": rotating(lambda x, out: theirs(x), inputs, outputs)},
                case=f"{case}, 4 Mi float32, threads: {torch.get_num_threads()}, kernel: {cast.choice().used}",
                packages=("torch", "torchao"))
