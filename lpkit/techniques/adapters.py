"""Adapters: few new weights beside a model that stays as it was. Rows of `model.changes`. No torch.

Everything of the model is frozen, so that it has no gradients, no moments and no products for
weight gradients; what its backward needs to reach the first adapter stays saved. With `start.run`
they adapt the weights of a run, and without it an initialisation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

from lpkit.errors import ConfigError, nearest, shown
from lpkit.techniques.attention import Rule
from lpkit.techniques.operation import POSITIONS, Kind
from lpkit.techniques.row import Settings
from lpkit.values import Count, Positive, Rate


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(Settings):
    targets: tuple[str, ...] = ("*",)   # Linears of a block by name: attention.qkv, mlp.*


@dataclass(frozen=True, kw_only=True)
class LoraSettings(AdapterSettings):
    """`shared`: q, k and v, or gate and up, have one A, as in GPT-2's c_attn; else each its own."""

    keeps_base: ClassVar[bool] = True       # frozen is what the run began from
    reads_base: ClassVar[bool] = False      # what is trained begins as something made of W

    rank: Count = 8
    alpha: Positive = 16.0
    shared: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True)
class StableLoraSettings(LoraSettings):
    @property
    def scale(self) -> float:
        return self.alpha / math.sqrt(self.rank)


@dataclass(frozen=True, kw_only=True)
class DoraSettings(LoraSettings):
    reads_base = True


@dataclass(frozen=True, kw_only=True)
class PissaSettings(LoraSettings):
    keeps_base, reads_base = False, True

    @property
    def scale(self) -> float:
        return 1.0      # A and B are a part of the weight


@dataclass(frozen=True, kw_only=True)
class BottleneckSettings(AdapterSettings):
    targets: tuple[str, ...] = ("attention.out", "mlp.down")
    width: Count = 64


@dataclass(frozen=True, kw_only=True)
class VirtualSettings(Settings):
    """`length` learned places before a text, which has model.context tokens all the same."""

    length: Count = 20

    def problem(self, m: Any) -> str:
        if len(m.changes) > 1:
            return f"model.changes={self.name} stands alone; leave out the others"
        if not POSITIONS[m.position].turns:
            return (f"model.changes={self.name} stands before {m.T} tokens, and "
                    f"model.position={m.position} has no place for more; set model.position=rope")
        if m.attention.rule(m.T) != Rule():
            return (f"model.changes={self.name} is seen by every token, and "
                    f"model.attention={m.attention.name} may hide it; set model.attention=full")
        return ""


def virtual(m: Any, name: str = "") -> int:
    """The places before a text, of the row `name` alone where one is given."""
    return sum(one.length for one in m.changes if isinstance(one, VirtualSettings)
               and name in ("", one.name))


def attended(m: Any) -> Any:
    """The model without changes whose context is what attention meets."""
    return replace(m, context=m.T + virtual(m), changes=()) if virtual(m) else m


def adapted(names: Iterable[str], settings: AdapterSettings) -> list[str]:
    """`names` that `settings` adapts, in order. Raises ConfigError for a pattern without any."""
    names = list(names)
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"model.changes={settings.name} has the target {shown(pattern)}, but "
                              f"no Linear of a block is called so; {nearest(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, one) for one in settings.targets)]


