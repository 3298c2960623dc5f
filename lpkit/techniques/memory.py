"""What a step keeps, where, and in how many bits: a family of rows for each field of
`config.memory`.

The first row of each family is the plain way. A row has what the predictor needs: bytes, and what
is recomputed. `problem` returns why a row does not go with the rest of a Config, and the way out.
Implementations are in `lpkit.memory`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from lpkit.errors import ConfigError
from lpkit.techniques.optimizers import MOMENT_FORMATS
from lpkit.techniques.recipes import Recipe
from lpkit.techniques.row import Settings, Technique
from lpkit.values import Count

# Recomputation of activations in backward. The implementation is f(settings) ->
# lpkit.memory.recompute.Recomputation.

@dataclass(frozen=True, kw_only=True)
class EveryBlock(Settings):
    every: Count = 1        # recompute every n-th block

    def __str__(self) -> str:
        return self.name if self.every == 1 else f"{self.name}, every {self.every}"


@dataclass(frozen=True, kw_only=True)
class Recompute(Technique):
    """`repeats`: what runs again in backward, out of products, attention, pointwise and tensor
    (tensor-parallel messages); "unfused attention" where scores are kept in pieces."""

    repeats: frozenset[str] = frozenset()
    attention_alone: bool = False   # only attention runs again, not the block around it
    keeps_results: bool = False     # keeps results of products and of fused attention
    every: Callable[[Settings], int] = lambda settings: 1   # every n-th block runs again
    # share of the saved bytes that a compiler keeps, which it decides itself: an estimate
    kept_share: Callable[[Settings], float] | None = None

    @property
    def repeats_blocks(self) -> bool:
        return bool(self.repeats) and not self.attention_alone

    def again_bytes(self, input_bytes: float, saved_bytes: float, result_bytes: float,
                    settings: Settings) -> float:
        """Return what a recomputed block keeps: its input, or also results or a share of all."""
        if self.kept_share is not None:
            return max(input_bytes, self.kept_share(settings) * saved_bytes)
        return input_bytes + (result_bytes if self.keeps_results else 0)

    def again_share(self, layers: int, settings: Settings) -> float:
        """Return the share of the blocks' work that runs again."""
        if not self.repeats:
            return 0.0
        if self.kept_share is not None:
            return 1 - self.kept_share(settings)
        return -(-layers // self.every(settings)) / layers


WHOLE_BLOCK = frozenset({"products", "attention", "pointwise", "tensor"})

RECOMPUTE = {
    "none": Recompute(why="everything is kept", implementation="lpkit.memory.recompute:nothing"),
    "core-attention": Recompute(
        why="q, k and v are kept, what attention makes of them is computed again",
        source="Korthikanti et al. 2022, arXiv:2205.05198, who call it selective",
        repeats=frozenset({"attention"}), attention_alone=True,
        implementation="lpkit.memory.recompute:core_attention"),
    "selective": Recompute(
        why="results of weight products and of fused attention are kept, what is cheap is computed "
        "again", source="https://pytorch.org/blog/activation-checkpointing-techniques/",
        settings=EveryBlock(),
        repeats=frozenset({"pointwise", "unfused attention"}), keeps_results=True,
        every=attrgetter("every"), implementation="lpkit.memory.recompute:selective"),
    "block": Recompute(
        why="a block keeps its input alone and runs again in backward",
        source="Chen et al. 2016, arXiv:1604.06174", settings=EveryBlock(), repeats=WHOLE_BLOCK,
        every=attrgetter("every"), implementation="lpkit.memory.recompute:block"),
}


# Storage of activations between forward and backward. f(device) -> lpkit.memory.saved.Place.

@dataclass(frozen=True, kw_only=True)
class Offload(Technique):
    """`number_bytes`: bytes kept on the device per number, by machine kind; absent: unchanged."""

    number_bytes: Mapping[str, float] = field(default_factory=dict)
    eager: str = ("its hooks move what each operation saves, and a compiled model has other "
                  "operations")


ACTIVATION_OFFLOAD = {
    "device": Offload(why="where they were made", eager="",
                      implementation="lpkit.memory.saved:on_device"),
    "cpu": Offload(
        why="pinned memory, copied beside the computation and brought back before backward asks",
        source="Ren et al. 2021, arXiv:2101.06840", number_bytes={"gpu": 0.0},
        implementation="lpkit.memory.saved:on_host"),
}


# The loss. f(settings, autocast) -> contracts.Loss.

@dataclass(frozen=True, kw_only=True)
class Chunked(Settings):
    chunk_tokens: Count = 1024      # tokens at a time


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Technique):
    """`entry`: the method of the model that the loss calls; None: the model itself. `in_pieces`: it
    has its own kernel, which torch.compile cannot fuse."""

    entry: str | None = None
    in_pieces: bool = False
    chunk_tokens: Callable[[Settings], int] = lambda settings: 0    # 0: all logits at once


