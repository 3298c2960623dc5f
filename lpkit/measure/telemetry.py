"""The effect of number formats on a run's tensors: statistics of each operand of each Linear, under
the run's own cast and under the casts of other recipes.

    telemetry.attach(training, run_dir, every=20)   # then fit(training, run_dir)
    telemetry.read(run_dir)                         # a list of Samples

No layer needs to change. In a sampled step, a hook on each nn.Linear gets x, w and dy, and applies
the casts of the recipes to copies of them. In all other steps there are no hooks. Telemetry never
uses a random generator of the run and never writes to its tensors. So the loss is bit for bit the
same with and without telemetry.

Shares are of the elements that are not zero, and of the blocks that have such elements. Ratios are
in dB, scales in powers of two. The largest magnitude and the number of NaNs are exact. All other
statistics are from a sample of `rows` rows of the tensor. Each Sample draws new rows with equal
probability, in groups that no block of a cast crosses. The group with the largest magnitude is cast
too, but not counted: it makes sure that the scale of a whole tensor is right. Each Sample has
`sampled_rows` and `total_rows`.

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
ROWS = 32               # rows that are drawn from each tensor
GROUP = 4               # at least this many adjacent rows are drawn together

ROLES = {   # by role: (the matmul that uses the tensor, the name of the operand there)
    "x": ("y", "x"), "w": ("y", "w"), "dy": ("dx", "g"),
    "x.T": ("dw", "x"), "w.T": ("dx", "w"), "dy.T": ("dw", "g"),
}

@dataclass(frozen=True, kw_only=True)
class Quality:
    """The effect of one cast on one tensor."""

    sqnr_db: float | None           # 10 log10(sum x^2 / sum (x - cast x)^2); None: no error
    underflow: float                # share of elements that the cast turned into zero
    # share of elements that exceed the format's largest value by more than half a spacing
    saturated: float
    scale_octaves: float            # log2 of (largest block scale / smallest block scale)
    worst_block_db: float | None    # the least SQNR of a block
    saturated_blocks: float         # share of blocks with a saturated element
    zeroed_blocks: float            # share of blocks whose elements all became zero
    zero_blocks: float              # share of all blocks that were zero before the cast
    # log2 of the least and the largest magnitude that the format has under the largest scale
    window: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The statistics of one tensor in one step."""

    step: int
    layer: str                      # name of the Linear
    role: str                       # a key of ROLES
    cast: dict[str, Any]            # the fields of the Cast that the run applied
    total_rows: int
    sampled_rows: int
    amax: float | None              # exact largest magnitude; None: not finite
    # exact number of NaNs and infinities; if it is above 0, there are no other statistics
    nonfinite: int
    own: Quality | None             # the effect of `cast`
    others: dict[str, Quality]      # by recipe: the effect that its cast would have
    # for each floor(log2 |x|), the number of sampled elements; zeros are left out
    exponents: dict[int, int]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sample:
        """Return the Sample that was saved as JSON. JSON has lists instead of tuples, and strings
        instead of integer keys."""
        others = {name: _quality(numbers) for name, numbers in values["others"].items()}
        cast = {**values["cast"], "block": tuple(values["cast"]["block"])}
        exponents = {int(exponent): count for exponent, count in values["exponents"].items()}
        own = values["own"] and _quality(values["own"])
        return cls(**{**values, "own": own, "others": others, "cast": cast, "exponents": exponents})


def _quality(values: dict[str, Any]) -> Quality:
    return Quality(**{**values, "window": tuple(values["window"])})


# ---- Statistics of one tensor

