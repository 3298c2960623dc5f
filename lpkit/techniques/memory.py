"""What a step keeps, where and in how many bits: a family for each field of `config.memory`, the
plain way first.

A row says what the predictor needs of it: bytes, and what is recomputed. `problem` says why it
cannot be beside the rest of a Config, and the way out; empty: it can. Implementations are in
`lpkit.memory`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lpkit.errors import ConfigError, pick, positive, share
from lpkit.techniques.recipes import Recipe
from lpkit.techniques.row import Settings, Technique

# Activations that backward computes again. The implementation is f(settings) ->
# lpkit.memory.recompute.Recomputation.

@dataclass(frozen=True, kw_only=True)
class EveryBlock(Settings):
    every: int = 1          # every n-th block

    def __post_init__(self):
        positive("memory.recompute.", every=self.every)

    def __str__(self) -> str:
        return self.name if self.every == 1 else f"{self.name}, every {self.every}"


@dataclass(frozen=True, kw_only=True)
class Budget(Settings):
    budget: float = 0.5     # the share of the activations that torch.compile may keep

    def __post_init__(self):
        share("memory.recompute.", budget=self.budget)


@dataclass(frozen=True, kw_only=True)
class Recompute(Technique):
    """`repeats`: what runs once more in backward, of products, attention, pointwise and tensor (its
    messages); "unfused attention" where scores are kept in pieces. `keeps_results`: of products and
    fused attention. `blocks(settings)`: which."""

    repeats: frozenset[str] = frozenset()
    keeps_results: bool = False
    every: Callable[[Settings], int] = lambda settings: 1  # of the blocks that run again: each n-th
    # of what is saved; the compiler decides which. An estimate
    kept_share: Callable[[Settings], float] | None = None

    def again_bytes(self, input_bytes: float, saved_bytes: float, result_bytes: float,
                    settings: Settings) -> float:
        """What a block keeps that runs again, of its input, of all that it saves and of its
        products' results."""
        if self.kept_share is not None:
            return max(input_bytes, self.kept_share(settings) * saved_bytes)
        return input_bytes + (result_bytes if self.keeps_results else 0)

    def again_share(self, layers: int, settings: Settings) -> float:
        """Of the blocks' work, what is done once more."""
        if not self.repeats:
            return 0.0
        if self.kept_share is not None:
            return 1 - self.kept_share(settings)
        return -(-layers // self.every(settings)) / layers


RECOMPUTE = {
    "none": Recompute(why="everything is kept", implementation="lpkit.memory.recompute:nothing"),
    "selective": Recompute(
        why="results of weight products and of fused attention are kept, what is cheap is computed "
        "again", source="Korthikanti et al. 2022, arXiv:2205.05198",
        implementation="lpkit.memory.recompute:selective", settings=EveryBlock(),
        repeats=frozenset({"pointwise", "unfused attention"}), keeps_results=True,
        every=lambda settings: settings.every),
    "block": Recompute(
        why="a block keeps its input alone and runs again in backward",
        source="Chen et al. 2016, arXiv:1604.06174", implementation="lpkit.memory.recompute:block",
        settings=EveryBlock(), repeats=frozenset({"products", "attention", "pointwise", "tensor"}),
        every=lambda settings: settings.every), "budget": Recompute(
        why="torch.compile chooses what to compute again",
        source="https://pytorch.org/blog/activation-checkpointing-techniques/",
        implementation="lpkit.memory.recompute:within_budget", settings=Budget(),
        needs_compile="whose graph it divides",
        repeats=frozenset({"products", "attention", "pointwise", "tensor"}),
        kept_share=lambda settings: settings.budget),
}


# Activations between forward and backward. f(device) -> lpkit.memory.saved.Place.

@dataclass(frozen=True, kw_only=True)
class Offload(Technique):
    """`number_bytes`: for each number that blocks keep on the device, by kind of machine; absent:
    as it is."""

    number_bytes: Mapping[str, float] = field(default_factory=dict)
    eager: str = "its hooks move what each operation saves, and a compiled model has other operations"


GROUP = 256     # numbers of a quantized activation that share a least and a largest


def _quantized(bits: int) -> Offload:
    return Offload(why=f"{bits} bits a number and 8 bytes for each {GROUP}, rounded stochastically",
                   source="Chen et al. 2021, arXiv:2104.14129",
                   implementation=f"lpkit.memory.saved:int{bits}",
                   number_bytes=dict.fromkeys(("cpu", "gpu"), bits / 8 + 8 / GROUP))


ACTIVATION_OFFLOAD = {
    "device": Offload(why="where they were made", eager="",
                      implementation="lpkit.memory.saved:on_device"),
    "cpu": Offload(why="pinned memory, copied beside the computation and brought back before "
                   "backward asks", source="Ren et al. 2021, arXiv:2101.06840",
                   implementation="lpkit.memory.saved:on_host", number_bytes={"gpu": 0.0}),
    "disk": Offload(why="a file", source="Rajbhandari et al. 2021, arXiv:2104.07857",
                    implementation="lpkit.memory.saved:on_disk",
                    number_bytes={"cpu": 0.0, "gpu": 0.0}),
    "int8": _quantized(8), "int4": _quantized(4), "int2": _quantized(2),
}


# The loss. f(settings, autocast) -> contracts.Loss.

@dataclass(frozen=True, kw_only=True)
class Chunked(Settings):
    chunk_tokens: int = 1024        # at a time

    def __post_init__(self):
        positive("memory.cross_entropy.", chunk_tokens=self.chunk_tokens)


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Technique):
    """`entry`: the method of the model that the loss calls, which is the one to compile; None: the
    model."""

    entry: str | None = None
    chunk_tokens: Callable[[Settings], int] = lambda settings: 0       # 0: all logits at once


