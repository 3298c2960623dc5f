"""Adapters: few new weights beside a model that stays as it was. Rows of `model.changes`. No torch.

Everything of the model is frozen, so that it has no gradients, no moments and no products for
weight gradients; what its backward needs to reach the first adapter stays saved. With `start.run`
they adapt the weights of a run, and without it an initialisation.
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
    """`shared`: q, k and v, or gate and up, have one A, as in GPT-2's c_attn; else each its own."""

    keeps_base: ClassVar[bool] = True       # frozen is what the run began from
    reads_base: ClassVar[bool] = False      # what is trained begins as something made of W
    vectors: ClassVar[Mapping[str, str]] = {}   # numbers of its rows, by the names that peft has

    rank: Count = 8
    alpha: Positive = 16.0
    shared: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def virtual(m: Any, in_stream: bool = False) -> int:
    """Returns how many learned places stand before a text, of settings that have `places`;
    `in_stream`: only those that run through the blocks, too."""
    return sum(one.places for one in m.changes if hasattr(one, "places")
               and (one.in_stream or not in_stream))


def attended(m: Any) -> Any:
    """The model without changes whose context is what attention meets."""
    return replace(m, context=m.T + virtual(m), changes=()) if virtual(m) else m


def drops_probabilities(m: Any) -> bool:
    """True if an update sets probabilities of attention to 0, by settings that say `drops`."""
    return any(getattr(one, "drops", False) for one in m.changes)


def adapted(names: Iterable[str], settings: AdapterSettings) -> list[str]:
    """`names` that `settings` adapts, in order. Raises ConfigError for a pattern without any."""
    names = list(names)
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"model.changes={settings.name} has the target {shown(pattern)}, but "
                              f"no Linear of a block is called so; {nearest(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, one) for one in settings.targets)]


@dataclass(frozen=True, kw_only=True)
class QuantisedBaseSettings(Settings):
    format: Literal["nf4", "e4m3fn", "int8", "int4"] = "nf4"
    block: Literal[32, 64, 128, 256, 512, 1024] = 64    # numbers that share a scale
    double: bool = True     # scales in 8 bits, less their mean, with a float32 for 256 of them


def _beside_casts(config: Any, recipe: Any) -> str:
    if not (recipe.products or recipe.loss_scaling or config.parallel.stage > 1):
        return ""
    return ("is multiplied in bf16 or float32, and each rank has all of it; set "
            "precision.recipe=bf16, and parallel.zero=0 or 1")


TERMS, FILES = "lpkit.predict.adapters:", "lpkit.exchange.adapted:"


@dataclass(frozen=True, kw_only=True)
class Adapter(Kind):
    """A row of MODEL_CHANGES whose bytes the formula follows tensor by tensor.

    In peft's files: `theirs`, the keys of adapter_config.json that mean this row; `saves(run,
    tensors, folder)` and `brings(folder, said, base, out, name)`, "package.module:name".
    """

    theirs: Mapping[str, Any] = field(default_factory=dict)
    saves: str = ""
    brings: str = ""


@dataclass(frozen=True, kw_only=True)
class LowRank(Adapter):
    """A product of two thin matrices beside each target, which all have the same files."""

    operations: str = TERMS + "lora"
    implementation: str = "lpkit.nn.adapters:add_lora"
    saves: str = FILES + "save_lora"
    brings: str = FILES + "bring_lora"


CODED = (".codes", ".scales", ".scales_scale", ".scales_mean")      # endings of its buffers
ADAPTERS: dict[str, Kind] = {
    "lora": LowRank(
        why="beside each frozen matrix a product of two thin ones", settings=LoraSettings(),
        source="Hu et al. 2021, arXiv:2106.09685", theirs={"peft_type": "LORA"}),
    "quantised-base": Adapter(      # what adapters that come before it leave frozen
        operations=TERMS + "in_codes", why="frozen matrices of blocks as codes and scales, made "
        "anew for each product", source="Dettmers et al. 2023, arXiv:2305.14314",
        settings=QuantisedBaseSettings(), problem=_beside_casts,
        implementation="lpkit.memory.quantised_base:quantise_base"),
}