@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Rows that were drawn from an operand, followed by the group of rows with the operand's
    largest magnitude. The last group is cast, but the statistics do not count it."""

    x: Tensor                   # (rows [+ group], K) float32; the matmul sums over K
    rows: int                   # number of rows of x that statistics count
    total_rows: int             # rows of the operand
    amax: Tensor                # () float32: largest magnitude of the whole operand
    nonfinite: Tensor           # (): NaNs and infinities of the whole operand
    # results that several casts share
    _shared: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def unit(self) -> Tensor:
        """The power of two by which x is multiplied before it is squared. Without it, squares of
        small gradients would underflow in float32."""
        exponent = torch.frexp(self.amax).exponent.clamp(-120, 120)
        return torch.ldexp(torch.ones_like(self.amax), -exponent)

    def mixed(self, transform: str) -> Tensor:
        """Return x after a transform (a row of TRANSFORMS), computed once."""
        if transform not in self._shared:
            self._shared[transform] = TRANSFORMS[transform](self.x)
        return self._shared[transform]

    def blocks(self, transform: str, r: int, c: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the counted rows times `unit`, as a tensor (R, r, C, c) of R x C blocks with r
        rows and c columns; and two tensors (R, C): the sum of squares of each block, and the number
        of its elements that are not zero."""
        key = transform, r, c
        if key not in self._shared:
            x = (self.mixed(transform)[:self.rows] * self.unit).view(self.rows // r, r, -1, c)
            self._shared[key] = x, x.square().sum((1, 3)), x.count_nonzero((1, 3))
        return self._shared[key]


def draw(x: Tensor, casts: Iterable[Cast], rows: int | None,
         generator: torch.Generator | None = None) -> SampledRows:
    """Draw `rows` rows of x (M, K); None: all rows. x is padded with zeros to a multiple of the
    blocks of all `casts`. All rows are drawn, too, if a cast has scales that span all rows."""
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
    count = len(x)              # number of rows that statistics count
    if wanted < groups and not by_column:
        picked = torch.randperm(groups, generator=generator)[:wanted].sort().values.to(x.device)
        picked = torch.cat((picked, tops.nan_to_num(0, 0).argmax()[None]))
        x, count = x.unflatten(0, (-1, group))[picked].flatten(0, 1), wanted * group
    return SampledRows(x=x.float(), rows=count, total_rows=total, amax=tops.amax(),
                       nonfinite=amaxes.nonfinite)


def measure(drawn: SampledRows, cast: Cast, *, amax: Tensor | None = None) -> Tensor:
    """Return the 12 numbers from which `quality` computes a Quality, as a float64 tensor on the
    device of x, so that the host need not wait for each number. `amax`: the largest magnitude that
    sets the scale, as in `quantise`; None: the largest magnitude of x. The code below has tensors
    of shape (R, C), with a number for each block of the cast."""
    mixed = drawn.mixed(cast.transform)
    quantised = quantise(mixed, replace(cast, transform="none"), amax=amax,
                         noise=Noise(seed=0) if cast.rounding == "stochastic" else None)
    scale = quantised.scale if quantised.tensor is None else quantised.scale * quantised.tensor
    r, c = cast.block[0] or len(mixed), cast.block[1] or mixed.shape[1]
    kept = -(-drawn.rows // r)                              # rows of blocks that statistics count
    scale, top, r = scale[:kept], quantised.amax[:kept], min(r, drawn.rows)
    x, signal, some = drawn.blocks(cast.transform, r, c)
    data = quantised.data[:drawn.rows].view(x.shape)
    noise = torch.addcmul(x, data, (scale * drawn.unit)[:, None, :, None],
                          value=-1).square_().sum((1, 3))
    left = data.count_nonzero((1, 3))
    # An element saturates if its magnitude exceeds the format's largest value by more than half the
    # spacing of values there.
    to = format_of(cast.format)
    half = 2.0**(to.max_exponent - to.mantissa_bits - 1)
    # there: the block has an element that is not zero. With a scale of 0, no element saturates.
    there, scaled = some > 0, scale > 0
    limit = ((to.largest + half) * scale.double()).masked_fill(~scaled, torch.inf)
    beyond = torch.zeros_like(some)
    if bool((top > limit).any()):
        beyond = (x.abs().double() > (limit * drawn.unit)[:, None, :, None]).sum((1, 3))
    counts = torch.stack((some, left, beyond, there, (beyond > 0) & there,
                          (left == 0) & there)).sum((1, 2))
    ratio = torch.where(there, signal / noise, torch.inf)   # infinite if the noise is 0
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
    """Return a ratio in dB. Return None if the ratio has no finite logarithm: it is infinite (no
    error), 0 or NaN (no signal).

    >>> decibel(100.0), decibel(math.inf)
    (20.0, None)
    """
    return 10 * math.log10(ratio) if 0 < ratio < math.inf else None


def exponents(x: Tensor) -> dict[int, int]:
    """Return, for each floor(log2 |x|), the number of elements of x (float32). Elements below
    2^-126 in magnitude are not counted.

    >>> exponents(torch.tensor([1.0, 1.5, 0.25, 0.0]))
    {-2: 1, 0: 2}
    """
    codes = (x.contiguous().view(torch.int32) >> 23) & 0xFF
    counts = torch.bincount(codes.flatten(), minlength=256)[1:255].tolist()
    return {exponent: count for exponent, count in enumerate(counts, -126) if count}


def cast_of(recipe: Recipe, role: str) -> Cast:
    """Return the cast of a role (a key of ROLES) under a recipe."""
    if (cast := recipe.cast_of[ROLES[role]]) is not None:
        return cast
    # the recipe does not scale this operand: it is only converted to the dtype of the matmul
    dtype = recipe.compute or "float32"
    name = next(f.name for f in FORMATS.values() if f.torch_dtype == dtype)
    return Cast(format=name, scale="none")


# ---- Telemetry of a run

@contextmanager
def observed(linears: Mapping[str, nn.Linear],
             look: Callable[[str, nn.Linear, str, Tensor, torch.dtype], None]) -> Iterator[None]:
    """In this block, call `look(name, layer, tensor, value, dtype)` for each operand of each
    Linear: its x, its w, and the gradient dy of its output. `tensor` is "x", "w" or "dy", `value`
    is the operand, and `dtype` is the dtype of the Linear's output."""
    def forward(name: str, layer: nn.Linear, args: tuple[Tensor, ...], out: Tensor) -> None:
        # The hook below must not refer to `out`: it would keep `out` alive until backward, in a
        # reference cycle.
        dtype = out.dtype
        look(name, layer, "x", args[0], dtype)
        turned = getattr(layer, "transposed", False)
        look(name, layer, "w", layer.weight.T if turned else layer.weight, dtype)
        if out.requires_grad:
            out.register_hook(lambda dy: look(name, layer, "dy", dy, dtype))

    with ExitStack() as stack:
        for name, layer in linears.items():
            stack.callback(layer.register_forward_hook(partial(forward, name)).remove)
        # A compiled model does not call hooks that are added after its compilation. So sampled
        # steps run without compiled code.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@dataclass(kw_only=True)
class Telemetry:
    """Telemetry of a `model`: it samples the steps 1, 1 + every, 1 + 2 * every, ... Its method
    `watch` is a watcher of a Training.

    layers:          patterns of the names of Linears
    roles:           keys of ROLES
    counterfactuals: names of recipes to compare with; None: all recipes but fp32
    rows:            rows to draw from each tensor; None: all rows, which takes more than 5% of a
                     small model's step
    path:            file to which a JSON line per Sample is appended; None: Samples are added to
                     `samples`

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
        """Sample the step `step`, counted from 0, if it is a multiple of `every`. Forward and
        backward of the step run in the block."""
        if step % self.every:
            yield
            return
        self.step, self._seen, self._new_samples = step + 1, set(), []
        with observed(self._linears, self._sample):
            yield
        self._keep(self._new_samples)

    def _sample(self, name: str, module: nn.Linear, tensor: str, value: Tensor,
                dtype: torch.dtype) -> None:
        """Sample one operand, if it is the first time in this step. Later micro-batches, and a
        forward pass that recomputation runs again, are skipped."""
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
        """Return the Sample of an operand x (M, K) in a role: its statistics under the run's own
        recipe (the key "") and under all other recipes."""
        ours = getattr(module, "recipe", None)
        ours = ours or Recipe(compute=str(dtype).removeprefix("torch."), dtype="", source="")
        recipes = {"": ours, **self._others}
        casts = {key: cast_of(recipe, role) for key, recipe in recipes.items()}
        # Casts whose blocks have the same number of rows share one draw.
        by_height = defaultdict(list)
        for cast in casts.values():
            by_height[max(GROUP, cast.tile[0])].append(cast)
        draws = {height: draw(x, same, self.rows, torch.Generator().manual_seed(self.step))
                 for height, same in by_height.items()}
        drawn = draws[min(draws)]
        # Recipes with equal casts are measured once: `alike` has the key of each recipe in
        # `counted`, which has the measured numbers.
        alike, counted = {}, {}
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
                 drawn: SampledRows) -> Tensor | None:
        """Return the amax that sets the scale under delayed scaling: from the layer's own history,
        or from earlier Samples if the layer has none. Return None if the recipe has no delayed
        scaling for this role."""
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
        """Append samples to the file, or to `samples` if there is no file. A long run needs the
        file, because its samples would exceed the memory."""
        if self.path is None:
            self.samples += samples
        else:
            if self._chain is None:
                self._chain = records.Chain(self.path, Run.at(self.path.parent).mark)
            append_lines(self.path, [self._chain.line(asdict(sample)) for sample in samples])


def attach(training: Training, run_dir: str | Path | None = None, **settings: Any) -> Telemetry:
    """Add telemetry to `training` and return it. Samples go to a file in `run_dir`, into which
    `fit` then trains; None: they stay in memory. `settings` are other fields of Telemetry. Raises
    ConfigError as Telemetry does."""
    path = None if run_dir is None else Path(run_dir) / FILE
    telemetry = Telemetry(model=training.model, path=path, **settings)
    training.watchers.append(telemetry.watch)
    return telemetry


def read(path: str | Path) -> list[Sample]:
    """Return the Samples of a run folder, or of its telemetry file, in the order of steps. If a
    step was run twice, its last Samples are returned. A damaged line is skipped with a warning.
    Raises ConfigError if there is no telemetry file."""
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
