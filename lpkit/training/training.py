"""`Training`: the one object that can take an update.

    training = Training.build(config)               # model, optimizer, schedule and data of a run
    training.update(step)                           # the only place where a model is updated
    training.evaluate()                             # mean nats per token of the validation data
    training.load_state_dict(training.state_dict())

The loop, bisection, telemetry, measurements and benchmarks all call `update`, so all of them see
the same computation as a run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lpkit import records
from lpkit.config import Config
from lpkit.contracts import Batch, DataPolicy, Governor, Loss, Schedule, StatePlacement
from lpkit.optim import stepper
from lpkit.optim.stepper import Stepper
from lpkit.parallel.cut import Cut
from lpkit.parallel.ranks import Ranks
from lpkit.parallel.sharding import Sharding, sharding
from lpkit.precision.compute import CACHED, compute_dtype
from lpkit.techniques import schedules
from lpkit.techniques.changes import GOVERNORS
from lpkit.techniques.kernels import by_name
from lpkit.techniques.memory import rows_of
from lpkit.techniques.operation import fused
from lpkit.techniques.optimizers import OptimizerSettings, acting, find
from lpkit.training import build, seams
from lpkit.training import start as starting
from lpkit.training.build import Decisions
from lpkit.training.checkpoint import EVALUATED, evaluated_weights
from lpkit.training.control import GivenUp
from lpkit.training.graphs import ON, Graphs
from lpkit.training.runs import RunFailedError
from lpkit.training.start import Start
from lpkit.training.steps import Executor, LossScaler, Phases


class RandomTokens(DataPolicy):
    """The same random tokens of one rank at every step, for measurements. They are drawn when they
    are first needed."""

    def __init__(self, config: Config, device: torch.device | str = "cpu"):
        tokens = config.model.context // config.parallel.context
        shape = config.micro_batch * config.micro_batches, tokens
        self.draw = partial(torch.randint, config.model.vocab, shape, device=device)
        names = ["scores"] if config.data.scores else []
        self.extra = lambda: {name: torch.rand(shape, device=device) for name in names}

    @cached_property
    def drawn(self) -> Batch:
        return Batch(self.draw(), self.draw(), extra=self.extra())

    def batch(self, step: int) -> Batch:
        return self.drawn


@dataclass(frozen=True, kw_only=True)
class Update:
    """The results of an update. Losses stay tensors, so that the host does not wait for the GPU."""

    loss: Tensor            # mean nats per token, before the update
    grad_norm: Tensor       # before clipping; inf if it overflowed and nothing was updated
    lr: float
    extra: dict[str, float | Tensor]


@dataclass(frozen=True, kw_only=True)
class Training:
    config: Config
    decisions: Decisions
    model: nn.Module
    optimizer: Optimizer
    optimizer_step: Callable[[], Tensor]    # clips, steps, frees the gradients; returns their norm
    schedule: Schedule
    loss: Loss                              # the loss of evaluation
    objective: Loss                         # the loss that updates minimise
    data: DataPolicy
    val: DataPolicy
    tokenizer: dict[str, Any]
    tokens: dict[str, str]                  # SHA-256 of the training and the validation tokens
    start: Start                            # the weights that it starts from
    state_placement: StatePlacement
    scaler: LossScaler | None
    sharding: Sharding
    # a context around the micro-batches of an update, in which casts of weights are cached
    cached_casts: Callable[[nn.Module], AbstractContextManager]
    governors: dict[str, Governor]
    acting: list[OptimizerSettings]         # the settings that `optimizers.acting` returns
    step_metrics: dict[str, Callable[[], float | Tensor]]       # for StepRecord.extra
    watchers: list[Callable[[int], AbstractContextManager]] = field(default_factory=list)
    executor: Executor = field(default_factory=Executor)

    @classmethod
    def build(cls, config: Config, *, before: Mapping[str, Any] | None = None,
              data: DataPolicy | None = None, decisions: Decisions | None = None,
              ranks: Ranks | None = None) -> Training:
        """Builds a training.

        before: the environment of a run that is resumed
        data:   read instead of the config's corpus, also in evaluation
        ranks:  the ranks that train together; None for this process alone

        Raises ConfigError for an invalid combination, before anything is allocated.
        """
        ranks = ranks or Ranks()
        decisions = decisions or build.decide(config, before=before, ranks=ranks)
        val, tokenizer, tokens = data, {}, {}
        if data is None:
            from lpkit.training.data import corpus

            text = corpus(config, ranks, decisions.device)
            data, val, tokenizer, tokens = text.data, text.val, text.tokenizer, text.tokens
        rows, device, m = rows_of(config), decisions.device, config.memory
        # On a CPU PyTorch's kernels are used, unless the config requests others. A rank that has
        # only some of the layers cannot try kernels in a whole model.
        kernels, alone = None, config.parallel.pipeline == 1
        if alone and (device.type == "cuda"
                      or set(by_name(config.system.kernels).values()) != {"auto"}):
            kernels = build.kernels(config, decisions, ranks)
        shards = sharding(ranks, config.parallel, compute=compute_dtype(decisions.recipe),
                          entry=build.entry_of_loss(config, decisions))
        start = starting.read(config, records.digest(tokenizer) if tokenizer else "")
        model = build.build_model(config, decisions, kernels, shards, start)
        if not shards.autocasts:
            decisions = replace(decisions, recipe=replace(decisions.recipe, compute=None))
        owned = shards.own(model)
        scaler, step_metrics = None, {}
        if scaling := decisions.recipe.loss_scaling:
            scaler = LossScaler(initial=scaling.loss_scale, growth_steps=scaling.growth_steps)
            scaler.to(device)
            step_metrics |= {"loss_scale": partial(Tensor.clone, scaler.scale),
                             "dropped": partial(Tensor.clone, scaler.dropped)}
        placement = rows["optimizer_state"].load()(device)
        decays = {f"{prefix}.{name}": part.decays for prefix, part in model.named_modules()
                  if hasattr(part, "decays") for name, _ in part.named_parameters(recurse=False)}
        optimizer = stepper.build(owned, config.optimizer, moment_format=m.moment_format.name,
                                  placement=placement, seed=config.seed + (shards.index << 24),
                                  kernels=config.system.kernels, by_first=ranks.by_first,
                                  told=lambda name: replace(
                                      shards.told(name), fused=fused(config.model, name),
                                      decays=decays.get(name)))
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        governors = {settings.name: GOVERNORS[settings.name].load()(settings)
                     for settings in config.governors}
        choices = stepper.recorded(optimizer, decisions.choices | seams.governing(governors)
                                   | (kernels.choices if kernels else {}))
        cached_casts: Callable[[nn.Module], AbstractContextManager] = nullcontext
        if "weight_casts" in choices and choices["weight_casts"].used == CACHED:
            from lpkit.precision.weight_cache import weights_cached

            cached_casts = weights_cached
        loss = build.build_loss(config, replace(decisions, choices=choices))
        executor = Graphs() if choices["cuda_graphs"].used == ON else Executor()
        if shards.layout.pipeline > 1:
            from lpkit.training.pipelined import PipelineExecutor

            executor = PipelineExecutor(config, ranks)
        return cls(
            config=config, decisions=replace(decisions, choices=choices), model=model,
            optimizer=optimizer, data=data, val=val, tokenizer=tokenizer, tokens=tokens,
            start=start, schedule=schedules.schedule(config.schedule, config.steps),
            optimizer_step=rows["optimizer_step"].load()(
                optimizer, list(owned.values()), config.optimizer.clip, shards.norm),
            loss=loss, objective=build.build_objective(config, decisions, ranks, loss, tokenizer),
            state_placement=placement, scaler=scaler, step_metrics=step_metrics, sharding=shards,
            cached_casts=cached_casts, governors=governors | shards.governors,
            acting=acting(config.optimizer), executor=executor)

    @property
    def device(self) -> torch.device:
        return self.decisions.device

    @property
    def ranks(self) -> Ranks:
        return self.sharding.ranks

    def batch(self, step: int) -> Batch:
        """Returns this rank's part of a batch, on its device."""
        return self.data.batch(step).to(self.device)

    def update(self, step: int, *, phases: Phases = nullcontext) -> Update:
        """Takes the update that follows `step` updates, without waiting for the GPU.

        Governors may change the model before and after the update. A watcher is a context around
        all forwards and backwards, and changes nothing. `phases(name)` is a context around each
        "forward", each "backward" and the "optimizer" step, for a clock.
        """
        self.ranks.waits.seconds = 0.0
        self._govern("begin", step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.schedule(step)
        with ExitStack() as stack:
            for watch in self.watchers:
                stack.enter_context(watch(step))
            loss = self.forward_backward(batch := self.batch(step), phases=phases)
        with phases("optimizer"):
            grad_norm = self.optimizer_step()
            if self.scaler is not None:
                grad_norm = torch.where(self.scaler.dropped > 0, torch.inf, grad_norm)
            self.sharding.spread()      # gathers the new weights if each rank updated a part
            self._govern("end", step)
            for rule in self.acting:
                resolve_name(find(rule.name).after)(self, rule, batch, step)
        return Update(loss=loss, grad_norm=grad_norm, lr=self.optimizer.param_groups[0]["lr"],
                      extra={name: read() for name, read in self.step_metrics.items()})

    def _govern(self, moment: str, step: int) -> None:
        """Calls the method `moment` ("begin" or "end") of each governor that has it."""
        for governor in self.governors.values():
            if (change := getattr(governor, moment, None)) is not None:
                change(self, step)

    def forward_backward(self, batch: Batch, *, phases: Phases = nullcontext) -> Tensor:
        """Leaves the gradients of `batch` in the parameters, and returns its mean loss."""
        return self.executor.forward_backward(self, batch, phases=phases)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undoes a step that is given up in this context: frees the gradients, and restores what
        micro-batches advance (histories of casts, random generators)."""
        buffers = [(t, t.clone()) for t in self.model.buffers()]
        generators = self._generators()
        try:
            yield
        except GivenUp:
            for p in (*self.model.parameters(), *self.sharding.owned.values()):
                p.grad = None
            for t, before in buffers:
                t.copy_(before)
            self._set_generators(generators)
            raise

    @torch.no_grad()
    def evaluate(self, *, phases: Phases = nullcontext) -> float:
        """Returns the mean nats per next (or hidden) token, whatever the objective, of the first
        `eval_batches` batches of `global_batch` sequences: the weighted sum of losses over the sum
        of weights, for any number of ranks and micro-batches. `phases` is called with "evaluation"
        for each micro-batch."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        try:
            with self.evaluated():
                for i in range(self.config.eval_batches):
                    batch = self.val.batch(i).to(self.device)
                    for piece in batch.chunk(-(-len(batch.tokens) // self.config.micro_batch)):
                        with phases("evaluation"):
                            weight = (piece.targets.numel() if piece.weights is None
                                      else piece.weights.sum())
                            nats = self.executor.loss(self, piece).double()
                            total += torch.stack((nats, torch.ones_like(nats))) * weight
        finally:
            self.model.train()
        nats, weight = self.ranks.mean(total).tolist()
        if not weight:
            raise RunFailedError("no token of the validation data counts; raise eval_batches")
        return nats / weight

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """In this context the model has the weights that evaluation reads. They differ from the
        trained weights if the optimizer keeps, for example, an average of them (Defazio et al.
        2024, https://arxiv.org/abs/2405.15682).
        """
        theirs = self._evaluated()
        trained = {name: self.sharding.owned[name].detach().clone() for name in theirs}
        try:
            self._set_owned(theirs)
            yield
        finally:
            self._set_owned(trained)

    def _evaluated(self) -> dict[str, Tensor]:
        """Returns the weights that evaluation reads instead of owned parameters, by name. It leaves
        out parameters that evaluation reads themselves."""
        if not isinstance(self.optimizer, Stepper):
            return {}
        evaluated = {name: self.optimizer.evaluated(p) for name, p in self.sharding.owned.items()}
        return {name: w for name, w in evaluated.items() if w is not None}

    @torch.no_grad()
    def _set_owned(self, weights: Mapping[str, Tensor]) -> None:
        for name, w in weights.items():
            self.sharding.owned[name].copy_(w)
        if weights:
            self.sharding.spread()

    @torch.no_grad()
    def logits(self, tokens: Tensor, *cache: Any) -> Tensor:
        """Returns logits (B, T, V) in the precision of the run. `cache`: keys and values."""
        with self.decisions.autocast:
            return self.model(tokens, *cache)

    def copy(self) -> Training:
        """Returns another training with the same weights and state, that reads the same data."""
        parts = {name: getattr(self, name) for name in
                 ("model", "optimizer", "optimizer_step", "scaler", "governors", "step_metrics")}
        # in one deepcopy, because the parts share parameters
        return replace(self, **copy.deepcopy(parts), watchers=[], executor=self.executor.fresh())

    # ---- the content of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns tensors and numbers by their names in a checkpoint."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)      # state may still be on its way to the host
        names = {p: name for name, p in self.sharding.owned.items()}
        state: dict[str, Any] = self._tensors()
        for p, slots in self.optimizer.state.items():
            for slot, t in slots.items():
                cut = torch.is_tensor(t) and self._is_cut(p, slot)
                state[f"optimizer/{names[p]}/{slot}"] = (
                    self.sharding.whole(names[p], t) if cut else t)
        for name, w in self._evaluated().items():
            state[EVALUATED + name] = self.sharding.whole(name, w)
        return state | self._generators()

    def _generators(self) -> dict[str, Tensor]:
        state = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _set_generators(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in state:
            torch.cuda.set_rng_state(state["rng/cuda"], self.device)

    def _is_cut(self, p: nn.Parameter, slot: str) -> bool:
        """Returns whether a tensor of the optimizer's state is cut like p."""
        return not isinstance(self.optimizer, Stepper) or self.optimizer.is_cut(p, slot)

    def blank(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | Cut:
        """Returns an empty tensor for a checkpoint's tensor of this name; a Cut with this rank's
        pieces if the tensor is cut."""
        part, _, rest = name.partition("/")
        parameter, _, slot = rest.partition("/")
        owned, like = self.sharding.owned.get(parameter), None
        if part == "model" and parameter in self.sharding.shapes:
            like = self.sharding.saved(parameter, self.model.get_parameter(parameter))
        elif owned is not None and (part == "evaluated" or (
                part == "optimizer" and self._is_cut(owned, slot))):
            like = self.sharding.whole(parameter, owned)
        if isinstance(like, Cut) and like.shape == shape:
            return like.empty(dtype)
        return torch.empty(shape, dtype=dtype)

    def load_state_dict(self, state: Mapping[str, Any], *, source: object = "the state") -> None:
        """Loads a state. Raises RunFailedError if `state` lacks a tensor, or if a shape or dtype
        differs."""
        parameters = self.sharding.owned
        if self.sharding.layout.pipeline > 1:       # without the parameters of other stages
            ours = self._tensors().keys()
            state = {name: t for name, t in state.items() if name in ours
                     or (parts := name.split("/"))[0] not in ("model", "optimizer", "evaluated")
                     or (parts[0] != "model" and parts[1] in parameters)}
        slots = [name for name in state
                 if name.startswith("optimizer/") and name.split("/")[1] in parameters]
        governed = [name for name in state
                    if name.startswith("governor/") and name.split("/")[1] in self.governors]
        self._load(self._tensors(), state, source,
                   beside=["rng/cpu", "rng/cuda", *slots, *governed,
                           *(name for name in state if name.startswith(EVALUATED))])
        for name, governor in self.governors.items():
            prefix = f"governor/{name}/"
            governor.load_state_dict({key.removeprefix(prefix): t for key, t in state.items()
                                      if key.startswith(prefix)})
        for name in slots:
            _, parameter, slot = name.split("/")
            value = state[name]
            if isinstance(value, (Tensor, Cut)):
                if self._is_cut(parameters[parameter], slot):
                    value = self.sharding.part(parameter, value)
                value = self.state_placement.store(value.to(self.device))
            self.optimizer.state[parameters[parameter]][slot] = value
        self.sharding.spread()
        self._set_generators(state)

    def load_model(self, state: Mapping[str, Any], *, source: object = "the state") -> None:
        """Loads only the weights that evaluation reads, and the buffers, for sampling."""
        self._load(self._weights(), evaluated_weights(state), source)

    def _weights(self) -> dict[str, Tensor | Cut]:
        """Returns the weights, without frozen weights that are read from another run."""
        saved = _saved("model", self.model)
        named = self.sharding.shapes
        return {name: self.sharding.saved(key, t) if (key := name.partition("/")[2]) in named else t
                for name, t in saved.items() if name not in self.start.frozen}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = self._weights()
        if self.scaler is not None:
            tensors |= _saved("state", self.scaler)
        for name, governor in self.governors.items():
            tensors |= {f"governor/{name}/{key}": t for key, t in governor.state_dict().items()}
        return tensors

    @torch.no_grad()
    def _load(self, ours: Mapping[str, Tensor], state: Mapping[str, Any], source: object,
              beside: Collection[str] = ()) -> None:
        """Loads all of `ours`, and refuses names that are left over. `beside`: names that other
        code loads."""
        way_out = "resume with the settings that it was saved with"
        missing = [name for name in ours if name not in state]
        if missing:
            raise RunFailedError(f"{source} lacks {len(missing)} of the run's tensors, "
                                 f"{missing[0]} first; {way_out}")
        if unknown := state.keys() - ours.keys() - set(beside):
            raise RunFailedError(f"{source} holds {len(unknown)} tensors that this run does not "
                                 f"have, {min(unknown)} first; {way_out}")
        for name, t in ours.items():
            theirs = state[name]
            # copy_ would broadcast a short history into a longer one, and would round to another
            # dtype
            if (t.shape, t.dtype) != (theirs.shape, theirs.dtype):
                raise RunFailedError(
                    f"{source} holds {name} as {theirs.dtype} {tuple(theirs.shape)}, and this run "
                    f"has it as {t.dtype} {tuple(t.shape)}; {way_out}")
        for name, t in ours.items():
            if not name.startswith("governor/"):
                t.copy_(state[name])


def _saved(part: str, module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and saved buffers; a tied tensor occurs once."""
    wanted = module.state_dict(keep_vars=True).keys()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {f"{part}/{name}": t for name, t in tensors if name in wanted}
