"""Turn the names in a Config into implementations. `decide` chooses what a run uses on this machine
(device, recipe, attention backend, ...), and `build_model` builds the model that the run trains.

The initial weights are set in this order (`made`): the initialisation fills all parameters, by
their names and shapes; modules with a method `reset(init)` set their own initial values; the
weights of another run are copied (`start`); the changes of the model (`model.changes`) are applied.
"""

import datetime
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import lpkit
from lpkit import hardware
from lpkit.config import Config
from lpkit.contracts import Attend, Choice, Loss, ObjectiveContext, Stage, Transform
from lpkit.errors import ConfigError
from lpkit.execution import attention as attending
from lpkit.execution import compiled as compiling
from lpkit.execution.compiled import OFF, Compile
from lpkit.machine_facts import gpus
from lpkit.memory import rows as memory
from lpkit.nn import attention
from lpkit.nn.init import initialise
from lpkit.nn.transformer import Transformer
from lpkit.parallel.ranks import Ranks
from lpkit.parallel.sharding import Sharding
from lpkit.precision import backends
from lpkit.precision.compute import LowPrecision, autocast, linears
from lpkit.techniques import layouts
from lpkit.techniques.adapters import virtual
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.blocks import MODEL_CHANGES, operations
from lpkit.techniques.changes import MODEL_TRANSFORMS, running
from lpkit.techniques.data import SIZES
from lpkit.techniques.kernels import LOSS, OF_KERNEL
from lpkit.techniques.layouts import CONTEXT
from lpkit.techniques.memory import rows_of
from lpkit.techniques.objectives import OBJECTIVES
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.recipes import RECIPES, Recipe, resolve, untiled
from lpkit.techniques.row import Settings
from lpkit.training import graphs, seams
from lpkit.training.start import Start, refuse_growth

if TYPE_CHECKING:   # imported only by runs on GPUs, and by runs that request a kernel
    from lpkit.execution.kernels import Kernels


