"""Memory techniques: which tensors a step keeps, where, and in how many bits. Each field of
`config.memory` has a family of rows.

The first row of each family is PyTorch's ordinary way. A row has the facts that the predictor
needs, for example bytes per number. `problem` returns why a row does not go with the rest of a
Config, and the way out. The implementations are in `lpkit.memory`.
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
    """Settings of a row that recomputes blocks."""

    every: Count = 1        # n: recompute blocks 0, n, 2n, ...; 1: all blocks

    def __str__(self) -> str:
        return self.name if self.every == 1 else f"{self.name}, every {self.every}"


@dataclass(frozen=True, kw_only=True)
class RecomputeRow(Technique):
    """A row of RECOMPUTE.

    repeats:         what runs again in backward: some of "products" (matmuls), "attention",
                     "pointwise", "tensor" (messages of tensor parallelism), and "unfused attention"
                     (attention of backends that store scores)
    attention_alone: only attention runs again, not the block around it
    keeps_results:   the results of matmuls and of fused attention are kept
    every:           f(settings) -> n: blocks 0, n, 2n, ... run again
    kept_share:      f(settings) -> share of the saved bytes that are kept, if a compiler decides
                     which tensors it keeps: an estimate. None: the other fields decide
    """

    repeats: frozenset[str] = frozenset()
    attention_alone: bool = False
    keeps_results: bool = False
    every: Callable[[Settings], int] = lambda settings: 1
    kept_share: Callable[[Settings], float] | None = None

    @property
    def repeats_blocks(self) -> bool:
        """True if the forward pass of whole blocks runs again in backward."""
        return bool(self.repeats) and not self.attention_alone

    def again_bytes(self, input_bytes: float, saved_bytes: float, result_bytes: float,
                    settings: Settings) -> float:
        """Return the bytes that a recomputed block keeps until backward: its input, and what the
        row keeps in addition.

        input_bytes:  bytes of the block's input
        saved_bytes:  bytes that the block would save without recomputation
        result_bytes: bytes of the results of matmuls and of fused attention
        """
        if self.kept_share is not None:
            return max(input_bytes, self.kept_share(settings) * saved_bytes)
        return input_bytes + (result_bytes if self.keeps_results else 0)

    def again_share(self, layers: int, settings: Settings) -> float:
        """Return the share of all blocks that run again (with `kept_share`: of their work)."""
        if not self.repeats:
            return 0.0
        if self.kept_share is not None:
            return 1 - self.kept_share(settings)
        return -(-layers // self.every(settings)) / layers


WHOLE_BLOCK = frozenset({"products", "attention", "pointwise", "tensor"})

# Searches try the rows in this order (`predict.device.to_search`, which leaves out core-attention),
# so rows that add fewer seconds come first.
RECOMPUTE = {
    "none": RecomputeRow(why="nothing runs again: all saved tensors are kept",
                         implementation="lpkit.memory.recompute:nothing"),
    "core-attention": RecomputeRow(
        why="q, k and v are kept, and attention runs again in backward",
        source="Korthikanti et al. 2022, arXiv:2205.05198, who call it selective",
        repeats=frozenset({"attention"}), attention_alone=True,
        implementation="lpkit.memory.recompute:core_attention"),
    "selective": RecomputeRow(
        why="results of weight products and of fused attention are kept; cheap operations run "
        "again", source="https://pytorch.org/blog/activation-checkpointing-techniques/",
        settings=EveryBlock(),
        repeats=frozenset({"pointwise", "unfused attention"}), keeps_results=True,
        every=attrgetter("every"), implementation="lpkit.memory.recompute:selective"),
    "block": RecomputeRow(
        why="a block keeps only its input, and runs again in backward",
        source="Chen et al. 2016, arXiv:1604.06174", settings=EveryBlock(), repeats=WHOLE_BLOCK,
        every=attrgetter("every"), implementation="lpkit.memory.recompute:block"),
}


# Where activations are stored between forward and backward. The implementation is
# f(device) -> lpkit.memory.saved.Place.

@dataclass(frozen=True, kw_only=True)
class Offload(Technique):
    """A row of ACTIVATION_OFFLOAD. `number_bytes`: {kind of machine: bytes per number that stay on
    the device}. A kind that is missing stores activations as without offload."""

    number_bytes: Mapping[str, float] = field(default_factory=dict)
    eager: str = ("its hooks move the tensors that each operation saves, and a compiled model has "
                  "other operations")


ACTIVATION_OFFLOAD = {
    "device": Offload(why="activations stay on the device", eager="",
                      implementation="lpkit.memory.saved:on_device"),
    "cpu": Offload(
        why="activations are copied to pinned host memory during computation, and return before "
            "backward needs them",
        source="Ren et al. 2021, arXiv:2101.06840", number_bytes={"gpu": 0.0},
        implementation="lpkit.memory.saved:on_host"),
}


# The cross-entropy loss. The implementation is f(settings, autocast) -> contracts.Loss.

@dataclass(frozen=True, kw_only=True)
class Chunked(Settings):
    chunk_tokens: Count = 1024      # tokens at a time


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Technique):
    """A row of CROSS_ENTROPY.

    entry:        name of the model's method that the loss calls; None: it calls the model itself
    in_pieces:    the loss has its own kernel, which torch.compile cannot fuse
    chunk_tokens: f(settings) -> tokens whose logits exist at a time; 0: all
    """

    entry: str | None = None
    in_pieces: bool = False
    chunk_tokens: Callable[[Settings], int] = lambda settings: 0


CROSS_ENTROPY = {
    "full": CrossEntropy(why="all logits at once", implementation="lpkit.memory.loss:full"),
    "chunked": CrossEntropy(
        why="the forward pass computes the gradients of hidden states and head, for some of the "
        "tokens at a time",
        source="Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, arXiv:2411.09009",
        settings=Chunked(), entry="hidden", in_pieces=True, chunk_tokens=attrgetter("chunk_tokens"),
        implementation="lpkit.memory.loss:chunked"),
}


# The dtype of parameters and gradients. The implementation is f() -> transforms of the model.

@dataclass(frozen=True, kw_only=True)
class ParamDtype(Technique):
    """A row of PARAM_DTYPE."""

    param_bytes: int                    # bytes of one parameter, and of one gradient
    # bytes of one number of the residual stream; None: as the recipe has it
    residual_bytes: int | None = None


def _needs_bf16(config: Any, recipe: Recipe) -> str:
    """Return why memory.param_dtype=bf16 does not go with `recipe`; "": it does."""
    if recipe.compute == "bfloat16":
        return ""
    return ("needs a recipe that computes in bf16, because the rest of the model computes in the "
            "dtype of its parameters; set precision.recipe to bf16 or to an 8- or 4-bit recipe, or "
            "memory.param_dtype=fp32")


PARAM_DTYPE = {
    "fp32": ParamDtype(why="weights and gradients in float32", param_bytes=4,
                       implementation="lpkit.memory.update:as_built"),
    "bf16": ParamDtype(
        why="weights, gradients and residual stream in bf16; moments in memory.moment_format",
        source="Zamirai et al. 2020, arXiv:2010.06192", param_bytes=2, residual_bytes=2,
        problem=_needs_bf16, implementation="lpkit.memory.update:in_bf16"),
}


# Where the optimizer state is stored between updates. The implementation is
# f(device) -> contracts.StatePlacement.

@dataclass(frozen=True, kw_only=True)
class OptimizerState(Technique):
    """A row of OPTIMIZER_STATE."""

    leaves: tuple[str, ...] = ()        # kinds of machines where the state is not in device memory


OPTIMIZER_STATE = {
    "device": OptimizerState(why="on the device, like the parameters",
                             implementation="lpkit.memory.state:on_device"),
    "cpu": OptimizerState(
        why="in pinned host memory; the copies run during computation", leaves=("gpu",),
        source="Ren et al. 2021, arXiv:2101.06840", implementation="lpkit.memory.state:on_host"),
}


# When parameters are updated. The implementation is f(optimizer, parameters, clip, norm) -> a
# function without arguments, which updates and returns the norm of all gradients.

@dataclass(frozen=True, kw_only=True)
class OptimizerStep(Technique):
    """A row of OPTIMIZER_STEP."""

    gradients_held: int     # 1: the gradients of all parameters exist at the same time; 0: not


def _in_backward_problem(config: Any, recipe: Recipe) -> str:
    """Return why updates during backward do not go with the config, and the way out; "": they do.
    """
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
        why="a parameter is updated as soon as its gradient is computed, which is then freed",
        source="Lv et al. 2023, arXiv:2306.09782", gradients_held=0, problem=_in_backward_problem,
        eager="a compiled backward pass hands out every gradient at its end",
        implementation="lpkit.memory.update:InBackward"),
}


TABLES: dict[str, Mapping[str, Technique]] = {      # field of `config.memory`: its family
    "recompute": RECOMPUTE, "activation_offload": ACTIVATION_OFFLOAD,
    "cross_entropy": CROSS_ENTROPY, "param_dtype": PARAM_DTYPE, "optimizer_state": OPTIMIZER_STATE,
    "moment_format": MOMENT_FORMATS, "optimizer_step": OPTIMIZER_STEP}


def check(config: Any, recipe: Recipe) -> None:
    """Raise ConfigError if a row that `config.memory` names does not go with the rest of `config`.
    """
    for name, row in rows_of(config).items():
        if problem := row.problem(config, recipe):
            raise ConfigError(f"memory.{name}={getattr(config.memory, name).name} {problem}")


def rows_of(config: Any) -> dict[str, Technique]:
    """Return {field: row} for all fields of `config.memory`."""
    return {key: table[getattr(config.memory, key).name] for key, table in TABLES.items()}
