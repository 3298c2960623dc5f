"""Updates a parameter in one pass over memory, by Triton: the kernel reads weight, gradient and
slots once, and writes weight and slots once. A 16-bit weight is rounded in the same pass.

The kernel `_pass` reads and writes the numbers, and calls a function of the rule (`_adamw`,
`_lion`) on them. The definition of a rule is in `lpkit.optim.rules`. A multiply-add rounds once in
the kernel and twice in the definition. So the kernel's results are as close to float64 as the
definition's, but not bit-equal.

    bytes per weight, AdamW with float32 slots and a bf16 weight and gradient:
    2 + 2 + 4 + 4 read, 2 + 4 + 4 written, and 4 read for the random bits of rounding
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lpkit.contracts import Choice
from lpkit.kernels.choose import REFERENCE, choose
from lpkit.kernels.jit import jit, tl, triton
from lpkit.kernels.kernel import Kernel, spoiled
from lpkit.optim import rules
from lpkit.optim.rounding import DROPPED, drawn, noise
from lpkit.techniques.kernels import OF_KERNEL, asked_of
from lpkit.techniques.optimizers import AdamWSettings, LionSettings, OptimizerSettings

BLOCK, WARPS = 1024, 4          # numbers and warps of a program
MASK = -(1 << DROPPED)          # keeps the bits of a float32 that bf16 has


@jit
def _adamw(w, g, m, v, decay, a, b, c, d, e):
    """Return the new w, m and v of AdamW. decay: 1 - lr * weight decay; a: 1 - beta1; b: 1 - beta2;
    c: 1 / (1 - beta2^t); d: lr / (1 - beta1^t), where t is the number of the update; e: eps."""
    m += a * (g - m)
    v = v * (1 - b) + b * g * g
    return w * decay - d * (m / (tl.sqrt(v * c) + e)), m, v


@jit
def _lion(w, g, m, v, decay, a, b, c, d, e):
    """Return the new w and m of Lion, and v, which it does not use. decay: 1 - lr * weight decay;
    a: 1 - beta1; b: 1 - beta2; d: lr."""
    lean = m + a * (g - m)
    direction = tl.where(lean > 0, 1.0, 0.0) - tl.where(lean < 0, 1.0, 0.0)
    return w * decay - d * direction, m + b * (g - m), v


@jit
def _pass(w, g, m, v, bits, new_w, new_m, new_v, n, decay, a, b, c, d, e, RULE: tl.constexpr,
          SECOND: tl.constexpr, DRAWN: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """Update one program's BLOCK numbers of a parameter of n numbers.

    w, g, m, v: pointers to the weight, the gradient and the slots (contiguous; slots in float32)
    bits:       pointer to random int32, 0 to 2^16 - 1; read only if DRAWN
    new_w, new_m, new_v: pointers to the results; they may equal w, m, v
    RULE:   the function of the rule, in float32; decay, a ... e: its arguments (see `_adamw`)
    SECOND: whether the rule has a second slot; if not, v and new_v are not read or written
    DRAWN:  whether w is bf16 and rounded stochastically
    CUT:    MASK; an argument, because a Triton kernel cannot read a global that is no constexpr
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    weight = tl.load(w + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(m + at, mask=inside, other=0.0)
    second = first      # any value: a rule without a second slot returns it unused
    if SECOND:
        second = tl.load(v + at, mask=inside, other=0.0)
    weight, first, second = RULE(weight, gradient, first, second, decay, a, b, c, d, e)
    # Stochastic rounding (as `rounding.drawn`): add noise to the 16 bits that bf16 lacks, so that a
    # carry rounds up with the probability of the dropped fraction; then clear them, so that the
    # conversion below is exact.
    if DRAWN:
        noisy = weight.to(tl.int32, bitcast=True) + tl.load(bits + at, mask=inside, other=0)
        weight = (noisy & CUT).to(tl.float32, bitcast=True)
    tl.store(new_w + at, weight.to(new_w.dtype.element_ty), mask=inside)
    tl.store(new_m + at, first, mask=inside)
    if SECOND:
        tl.store(new_v + at, second, mask=inside)


@dataclass(frozen=True, kw_only=True)
class OnePass:
    """A rule that has a kernel."""

    definition: Callable[..., None]     # the rule in `lpkit.optim.rules`
    function: Any                       # its Triton function
    # (settings, number of the update) -> the arguments a ... e of `function`
    numbers: Callable[[Any, int], tuple[float, ...]]
    slots: int                          # number of slots, 1 or 2
    settings: OptimizerSettings         # for the examples

    def defined(self, w: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Return the new w and slots, by the definition, without changing the arguments.

        w, g: of the same dtype and shape. rest: the slots in float32; the random bits of rounding
        in int32 (`rounding.noise`), or None to round to nearest; the settings; the number of the
        update.
        """
        *slots, bits, settings, update = rest
        wide = w.clone() if w.dtype == torch.float64 else w.float().clone()
        slots = [slot.clone() for slot in slots]
        self.definition(wide, g.to(wide.dtype), slots, settings, update)
        if w.dtype == torch.bfloat16:
            wide = wide.bfloat16() if bits is None else drawn(wide, bits.clone())
        return wide, *slots

    def by_triton(self, w: Tensor, g: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Return the same as `defined`, by the kernel."""
        *slots, bits, settings, update = rest
        new = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (w, *slots)]
        w, g, *slots = (t.contiguous() for t in (w, g, *slots))
        self.launch(w, g, slots, bits, settings, update, new)
        return tuple(new)

    def launch(self, w: Tensor, g: Tensor, slots: Sequence[Tensor], bits: Tensor | None,
               settings: Any, update: int, new: Sequence[Tensor]) -> None:
        """Launch the kernel on contiguous tensors. new: the output tensors for w and the slots;
        they may be the input tensors."""
        blocks = triton.cdiv(w.numel(), BLOCK)
        _pass[(blocks,)](
            w, g, slots[0], slots[-1], w if bits is None else bits, new[0], new[1], new[-1],
            w.numel(), 1 - settings.lr * settings.weight_decay, *self.numbers(settings, update),
            RULE=self.function, SECOND=self.slots == 2, DRAWN=bits is not None, CUT=MASK,
            BLOCK=BLOCK, num_warps=WARPS)

    @property
    def kernel(self) -> Kernel:
        """The definition and the Triton version, with examples, for `kernels.choose`."""
        return Kernel(
            definition=self.defined, versions={"triton": self.by_triton},
            examples=self._examples)

    def arguments(self, w: Tensor, bits: Tensor | None = None, update: int = 3) -> tuple:
        """Return arguments of `defined` for timing. They share no memory, because a shared tensor
        would be read from memory only once, and the measured time would be too short."""
        slots = [w.float().square() for _ in range(self.slots)]
        return w, w.clone(), *slots, bits, self.settings, update

    def _examples(self, rng: torch.Generator, device: torch.device):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((5, 123), (1,), (0,), (3, 1024)):
                w, g, m, v = (torch.randn(shape, generator=rng) for _ in range(4))
                slots = [t.to(device) for t in (m, v.square())[:self.slots]]
                w, g = w.to(device, dtype), g.to(device, dtype)
                yield w, g, *slots, None, self.settings, 1
                if dtype == torch.bfloat16:
                    yield w, g, *slots, noise(w.cpu(), rng).to(device), self.settings, 1000
        zero = torch.zeros(3, 40, device=device)
        yield self.arguments(zero, update=1)
        bad = spoiled(torch.randn(4, 48, generator=rng).to(device), (1, 3), (2, 5))
        yield bad, bad.flip(0), *[bad.square()] * self.slots, None, self.settings, 7


def _of_adamw(settings: AdamWSettings, update: int) -> tuple[float, ...]:
    return (1 - settings.beta1, 1 - settings.beta2, 1 / (1 - settings.beta2**update),
            settings.lr / (1 - settings.beta1**update), settings.eps)


def _of_lion(settings: LionSettings, update: int) -> tuple[float, ...]:
    return 1 - settings.beta1, 1 - settings.beta2, 0.0, settings.lr, 0.0


RULES = {
    "adamw": OnePass(definition=rules.adamw, function=_adamw, numbers=_of_adamw, slots=2,
                     settings=AdamWSettings(name="adamw", lr=0.01)),
    "lion": OnePass(definition=rules.lion, function=_lion, numbers=_of_lion, slots=1,
                    settings=LionSettings(name="lion", lr=0.01)),
}
ADAMW, LION = (rule.kernel for rule in RULES.values())


def chosen(name: str, asked: str, parameters: Sequence[Tensor],
           by_first: Callable = operator.call) -> tuple[OnePass | None, dict[str, Choice]]:
    """Return the rule `name` with its kernel, or None to use the definition; and the choice to
    record. The kernel is used if it is correct on this machine, and is the fastest version or was
    requested.

    asked:      `system.kernels`
    parameters: the parameters of the rule; the race uses the largest
    by_first:   `Ranks.by_first`, so that the first rank races for all ranks
    """
    p = max(parameters, key=Tensor.numel, default=None)
    if name not in RULES or p is None or isinstance(p, FakeTensor) or triton is None:
        return None, {}
    asked = asked_of(asked, name)
    if asked == "auto" and not p.is_cuda:
        return None, {}
    choice = Choice(**by_first(partial(_chosen, RULES[name], name, asked, p.detach())))
    return RULES[name] if choice.used == "triton" else None, {OF_KERNEL + name: choice}


def _chosen(rule: OnePass, name: str, asked: str, p: Tensor) -> dict[str, str]:
    w, kernel = p.clone(), rule.kernel
    arguments = rule.arguments(w, None if w.dtype == torch.float32 else noise(w, None))
    offered = {REFERENCE: kernel.definition, **kernel.versions}
    return asdict(choose(name, kernel, asked if asked in offered else "auto", [arguments],
                         offered=offered).choice)
