"""The tensors of a real training step, and what a number format makes of them: measured, and
expected by formula.

    found = operands(Training.build(config), steps=40)      # by role
    measured_db(x, fmt)     expected_db(fmt, crest=crest(x))
    zero_share(x, fmt)      expected_zero_share(fmt, sigma=...)

Ratios in dB are 10 log10 of energies. The formulas: Bennett 1948,
https://doi.org/10.1002/j.1538-7305.1948.tb01340.x (an error that is uniform over a spacing d has
the energy d^2 / 12); Widrow and Kollar 2008, Quantization Noise.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from lpkit.errors import ConfigError
from lpkit.kernels import cast
from lpkit.precision.error import sqnr_db
from lpkit.techniques.formats import Format
from lpkit.training.training import Training


def operands(training: Training, *, steps: int) -> dict[str, list[Tensor]]:
    """Make `steps` updates; then what each nn.Linear multiplies in the next one.

    By role, one float32 tensor a layer: its weights, its input, and the gradient of its output.
    """
    if steps < 1:
        raise ConfigError(f"a model that has not trained has not its tensors yet: steps must be 1 "
                          f"or more, got {steps}")
    for step in range(steps):
        training.update(step)
    found: dict[str, list[Tensor]] = {"weights": [], "activations": [], "gradients": []}

    def keep(role: str, x: Tensor) -> None:
        found[role].append(x.detach().float().flatten(0, -2))

    def forward(layer: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        keep("weights", layer.weight)
        keep("activations", inputs[0])
        y.register_hook(partial(keep, "gradients"))

    hooks = [layer.register_forward_hook(forward) for layer in training.model.modules()
             if isinstance(layer, nn.Linear)]
    try:
        # what was compiled does not call a later hook
        compiled = "torch._dynamo" in sys.modules
        with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            training.forward_backward(training.batch(steps))
    finally:
        for hook in hooks:
            hook.remove()
        training.optimizer.zero_grad(set_to_none=True)
    return found


def measured_db(x: Tensor, fmt: Format) -> float | None:
    """Signal over noise, after scaling the largest magnitude of x to the format's largest value."""
    scale = cast.amax(x).values / fmt.largest
    return sqnr_db(x, cast.qdq(x, fmt, scale, dtype=torch.float32))


def crest(x: Tensor) -> float:
    """Largest magnitude over root mean square."""
    return (x.abs().max() / x.double().square().mean().sqrt()).item()


def zero_share(x: Tensor, fmt: Format) -> float:
    """Share of the elements other than zero that become zero when nothing is scaled."""
    return ((x.abs() <= fmt.smallest / 2) & (x != 0)).sum().item() / (x != 0).sum().item()


def exponent_shares(tensors: list[Tensor]) -> dict[int, float]:
    """floor(log2 |x|) of all elements other than zero, and the share of each; from -60 to 20."""
    x = torch.cat([t.flatten() for t in tensors])
    e = torch.frexp(x[x != 0]).exponent.sub(1).clamp(-60, 20)
    counts = torch.bincount(e + 60, minlength=81)
    return {k - 60: n / e.numel() for k, n in enumerate(counts.tolist()) if n}


def expected_db(fmt: Format, *, crest: float) -> float:
    """Of a Gaussian whose largest magnitude, `crest` standard deviations out, is scaled to the
    format's largest value."""
    sigma = fmt.largest / crest
    return 10 * math.log10(sigma**2 / rounding_noise(fmt, sigma))


def rounding_noise(fmt: Format, sigma: float, share_below: float = 0.0) -> float:
    """Energy of the rounding errors of N(0, sigma), without the `share_below` of it that is closest
    to zero. Each binade holds a share of the numbers and has one spacing d: d^2 / 12."""
    noise = 0.0
    # the first holds the subnormals too
    for e in range(fmt.min_exponent, max(fmt.min_exponent, fmt.max_exponent) + 1):
        share = math.erf(2.0**(e + 1) / sigma / math.sqrt(2))
        noise += (share - share_below) * 4.0**(e - fmt.mantissa_bits) / 12
        share_below = share
    return noise


def expected_zero_share(fmt: Format, *, sigma: float) -> float:
    """Of a Gaussian of that standard deviation: what lies within half a spacing of zero."""
    return math.erf(fmt.smallest / 2 / sigma / math.sqrt(2))