CROSS_ENTROPY = {
    "full": CrossEntropy(why="all logits at once", implementation="lpkit.memory.loss:full"),
    "chunked": CrossEntropy(
        why="gradients of hidden states and head are made in the forward pass, some of the tokens "
        "at a time",
        source="Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009",
        settings=Chunked(), entry="hidden", in_pieces=True, chunk_tokens=attrgetter("chunk_tokens"),
        implementation="lpkit.memory.loss:chunked"),
}


# The dtype of parameters and gradients. f() -> transforms of the model.

@dataclass(frozen=True, kw_only=True)
class ParamDtype(Technique):
    param_bytes: int                    # bytes of a parameter, and of its gradient
    # bytes of a number in the residual stream; None: as in the recipe
    residual_bytes: int | None = None


def _needs_bf16(config: Any, recipe: Recipe) -> str:
    if recipe.compute == "bfloat16":
        return ""
    return ("needs a recipe that computes in bf16, because the rest of the model computes in the "
            "dtype of its parameters; set precision.recipe=bf16 or one of 8 or 4 bits, or "
            "memory.param_dtype=fp32")


PARAM_DTYPE = {
    "fp32": ParamDtype(why="every update is exact to float32", param_bytes=4,
                       implementation="lpkit.memory.update:as_built"),
    "bf16": ParamDtype(
        why="weights, gradients and residual stream in 2 bytes; moments as memory.moment_format says",
        source="Zamirai et al. 2020, arXiv:2010.06192", param_bytes=2, residual_bytes=2,
        problem=_needs_bf16, implementation="lpkit.memory.update:in_bf16"),
}


# Where the optimizer's state is stored between updates. f(device) -> contracts.StatePlacement.

@dataclass(frozen=True, kw_only=True)
class OptimizerState(Technique):
    leaves: tuple[str, ...] = ()        # kinds of machines where the state is outside device memory


OPTIMIZER_STATE = {
    "device": OptimizerState(why="beside the parameters",
                             implementation="lpkit.memory.state:on_device"),
    "cpu": OptimizerState(
        why="pinned memory, copied beside the computation", leaves=("gpu",),
        source="Ren et al. 2021, arXiv:2101.06840", implementation="lpkit.memory.state:on_host"),
}


# When a parameter is updated. f(optimizer, parameters, clip) -> f() -> the norm of the gradients.

@dataclass(frozen=True, kw_only=True)
class OptimizerStep(Technique):
    gradients_held: int     # 1: gradients of all parameters exist at once; 0: they do not


def _in_backward_problem(config: Any, recipe: Recipe) -> str:
    ways = {}       # setting to change: why the row does not go with its present value
    if config.grad_accum_steps > 1:
        ways["grad_accum_steps=1"] = (
            f"uses a gradient before the next micro-batch adds to it, but "
            f"grad_accum_steps={config.grad_accum_steps}")
    if config.optimizer.clip:
        ways["optimizer.clip=0"] = (
            f"frees each gradient at once, but clipping needs the norm of all of them and "
            f"optimizer.clip={config.optimizer.clip}")
    if recipe.loss_scaling:
        ways["precision.recipe=bf16"] = (
            "has updated parameters before an overflow is known, and cannot skip the update")
    if not ways:
        return ""
    return f"{next(iter(ways.values()))}; set {' '.join(ways)}, or memory.optimizer_step=after"


OPTIMIZER_STEP = {
    "after": OptimizerStep(
        why="gradients are clipped by their global norm, which needs all of them",
        gradients_held=1, implementation="lpkit.memory.update:after"),
    "in-backward": OptimizerStep(
        why="each gradient is used and freed as soon as it is computed",
        source="Lv et al. 2023, arXiv:2306.09782", gradients_held=0, problem=_in_backward_problem,
        eager="a compiled backward pass hands out every gradient at its end",
        implementation="lpkit.memory.update:InBackward"),
}


TABLES: dict[str, Mapping[str, Technique]] = {      # by the field of `config.memory`
    "recompute": RECOMPUTE, "activation_offload": ACTIVATION_OFFLOAD,
    "cross_entropy": CROSS_ENTROPY, "param_dtype": PARAM_DTYPE, "optimizer_state": OPTIMIZER_STATE,
    "moment_format": MOMENT_FORMATS, "optimizer_step": OPTIMIZER_STEP}


def check(config: Any, recipe: Recipe) -> None:
    """Raise ConfigError for rows that do not go together."""
    for name, row in rows_of(config).items():
        if problem := row.problem(config, recipe):
            raise ConfigError(f"memory.{name}={getattr(config.memory, name).name} {problem}")


def rows_of(config: Any) -> dict[str, Technique]:
    """Return the row that each field of `config.memory` names."""
    return {key: table[getattr(config.memory, key).name] for key, table in TABLES.items()}
