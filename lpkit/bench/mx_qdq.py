"""MXFP8 quantise-dequantise on a CPU, beside torchao's eager path. Values are compared bit for bit
first."""

import torch
from torch import Tensor

from lpkit.bench.harness import ROUNDS, Result, race
from lpkit.bench.qdq import rotating, same_bits
from lpkit.kernels import cast
from lpkit.techniques.formats import FORMATS

SHAPE = (1024, 4096)
BUFFERS = 4             # of inputs and of outputs each: 128 MiB pass by before one comes back
TARGET = 6.0


def ours(x: Tensor, out: Tensor) -> Tensor:
    return cast.mx(x, FORMATS["e4m3fn"], out=out).values


def torchaos(x: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    scales, codes = to_mx(x, torch.float8_e4m3fn, cast.MX_BLOCK)
    return to_dtype(codes, scales, torch.float8_e4m3fn, cast.MX_BLOCK, x.dtype)


def run(rounds: int = ROUNDS) -> list[Result]:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator) for _ in range(BUFFERS)]
    outputs = [torch.empty(SHAPE) for _ in range(BUFFERS)]

    def check() -> None:
        same_bits("MXFP8", ours(inputs[0], outputs[0]), torchaos(inputs[0]))

    return race("mx-qdq", ours=rotating(ours, inputs, outputs), check=check, target=TARGET,
                rounds=rounds, peers={"torchao eager": rotating(lambda x, out: torchaos(x), inputs,
                                                                outputs)},
                case=f"MXFP8, E4M3 elements, floor rule, 4 Mi float32, threads: "
                f"{torch.get_num_threads()}, kernel: {cast.choice().used}",
                packages=("torch", "torchao"))
