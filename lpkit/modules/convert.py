"""Convert the Linears of any model to a recipe, in place, and back.

A converted module stays the same object, with the same parameters, hooks and name. Only its class
changes: to a subclass whose forward and backward run the three matmuls of a Linear (y, dx, dw)
under the recipe. So the optimizer, `state_dict`, adapters that are added later, `fully_shard`, DDP
and torch.compile work as without the recipe.

Delayed scaling has a history of amaxes, and stochastic rounding has a counter of draws. Both must
advance once per micro-batch, and a training loop of another library does not call us. So a backward
pass sets the buffer `due` to 1. The next forward (or `state_dict`) advances the history and the
counter if `due` is 1, and sets it to 0. A forward that activation checkpointing repeats inside the
backward pass does not advance them, because it must compute the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lpkit.errors import ConfigError, nearest, shown
from lpkit.execution.kernels import offered, sites, watched
from lpkit.kernels.choose import choose as chosen
from lpkit.kernels.choose import version
from lpkit.precision.backends import BACKENDS, choose
from lpkit.precision.linear import Arithmetic, Scaling
from lpkit.tables import html_table
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.recipes import Recipe, at_end, kept, resolve, untiled

CONVERTED, KEPT, LEFT = "converted", "kept", "not convertible"
TRANSPOSED = "transformers.pytorch_utils.Conv1D"        # weight (in_features, out_features)
# tokens of the operands on which kernels are tested: few, to verify against the definition in
# float64, and as many as in a micro-batch, to time the kernels
RACED_TOKENS = (256, 4096)
# modules whose weight is a table
MULTIPLY_NOTHING = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class ModuleRow:
    """A row of the Report: a module that has a parameter of two or more dimensions."""

    name: str
    kind: str                   # name of the module's class before it was converted
    shape: tuple[int, ...]      # shape of the weight
    status: str                 # CONVERTED, KEPT or LEFT
    why: str                    # the reason if it is not converted; else empty


@dataclass(frozen=True)
class Report:
    """The result of `convert`: one row per module with a weight matrix, in the order of the
    model."""

    recipe: str
    backend: str
    why: str                    # the reason for this backend
    rows: tuple[ModuleRow, ...]
    # name of a cast -> version of its kernel; empty on a CPU
    kernels: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ModuleRow:
        return {row.name: row for row in self.rows}[name]

    def named(self, status: str) -> list[str]:
        """Return the names of the modules with this status: CONVERTED, KEPT or LEFT."""
        return [row.name for row in self.rows if row.status == status]

    def to_dict(self) -> dict[str, Any]:
        """Return the report, JSON-ready."""
        return asdict(self)

    @property
    def summary(self) -> str:
        """The recipe, the backend and the number of modules of each status, in one line."""
        counts = ", ".join(f"{len(names)} {status}" for status in (CONVERTED, KEPT, LEFT)
                           if (names := self.named(status)))
        return f"{self.recipe} by {self.backend} ({self.why}): {counts}"

    def __str__(self) -> str:
        rest = [f"  {row.name or 'the model'} {row.kind}{list(row.shape)}: {row.status}, {row.why}"
                for row in self.rows if row.status != CONVERTED]
        return "\n".join([self.summary, *rest])

    def _repr_html_(self) -> str:
        lines = [(row.name, row.kind, " x ".join(map(str, row.shape)), row.status, row.why)
                 for row in self.rows]
        return html_table(("module", "class", "weight", "status", "why"), lines,
                          caption=self.summary)


class Converted(Scaling):
    """First base class of every converted module. `before`: the class of the module before it was
    converted, which is the second base class."""

    before: type[nn.Module]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the Linear, (..., out_features) for x (..., in_features)."""
        self.catch_up()
        if not (x.requires_grad or self.weight.requires_grad) and self.training:
            # frozen, and nothing before it is trained: no backward pass will set `due`
            self.due.fill_(1)
        return super().forward(x)

    def cast(self, product: str, role: str, *args: Any, first: bool = False, **how: Any) -> Any:
        """Cast an operand as `Scaling.cast` does. The first cast of the output's gradient (role g)
        shows that a backward pass runs, so it sets `due`."""
        if role == "g" and first:
            self.due.fill_(1)
        return super().cast(product, role, *args, first=first, **how)

    def catch_up(self) -> None:
        """Advance the history of amaxes and the counter of draws if `due` is 1, that is, after a
        finished micro-batch; then set `due` to 0. `due` stays on the device: without a branch on
        its value, the code needs no synchronisation, and torch.compile can trace it."""
        if not (self.recipe.delayed or self.recipe.stochastic):
            return
        # inside a backward pass: activation checkpointing repeats this forward
        if not torch.compiler.is_compiling() and torch._C._current_autograd_node() is not None:
            return
        with torch.no_grad():
            if self.recipe.delayed:
                amaxes = self.of_roles("amax")
                newest, old = torch.stack(amaxes)[:, None], self.amax_history[:, 1:]
                old.copy_(torch.where(self.due > 0, torch.cat((newest, old[:, :-1]), 1), old))
                for amax in amaxes:
                    amax.mul_(1 - self.due)
            if self.recipe.stochastic:
                self.draws += self.due
            self.due.zero_()

    # pickle stores a class by its name, and the classes that `_class` makes have none in a module;
    # so store `before`
    def __reduce__(self) -> tuple:
        return _empty, (self.before,), self.__dict__

    def extra_repr(self) -> str:
        return f"{self.before.extra_repr(self)}, recipe={self.recipe.settings.name}"


