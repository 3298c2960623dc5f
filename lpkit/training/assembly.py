"""From a Config to a Job: the only place where names become implementations and techniques meet.

A technique is one more row in one of these tables.
"""

import datetime
import platform
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lpkit
from lpkit import hardware
from lpkit.config import Config, ConfigError
from lpkit.contracts import Choice, Loss, OptimizerSpec, Place, Stage, Step, Transform, pick
from lpkit.datasets import POLICIES, prepare
from lpkit.memory import rows as memory
from lpkit.nn import attention
from lpkit.nn.init import INITS
from lpkit.nn.transformer import Transformer
from lpkit.optim.adamw import AdamW, AdamW8bit
from lpkit.optim.schedules import SCHEDULES, with_warmup
from lpkit.precision import backends, weight_cache
from lpkit.precision.linear import advance, nonfinite_report
from lpkit.precision.recipes import RECIPES, Recipe, resolve
from lpkit.precision.transform import LowPrecision
from lpkit.predict import parameter_count
from lpkit.predict.flops import training_flops_per_token
from lpkit.training.loop import Job
from lpkit.training.steps import LossScaler, accumulate

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


def build_model(config: Config, device: torch.device, *, attend: str = "sdpa",
                transforms: tuple[Transform, ...] = ()) -> nn.Module:
    """Initialised from `config.seed`, moved to `device`, transformed in the order of the stages."""
    torch.manual_seed(config.seed)
    model = Transformer(config.model, attend=attention.backend(attend))
    pick(INITS, config.model.init, "model.init")(model)
    if next(model.parameters()).device.type != device.type:     # a fake one is made where it belongs, and cannot move
        model.to(device)
    for transform in sorted(transforms, key=lambda t: t.stage):
        model = transform(model)
    return model


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What a run will use, before anything is allocated."""

    device: torch.device
    recipe: Recipe
    chosen: dict[str, Choice]


@dataclass(frozen=True, kw_only=True)
class Built:
    """What computes: the fields of a Job that need no data."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    finish: Callable[[], Tensor]
    loss: Loss
    place: Place
    state: nn.Module
    more: Callable[[], dict[str, float]]


def decide(config: Config, *, before: Mapping[str, Any] | None = None) -> Decided:
    """`before` is the environment of a run that goes on. Raises ConfigError for anything that cannot be."""
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
    chosen |= memory.choose(config, recipe, device)
    return Decided(device=device, recipe=recipe, chosen=chosen)


def build(config: Config, decided: Decided, *, more: tuple[Transform, ...] = ()) -> Built:
    """The model with its transforms and `more`, the optimizer and the step. Allocates; raises ConfigError."""
    recipe, chosen, device, m = decided.recipe, decided.chosen, decided.device, config.memory
    precision = LowPrecision(recipe=recipe, backend=backends.BACKENDS[chosen["backend"].used], seed=config.seed,
                             tokens=config.batch // config.accumulate * config.model.context)
    rows = memory.rows_of(config)
    compiled = (Compile(entry=rows["loss"].entry, backend=rows["recompute"].compiler(m)),) if chosen["compile"].used == "on" else ()
    model = build_model(config, device, attend=chosen["attention"].used,
                        transforms=(*rows["parameters"].transforms(), precision, *more,
                                    *rows["recompute"].transforms(m), *rows["saved"].transforms(), *compiled))
    loss, scaler = rows["loss"].make(m, recipe.autocast(device)), loss_scaler(recipe, device)
    place = rows["optimizer_state"].place(device)
    optimizer = optimizer_spec(config).build(model, place)
    return Built(
        model=model, optimizer=optimizer,
        step=weight_cache.WEIGHTS[chosen["weights"].used if "weights" in chosen else weight_cache.PLAIN](
            accumulate(config.accumulate, loss, after=advance, scaler=scaler)),
        finish=rows["update"].make(optimizer, list(model.parameters()), config.optimizer.clip),
        loss=loss, place=place or Place(), state=nn.Module() if scaler is None else scaler,
        more=dict if scaler is None else lambda: {"loss_scale": scaler.scale.item()})


def optimizer_spec(config: Config) -> OptimizerSpec:
    o = config.optimizer
    return pick(OPTIMIZERS, o.name, "optimizer.name")(
        lr=o.lr, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay, seed=config.seed)


def assemble(config: Config, *, before: Mapping[str, Any] | None = None, cache_dir: Path | None = None) -> Job:
    """Everything that one run needs. `before` is the environment of a run that goes on.

    Raises ConfigError for anything that cannot be.
    """
    o = config.optimizer
    # Names first: a misspelt one should not wait for a corpus.
    optimizer_spec(config)
    schedule = with_warmup(pick(SCHEDULES, o.schedule, "optimizer.schedule"), steps=config.steps,
                           warmup_steps=o.warmup_steps, final=o.final_lr_ratio, decay_fraction=o.decay_fraction)
    policy = pick(POLICIES, config.data.policy, "data.policy")
    decided = decide(config, before=before)
    _refuse_what_cannot_fit(config, decided)
    files = prepare(config.data, vocab=config.model.vocab, cache_dir=cache_dir)
    context, micro_batch = config.model.context, config.batch // config.accumulate
    built = build(config, decided)
    return Job(
        config=config, device=decided.device, chosen=decided.chosen, **vars(built), schedule=schedule,
        data=policy(tokens=files.train, batch=config.batch, context=context, seed=config.seed),
        # evaluation needs no gradients, but the logits of a whole batch may not fit where a micro-batch's do
        val=POLICIES["spread-windows"](tokens=files.val, batch=micro_batch, context=context),
        tokenizer=files.tokenizer.to_dict(), environment=environment(decided.device, decided.chosen),
        flops_per_token=training_flops_per_token(config.model),
        # Against the peak of 16 bits whatever the recipe, so that a recipe that is faster has a higher MFU.
        peak_flops=lambda: hardware.peak_flops("fp32" if decided.recipe.compute is None else "bf16", str(decided.device))[0],
        diagnose=nonfinite_report)


def loss_scaler(recipe: Recipe, device: torch.device) -> LossScaler | None:
    scaling = recipe.loss_scaling
    return scaling and LossScaler(initial=scaling.initial, growth_steps=scaling.growth_steps).to(device)


def _refuse_what_cannot_fit(config: Config, decided: Decided) -> None:
    """Weights, gradients and optimizer state alone, by arithmetic, before anything is allocated."""
    rows, place, device = memory.rows_of(config), decided.chosen.get("optimizer_state"), decided.device
    state = optimizer_spec(config).state_bytes_per_param if place is None or place.used == memory.PLAIN.optimizer_state else 0
    needed = parameter_count(config.model) * (rows["parameters"].itemsize * (1 + rows["update"].gradients) + state)
    held = hardware.memory_bytes(device)
    if needed > held:
        raise ConfigError(f"weights, gradients and optimizer state of this model take {needed / 1e9:,.1f} GB, and "
                          f"{device} has {held / 1e9:,.1f} GB; choose a smaller preset, or see what it takes with "
                          f"`lpkit predict`")


def environment(device: torch.device, chosen: Mapping[str, Choice]) -> dict[str, Any]:
    """Where a number comes from."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "lpkit": lpkit.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": version("numpy"), "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else hardware.cpu_name(),
        "threads": torch.get_num_threads(),
        "chosen": {key: asdict(choice) for key, choice in chosen.items()},
    }