def choose_device(asked: str, local_rank: int = 0, local_world: int = 1) -> Choice:
    """Choose the device of this rank. With several ranks on a machine, rank i of the machine uses
    GPU i.

    asked: "auto", "cpu", "cuda" or "cuda:0"
    Raises ConfigError if a GPU was requested and there is none. A GPU that exists but cannot be
    used is an error even with "auto": otherwise a run would train on the CPU, and nobody would
    notice for days.
    """
    kind, _, number = asked.partition(":")
    if kind == "cpu":
        return Choice(asked=asked, used=asked, why="requested")
    if local_world > 1 and number:
        raise ConfigError(f"system.device={asked} names one GPU, and {local_world} processes take "
                          f"a GPU each; use system.device=cuda, and choose the GPUs with "
                          f"CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    # If PyTorch cannot use the driver, it counts 0 GPUs, although the machine has some (`gpus`).
    if asked == "auto" and not (count or (torch.version.cuda and gpus())):
        return Choice(asked=asked, used="cpu", why="PyTorch sees no GPU")
    index = local_rank or (int(number) if number else None)
    problem = hardware.why_no_gpu(index) if (index or 0) < max(count, 1) else ""
    if (index or 0) >= count:
        problem = f"it was asked for, but PyTorch sees {count} GPUs{problem and f' ({problem})'}"
    if problem:
        raise ConfigError(f"system.device={asked}: {problem}; use system.device=cpu, and see "
                          f"`lpkit doctor` and nvidia-smi for the reason")
    if local_rank:
        why = f"PyTorch sees {count} GPUs, and rank {local_rank} uses this one"
    else:
        why = "requested" if asked != "auto" else f"PyTorch sees {torch.cuda.get_device_name()}"
    return Choice(asked=asked, used="cuda" if index is None else f"cuda:{index}", why=why)


def choose_recipe(asked: Settings, device: torch.device, before: str | None = None) -> Choice:
    """Choose the recipe. For `auto`, a resumed run uses `before`, the recipe with which it began;
    a new run uses what is faster on this device, bf16 or fp32."""
    if asked.name in RECIPES:
        return Choice(asked=asked.name, used=asked.name, why="requested")
    if before in RECIPES:
        return Choice(asked=asked.name, used=before, why="as when this run began")
    return hardware.bf16_choice(str(device))


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The choices of a run, made before anything is allocated."""

    device: torch.device
    recipe: Recipe
    choices: dict[str, Choice]
    # versions of kernels with which a resumed run began, by kernel
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def autocast(self) -> AbstractContextManager:
        return autocast(self.recipe, self.device)

    @property
    def record(self) -> dict[str, dict[str, str]]:
        return {key: asdict(choice) for key, choice in self.choices.items()}


def decide(config: Config, *, before: Mapping[str, Any] | None = None,
           ranks: Ranks | None = None) -> Decisions:
    """Make all choices of a run. Some choices time alternatives on this machine (races). Rank 0
    runs all races, and all ranks use its choices.

    before: the environment of a resumed run, whose choices are kept
    Raises ConfigError for an invalid config.
    """
    ranks = ranks or Ranks()
    layouts.refuse_untrainable(config)
    seams.refuse(config)
    refuse_growth(config)
    refuse_sizes(config)
    if not ranks.first:
        return _decide(config, {"chosen": ranks.agreed(None)}, ranks)
    decisions = _decide(config, before, ranks)
    ranks.agreed(decisions.record)
    return decisions


def refuse_sizes(config: Config) -> None:
    """Raise ConfigError if an update of `config.sizes` has more sequences or tokens than the config
    allows, or if its sequences are not whole micro-batches on all ranks."""
    whole = config.micro_batch * config.parallel.batch_ranks
    steps = range(config.steps if SIZES[config.sizes.name].at else 1)
    layout = config.parallel
    parts = layout.tensor * (2 * layout.context if layout.context > 1 else 1)
    for step, (count, tokens) in enumerate(map(config.sizes_at, steps)):
        if not (0 < count <= config.global_batch and count % whole == 0
                and 0 < tokens <= config.model.context and tokens % parts == 0):
            of = f"a multiple of {parts} and " if parts > 1 else ""
            raise ConfigError(
                f"sizes={config.sizes.name} gives update {step + 1} {count} sequences of {tokens} "
                f"tokens; let it give a multiple of {whole} (a micro-batch of every rank), at most "
                f"global_batch={config.global_batch}, and {of}at most "
                f"model.context={config.model.context} tokens")


def _decide(config: Config, before: Mapping[str, Any] | None, ranks: Ranks) -> Decisions:
    on = choose_device(config.system.device, ranks.local_rank, ranks.local_world)
    device = torch.device(on.used)
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)       # Triton launches kernels on the current device
    asked = config.precision.recipe
    begun = {key: choice["used"] for key, choice in (before or {}).get("chosen", {}).items()}
    m, tokens = config.model, config.micro_batch * config.model.T
    threads = hardware.threads_choice(config.system.threads, device, before=begun.get("threads"),
                                      flops=2 * tokens * m.D * m.F, processes=ranks.local_world)
    # set before the race between dtypes, which must use the same number of threads
    torch.set_num_threads(int(threads.used))
    # Start autograd's backward thread now: otherwise PyTorch prints a warning at its first matmul.
    if device.type == "cuda":
        torch.zeros(1, device=device, requires_grad=True).exp().backward()
    precision = choose_recipe(asked, device, begun.get("precision"))
    name = precision.used
    recipe = resolve(asked if asked.name == name else name)
    layouts.refuse_ungatherable(config, recipe)
    operations(MicroBatch(model=m))     # raises ConfigError for changes that do not go together
    for change in m.changes:
        if why := MODEL_CHANGES[change.name].problem(config, recipe):
            raise ConfigError(f"model.changes={change.name} {why}")
    compiled = memory.choose_compile(config, compiling.choose(config.system.compile, device))
    for axis, does in (("tensor", "sends messages inside of a block"),
                       ("context", "sends messages inside of a block"),
                       ("pipeline", "lets gradients of weights wait")):
        if compiled.used == OFF or (size := getattr(config.parallel, axis)) == 1:
            continue
        why = f"parallel.{axis}={size} {does}"
        if compiled.asked != "auto":
            raise ConfigError(f"system.compile={compiled.asked} compiles whole blocks, and {why}; "
                              f"set system.compile=false")
        compiled = Choice(asked="auto", used=OFF, why=why)
    for governor in running(config):
        from lpkit.predict.governed import shares

        if compiled.used == compiling.MODEL:
            raise ConfigError(f"system.compile=model compiles all layers into one graph, and "
                              f"governors={governor.name} changes what they run; set "
                              f"system.compile=blocks")
        sizes = {config.micro_batch * round(share * m.T)
                 for shares_of_tokens in shares(config) for share in shares_of_tokens}
        why = next(filter(None, (untiled(recipe, {"M": size}) for size in sorted(sizes))), "")
        if why and not recipe.pad:
            raise ConfigError(f"governors={governor.name}: {why}; set precision.recipe.pad=true")
    backend = backends.choose(config.precision.backend, name, recipe, device)
    chosen = {"device": on, "threads": threads, "precision": precision, "compile": compiled,
              "backend": backend}
    if (device.type == "cpu" and recipe.compute == "bfloat16" and compiled.used == OFF
            and backends.BACKENDS[backend.used].wide is not None):
        from lpkit.kernels import wide_product

        chosen["products"] = wide_product.choose_for(
            (tokens, m.D, max(m.F, m.V)), config.system.products, before=begun.get("products"))
    elif config.system.products != "auto":
        raise ConfigError(f"system.products={config.system.products} is for bf16 on a CPU without "
                          f"compiling, and this is {name} by {backend.used} on a "
                          f"{device.type.upper()}, compile {compiled.used}; use system.products="
                          f"auto")
    if config.precision.cache_weight_casts:
        from lpkit.precision import weight_cache

        forwards = config.grad_accum_steps * (2 if rows_of(config)["recompute"].repeats else 1)
        chosen["weight_casts"] = weight_cache.choose(
            name, recipe, backends.BACKENDS[backend.used], device,
            compiled=compiled.used != OFF, forwards=forwards)
    chosen["attention"] = attending.choose(
        config.system.attention, config, device, before=begun.get("attention"),
        compute=recipe.compute)
    chosen |= memory.choose(config, recipe, device)
    chosen["cuda_graphs"] = graphs.choose(config, recipe, device, ranks.world)
    kernels = {key.removeprefix(OF_KERNEL): used for key, used in begun.items()
               if key.startswith(OF_KERNEL)}
    return Decisions(device=device, recipe=recipe, choices=chosen, kernels=kernels)


def kernels(config: Config, decisions: Decisions, ranks: Ranks) -> "Kernels":
    """Return the transform that chooses the kernels of the model and of the loss. Its `choices`
    become part of the run's recorded choices."""
    from lpkit.execution.kernels import Kernels

    return Kernels(asked=config.system.kernels, besides=config.optimizer.name,
                   before=decisions.kernels, ranks=ranks,
                   in_block=decisions.choices["compile"].used != OFF,
                   captured=decisions.choices["cuda_graphs"].used == graphs.ON,
                   piece=rows_of(config)["cross_entropy"].chunk_tokens(config.memory.cross_entropy),
                   batch=(config.micro_batch, config.model.context // config.parallel.context),
                   autocast=decisions.autocast)


def build_model(config: Config, decisions: Decisions, kernels: "Kernels | None",
                sharding: Sharding, start: Start | None = None) -> nn.Module:
    """Build the model on its device: initialised, and changed by the transforms of its techniques.

    A rank normally builds only its rows of a sharded model (`sharding.making`). But the transforms
    that `config.transforms` names may need whole weights, so with them each rank builds the whole
    model before it is sharded. Stochastic rounding uses another seed on each rank, so that the
    errors of different ranks are independent.
    """
    recipe, choices, rows, m = decisions.recipe, decisions.choices, rows_of(config), config.memory
    backend = backends.BACKENDS[choices["backend"].used].by(choices.get("products"))
    named = [MODEL_TRANSFORMS[settings.name].load()(settings) for settings in config.transforms]
    with nullcontext() if named else sharding.making(decisions.device):
        model = initial_model(config, choices["attention"].used, start, sharding.ranks)
    precision = LowPrecision(recipe=recipe, backend=backend, names=list(linears(model)),
                             seed=config.seed + (sharding.ranks.in_stage << 24),
                             tokens=config.micro_batch * (config.model.T // config.parallel.context
                                                          + virtual(config.model, in_stream=True)))
    recomputation = rows["recompute"].load()(m.recompute)
    offload = rows["activation_offload"].load()(decisions.device)
    transforms = [*rows["param_dtype"].load()(), precision, *named, *filter(None, [kernels]),
                  *sharding.transforms, *recomputation.transforms, *offload.transforms]
    if (what := choices["compile"].used) != OFF:
        transforms.append(Compile(what=what, backend=recomputation.compiler))
    splits = [transform for transform in transforms if transform.stage < Stage.STORAGE]
    model = moved(transformed(model, splits), decisions.device)
    return transformed(model, [transform for transform in transforms
                               if transform.stage >= Stage.STORAGE])


def build_loss(config: Config, decisions: Decisions) -> Loss:
    """Build the loss of evaluation for the model of `build_model`, with the kernel that was chosen
    for it."""
    rows, m = rows_of(config), config.memory
    row, backend = rows["cross_entropy"], rows["recompute"].load()(m.recompute).compiler
    loss = row.load()(m.cross_entropy, decisions.autocast)
    if (kernel := decisions.choices.get(OF_KERNEL + LOSS)) is not None:
        loss = partial(loss, by=kernel.used)
    if decisions.choices["compile"].used == OFF or row.in_pieces:
        return loss
    return compiling.with_head(loss, decisions.autocast, backend)


def build_objective(config: Config, decisions: Decisions, ranks: Ranks, next_token: Loss,
                    tokenizer: Mapping[str, Any]) -> Loss:
    """Build the loss that updates minimise: `next_token`, which is the loss of evaluation, unless
    `config.objective` names another objective."""
    row = OBJECTIVES[config.objective.name]
    if not row.implementation:
        return next_token
    return row.load()(config.objective, ObjectiveContext(decisions.device, decisions.autocast,
                                                         ranks, next_token, tokenizer))


def entry_of_loss(config: Config, decisions: Decisions) -> str | None:
    """Return the name of the model's method that the loss calls; None: it calls the model itself.
    """
    compiled = decisions.choices["compile"].used != OFF
    return "hidden" if compiled else rows_of(config)["cross_entropy"].entry


def initial_model(config: Config, attend: str, start: Start | None = None,
         ranks: Ranks | None = None) -> nn.Module:
    """Build the model without its transforms: build its modules, initialise them, copy the weights
    of `start`, and apply `model.changes`, in this order. `attend`: name of the attention backend.
    """
    torch.manual_seed(config.seed)
    alone = ranks is None or config.parallel.context == 1
    model = Transformer(config.model, attend=attention.backend(attend, config.model) if alone
                        else among(config, attend, ranks))
    initialise(model, config.model.init)
    start = start or Start()
    filled = start.copy_into(model)
    for change in config.model.changes:
        MODEL_CHANGES[change.name].load()(model, change)
    start.keep(model, filled)
    return model


def among(config: Config, attend: str, ranks: Ranks) -> Attend:
    """Return attention over the tokens of all ranks of a context group: a
    `lpkit.parallel.context.Over` that calls the backend `attend` on this rank."""
    row, rule = CONTEXT[config.parallel.attention], config.model.attention.rule(config.model.T)
    partial_attend = attention.partial_of(attend) if row.partial else ATTENTION[attend].load()
    return partial(row.load()(partial_attend, ranks), rule=rule)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Move the model to `device`, unless it is there. A model of fake tensors is built on its
    device, and cannot be moved."""
    if any(t.device.type != device.type for t in (*model.parameters(), *model.buffers())):
        model.to(device)
    return model


def transformed(model: nn.Module, transforms: Iterable[Transform]) -> nn.Module:
    """Apply the transforms to the model, sorted by their `stage`, and return the model."""
    for transform in sorted(transforms, key=lambda t: t.stage):
        model = transform(model)
    return model


def environment(decisions: Decisions) -> dict[str, Any]:
    """Return what the numbers and the speed of a run depend on, for environment.json: versions,
    device, choices."""
    device = decisions.device
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "lpkit": lpkit.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": version("numpy"), "platform": platform.platform(),
        "device": hardware.device_name(device),
        "threads": torch.get_num_threads(), **hardware.provenance(device),
        "chosen": decisions.record,
    }
