"""From the names in a Config to implementations: what a run uses on this machine, and the model that it trains."""

import datetime
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import lpkit
from lpkit import hardware
from lpkit.config import Config, ConfigError
from lpkit.contracts import Choice, OptimizerSpec, Schedule, Stage, Transform, pick
from lpkit.memory import rows as memory
from lpkit.nn import attention
from lpkit.nn.init import INITS
from lpkit.nn.transformer import Transformer
from lpkit.optim.adamw import AdamW, AdamW8bit
from lpkit.optim.schedules import SCHEDULES, with_warmup
from lpkit.precision import backends, weight_cache
from lpkit.precision.recipes import RECIPES, Recipe, resolve
from lpkit.precision.transform import LowPrecision
from lpkit.predict import parameter_count

OPTIMIZERS = {"adamw": AdamW, "adamw-8bit": AdamW8bit}


@dataclass(frozen=True, kw_only=True)
class Compile(Transform):
    """torch.compile, in place: parameter names stay. `entry`: the method that the loss calls; None: the model itself."""

    entry: str | None = None
    backend: str | Callable = "inductor"
    stage = Stage.COMPILE

    def __call__(self, model: nn.Module) -> nn.Module:
        if self.entry is None:
            model.compile(backend=self.backend)
        else:
            setattr(model, self.entry, torch.compile(getattr(model, self.entry), backend=self.backend))
        return model