class _Transposed(Converted):
    """Base class of a converted Conv1D of transformers, whose weight is (in_features,
    out_features)."""

    transposed = True

    @property
    def in_features(self) -> int:
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]


@cache
def _class(before: type[nn.Module]) -> type[Converted]:
    """Return the class of converted modules of class `before`."""
    base = _Transposed if _path(before) == TRANSPOSED else Converted
    return type(f"Converted{before.__name__}", (base, before), {
        "before": before, "__module__": before.__module__, "__doc__": before.__doc__})


def _before_saving(module: Converted, *_: Any) -> None:
    """Hook of `state_dict`: the saved history must include the last micro-batch."""
    module.catch_up()


def _empty(before: type[nn.Module]) -> Converted:
    """Return a converted module without attributes, which pickle then fills."""
    return object.__new__(_class(before))


def _path(kind: type) -> str:
    """Return the module and name of a class: torch.nn.modules.linear.Linear."""
    return f"{kind.__module__}.{kind.__qualname__}"


def transposed(module: nn.Module) -> bool:
    """Return True for a Linear, converted or not, whose weight is (in_features, out_features)."""
    return any(_path(kind) == TRANSPOSED for kind in type(module).__mro__)


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield (name, module, parameter) for every module that directly owns a parameter of two or
    more dimensions. The parameter is `weight`, or else the first such parameter. A module with
    several names is yielded once, under its first name."""
    for name, module in model.named_modules():
        weights = {key: p for key, p in module.named_parameters(recurse=False) if p.ndim > 1}
        if weights:
            yield name, module, weights.get("weight", next(iter(weights.values())))


def output_heads(model: nn.Module) -> set[nn.Module]:
    """Return the modules that compute logits: the modules that `get_output_embeddings()` returns,
    and Linears that share their weight with an embedding. If there are none, return the last Linear
    that has as many outputs as an embedding has rows. May be empty."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    heads = {linear for linear in linears if any(linear.weight is table.weight for table in tables)}
    for module in model.modules():
        if (get := getattr(module, "get_output_embeddings", None)) is not None:
            try:
                heads |= {get()} - {None}
            except (AttributeError, NotImplementedError):
                pass        # transformers raises these for a model without a head
    rows = {table.num_embeddings for table in tables}
    return heads or {*[linear for linear in linears if linear.out_features in rows][-1:]}


def head_names(model: nn.Module) -> list[str]:
    """Return the names of the modules that `output_heads` returns."""
    heads = output_heads(model)
    return [name for name, module in model.named_modules() if module in heads]


def why_not(name: str, module: nn.Module, parents: Mapping[str, nn.Module]) -> str:
    """Return why the matmul of this module's weight cannot be converted, or "" if it can.

    name:    the module's dotted name in the model
    parents: dotted name -> module, for all modules of the model
    """
    kind, parent = type(module), parents.get(name.rpartition(".")[0])
    if isinstance(module, MULTIPLY_NOTHING):
        return "an embedding looks up rows and multiplies nothing"
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies this weight without calling its module"
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and not weight.is_floating_point():
        return f"its weight is stored as {str(weight.dtype).removeprefix('torch.')}"
    # A DTensor (FSDP2, tensor parallelism) is an ordinary weight in shards; other wrapper
    # subclasses hold quantised numbers.
    if is_traceable_wrapper_subclass(weight) and not isinstance(weight, DTensor):
        return f"its weight is a {type(weight).__name__}, quantised already"
    # A subclass of Linear with its own forward may compute something else.
    if _path(kind) == TRANSPOSED or (isinstance(module, nn.Linear)
                                     and kind.forward is nn.Linear.forward):
        return ""
    return f"lpkit converts Linears, and this is a {kind.__name__}"


