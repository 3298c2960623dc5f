"""Bytes that compiled casts move for each element they cast, by the compiler's own count of its
kernels' reads and writes; of the kit's kernels by what they say they move (`Kernel.moved_bytes`).

    python -m tests.execution.compiled_bytes fp8-tensorwise fp8-delayed
"""

import logging
import sys
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn
from torch._inductor import config, metrics

from lpkit.kernels import cast
from lpkit.precision.backends import BACKENDS
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.recipes import RECIPES
from tests.kernels.builds import PROOFS


def moved_per_element(layer: nn.Module, tokens: int = 2048) -> float:
    """Of a Linear's forward and backward, without a bias, in bf16 like its weight: what all kernels
    move, less what the three products read of 8-bit operands and write in 16 bits, over the
    elements of x, w and the gradient. Products that are not one kernel count as casts.
    The compiler takes a kernel of the kit for one that reads its arguments and writes its results
    once: what is more comes on top."""
    (N, K), M = layer.weight.shape, tokens
    x, g = torch.randn(M, K, dtype=torch.bfloat16).requires_grad_(), torch.randn(M, N,
        dtype=torch.bfloat16)
    with counting():
        torch.autograd.grad(torch.compile(layer, fullgraph=True)(x), (x, layer.weight), g)
    elements = M * K + N * K + M * N
    products = sum(a * inner + b * inner + 2 * a * b
                   for a, b, inner in ((M, N, K), (M, K, N), (N, K, M)))
    return (metrics.num_bytes_accessed - products) / elements


@contextmanager
def counting():
    """Into `metrics.num_bytes_accessed`, from 0."""
    torch._logging.set_logs(inductor_metrics=True)      # it counts when somebody listens
    logging.getLogger("torch._inductor.inductor_metrics").propagate = False
    torch._dynamo.reset()
    metrics.reset()
    with config.patch(fx_graph_cache=False, force_disable_caches=True):
        yield


def forward_per_element(before: nn.Module, width: int, tokens: int = 2048,
                        size: int = 512) -> float:
    """Of what stands before a Linear under fp8-delayed and hands it `size` numbers of a token, with
    that Linear's casts, over these numbers:
    what all kernels of a training forward move, less what the product and the casts of w do. In the
    graph of a GPU, where the amax is PyTorch's operations; a CPU's scheduler orders its loops."""
    linear = BACKENDS["scaled_mm"].wrap(nn.Linear(size, size, bias=False, dtype=torch.bfloat16),
        RECIPES["fp8-delayed"], name="layer", seed=0)
    x = torch.randn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    with counting(), mock.patch.object(cast, "_amax", cast.reference_amax):
        torch.compile(nn.Sequential(before, linear), fullgraph=True)(x)
    # amax 2, cast 2 + 1
    product, weight = tokens * size + size * size + 2 * tokens * size, 5 * size * size
    return (metrics.num_bytes_accessed - product - weight) / (tokens * size)


def of_recipe(name: str, *, version: str = "") -> float:
    """version: of the kernels that cast; empty: their definitions, which the compiler fuses."""
    plain, more = nn.Linear(512, 512, bias=False, dtype=torch.bfloat16), []
    layer = BACKENDS["scaled_mm"].wrap(plain, RECIPES[name], name="layer", seed=0)
    if not version:
        return moved_per_element(layer)
    kernel = KERNELS["cast-tensor"].load()
    call = kernel.versions[version]

    def counted(*arguments):
        results = call(*arguments)
        more.append(PROOFS["cast-tensor"].moved_bytes(*arguments)
                    - sum(t.nbytes for t in (arguments[0], *results)))
        return results

    layer.arithmetic.cast_tensor = counted
    layer(torch.randn(512, 512, dtype=torch.bfloat16).requires_grad_()).sum().backward()
    layer.arithmetic.cast_tensor = call
    return moved_per_element(layer, 512) + sum(more) / (3 * 512 * 512)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {of_recipe(name):.1f} bytes an element")