def choose_device(asked: str) -> Choice:
    """Raises ConfigError when a GPU was demanded and there is none."""
    count = torch.cuda.device_count()
    if asked == "auto":
        return (Choice(asked=asked, used="cuda", why=f"PyTorch sees {torch.cuda.get_device_name()}") if count else
                Choice(asked=asked, used="cpu", why="PyTorch sees no GPU"))
    kind, _, index = asked.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigError(f"system.device cannot be {asked!r}; choose auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= count:
        raise ConfigError(f"system.device={asked} was asked for, but PyTorch sees {count} GPUs; "
                          f"use system.device=auto or cpu, and see `lpkit doctor` for the reason")
    return Choice(asked=asked, used=asked, why="asked for")


def choose_recipe(asked: str, device: torch.device, before: str | None = None) -> Choice:
    """`before`: what a run that goes on was begun with. A race may end otherwise the second time, and so would the run."""
    if asked == "auto":
        return (Choice(asked=asked, used=before, why="as this run was begun") if before in RECIPES
                else hardware.bf16_choice(str(device)))
    pick(RECIPES, asked, "precision.recipe")
    return Choice(asked=asked, used=asked, why="asked for")


def choose_compile(asked: bool | str, device: torch.device) -> Choice:
    if asked == "auto":
        gpu = device.type == "cuda"
        return Choice(asked="auto", used="on" if gpu else "off",
                      why="a GPU repays the compilation" if gpu else "on a CPU compiling takes longer than a short run")
    return Choice(asked=str(asked).lower(), used="on" if asked else "off", why="asked for")


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What a run will use, before anything is allocated."""

    device: torch.device
    recipe: Recipe
    choices: dict[str, Choice]

    @property
    def autocast(self) -> AbstractContextManager:
        return self.recipe.autocast(self.device)


def decide(config: Config, *, before: Mapping[str, Any] | None = None) -> Decisions:
    """`before` is the environment of a run that goes on. Raises ConfigError for an invalid combination."""
    begun = (before or {}).get("chosen", {})
    if config.system.threads:
        torch.set_num_threads(config.system.threads)
    on = choose_device(config.system.device)
    device = torch.device(on.used)
    chosen = {"device": on, "precision": choose_recipe(config.precision.recipe, device, begun.get("precision", {}).get("used")),
              "compile": memory.choose_compile(config, choose_compile(config.system.compile, device))}
    recipe = resolve(config.precision, chosen["precision"].used)
    chosen["backend"] = backends.choose(config.precision.backend, chosen["precision"].used, recipe, device)
    if config.precision.weights != weight_cache.PLAIN:
        chosen["weights"] = weight_cache.choose(
            config.precision.weights, chosen["precision"].used, recipe, backends.BACKENDS[chosen["backend"].used], device,
            compiled=chosen["compile"].used == "on", forwards=config.accumulate * (1 + (config.memory.recompute != "none")))
    chosen["attention"] = attention.choose(config.model.attention, device_type=device.type, context=config.model.context,
                                           recipe="bf16" if recipe.compute == torch.bfloat16 else "fp32")
    pick(attention.BACKENDS, chosen["attention"].used, "model.attention")
    chosen |= memory.choose(config, recipe, device)
    return Decisions(device=device, recipe=recipe, choices=chosen)


def build_model(config: Config, decisions: Decisions, more: tuple[Transform, ...] = ()) -> nn.Module:
    """Initialised from `config.seed`, moved to its device, changed by its techniques' transforms and by `more`."""
    m, recipe, choices, rows = config.memory, decisions.recipe, decisions.choices, memory.rows_of(config)
    precision = LowPrecision(recipe=recipe, backend=backends.BACKENDS[choices["backend"].used], seed=config.seed,
                             tokens=config.batch // config.accumulate * config.model.context)
    transforms = [*rows["parameters"].transforms(), precision, *more, *rows["recompute"].transforms(m), *rows["saved"].transforms()]
    if choices["compile"].used == "on":
        transforms.append(Compile(entry=rows["loss"].entry, backend=rows["recompute"].compiler(m)))
    return transformed(initialised(config, decisions.device, choices["attention"].used), transforms)


def initialised(config: Config, device: torch.device, attend: str = "sdpa") -> nn.Module:
    """The model as its init leaves it, on `device`."""
    torch.manual_seed(config.seed)
    model = Transformer(config.model, attend=pick(attention.BACKENDS, attend, "model.attention"))
    pick(INITS, config.model.init, "model.init")(model)
    if next(model.parameters()).device.type != device.type:     # a fake one is made where it belongs, and cannot move
        model.to(device)
    return model


def transformed(model: nn.Module, transforms: Iterable[Transform]) -> nn.Module:
    """In the order of the stages, whatever the order given."""
    for transform in sorted(transforms, key=lambda t: t.stage):
        model = transform(model)
    return model


def optimizer_spec(config: Config) -> OptimizerSpec:
    o = config.optimizer
    return pick(OPTIMIZERS, o.name, "optimizer.name")(
        lr=o.lr, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay, seed=config.seed)


def schedule_of(config: Config) -> Schedule:
    o = config.optimizer
    return with_warmup(pick(SCHEDULES, o.schedule, "optimizer.schedule"), steps=config.steps,
                       warmup_steps=o.warmup_steps, final=o.final_lr_ratio, decay_fraction=o.decay_fraction)


def refuse_what_cannot_fit(config: Config, decisions: Decisions) -> None:
    """Weights, gradients and optimizer state alone, by arithmetic, before anything is allocated."""
    rows, place, device = memory.rows_of(config), decisions.choices.get("optimizer_state"), decisions.device
    state = optimizer_spec(config).state_bytes_per_param if place is None or place.used == memory.PLAIN.optimizer_state else 0
    needed = parameter_count(config.model) * (rows["parameters"].itemsize * (1 + rows["update"].gradients) + state)
    held = hardware.memory_bytes(device)
    if needed > held:
        raise ConfigError(f"weights, gradients and optimizer state of this model take {needed / 1e9:,.1f} GB, and "
                          f"{device} has {held / 1e9:,.1f} GB; choose a smaller preset, or see what it takes with "
                          f"`lpkit predict`")


def environment(decisions: Decisions) -> dict[str, Any]:
    """Where a number comes from."""
    device = decisions.device
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "lpkit": lpkit.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": version("numpy"), "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else hardware.cpu_name(),
        "threads": torch.get_num_threads(),
        "chosen": {key: asdict(choice) for key, choice in decisions.choices.items()},
    }