def convert(model: nn.Module, recipe: str | Recipe, *, keep: Iterable[str] = (),
            backend: str = "auto", pad: bool = False, seed: int = 0) -> Report:
    """Convert the Linears of `model` in place, so that their matmuls run under a row of RECIPES.
    Return a report on every module with a weight matrix.

    keep:    modules that are not converted, in addition to the output head and the layers that the
             recipe itself keeps. Each entry is a name, the beginning or end of names (up to a dot),
             a pattern such as `*.q_proj`, or `first` or `last:2` for whole blocks
    backend: a row of BACKENDS; auto: the fastest backend for the recipe on the model's device
    pad:     True: pad operands with zeros if their sizes are not multiples of the recipe's tiles;
             False: such a layer is not converted
    seed:    seed of stochastic rounding

    Raises ConfigError, without changing the model, for an unknown recipe, a name in `keep` that
    matches nothing, a model without a Linear to convert, weights on the meta device, and a model
    that is already converted.
    """
    name, row = recipe_of(recipe, pad)
    if not row.products:
        raise ConfigError(f"{name} casts no operand of a matmul, so there is nothing to convert; "
                          f"run the step under torch.autocast instead")
    weights = [weight for _, _, weight in matrices(model)]
    if any(weight.is_meta for weight in weights):
        raise ConfigError("this model's weights are on the meta device and have no values; load "
                          "them first (model.to_empty, load_state_dict). lpkit.predict works "
                          "without values")
    device = weights[0].device if weights else torch.device("cpu")
    choice = choose(backend, name, row, device)
    by = BACKENDS[choice.used]
    if not isinstance(by, Arithmetic):
        raise ConfigError(f"backend={choice.used} brings modules of its own, which cannot take the "
                          f"place of a model's Linears; choose emulated or scaled_mm")
    rows = converted(model, name, row, by, keep, seed)
    has_kernels = device.type == "cuda" and hasattr(by, "kernels")
    kernels = choose_kernels(model) if has_kernels else {}
    return Report(name, choice.used, choice.why, rows, kernels)


def recipe_of(recipe: str | Recipe, pad: bool = False) -> tuple[str, Recipe]:
    """Return the name and the row of a recipe. Raises ConfigError."""
    row = recipe if isinstance(recipe, Recipe) else resolve(recipe)
    if pad and row.make is not None:
        row = resolve(replace(row.settings, pad=True))
    return getattr(row.settings, "name", "") or "this recipe", row


def converted(model: nn.Module, name: str, recipe: Recipe, by: Arithmetic, keep: Iterable[str] = (),
              seed: int = 0) -> tuple[ModuleRow, ...]:
    """Convert `model` in place and return the rows of the report. name: the name of the recipe. by:
    the backend that computes the matmuls; each module gets a copy. Raises ConfigError as `convert`
    does."""
    if done := next((module for module in model.modules() if isinstance(module, Converted)), None):
        raise ConfigError(f"this model is converted already, to {done.recipe.settings.name}; call "
                          f"lpkit.unconvert(model) first")
    matrices_by_name = {name: (module, weight) for name, module, weight in matrices(model)}
    rows = _rows(model, matrices_by_name, recipe, keep, by.alignment)
    convertible = [row for row in rows if row.status == CONVERTED]
    if not convertible:
        reasons = "; ".join(f"{row.name}: {row.why}" for row in rows[:3]) or "it has no matrix"
        raise ConfigError(f"no module of this model can be converted to {name} ({reasons}); it "
                          f"needs a Linear whose sizes fit the tiles, or pad=True")
    for row in convertible:
        _equip(matrices_by_name[row.name][0], recipe, copy(by), row.name, seed)
    # In evaluation, the fast path of nn.TransformerEncoderLayer would read the weights directly and
    # so bypass the converted modules. Activation 0 (unknown) switches it off.
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.fast_path, layer.activation_relu_or_gelu = layer.activation_relu_or_gelu, 0
    return tuple(rows)


