"""Adapters: a few new weights beside a frozen model. Rows of `model.changes`. No torch.

All weights of the model are frozen, so they have no gradients, no optimizer moments and no matmuls
for weight gradients. What backward needs to reach the first adapter is still saved. With
`start.run`, adapters adapt the weights of a run; without it, they adapt an initialisation.
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
    """`shared`: q, k and v (or gate and up) share one A, as in GPT-2's c_attn; else each has an
    A."""

    keeps_base: ClassVar[bool] = True       # frozen weights are those that the run began with
    reads_base: ClassVar[bool] = False      # initial adapter weights are computed from W
    vectors: ClassVar[Mapping[str, str]] = {}   # field of each trained vector, by peft's name

    rank: Count = 8
    alpha: Positive = 16.0
    shared: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def virtual(m: Any, in_stream: bool = False) -> int:
    """Return the number of learned positions before a text, from settings that have `places`.
    `in_stream`: count only positions that run through the blocks."""
    return sum(change.places for change in m.changes if hasattr(change, "places")
               and (change.in_stream or not in_stream))


def attended(m: Any) -> Any:
    """Return the model without changes, with the context length that attention sees."""
    return replace(m, context=m.T + virtual(m), changes=()) if virtual(m) else m


def drops_probabilities(m: Any) -> bool:
    """True if a change sets attention probabilities to 0 in an update (settings with `drops`)."""
    return any(getattr(change, "drops", False) for change in m.changes)


def adapted(names: Iterable[str], settings: AdapterSettings) -> list[str]:
    """Return the `names` that `settings` adapts, in order. Raises ConfigError for a pattern that
    matches no name."""
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
    double: bool = True     # store scales in 8 bits minus their mean, with a float32 per 256 scales


def _beside_casts(config: Any, recipe: Any) -> str:
    if not (recipe.products or recipe.loss_scaling or config.parallel.stage > 1):
        return ""
    return ("is multiplied in bf16 or float32, and each rank has all of it; set "
            "precision.recipe=bf16, and parallel.zero=0 or 1")


TERMS, FILES = "lpkit.predict.adapters:", "lpkit.exchange.adapted:"


@dataclass(frozen=True, kw_only=True)
class Adapter(Kind):
    """A row of MODEL_CHANGES whose bytes the formula follows tensor by tensor.

    For peft's files: `theirs` are the keys of adapter_config.json that mean this row. `saves(run,
    tensors, folder)` and `brings(folder, said, base, out, name)` are "package.module:name".
    """

    theirs: Mapping[str, Any] = field(default_factory=dict)
    saves: str = ""
    brings: str = ""


@dataclass(frozen=True, kw_only=True)
class LowRank(Adapter):
    """A product of two thin matrices beside each target. All such rows share the file format."""

    operations: str = TERMS + "lora"
    implementation: str = "lpkit.nn.adapters:add_lora"
    saves: str = FILES + "save_lora"
    brings: str = FILES + "bring_lora"


# endings of the names of its buffers
CODED = (".codes", ".scales", ".scales_scale", ".scales_mean")
ADAPTERS: dict[str, Kind] = {
    "lora": LowRank(
        why="beside each frozen matrix a product of two thin ones", settings=LoraSettings(),
        source="Hu et al. 2021, arXiv:2106.09685", theirs={"peft_type": "LORA"}),
    "quantised-base": Adapter(      # the weights that adapters before it in the list freeze
        operations=TERMS + "in_codes", why="frozen matrices of blocks as codes and scales, made "
        "anew for each product", source="Dettmers et al. 2023, arXiv:2305.14314",
        settings=QuantisedBaseSettings(), problem=_beside_casts,
        implementation="lpkit.memory.quantised_base:quantise_base"),
}
