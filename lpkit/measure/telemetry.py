"""What number formats do to a run's tensors: statistics of every operand as it was cast, and as
other recipes would cast it.

    telemetry.attach(training, run_dir, every=20)   # then fit(training, run_dir)
    telemetry.read(run_dir)                         # a list of Samples

Layers need not cooperate. On a sampled step, a hook on each nn.Linear sees x, w and dy, and applies
the casts of recipes (rows of data) to copies. Between samples there are no hooks. Telemetry never
uses a random generator of the run and never writes to its tensors. So the loss is the same bit for
bit with and without it.

Shares count only elements that are not zero, and only blocks that contain such elements. Ratios are
in dB, scales in powers of two. The largest magnitude and the number of NaNs are exact. All else is
from `rows` rows of the tensor. Each sample draws new rows, in groups that no block crosses, with
equal probability. The group with the largest magnitude is cast as well, so that scales of a whole
tensor are right. Each sample has `sampled_rows` and `total_rows`.

The statistics follow Transformer Engine's debug features LogFp8TensorStats (underflows, scale
spread) and Mishra et al. 2025, https://arxiv.org/abs/2506.08027; the signal-to-quantisation-noise
ratio (SQNR) follows Widrow and Kollar 2008.
"""

from __future__ import annotations

import fnmatch
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lpkit import records
from lpkit.errors import ConfigError, nearest, pick
from lpkit.files import append_lines, refuse_links
from lpkit.kernels import cast as kernel
from lpkit.kernels.cast import Noise
from lpkit.precision.linear import HISTORY_RULES, Scaling
from lpkit.precision.linear import ROLES as OPERANDS
from lpkit.precision.scaled import TRANSFORMS, quantise
from lpkit.techniques.formats import FORMATS, format_of
from lpkit.techniques.recipes import ALL, RECIPES, Cast, Recipe
from lpkit.training.runs import Run
from lpkit.training.training import Training

FILE = "telemetry.jsonl"
ROWS = 32               # rows of each tensor, for statistics that are not exact
GROUP = 4               # at least this many adjacent rows are drawn together

ROLES = {   # (the product in which a tensor is used, its operand there)
    "x": ("y", "x"), "w": ("y", "w"), "dy": ("dx", "g"),
    "x.T": ("dw", "x"), "w.T": ("dx", "w"), "dy.T": ("dw", "g"),
}