def _rows(model: nn.Module, matrices_by_name: Mapping[str, tuple[nn.Module, Tensor]],
          recipe: Recipe, keep: Iterable[str], alignment: int) -> list[ModuleRow]:
    """Decide for each module whether it is converted, and return the rows of the report.

    matrices_by_name: name -> (module, weight), as `matrices` yields them
    alignment:        sizes of matmuls must be multiples of it on this backend
    """
    heads, parents = output_heads(model), dict(model.named_modules())
    reasons = {name: why_not(name, module, parents)
               for name, (module, _) in matrices_by_name.items()}
    linears = [name for name, why in reasons.items() if not why]
    inside = [name for name in linears if matrices_by_name[name][0] not in heads]
    ends = [pattern for pattern in recipe.high_precision_layers if pattern != "head"]
    by_recipe, by_name = kept(inside, ends), _matched(keep, linears)
    rows = []
    for name, (module, weight) in matrices_by_name.items():
        shape = tuple(weight.shape)
        sizes = dict(zip("KN", shape if transposed(module) else shape[::-1]))
        status, why = CONVERTED, ""
        if reasons[name]:
            status, why = LEFT, reasons[name]
        elif name in by_name or name in by_recipe or module in heads:
            status = KEPT
            why = ("named in keep" if name in by_name else "the output head" if module in heads
                   else "the recipe keeps it")
        elif not recipe.pad and (problem := untiled(recipe, sizes, alignment)):
            status, why = LEFT, f"{problem}; pad=True pads them"
        rows.append(ModuleRow(name, type(module).__name__, shape, status, why))
    return rows


def _matched(keep: Iterable[str], names: list[str]) -> set[str]:
    """Return the names that the entries of `keep` match. Raises ConfigError for an entry without a
    match."""
    keep = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else [*keep]
    if not all(isinstance(pattern, str) for pattern in keep):
        raise ConfigError(f"keep takes names of modules, as keep=('lm_head',), got {shown(keep)}")
    matched: set[str] = set()
    for pattern in keep:
        hit = {name for name in names if fnmatchcase(name, pattern)
               or f".{name}.".startswith(f".{pattern}.") or f".{name}".endswith(f".{pattern}")}
        if at_end(pattern, ()) is not None:
            hit = kept(names, [pattern])
        if not hit:
            raise ConfigError(f"keep={shown(pattern)} matches no Linear of this model; "
                              f"{nearest(pattern, names)}")
        matched |= hit
    return matched


def _equip(module: nn.Module, recipe: Recipe, by: Arithmetic, name: str, seed: int) -> None:
    """Convert one module in place. Stores what `unconvert` must remove: the hook `before_saving`,
    and in `added` the names of the new buffers."""
    before = set(module._buffers)
    module.__class__ = _class(type(module))
    module.equip(recipe, by, name=name, seed=seed)
    mark = torch.zeros((), dtype=torch.int64, device=module.weight.device)
    module.register_buffer("due", mark, persistent=False)
    module.before_saving = module.register_state_dict_pre_hook(_before_saving)
    module.added = set(module._buffers) - before


def choose_kernels(model: nn.Module) -> dict[str, str]:
    """Choose the version of each kernel that casts operands: verify and time all versions on the
    operands of the first converted module, as a run does (`lpkit.execution.kernels`). All converted
    modules then use the fastest correct version. Returns {name of a cast: version}."""
    layers = [module for module in model.modules() if isinstance(module, Converted)]
    # the calls of casts that a copy of the layer makes with few and with many tokens
    layer, seen = deepcopy(layers[0]), ({}, {})
    for tokens, calls in zip(RACED_TOKENS, seen):
        x = torch.randn(tokens, layer.in_features, device=layer.weight.device, dtype=torch.bfloat16)
        with watched(layer, calls), torch.enable_grad(), torch.autocast(x.device.type, x.dtype):
            layer(x.requires_grad_()).square().mean().backward()
    used = {}
    for name in seen[1]:
        few, many = ([*each[name].values()] for each in seen)
        versions = offered(name)
        used[name] = chosen(name, KERNELS[name].load(), "auto", few, offered=versions,
                            raced=many).choice.used
        call = version(versions, used[name], many)
        for holder, attribute, of in sites(model):
            if of == name:
                setattr(holder, attribute, call)
    return used


def unconvert(model: nn.Module) -> nn.Module:
    """Undo `convert` in place. The weights keep their current values. Returns the model."""
    for module in model.modules():
        if hasattr(module, "fast_path"):
            module.activation_relu_or_gelu = vars(module).pop("fast_path")
        if isinstance(module, Converted):
            module.before_saving.remove()
            for name in (*module.added, "recipe", "arithmetic", "name", "before_saving", "added"):
                delattr(module, name)
            module.__class__ = module.before
    return model
