"""Chooses the attention backend of a run, for `system.attention`.

If a backend of a library is requested by name, it is compared with the definition before it is
used. With "auto", all candidates are compared with the definition, and the correct candidates are
raced (`lpkit.kernels.choose`). On a GPU the candidates are all backends that can run. On a CPU they
are the backends in IN_16_BITS, and there is a race only if the run's attention takes about half a
minute or more. A race on a CPU takes about a second, once per machine. A shorter run uses the same
rule as predictions (`choose_attention`), so it has the same numbers on all machines of its kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lpkit.config import Config, ModelConfig
from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.hardware import multiplies_tiles
from lpkit.nn.attention import sees
from lpkit.techniques.adapters import attended, drops_probabilities
from lpkit.techniques.attention import EVERY_KEY, Rule
from lpkit.techniques.attention_backends import (
    ATTENTION,
    Attending,
    choose_attention,
    interpreted,
    why_not,
)
from lpkit.techniques.layouts import CONTEXT

if TYPE_CHECKING:   # imported only for a race, which a short run on a CPU does not need
    from lpkit.kernels.kernel import Kernel

ON_A_CPU = ("sdpa", "blocked")      # candidates on a CPU; neither stores the scores for backward
IN_16_BITS = (*ON_A_CPU, "blocked-wide")    # candidates on a CPU for 16-bit inputs
RACE_FLOPS = 1e12       # a run with fewer FLOPs of attention has no race; half a minute on a CPU
RACED_FLOPS = 4e9       # FLOPs of one call, forward and backward, in a race on a CPU (approximate)
# Time limits of a race. In 1 s there are about seven rounds. Half of the rounds show the opposite
# order of two backends that differ by 5%.
CPU_SECONDS, GPU_SECONDS = 1.0, 10.0
# Most tokens of the comparison with the definition, which stores scores in float64 for two groups
# of heads.
AT_HAND = {"cpu": 256, "gpu": 1024}
# `Kernel.slack`. An online softmax rounds other sums than the definition. Correct backends had up
# to 1.6 times the norm of the definition's errors, and 2.5 times its largest error.
SLACK = 3.0, 6.0
GRAIN = 2.0**-19        # `Kernel.grain`: the exp of PyTorch's CPU flash kernel has 20 bits
WHERE = "system.attention"


def of_parts(config: Config) -> Choice | None:
    """Return the choice if each rank attends to a part of the keys (context parallelism), which not
    all backends support; otherwise None."""
    layout, asked = config.parallel, config.system.attention
    if layout.context == 1 or not CONTEXT[layout.attention].partial:
        return None
    why = f"parallel.attention={layout.attention} combines parts of the keys by their log-sums"
    return Choice(asked=asked, used="tiled" if asked == "auto" else asked, why=why)


def choose(asked: str, config: Config, device: torch.device, *, compute: str | None,
           before: str | None = None) -> Choice:
    """Choose the attention backend of a run.

    asked:   `system.attention`
    compute: the dtype of autocast, for example "bfloat16"; None: float32 without autocast
    before:  the backend with which a resumed run began
    Raises ConfigError for a requested backend that cannot run here.
    """
    if combines := of_parts(config):
        return combines
    model, on_gpu = attended(config.model), device.type != "cpu"
    used, why = choose_attention(asked, device=device.type, low_precision=compute == "bfloat16",
                                 model=model, tiles=multiplies_tiles())
    given = Attending(model=model, device="gpu" if on_gpu else "cpu", here=True,
                      dtype=compute or "float32",
                      interpreter=interpreted(asked),
                      capability=torch.cuda.get_device_capability(device) if on_gpu else None)
    if asked == "auto" and before in ATTENTION and not why_not(before, given):
        return Choice(asked=asked, used=before, why="as when this run began")
    if problem := why_not(used, given):
        raise ConfigError(f"{WHERE}={used} {problem}")
    if asked == "auto" and model.attention.rule(model.T) and not drops_probabilities(model) and (
            on_gpu or flops(model) * config.global_batch * config.steps >= RACE_FLOPS):
        return race(given, config.micro_batch, device)
    if asked != "auto" and not ATTENTION[asked].assumed:
        verified(asked, given, config.micro_batch, device)
        why = "requested, and verified here"
    why += ran(used, given, device, refuse=asked != "auto")
    return Choice(asked=asked, used=used, why=why)


def flops(model: ModelConfig) -> float:
    """Return the FLOPs of causal attention for one sequence in all L layers, forward and backward:
    2 matmuls forward and 4 backward, each of 2 H E T^2 FLOPs, halved by causality."""
    return 6 * model.L * model.H * model.E * model.T**2


def race(given: Attending, batch: int, device: torch.device) -> Choice:
    """Return the fastest correct backend, forward and backward, at the run's shapes. On a CPU the
    shapes are reduced until one call has about RACED_FLOPS: first fewer sequences, then fewer
    groups of heads, then fewer tokens."""
    from lpkit.kernels.choose import choose as raced

    m, within = given.model, GPU_SECONDS
    kernel, offered, groups, T = of_backends(given), candidates(given), m.G, m.T
    if given.device == "cpu":
        # RACED_FLOPS, in units of the FLOPs of one layer for one sequence
        share = RACED_FLOPS * m.L / flops(m)
        batch, groups = min(batch, max(1, round(share))), min(m.G, max(1, round(share * m.G)))
        T = min(T, max(1, math.isqrt(int(share * m.G * T**2))))
        within, may = CPU_SECONDS, ON_A_CPU if given.dtype == "float32" else IN_16_BITS
        if m.T <= m.E:          # then the scores (T, T) are not larger than q (T, E)
            may = (*may, "plain")
        offered = {name: offered[name] for name in may if name in offered}
    chosen = raced(_name(given), kernel, "auto", at_hand(given, device), offered=offered,
                  raced=[drawn(given, device, batch=batch, groups=groups, T=T)],
                  within_seconds=within, setting=WHERE)
    choice = chosen.choice
    return replace(choice, why=choice.why + ran(choice.used, given, device))


def verified(name: str, given: Attending, batch: int, device: torch.device) -> None:
    """Raise ConfigError if the backend `name` fails or differs from the definition. On a GPU it is
    also compared at the run's shapes."""
    from lpkit.kernels.choose import choose as raced

    m, on_gpu = given.model, given.device == "gpu"
    whole = [drawn(given, device, batch=batch, groups=m.G, T=m.T)] if on_gpu else None
    raced(_name(given), of_backends(given), name, at_hand(given, device), raced=whole,
          offered=candidates(given) | {name: _with_rule(name, given.rule)}, setting=WHERE)


