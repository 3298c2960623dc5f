"""Kinds of attention by backends, by running each: forward and backward against the definition in
float64, in every dtype; or the sentence why not.

The lengths are one token and 130, which no kernel's tile divides. `lpkit doctor` shows the row of
full attention; docs/attention.md has them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lpkit.config import ModelConfig
from lpkit.nn.attention import backend
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION, Attending, nearest, why_not

LIMITS = {      # relative, of a result's norm: what some roundings of 24, 8 and 11 bits come to
    "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
LENGTHS = (1, 130)
SMALLER = {"size": 24, "block": 16}     # than the rows have it, so that something is left out
# every other block; and queries that see nothing
TABLE = tuple("".join("01"[a != 1 and (a + b) % 2 == 0] for b in range(9)) for a in range(9))
MODEL = ModelConfig(heads=4, head_dim=64, context=max(LENGTHS))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """`error`: the largest of its results and gradients, relative; `why`: it does not work."""

    kind: str
    backend: str
    dtype: str
    error: float = math.nan
    why: str = ""


def models() -> dict[str, ModelConfig]:
    """Every kind of the table, and what any can have besides, by name."""
    found = {}
    for name, row in KINDS.items():
        smaller = {key: value for key, value in SMALLER.items() if hasattr(row.settings, key)}
        found[name] = replace(MODEL, attention=replace(row.settings, name=name, **smaller))
    full, window, blocks = (found[name].attention for name in ("full", "window", "block-sparse"))
    return found | {
        "table": replace(MODEL, attention=replace(blocks, table=TABLE)),
        "global": replace(MODEL, attention=replace(window, global_tokens=3)),
        "capped": replace(MODEL, attention=replace(full, soft_cap=20.0)),
        "sinks": replace(MODEL, attention=replace(full, sinks=True)),
        "grouped": replace(MODEL, kv_heads=2), "one group": replace(MODEL, kv_heads=1)}


def cell(kind: str, name: str, dtype: str, device: torch.device,
         model: ModelConfig | None = None) -> Cell:
    """One, here and now. Whatever it raises is the reason why not."""
    model = model or models()[kind]
    on_gpu, said = device.type != "cpu", Cell(kind=kind, backend=name, dtype=dtype)
    asked = Attending(model=model, dtype=dtype, device="gpu" if on_gpu else "cpu", here=True,
                      capability=torch.cuda.get_device_capability(device) if on_gpu else None)
    if why := why_not(name, asked):
        return replace(said, why=why)
    try:
        error = max(_error(name, model, dtype, device, T) for T in LENGTHS)
    except Exception as failure:
        first = str(failure).strip().partition("\n")[0][:160]
        return replace(said, why=f"{type(failure).__name__}: {first}; {nearest(asked)} can")
    limit = 4 * ATTENTION[name].rounding or LIMITS[dtype]
    if not error <= limit:
        return replace(said, why=f"the numbers are wrong, relative error {error:.1e}; "
                                 f"{nearest(asked)} can")
    return replace(said, error=error)


def _error(name: str, model: ModelConfig, dtype: str, device: torch.device, T: int) -> float:
    draw = torch.Generator().manual_seed(T)
    wide = [torch.randn(2, heads, T, model.E, generator=draw) for heads in (model.H, model.G,
                                                                            model.G)]
    documents = (torch.arange(T) // 50).expand(2, T).contiguous().to(device)
    kind = KINDS[model.attention.name].load()(model)
    own = kind(torch.randn(2, T, model.D, generator=draw))      # sinks, features or gates
    if own is not None:
        wide.append(torch.randn(own.shape, generator=draw).requires_grad_(own.requires_grad))
    weights = torch.randn(2, model.H, T, model.E, generator=draw)
    # the same numbers
    given = [t.to(getattr(torch, dtype)).to(device) for t in (*wide, weights)]
    got = _results(name, model, given, documents)
    want = _results("plain", model, [t.double() for t in given], documents)
    whole = max(float(one.norm()) for one in want)
    # a gradient may be 0, or the small difference of large terms
    return max(float((a.double() - b).norm()) / max(float(b.norm()), whole / 10)
               for a, b in zip(got, want, strict=True))


def _results(name: str, model: ModelConfig, given: list[Tensor],
             documents: Tensor) -> list[Tensor]:
    """The output, and the gradients of q, k, v and of what the kind has besides."""
    *leaves, weights = given
    constant = [i > 2 and not t.requires_grad for i, t in enumerate(leaves)]
    leaves = [t.detach().requires_grad_(not stays) for t, stays in zip(leaves, constant)]
    q, k, v, *own = leaves
    out = backend(name, model)(q, k, v, documents, *own)
    learned = [t for t in leaves if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, learned, weights)]


def check(name: str, device: torch.device) -> str:
    """For the doctor: full attention in the dtype that a run has there. Raises ArithmeticError,
    which says why not."""
    found = cell("full", name, "float32" if device.type == "cpu" else "bfloat16", device)
    if found.why:
        raise ArithmeticError(found.why)
    return f"forward and backward in {found.dtype}, relative error {found.error:.0e}"
