"""Try each kind of attention with each backend, in every dtype: forward and backward are compared
with the definition in float64. The result is the relative error, or the reason why the backend does
not work.

Sequences have 1 token and 130 tokens, because no kernel's tile size divides 130. `lpkit doctor`
shows the results for full attention; docs/attention.md has the results of all kinds.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lpkit.config import ModelConfig
from lpkit.kernels.kernel import Kernel, gradients_of
from lpkit.measure.probes import UnavailableError, reason
from lpkit.nn.attention import backend
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import Attending, nearest, why_not

# Largest allowed error by dtype, relative to the norm of a result. A few roundings to the 24, 8 or
# 11 significant bits of the dtype cause as much.
LIMITS = {
    "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
LENGTHS = (1, 130)
MODEL = ModelConfig(heads=4, head_dim=64, context=max(LENGTHS))


def tried(name: str, model: ModelConfig, dtype: str, device: torch.device) -> str:
    """Return the largest relative error of results and gradients, in words. Raises
    UnavailableError if the backend `name` does not work; the message has the reason and a backend
    that works."""
    on_gpu = device.type != "cpu"
    needed = Attending(model=model, dtype=dtype, device="gpu" if on_gpu else "cpu", here=True,
                       capability=torch.cuda.get_device_capability(device) if on_gpu else None)
    if why := why_not(name, needed):
        raise UnavailableError(why)
    other = nearest(needed)
    instead = f"{other if other != name else 'plain'} can"
    try:
        error = max(_error(name, model, dtype, device, T) for T in LENGTHS)
    except Exception as failure:
        raise UnavailableError(f"{type(failure).__name__}: {reason(failure)[:160]}; "
                               f"{instead}") from failure
    if not error <= LIMITS[dtype]:
        raise UnavailableError(f"the numbers are wrong, relative error {error:.1e}; {instead}")
    return f"forward and backward in {dtype}, relative error {error:.0e}"


def check(name: str, device: torch.device) -> str:
    """Try full attention for the doctor, in the dtype that a run uses on this device: float32 on a
    CPU, bfloat16 on a GPU. Returns and raises as `tried` does."""
    return tried(name, MODEL, "float32" if device.type == "cpu" else "bfloat16", device)


def _error(name: str, model: ModelConfig, dtype: str, device: torch.device, T: int) -> float:
    """Return the largest relative error of the backend `name` for 2 sequences of T tokens: over its
    result and its gradients of q, k, v and the parameters of attention."""
    draw = torch.Generator().manual_seed(T)
    drawn = [torch.randn(2, heads, T, model.E, generator=draw) for heads in (model.H, model.G,
                                                                             model.G)]
    documents = (torch.arange(T) // 50).expand(2, T).contiguous().to(device)
    kind = KINDS[model.attention.name].load()(model)
    own = kind(torch.randn(2, T, model.D, generator=draw))      # sinks, features or gates
    kernel = Kernel(definition=backend("plain", model), gradients=(0, 1, 2),
                    examples=lambda *_: ())
    if own is not None:
        drawn.append(torch.randn(own.shape, generator=draw))
        if own.requires_grad:
            kernel = replace(kernel, gradients=(0, 1, 2, 4))
    drawn.append(torch.randn(2, model.H, T, model.E, generator=draw))
    # round to `dtype` first, so that backend and definition get the same numbers
    q, k, v, *own, weights = (t.to(getattr(torch, dtype)).to(device) for t in drawn)
    got = gradients_of(kernel, backend(name, model), (q, k, v, documents, *own), [weights])
    q, k, v, *own, weights = (t.double() for t in (q, k, v, *own, weights))
    want = gradients_of(kernel, kernel.definition, (q, k, v, documents, *own), [weights])
    whole = max(float(gradient.norm()) for gradient in want)
    # A gradient may be 0, or a small difference of large terms. So an error is divided by the norm
    # of its gradient, but at least by a tenth of the largest norm.
    return max(float((a.double() - b).norm()) / max(float(b.norm()), whole / 10)
               for a, b in zip(got, want, strict=True))