CROSS_ENTROPY = {
    "full": CrossEntropy(why="all logits at once", implementation="lpkit.memory.loss:full"),
    "chunked": CrossEntropy(
        why="gradients of hidden states and head are made in the forward pass, some of the tokens "
        "at a time", source="Hsu et al. 2024, arXiv:2410.10989; Wijmans et al. 2024, "
        "arXiv:2411.09009", settings=Chunked(), entry="hidden",
        implementation="lpkit.memory.loss:chunked",
        chunk_tokens=lambda settings: settings.chunk_tokens),
}


# The dtype of parameters and gradients. f() -> the model transforms.

@dataclass(frozen=True, kw_only=True)
class ParamDtype(Technique):
    """Bytes of a parameter and of its gradient, and of a number in the residual stream; None: as
    the recipe has it."""

    param_bytes: int
    residual_bytes: int | None = None
    rounded: bool = False       # stochastically, after an update in float32


def _needs_bf16(config: Any, recipe: Recipe) -> str:
    if recipe.compute == "bfloat16":
        return ""
    return "needs a recipe that computes in bf16, because the rest of the model computes in the dtype of its parameters; set precision.recipe=bf16 or one of 8 or 4 bits, or memory.param_dtype=fp32"


PARAM_DTYPE = {
    "fp32": ParamDtype(why="every update is exact to float32", param_bytes=4,
                       implementation="lpkit.memory.parameters:as_built"),
    "bf16": ParamDtype(
        why="weights, gradients and residual stream in 2 bytes",
        source="Zamirai et al. 2020, arXiv:2010.06192",
        implementation="lpkit.memory.parameters:in_bf16", param_bytes=2, residual_bytes=2,
        rounded=True, problem=_needs_bf16),
}


# Where the optimizer's state is stored between updates. f(device) -> contracts.StatePlacement, or
# None: on the device.

@dataclass(frozen=True, kw_only=True)
class OptimizerState(Technique):
    leaves: tuple[str, ...] = ()        # the kinds of machines whose memory the state leaves


OPTIMIZER_STATE = {
    "device": OptimizerState(why="beside the parameters",
                             implementation="lpkit.memory.state:on_device"),
    "cpu": OptimizerState(why="pinned memory, copied beside the computation",
                          source="Ren et al. 2021, arXiv:2101.06840",
                          implementation="lpkit.memory.state:on_host", leaves=("gpu",)),
    "disk": OptimizerState(why="a memory-mapped file", source="Rajbhandari et al. 2021, "
                           "arXiv:2104.07857", implementation="lpkit.memory.state:on_disk",
                           leaves=("cpu", "gpu")),
}


# When a parameter is updated. f(optimizer, parameters, clip) -> optimizer_step() -> the norm of the
# gradients.

@dataclass(frozen=True, kw_only=True)
class OptimizerStep(Technique):
    gradients_held: int     # of every parameter at once: 1, or 0


def _in_backward_problem(config: Any, recipe: Recipe) -> str:
    if config.grad_accum_steps > 1:
        return f"uses a gradient before the next micro-batch adds to it, but grad_accum_steps=" \
               f"{config.grad_accum_steps}; set grad_accum_steps=1, or memory.optimizer_step=after"
    if config.optimizer.clip:
        return f"frees each gradient at once, but clipping needs the norm of all of them and optimizer.clip={config.optimizer.clip}; set optimizer.clip=0, or memory.optimizer_step=after"
    if recipe.loss_scaling:
        return "has updated parameters before an overflow is known, and cannot skip the update; choose precision.recipe=bf16, or memory.optimizer_step=after"
    return ""


OPTIMIZER_STEP = {
    "after": OptimizerStep(why="gradients are clipped by their global norm, which needs all of "
                           "them", gradients_held=1, implementation="lpkit.memory.update:after"),
    "in-backward": OptimizerStep(
        why="each gradient is used and freed as soon as it is computed",
        source="Lv et al. 2023, arXiv:2306.09782", implementation="lpkit.memory.update:InBackward",
        gradients_held=0, problem=_in_backward_problem, eager="a compiled backward pass hands out "
        "every gradient at its end"),
}


def check(config: Any, recipe: Recipe) -> None:
    """Raises ConfigError for rows that cannot be beside one another."""
    for field_name, row in rows_of(config).items():
        if problem := row.problem(config, recipe):
            raise ConfigError(f"memory.{field_name}={getattr(config.memory, field_name).name} "
                              f"{problem}")


def recompute_of(config: Any, asked: Settings | str | None = None) -> tuple[Recompute, Settings]:
    """The row and its settings; of a name, the config's settings where it has that row, else the
    row's own."""
    settings = config.memory.recompute if asked is None else asked
    if isinstance(settings, str):
        row = pick(RECOMPUTE, settings, "memory.recompute")
        same = config.memory.recompute.name == settings
        settings = config.memory.recompute if same else replace(row.settings, name=settings)
    return RECOMPUTE[settings.name], settings


def by_cost() -> tuple[str, ...]:
    """The rows of RECOMPUTE that anybody may try, the cheapest first: those that need no
    compiler."""
    return tuple(name for name, row in RECOMPUTE.items() if not row.needs_compile)


def rows_of(config: Any) -> dict[str, Technique]:
    """The row that each field of `config.memory` names."""
    return {key: f.metadata["table"][getattr(config.memory, key).name]
            for key, f in type(config.memory).__dataclass_fields__.items() if "table" in f.metadata}
