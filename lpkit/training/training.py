"""`Training`: a model with its optimizer, schedule and data, ready to be updated.

    training = Training.build(config)               # everything that a run of `config` needs
    training.update(step)                           # the only place where a model is updated
    training.evaluate()                             # mean nats per token of the validation data
    training.load_state_dict(training.state_dict())

The training loop, bisection, telemetry, measurements and benchmarks all call `update`, so all of
them compute exactly what a run computes.
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
    """The same batch of random tokens at every step, for measurements: this rank's (sequences,
    tokens). The tokens are drawn when `batch` is first called."""

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
    """The results of an update. Numbers that the GPU computes stay tensors, so that the host does
    not wait for them."""

    loss: Tensor            # mean nats per token of all ranks, before the update
    grad_norm: Tensor       # before clipping; inf if gradients overflowed and nothing was updated
    lr: float               # learning rate of the first parameter group
    extra: dict[str, float | Tensor]        # the step_metrics of the training


@dataclass(frozen=True, kw_only=True)
class Training:
    """See the beginning of this module."""

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
    start: Start                            # the weights that the run starts from
    state_placement: StatePlacement
    scaler: LossScaler | None
    sharding: Sharding
    # a context around the micro-batches of an update, in which casts of weights are cached
    cached_casts: Callable[[nn.Module], AbstractContextManager]
    governors: dict[str, Governor]
    # settings of the optimizers that also act after an update (`optimizers.acting`)
    acting: list[OptimizerSettings]
    # by name: a function that returns a number of the last update, for StepRecord.extra
    step_metrics: dict[str, Callable[[], float | Tensor]]
    # f(step) -> a context around forward and backward of an update
    watchers: list[Callable[[int], AbstractContextManager]] = field(default_factory=list)
    executor: Executor = field(default_factory=Executor)

    @classmethod
    def build(cls, config: Config, *, before: Mapping[str, Any] | None = None,
              data: DataPolicy | None = None, decisions: Decisions | None = None,
              ranks: Ranks | None = None) -> Training:
        """Build the training of `config`.

        before:    the environment of a run that is resumed, whose choices are kept
        data:      batches to use instead of the config's text, for updates and for evaluation
        decisions: the choices for this machine; None: make them
        ranks:     this process among the ranks that train together; None: it trains by itself

        Raises ConfigError for settings that do not go together, before anything is allocated.
        """
        ranks = ranks or Ranks()
        decisions = decisions or build.decide(config, before=before, ranks=ranks)
        val, tokenizer, tokens = data, {}, {}
        if data is None:
            from lpkit.training.data import corpus

            text = corpus(config, ranks, decisions.device)
            data, val, tokenizer, tokens = text.data, text.val, text.tokenizer, text.tokens
        rows, device, m = rows_of(config), decisions.device, config.memory
        # On a CPU, PyTorch's kernels are used, unless the config requests others. In a pipeline,
        # kernels are not chosen: they are timed in a whole model, and a rank has only some layers.
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
                                  facts=lambda name: replace(
                                      shards.parameter(name), fused=fused(config.model, name),
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
        """Return this rank's part of the batch of the update after `step` updates, on the device.
        """
        return self.data.batch(step).to(self.device)

    def update(self, step: int, *, phases: Phases = nullcontext) -> Update:
        """Take the update that follows `step` updates, without waiting for the GPU. The first
        update has step 0.

        Governors may change the model before and after the update. Watchers, contexts around
        forward and backward, only observe. `phases(name)` returns a context around each "forward",
        each "backward" and the "optimizer" step, in which for example a clock runs.
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
            self.sharding.spread()      # give each rank the weights that other ranks have updated
            self._govern("end", step)
            for rule in self.acting:
                resolve_name(find(rule.name).after)(self, rule, batch, step)
        return Update(loss=loss, grad_norm=grad_norm, lr=self.optimizer.param_groups[0]["lr"],
                      extra={name: read() for name, read in self.step_metrics.items()})

    def _govern(self, moment: str, step: int) -> None:
        """Call the method `moment` ("begin" or "end") of each governor that has this method."""
        for governor in self.governors.values():
            if (change := getattr(governor, moment, None)) is not None:
                change(self, step)

    def forward_backward(self, batch: Batch, *, phases: Phases = nullcontext) -> Tensor:
        """Run forward and backward. Leave the gradients of the batch in the owned parameters, and
        return the mean loss of all ranks. `batch`: this rank's part of the update's batch."""
        return self.executor.forward_backward(self, batch, phases=phases)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """If a step is given up in this block (GivenUp), undo it: free the gradients, and restore
        what each micro-batch changes (buffers with amax histories, random generators)."""
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
        """Return the mean loss of the validation data in nats per predicted token.

        It is the cross-entropy, whatever the objective, of the first `eval_batches` batches of
        `global_batch` sequences: the sum of the weighted losses of all tokens, divided by the sum
        of their weights. So it is the same for any number of ranks and micro-batches.
        `phases("evaluation")` returns a context around each micro-batch.
        """
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
            raise RunFailedError("every token of the evaluated batches has the weight 0, so there "
                                 "is no validation loss; raise eval_batches")
        return nats / weight

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Return a context in which the model has the weights for evaluation. Most optimizers
        evaluate with the trained weights. A schedule-free optimizer evaluates with an average of
        them (Defazio et al. 2024, https://arxiv.org/abs/2405.15682).
        """
        theirs = self._evaluated()
        trained = {name: self.sharding.owned[name].detach().clone() for name in theirs}
        try:
            self._set_owned(theirs)
            yield
        finally:
            self._set_owned(trained)

    def _evaluated(self) -> dict[str, Tensor]:
        """Return the weights that evaluation uses instead of the owned parameters, by name, without
        parameters for which it uses the trained weights."""
        if not isinstance(self.optimizer, Stepper):
            return {}
        evaluated = {name: self.optimizer.evaluated(p) for name, p in self.sharding.owned.items()}
        return {name: w for name, w in evaluated.items() if w is not None}

    @torch.no_grad()
    def _set_owned(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the owned parameters of these names, and send them to all ranks."""
        for name, w in weights.items():
            self.sharding.owned[name].copy_(w)
        if weights:
            self.sharding.spread()

    @torch.no_grad()
    def logits(self, tokens: Tensor, *cache: Any) -> Tensor:
        """Return the logits (B, T, V) of tokens (B, T), in the precision of the run. `cache`: a
        `lpkit.nn.kv_cache.Cache` of the tokens before; it is extended by these tokens."""
        with self.decisions.autocast:
            return self.model(tokens, *cache)

    def copy(self) -> Training:
        """Return a training with copies of the weights and of all state. It reads the same data.
        """
        parts = {name: getattr(self, name) for name in
                 ("model", "optimizer", "optimizer_step", "scaler", "governors", "step_metrics")}
        # one deepcopy for all, so that the copies share parameters as the originals do
        return replace(self, **copy.deepcopy(parts), watchers=[], executor=self.executor.fresh())

    # ---- the content of a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors and numbers of a checkpoint, by name: "model/NAME", "optimizer/NAME/
        SLOT", "evaluated/NAME", "governor/...", "state/..." and "rng/...". Tensors of which this
        rank has a part are Cuts."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)     # copies of states to the host must be complete
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
        """Return the states of PyTorch's random generators, by their names in a checkpoint."""
        state = {"rng/cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _set_generators(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["rng/cpu"])
        if self.device.type == "cuda" and "rng/cuda" in state:
            torch.cuda.set_rng_state(state["rng/cuda"], self.device)

    def _is_cut(self, p: nn.Parameter, slot: str) -> bool:
        """Return whether slot `slot` of parameter `p` is divided over the ranks as `p` is."""
        return not isinstance(self.optimizer, Stepper) or self.optimizer.is_cut(p, slot)

    def blank(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | Cut:
        """Return an uninitialised tensor into which to load the checkpoint's tensor `name`: a Cut
        with this rank's pieces if this rank has only a part, otherwise a whole tensor."""
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
        """Load a state from `state_dict` of any layout. `source`: its name in errors. Raises
        RunFailedError if a tensor is missing or unknown, or has another shape or dtype."""
        parameters = self.sharding.owned
        if self.sharding.layout.pipeline > 1:       # leave out the parameters of other stages
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
        """Load only the weights for evaluation, and the buffers, for sampling."""
        self._load(self._weights(), evaluated_weights(state), source)

    def _weights(self) -> dict[str, Tensor | Cut]:
        """Return parameters and buffers in the form that a checkpoint stores, without frozen
        weights that are read from the base run (`start`)."""
        saved = _saved("model", self.model)
        named = self.sharding.shapes
        return {name: self.sharding.saved(key, t) if (key := name.partition("/")[2]) in named else t
                for name, t in saved.items() if name not in self.start.frozen}

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights, the state of loss scaling and the state of governors, by their names
        in a checkpoint."""
        tensors = self._weights()
        if self.scaler is not None:
            tensors |= _saved("state", self.scaler)
        for name, governor in self.governors.items():
            tensors |= {f"governor/{name}/{key}": t for key, t in governor.state_dict().items()}
        return tensors

    @torch.no_grad()
    def _load(self, ours: Mapping[str, Tensor], state: Mapping[str, Any], source: object,
              beside: Collection[str] = ()) -> None:
        """Copy the tensors of `state` into `ours`, by name. `beside`: further names in `state`,
        which the caller loads. Raises RunFailedError for any other name in `state`."""
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
            # checked because copy_ would broadcast a shorter history, and round to another dtype
            if (t.shape, t.dtype) != (theirs.shape, theirs.dtype):
                raise RunFailedError(
                    f"{source} holds {name} as {theirs.dtype} {tuple(theirs.shape)}, and this run "
                    f"has it as {t.dtype} {tuple(t.shape)}; {way_out}")
        for name, t in ours.items():
            if not name.startswith("governor/"):
                t.copy_(state[name])


def _saved(part: str, module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers of a module, named `part`/NAME. A tensor
    with two names, such as a tied embedding, is returned once."""
    wanted = module.state_dict(keep_vars=True).keys()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {f"{part}/{name}": t for name, t in tensors if name in wanted}