def candidates(given: Attending) -> dict[str, Any]:
    """Return the candidates of a race by name: the definition `plain`, and all backends that can
    run."""
    rows = {name: row for name, row in ATTENTION.items()
            if name == "plain" or not why_not(name, given)}
    return {name: _with_rule(name, given.rule) for name in rows}


def _with_rule(name: str, rule: Rule) -> Any:
    """Return the backend `name` as a function of q, k, v, documents and sinks, under `rule`."""
    call = ATTENTION[name].load()
    return call if rule == Rule() else partial(call, rule=rule)


def _name(given: Attending) -> str:
    return "attention-" + hashlib.sha256(repr(given.rule).encode()).hexdigest()[:8]


def of_backends(given: Attending) -> Kernel:
    """Return attention under a rule as a Kernel with arguments q, k, v, documents, sinks."""
    from lpkit.kernels.kernel import Kernel

    return Kernel(definition=_with_rule("plain", given.rule), gradients=(0, 1, 2, 4), slack=SLACK,
                  grain=GRAIN, examples=lambda draw, device: examples(given, draw, device))


def examples(given: Attending, draw: torch.Generator, device: torch.device) -> Iterator[tuple]:
    """Yield arguments on which wrong backends are likely to fail.

    The numbers of tokens are 1 (on a GPU 3), a few more than a kernel's tile, and just more than
    the rule's window. Each size comes twice with different numbers, so that a result that was
    cached by shape is wrong. One size also comes with large scores. There are three sequences and,
    if possible, two groups of heads, so that a wrong index gives wrong results. On a GPU the
    smallest size is not 1, because Triton would compile each kernel again for it, which takes
    seconds.
    """
    most, groups = min(given.model.T, AT_HAND[given.device]), min(given.model.G, 2)
    few, edge = {"cpu": 1, "gpu": 3}[given.device], (given.rule.window or 1) + 1
    for T in sorted({min(tokens, most) for tokens in (few, 65, 130, edge)}):
        for scale in (1.0, 1.0, 8.0)[:3 if T == 65 else 2]:
            q, *others = drawn(given, device, batch=3, groups=groups, T=T, draw=draw)
            yield q * scale, *others


def at_hand(given: Attending, device: torch.device) -> list[tuple]:
    """Return arguments with few tokens, on which candidates are compared with the definition."""
    return [drawn(given, device, batch=1, groups=min(given.model.G, 2),
                  T=min(given.model.T, AT_HAND[given.device]))]


def drawn(given: Attending, device: torch.device, *, batch: int, groups: int, T: int,
          draw: torch.Generator | None = None) -> tuple:
    """Return random q (batch, heads, T, E), k and v (batch, groups, T, E), with the strides that a
    model gives them; documents (batch, T) or None; and sinks (heads,) or None."""
    m, rule = given.model, given.rule
    draw = draw or torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(device, getattr(torch, given.dtype))

    heads = m.H // m.G * groups
    q, k, v = (normal(batch, T, n, m.E).transpose(1, 2) for n in (heads, groups, groups))
    begins = torch.rand(batch, T, generator=draw) < 4 / T       # a few documents, of any length
    documents = begins.cumsum(1).to(device) if rule.documents else None
    return q, k, v, documents, normal(heads) if rule.sinks else None


def ran(used: str, given: Attending, device: torch.device, *, refuse: bool = False) -> str:
    """Return a clause with the name of the kernel that PyTorch's sdpa uses here; "" if `used` is
    another backend.

    refuse: raise ConfigError if sdpa has no fused kernel here and would use PyTorch's formula,
            which stores all scores
    """
    m, rule = given.model, given.rule
    if used != "sdpa":
        return ""
    q, k, v, documents, _ = drawn(given, device, batch=1, groups=m.G,
                                  T=min(m.T, AT_HAND[given.device]))
    mask = None
    if rule not in (Rule(), EVERY_KEY):
        places = torch.arange(q.shape[2], device=device)
        mask = sees(rule, places, places, documents)
    kernel = SDPBackend(torch._fused_sdp_choice(q, k, v, mask, 0.0, rule == Rule(),
                                                enable_gqa=m.G != m.H))
    name = kernel.name.lower().removesuffix("_attention")
    if refuse and kernel == SDPBackend.MATH:
        able = [key for key in candidates(given) if key not in ("plain", "sdpa")]
        raise ConfigError(f"{WHERE}=sdpa would use PyTorch's formula here, which stores all "
                          f"scores; use {', '.join(able) or 'plain'}")
    return f"; here {name}"