TERMS, OF = "lpkit.predict.adapters:", "lpkit.nn.adapters:"
ADAPTERS: dict[str, Kind] = {
    "bottleneck": Kind(
        operations=TERMS + "bottleneck", why="two small layers behind each part of a block, the rest frozen",
        source="Houlsby et al. 2019, arXiv:1902.00751", settings=BottleneckSettings(),
        implementation=OF + "add_bottlenecks"),
    "dora": Kind(
        operations=TERMS + "dora", why="LoRA in the direction of each row, whose length is learned apart",
        source="Liu et al. 2024, arXiv:2402.09353", settings=DoraSettings(),
        implementation=OF + "add_dora"),
    "ia3": Kind(
        operations=TERMS + "vectors", why="keys, values and the MLP's inner numbers times learned vectors, the "
        "rest frozen", source="Liu et al. 2022, arXiv:2205.05638", implementation=OF + "add_scales",
        settings=AdapterSettings(targets=("attention.qkv", "mlp.down"))),
    "lora": Kind(
        operations=TERMS + "lora", why="beside each frozen matrix a product of two thin ones",
        source="Hu et al. 2021, arXiv:2106.09685", settings=LoraSettings(),
        implementation=OF + "add_lora"),
    "pissa": Kind(
        operations=TERMS + "lora", why="LoRA that begins as the largest singular directions of the matrix",
        source="Meng et al. 2024, arXiv:2404.02948", settings=PissaSettings(),
        implementation=OF + "add_pissa"),
    "prefix": Kind(
        operations=TERMS + "prefix", why="learned keys and values before those of each layer, the model frozen",
        source="Li and Liang 2021, arXiv:2101.00190, without the MLP that makes them in training",
        settings=VirtualSettings(), implementation=OF + "add_prefix"),
    "prompt": Kind(
        operations=TERMS + "prompt", why="learned vectors before the embeddings of the text, the model frozen",
        source="Lester et al. 2021, arXiv:2104.08691", settings=VirtualSettings(),
        implementation=OF + "add_prompt"),
    "rslora": Kind(
        operations=TERMS + "lora", why="LoRA whose product counts alpha over the root of its rank",
        source="Kalajdzievski 2023, arXiv:2312.03732", settings=StableLoraSettings(),
        implementation=OF + "add_lora"),
}


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


@dataclass(frozen=True, kw_only=True)
class DropoutSettings(Settings):
    """Shares of numbers that an update sets to 0; it divides the others by the share that is left.
    Evaluation and sampling drop nothing."""

    embedding: Rate = 0.0   # of embeddings and positions, as embd_pdrop of GPT-2
    residual: Rate = 0.0    # of what attention and MLP add to the stream, as resid_pdrop
    attention: Rate = 0.0   # of attention's probabilities, as attn_pdrop
    adapters: Rate = 0.0    # of the input of LoRA's A, as lora_dropout of peft

    def problem(self, m: Any) -> str:
        before = [type(one) for one in m.changes[:-1]]
        others = [one for one in before if one is not QuantisedBaseSettings]
        lora = [one for one in others if issubclass(one, LoraSettings)]
        return next((f"model.changes={self.name} {why}" for found, why in (
            (not any((self.embedding, self.residual, self.attention, self.adapters)),
             "drops nothing; set embedding, residual, attention or adapters"),
            (m.changes[-1] != self or lora != others,
             "comes last, behind LoRA and quantised-base alone; leave the others out"),
            (self.adapters and (not lora or DoraSettings in lora),
             f"has adapters={self.adapters} and no LoRA; name lora, rslora or pissa before it"),
            (self.attention and m.attention.rule(m.T) is None,
             f"needs probabilities, and model.attention={m.attention.name} has none; set attention=0"),
            ) if found), "")


def drops_probabilities(m: Any) -> bool:
    return any(isinstance(one, DropoutSettings) and one.attention for one in m.changes)


def _draws(config: Any, recipe: Any) -> str:
    system, offload = config.system, config.memory.activation_offload.name
    if config.parallel.devices > 1 or config.governors or offload != "device":
        return ("draws and keeps the masks of one whole device so far; leave out parallel, governors "
                "and memory.activation_offload")
    # a GPU has both by default
    by_default = "auto" if system.device == "cpu" else False
    if not {system.compile, system.cuda_graphs} <= {False, by_default}:
        return ("draws masks outside of compiled code and CUDA graphs; set system.compile=false and "
                "system.cuda_graphs=false")
    return ""


DROPOUT = {"dropout": Kind(
    operations=TERMS + "dropped", why="an update sets a share of numbers to 0", problem=_draws,
    source="Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html",
    settings=DropoutSettings(), implementation=OF + "add_dropout")}
CODED = (".codes", ".scales", ".scales_scale", ".scales_mean")      # endings of its buffers
QUANTISED = {"quantised-base": Kind(     # what adapters that come before it leave frozen
    operations=TERMS + "in_codes", why="frozen matrices of blocks as codes and scales, made anew for each "
    "product", source="Dettmers et al. 2023, arXiv:2305.14314", settings=QuantisedBaseSettings(),
    problem=_beside_casts, implementation="lpkit.memory.quantised_base:quantise_base")}