@dataclass(frozen=True, kw_only=True)
class Quality:
    """The effect of one cast on one tensor."""

    sqnr_db: float | None           # 10 log10(sum x^2 / sum (x - cast x)^2); None: no error
    underflow: float                # share of elements that became zero
    saturated: float                # share beyond the largest value by more than half a spacing
    scale_octaves: float            # log2 of the largest block scale over the smallest
    worst_block_db: float | None    # the least SQNR of a block
    saturated_blocks: float         # share of blocks with a saturated element
    zeroed_blocks: float            # share of blocks in which all elements became zero
    zero_blocks: float              # share of all blocks that were zero before the cast
    # log2 of the least and the largest magnitude that the largest scale can express
    window: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One tensor at one step."""

    step: int
    layer: str
    role: str                       # a name from ROLES
    cast: dict[str, Any]            # the fields of the Cast that the run applied
    total_rows: int
    sampled_rows: int
    amax: float | None              # exact; None: not finite
    # NaNs and infinities, exact; if there are any, there are no other statistics
    nonfinite: int
    own: Quality | None             # under `cast`
    others: dict[str, Quality]      # under each other recipe, as if it had been used
    # floor(log2 |x|) -> number of sampled elements, without zeros
    exponents: dict[int, int]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """Return a Sample from JSON, which has lists for tuples and strings for keys of dicts."""
        others = {name: _quality(numbers) for name, numbers in values["others"].items()}
        cast = {**values["cast"], "block": tuple(values["cast"]["block"])}
        exponents = {int(exponent): count for exponent, count in values["exponents"].items()}
        own = values["own"] and _quality(values["own"])
        return cls(**{**values, "own": own, "others": others, "cast": cast, "exponents": exponents})


def _quality(values: dict[str, Any]) -> Quality:
    return Quality(**{**values, "window": tuple(values["window"])})


# ---- Statistics of one tensor

@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Rows of an operand, and one more group with its largest magnitude, which is cast as well."""

    x: Tensor                   # (rows [+ group], contracted axis) float32
    rows: int                   # number of rows of x that count
    total_rows: int
    amax: Tensor                # () float32, of the whole operand
    nonfinite: Tensor           # ()
    # results that several casts share
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def unit(self) -> Tensor:
        """A power of two to multiply by, since squares of small gradients underflow in float32."""
        exponent = torch.frexp(self.amax).exponent.clamp(-120, 120)
        return torch.ldexp(torch.ones_like(self.amax), -exponent)

    def mixed(self, transform: str) -> Tensor:
        if transform not in self._shared:
            self._shared[transform] = TRANSFORMS[transform](self.x)
        return self._shared[transform]

    def blocks(self, transform: str, r: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows that count, times `unit`, as (R, r, C, c); and for each block the sum of
        squares and the number of elements that are not zero."""
        key = transform, r, c
        if key not in self._shared:
            x = (self.mixed(transform)[:self.rows] * self.unit).view(self.rows // r, r, -1, c)
            self._shared[key] = x, x.square().sum((1, 3)), x.count_nonzero((1, 3))
        return self._shared[key]


def draw(x: Tensor, casts: Iterable[Cast], rows: int | None,
         generator: torch.Generator | None = None) -> Drawn:
    """Draw `rows` rows of x (M, K); None: all. x is padded with zeros until all `casts` tile."""
    tiles = [cast.tile for cast in casts]
    x = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
    along = max((side for tile in tiles for side in tile[1:]), default=1)
    group = max(GROUP, *(tile[0] for tile in tiles))
    total = len(x)
    if -total % group or -x.shape[1] % along:
        x = nn.functional.pad(x, (0, -x.shape[1] % along, 0, -total % group))
    by_column = any(cast.block[0] == ALL != cast.block[1] for cast in casts)
    amaxes = kernel.amax(x, (group, 0))
    tops, groups, wanted = amaxes.values.view(-1), len(x) // group, -(-(rows or total) // group)
    count = len(x)              # number of rows that count
    if wanted < groups and not by_column:       # else a scale spans all rows
        picked = torch.randperm(groups, generator=generator)[:wanted].sort().values.to(x.device)
        picked = torch.cat((picked, tops.nan_to_num(0, 0).argmax()[None]))
        x, count = x.unflatten(0, (-1, group))[picked].flatten(0, 1), wanted * group
    return Drawn(x=x.float(), rows=count, total_rows=total, amax=tops.amax(),
                 nonfinite=amaxes.nonfinite)


def measure(drawn: Drawn, cast: Cast, *, amax: Tensor | None = None) -> Tensor:
    """Return sums and counts for `quality`, (12,) float64 on x's device. `amax`: as in `quantise`.
    """
    mixed = drawn.mixed(cast.transform)
    quantised = quantise(mixed, replace(cast, transform="none"), amax=amax,
                         noise=Noise(seed=0) if cast.rounding == "stochastic" else None)
    scale = quantised.scale if quantised.tensor is None else quantised.scale * quantised.tensor
    r, c = cast.block[0] or len(mixed), cast.block[1] or mixed.shape[1]
    kept = -(-drawn.rows // r)                              # rows of blocks that count
    scale, top, r = scale[:kept], quantised.amax[:kept], min(r, drawn.rows)
    x, signal, some = drawn.blocks(cast.transform, r, c)
    data = quantised.data[:drawn.rows].view(x.shape)
    noise = torch.addcmul(x, data, (scale * drawn.unit)[:, None, :, None],
                          value=-1).square_().sum((1, 3))
    left = data.count_nonzero((1, 3))
    # a magnitude saturates if it is more than half a spacing beyond the largest value
    to = format_of(cast.format)
    half = 2.0**(to.max_exponent - to.mantissa_bits - 1)
    there, scaled = some > 0, scale > 0     # under a scale of 0, nothing saturates
    limit = ((to.largest + half) * scale.double()).masked_fill(~scaled, torch.inf)
    beyond = torch.zeros_like(some)
    if bool((top > limit).any()):
        beyond = (x.abs().double() > (limit * drawn.unit)[:, None, :, None]).sum((1, 3))
    counts = torch.stack((some, left, beyond, there, (beyond > 0) & there,
                          (left == 0) & there)).sum((1, 2))
    ratio = torch.where(there, signal / noise, torch.inf)   # noise 0: inf
    sums = torch.stack((signal.sum(), noise.sum(), ratio.amin(),
                        torch.where(there, scale, 0).amax(),
                        torch.where(there & scaled, scale, scale.amax()).amin()))
    return torch.cat((counts.double(), sums.double(), sums.new_full((1,), some.numel()).double()))


def quality(numbers: list[float], cast: Cast) -> Quality:
    """Return a Quality from the numbers of `measure`."""
    (elements, left, beyond, there, saturated, zeroed,
     signal, noise, worst, high, low, blocks) = numbers
    to, elements, some = format_of(cast.format), max(elements, 1), max(there, 1)
    top = math.log2(high or 1)
    return Quality(
        sqnr_db=decibel(signal / noise if noise else math.inf),
        underflow=(elements - left) / elements if there else 0.0, saturated=beyond / elements,
        scale_octaves=top - math.log2(low or 1), worst_block_db=decibel(worst),
        saturated_blocks=saturated / some, zeroed_blocks=zeroed / some,
        zero_blocks=1 - there / blocks,
        window=(top + math.log2(to.smallest), top + math.log2(to.largest)))


def decibel(ratio: float) -> float | None:
    """Return a ratio in dB; None if it has no logarithm: no error (infinite), or no signal (0,
    NaN)."""
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def exponents(x: Tensor) -> dict[int, int]:
    """Count the elements of x (float32) by floor(log2 |x|), without those below 2^-126."""
    codes = (x.contiguous().view(torch.int32) >> 23) & 0xFF
    counts = torch.bincount(codes.flatten(), minlength=256)[1:255].tolist()
    return {exponent: count for exponent, count in enumerate(counts, -126) if count}


def cast_of(recipe: Recipe, role: str) -> Cast:
    if (cast := recipe.cast_of[ROLES[role]]) is not None:
        return cast
    # no recipe scales this operand: it is cast to the dtype of the product
    dtype = recipe.compute or "float32"
    name = next(f.name for f in FORMATS.values() if f.torch_dtype == dtype)
    return Cast(format=name, scale="none")


# ---- Telemetry of a run

@contextmanager
def observed(linears: Mapping[str, nn.Linear],
             look: Callable[[str, nn.Linear, str, Tensor, torch.dtype], None]) -> Iterator[None]:
    """Call `look(name, layer, tensor, value, dtype)` for each operand of each Linear: its x, its w,
    and the gradient dy of its output. `dtype` is the dtype of the output."""
    def forward(name: str, layer: nn.Linear, args: tuple[Tensor, ...], out: Tensor) -> None:
        # not `out` itself: a closure over it would keep it until backward, and itself in a cycle
        dtype = out.dtype
        look(name, layer, "x", args[0], dtype)
        turned = getattr(layer, "transposed", False)
        look(name, layer, "w", layer.weight.T if turned else layer.weight, dtype)
        if out.requires_grad:
            out.register_hook(lambda dy: look(name, layer, "dy", dy, dtype))

    with ExitStack() as stack:
        for name, layer in linears.items():
            stack.callback(layer.register_forward_hook(partial(forward, name)).remove)
        # a compiled model does not call hooks that are added later, and is not recompiled for them
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@dataclass(kw_only=True)
class Telemetry:
    """Samples `model` every `every` steps: step 1, 1 + every, ... `watch` is a watcher of a
    Training.

    layers:          patterns of names of Linears
    roles:           some of ROLES
    counterfactuals: names of recipes to compare with; None: all but fp32
    rows:            rows to draw from each tensor; None: all rows, over 5% of a small model's step
    path:            file that gets a JSON line per sample, while `samples` stays empty; None:
                     samples go to `samples`
    Raises ConfigError for an unknown name.
    """

    model: nn.Module
    every: int = 20
    layers: tuple[str, ...] = ("*",)
    roles: tuple[str, ...] = ("x", "w", "dy")
    counterfactuals: tuple[str, ...] | None = None
    rows: int | None = ROWS
    path: Path | None = None
    step: int = 0                                   # the current step, from 1
    samples: list[Sample] = field(default_factory=list)
    _amaxes: dict[tuple[str, str], Tensor] = field(default_factory=dict, repr=False)
    _chain: records.Chain | None = field(default=None, init=False, repr=False)

    def __post_init__(self):
        if self.every < 1 or (self.rows is not None and self.rows < 1):
            raise ConfigError(f"telemetry looks every N >= 1 steps at R >= 1 rows, got "
                              f"every={self.every}, rows={self.rows}")
        for role in self.roles:
            pick(ROLES, role, "role")
        names = self.counterfactuals
        if names is None:
            names = [name for name in RECIPES if RECIPES[name].compute]
        self._others = {name: pick(RECIPES, name, "recipe") for name in names}
        linears = {name: module for name, module in self.model.named_modules()
                   if isinstance(module, nn.Linear | Scaling)}
        self._linears: dict[str, nn.Linear] = {}
        for pattern in self.layers:
            matched = fnmatch.filter(linears, pattern)
            if not matched:
                raise ConfigError(f"telemetry: {pattern!r} matches no Linear of this model; "
                                  f"{nearest(pattern, linears)}")
            self._linears |= {name: linears[name] for name in matched}

    @contextmanager
    def watch(self, step: int) -> Iterator[None]:
        """Sample `step` (from 0) if it is due. Use it around forward and backward."""
        if step % self.every:
            yield
            return
        self.step, self._seen, self._new_samples = step + 1, set(), []
        with observed(self._linears, self._sample):
            yield
        self._keep(self._new_samples)

    def _sample(self, name: str, module: nn.Linear, tensor: str, value: Tensor,
                dtype: torch.dtype) -> None:
        """Sample the first micro-batch only. A recomputed forward is skipped as a repetition."""
        if (name, tensor) in self._seen:
            return
        self._seen.add((name, tensor))
        x = value.detach().reshape(-1, value.shape[-1])
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            faces = {tensor: x, f"{tensor}.T": x.T}
            self._new_samples += [self._look(name, module, role, faces[role], dtype)
                            for role in self.roles if role in faces]

    def _look(self, name: str, module: nn.Linear, role: str, x: Tensor,
              dtype: torch.dtype) -> Sample:
        ours = getattr(module, "recipe", None)
        ours = ours or Recipe(compute=str(dtype).removeprefix("torch."), dtype="", source="")
        recipes = {"": ours, **self._others}
        casts = {key: cast_of(recipe, role) for key, recipe in recipes.items()}
        # casts by the height of their blocks; each height gets one draw
        by_height = defaultdict(list)
        for cast in casts.values():
            by_height[max(GROUP, cast.tile[0])].append(cast)
        draws = {height: draw(x, same, self.rows, torch.Generator().manual_seed(self.step))
                 for height, same in by_height.items()}
        drawn = draws[min(draws)]
        alike, counted = {}, {}             # recipes with equal casts are measured once
        for key, cast in casts.items():
            history = self._history(name, module, role, recipes[key], drawn)
            alike[key] = (cast, None if history is None else key)
            if alike[key] not in counted:
                counted[alike[key]] = measure(draws[max(GROUP, cast.tile[0])], cast, amax=history)
        self._amaxes[name, role] = torch.maximum(drawn.amax,
                                                 self._amaxes.get((name, role), drawn.amax))
        exact = torch.stack((drawn.amax.double(), drawn.nonfinite.double().to(x.device)))
        values = torch.cat((exact, *counted.values())).cpu()        # one transfer to the host
        amax, nonfinite = values[:2].tolist()
        qualities = {}
        if not nonfinite:
            numbers = values[2:].view(len(counted), -1).tolist()
            qualities = {like: quality(each, like[0]) for like, each in zip(counted, numbers)}
        return Sample(
            step=self.step, layer=name, role=role, cast=asdict(casts[""]),
            total_rows=drawn.total_rows, sampled_rows=min(drawn.rows, drawn.total_rows),
            amax=amax if math.isfinite(amax) else None, nonfinite=int(nonfinite),
            exponents=exponents(drawn.x[:drawn.rows]), own=qualities.get(alike[""]),
            others={key: qualities[alike[key]] for key in self._others if qualities})

    def _history(self, name: str, module: nn.Linear, role: str, recipe: Recipe,
                 drawn: Drawn) -> Tensor | None:
        """Return the amax for delayed scaling: the layer's history, or that of earlier samples."""
        product, operand = ROLES[role]
        if recipe.delayed is None or getattr(recipe, product) is None:
            return None
        history = getattr(module, "amax_history", None)
        # a layer that was promoted to a wider dtype keeps its history
        if history is None or module.recipe.delayed is None:
            return self._amaxes.get((name, role), drawn.amax) * 2.0**recipe.delayed.margin
        delayed = module.recipe.delayed
        amax = HISTORY_RULES[delayed.history_rule](history[OPERANDS.index(operand), 1:])
        return amax * 2.0**delayed.margin

    def _keep(self, samples: list[Sample]) -> None:
        """Write samples to the file if there is one, since a long run would exceed the memory."""
        if self.path is None:
            self.samples += samples
        else:
            if self._chain is None:
                self._chain = records.Chain(self.path, Run.at(self.path.parent).mark)
            append_lines(self.path, [self._chain.line(asdict(sample)) for sample in samples])


def attach(training: Training, run_dir: str | Path | None = None, **settings: Any) -> Telemetry:
    """Watch `training`; then `fit` it into the same `run_dir`. `settings`, errors: as `Telemetry`.
    """
    path = None if run_dir is None else Path(run_dir) / FILE
    telemetry = Telemetry(model=training.model, path=path, **settings)
    training.watchers.append(telemetry.watch)
    return telemetry


def read(path: str | Path) -> list[Sample]:
    """Return the samples of a run folder by step. A repeated step counts once, with its last
    samples. A damaged line is skipped with a warning. Raises ConfigError if there are none."""
    path = Path(path)
    refuse_links(path)
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{str(path)!r} holds no {FILE}; train with telemetry, every 20 steps "
                          f"for example")
    lines, problems = records.read_lines(file, Run.at(path).mark if path.is_dir() else None)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    samples = map(Sample.from_dict, lines)
    last = {(sample.step, sample.layer, sample.role): sample for sample in samples}
    return sorted(last.values(), key=lambda sample: sample.step)
