"""Adapters: a few trained weights that are added to a frozen model. Rows of `model.changes`. This
module does not import torch.

All weights of the model are frozen: they have no gradients, no optimizer moments and no matmuls for
weight gradients. Backward still computes the gradients of activations down to the first adapter,
and forward saves what this needs. With `start.run`, the frozen weights are those of a run; without
it, they are an initialisation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from lpkit.errors import ConfigError, nearest, shown
from lpkit.techniques.operation import Kind
from lpkit.techniques.row import Settings
from lpkit.values import Count, Positive


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    targets: tuple[str, ...] = ("*",)   # Linears of a block by name: attention.qkv, mlp.*


@dataclass(frozen=True, kw_only=True)
class LoraSettings(AdapterSettings):
    """LoRA adds scale * B A to a frozen weight W (out, in), with A (rank, in) and B (out, rank).

    shared: q, k and v (or gate and up), which are one weight, have one A, as in peft for GPT-2's
            c_attn; otherwise each of them has its own A
    """

    keeps_base: ClassVar[bool] = True       # the frozen weights stay as they were at the beginning
    reads_base: ClassVar[bool] = False      # initial adapter weights are computed from W
    # {name of a trained vector in peft's files: field of the adapter}
    vectors: ClassVar[Mapping[str, str]] = {}

    rank: Count = 8
    alpha: Positive = 16.0
    shared: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def virtual(m: Any, in_stream: bool = False) -> int:
    """Return the number of learned positions that the changes of model `m` put before a text (as a
    prompt or a prefix), from changes that have `places`.

    in_stream: count only positions that are part of the residual stream, not those that only
               attention sees
    """
    return sum(change.places for change in m.changes if hasattr(change, "places")
               and (change.in_stream or not in_stream))


def attended(m: Any) -> Any:
    """Return the ModelConfig `m` with the context length that attention sees: m.T plus the learned
    positions before the text."""
    return replace(m, context=m.T + virtual(m), changes=()) if virtual(m) else m


def drops_probabilities(m: Any) -> bool:
    """Return whether a change of model `m` sets attention probabilities to 0 at random in updates:
    its settings have `drops`."""
    return any(getattr(change, "drops", False) for change in m.changes)


def adapted(names: Iterable[str], settings: AdapterSettings) -> list[str]:
    """Return those of the `names` of Linears to which `settings` adds adapters, in order. Raises
    ConfigError for a pattern in `settings.targets` that matches no name."""
    names = list(names)
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"model.changes={settings.name} has the target {shown(pattern)}, but "
                              f"no Linear of a block is called so; {nearest(pattern, names)}")
    return [name for name in names
            if any(fnmatchcase(name, pattern) for pattern in settings.targets)]


@dataclass(frozen=True, kw_only=True)
class QuantisedBaseSettings(Settings):
    format: Literal["nf4", "e4m3fn", "int8", "int4"] = "nf4"
    block: Literal[32, 64, 128, 256, 512, 1024] = 64    # weights that share a scale
    # subtract the mean of the scales and store them in 8 bits, with a float32 scale per 256 scales
    double: bool = True


def _beside_casts(config: Any, recipe: Any) -> str:
    """Return why a quantised base does not go with the recipe or the layout; "": it does."""
    if not (recipe.products or recipe.loss_scaling or config.parallel.stage > 1):
        return ""
    return ("is multiplied in bf16 or float32, and each rank has all of it; set "
            "precision.recipe=bf16, and parallel.zero=0 or 1")


TERMS, FILES = "lpkit.predict.adapters:", "lpkit.exchange.adapted:"


@dataclass(frozen=True, kw_only=True)
class AdapterRow(Kind):
    """A row of MODEL_CHANGES whose bytes the memory formula predicts tensor by tensor.

    theirs: the entries of peft's adapter_config.json that mean this row
    saves:  "package.module:name" of f(run, tensors, folder), which exports the adapter for peft
    brings: "package.module:name" of f(folder, peft's config, base, out, name), which imports it
    """

    theirs: Mapping[str, Any] = field(default_factory=dict)
    saves: str = ""
    brings: str = ""


@dataclass(frozen=True, kw_only=True)
class LowRank(AdapterRow):
    """A product of two thin matrices is added to each target. All such rows have the same format of
    files."""

    operations: str = TERMS + "lora"
    implementation: str = "lpkit.nn.adapters:add_lora"
    saves: str = FILES + "save_lora"
    brings: str = FILES + "bring_lora"


# endings of the names of the buffers of a quantised base
CODED = (".codes", ".scales", ".scales_scale", ".scales_mean")
ADAPTERS: dict[str, Kind] = {
    "lora": LowRank(
        why="adds a product of two thin matrices to each frozen matrix", settings=LoraSettings(),
        source="Hu et al. 2021, arXiv:2106.09685", theirs={"peft_type": "LORA"}),
    # stores the weights that the adapters before it in `model.changes` have frozen
    "quantised-base": AdapterRow(
        operations=TERMS + "in_codes", why="stores the frozen matrices of blocks as codes and "
        "scales, and decodes them again for each product",
        source="Dettmers et al. 2023, arXiv:2305.14314",
        settings=QuantisedBaseSettings(), problem=_beside_casts,
        implementation="lpkit.memory.quantised_base:quantise_base"),
}
