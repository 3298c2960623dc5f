"""Turns names in a Config into implementations: `decide` chooses what a run uses on this machine,
and `build_model` builds the model that it trains.

`made` initialises the model first, by names and shapes. Then parts that have `reset(init)` set
their own starting values. Then come the weights of another run (`start`), and at last changes of
the model.
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
    """Chooses the device of this rank; with several ranks, a rank has the GPU of its local number.
    Raises ConfigError if a GPU was requested and there is none. A GPU that is present but cannot be
    used is refused even with auto: otherwise a run would silently train on the CPU, and nobody
    would notice for days."""
    kind, _, number = asked.partition(":")
    if kind == "cpu":
        return Choice(asked=asked, used=asked, why="requested")
    if local_world > 1 and number:
        raise ConfigError(f"system.device={asked} names one GPU, and {local_world} processes take "
                          f"one each; use system.device=cuda, and CUDA_VISIBLE_DEVICES to say which")
    count = torch.cuda.device_count()
    # a PyTorch that cannot use the driver counts no GPU
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
    """`before`: the recipe that a resumed run began with. A second race could choose another."""
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
    # kernels that a resumed run began with
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def autocast(self) -> AbstractContextManager:
        return autocast(self.recipe, self.device)

    @property
    def record(self) -> dict[str, dict[str, str]]:
        return {key: asdict(choice) for key, choice in self.choices.items()}


def decide(config: Config, *, before: Mapping[str, Any] | None = None,
           ranks: Ranks | None = None) -> Decisions:
    """Makes all choices of a run. `before`: the environment of a resumed run. The first of `ranks`
    runs all races, and all ranks use its choices. Raises ConfigError for an invalid config."""
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
    """Raises ConfigError for updates that are too large, or not whole micro-batches of all ranks.
    """
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
        torch.cuda.set_device(device)       # Triton launches on the current device
    asked = config.precision.recipe
    begun = {key: choice["used"] for key, choice in (before or {}).get("chosen", {}).items()}
    m, tokens = config.model, config.micro_batch * config.model.T
    threads = hardware.threads_choice(config.system.threads, device, before=begun.get("threads"),
                                      flops=2 * tokens * m.D * m.F, processes=ranks.local_world)
    # before the race of dtypes, which must use them, too
    torch.set_num_threads(int(threads.used))
    # start backward's own thread first: otherwise PyTorch warns at its first product
    if device.type == "cuda":
        torch.zeros(1, device=device, requires_grad=True).exp().backward()
    precision = choose_recipe(asked, device, begun.get("precision"))
    name = precision.used
    recipe = resolve(asked if asked.name == name else name)
    layouts.refuse_ungatherable(config, recipe)
    operations(MicroBatch(model=m))     # refuses changes that cannot be folded in
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
    """Returns the transform that chooses the kernels of the model and of the loss. Its `choices`
    are recorded with the run's choices."""
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
    """Builds the model: initialised, changed by its techniques' transforms, on its device. Nobody
    knows what the transforms named in `config` do to weights, so with them each rank builds the
    whole model before it is sharded. Each rank rounds activations and gradients with its own noise.
    """
    recipe, choices, rows, m = decisions.recipe, decisions.choices, rows_of(config), config.memory
    backend = backends.BACKENDS[choices["backend"].used].by(choices.get("products"))
    named = [MODEL_TRANSFORMS[settings.name].load()(settings) for settings in config.transforms]
    with nullcontext() if named else sharding.making(decisions.device):
        model = made(config, choices["attention"].used, start, sharding.ranks)
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
    """Builds the loss of `build_model`'s model, with the loss kernel that was chosen."""
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
    """Builds the loss that updates minimise: the loss of evaluation, unless the config names
    another objective."""
    row = OBJECTIVES[config.objective.name]
    if not row.implementation:
        return next_token
    return row.load()(config.objective, ObjectiveContext(decisions.device, decisions.autocast,
                                                         ranks, next_token, tokenizer))


def entry_of_loss(config: Config, decisions: Decisions) -> str | None:
    """Returns the method of the model that the loss calls; None for the model itself."""
    compiled = decisions.choices["compile"].used != OFF
    return "hidden" if compiled else rows_of(config)["cross_entropy"].entry


def made(config: Config, attend: str, start: Start | None = None,
         ranks: Ranks | None = None) -> nn.Module:
    """Builds the model's parts, then initialises them, copies the weights that it starts from, and
    applies its changes, in this order."""
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
    """Returns attention over the tokens of all ranks of a context group."""
    row, rule = CONTEXT[config.parallel.attention], config.model.attention.rule(config.model.T)
    partial_attend = attention.partial_of(attend) if row.partial else ATTENTION[attend].load()
    return partial(row.load()(partial_attend, ranks), rule=rule)


def moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Moves the model to `device`. A fake model is built on its device, and cannot move."""
    if any(t.device.type != device.type for t in (*model.parameters(), *model.buffers())):
        model.to(device)
    return model


def transformed(model: nn.Module, transforms: Iterable[Transform]) -> nn.Module:
    """Applies transforms in the order of their stages, in whatever order they are given."""
    for transform in sorted(transforms, key=lambda t: t.stage):
        model = transform(model)
    return model


def environment(decisions: Decisions) -> dict[str, Any]:
    """Returns the record of what a run's numbers depend on: versions, device, choices."""
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
