"""Lesson 13, efficient attention: its study, its figures and its exercises.

What does a kind of attention cost over the context length, and what does it forget?

    layer = Layer(kind=KINDS["window"].settings, context=1024)
    layer.needed_flops, layer.computed_flops, layer.saved_bytes     # by formula
    seconds([layer, ...], rounds=5)                                 # forward and backward, measured
    [learned] = learn({"full": kind}, Recall(pairs=8, symbols=8), context=40, steps=150)["full"]
    learned.by_distance(8)                                          # share of right answers

Timed is only the attention of one layer, as its model calls it: from q, k and v to the output of
the heads. The models that learn a task have two layers and a width of 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from random import Random
from typing import TypeVar

import torch
from torch import Tensor

import lessons.rows.linear_attention
import lessons.rows.sparse_attention  # noqa: F401  adds rows
from lessons.draws import normal
from lessons.figures.colours import SYMBOLS, lines_of
from lessons.figures.drawing import SECONDS, axis, figure, rule, scatter
from lessons.figures.waiting import progress
from lessons.judging.judge import Exercise, adding_to
from lessons.saved import saved_bytes
from lessons.tasks import Copy, Recall, Task
from lpkit import hardware
from lpkit.config import Config, ModelConfig
from lpkit.contracts import DataPolicy
from lpkit.errors import ConfigError, pick
from lpkit.machine_facts import cores
from lpkit.nn import attention
from lpkit.presets import preset
from lpkit.tables import FAINT
from lpkit.techniques.attention import KINDS as ALL
from lpkit.techniques.attention import Rule
from lpkit.techniques.attention_backends import choose_attention
from lpkit.techniques.blocks import operations
from lpkit.techniques.data import POLICIES
from lpkit.techniques.operation import MicroBatch, Op
from lpkit.techniques.row import Settings
from lpkit.timing import Watch, interleaved_seconds
from lpkit.training.training import RandomTokens, Training

# the notebook imports these names of other modules from here
__all__ = ["Copy", "Recall", "Rule", "attention", "hardware", "preset", "progress"]

# ---- The study

T = TypeVar("T")
KINDS = {name: ALL[name] for name in ("full", "window", "block-sparse", "documents", "linear",
                                      "performer", "delta")}
# FLOPs of forward and backward over those of forward: forward has 2 matmuls over pairs; backward
# has 5, since it computes the scores again: (2 + 5) / 2
FLASH_PRODUCTS = 3.5
# settings of the models that learn
LEARNING = {"model.layers": 2, "model.width": 64, "model.heads": 2, "model.mlp_width": 64,
            "model.position": "rope", "model.norm": "rmsnorm", "model.bias": False,
            "model.tied": False, "model.init": "fan-in", "schedule.warmup_steps": 20,
            "optimizer.lr": 5e-3, "precision.recipe": "fp32", "system.device": "cpu",
            "system.threads": 1, "global_batch": 32}
ASKED = 10**6               # step of the first test batch, far beyond the training steps
QUESTIONS = 4               # number of test batches


def cheaper(kind: str) -> Settings:
    """Return the default settings of a kind of attention in KINDS other than full attention. Raises
    ConfigError for full attention and for an unknown kind."""
    return pick({name: row for name, row in KINDS.items() if name != "full"}, kind, "kind").settings


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The attention of one layer in float32 on a CPU, on one sequence."""

    kind: Settings          # settings of a row of KINDS
    context: int            # tokens of the sequence
    heads: int = 2
    head_dim: int = 64
    document: int = 0       # tokens of a document, for kinds that read document ids; 0: `context`

    @cached_property
    def config(self) -> Config:
        """The config of a model of one layer with this attention."""
        config = Config().replace({
            "model.layers": 1, "model.width": self.heads * self.head_dim, "model.vocab": 16,
            "model.heads": self.heads, "model.mlp_width": 16, "model.context": self.context,
            "model.bias": False, "precision.recipe": "fp32", "system.device": "cpu",
            "system.threads": 1, "global_batch": 1})
        return _attending(config, self.kind)

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def backend(self) -> str:
        """The attention backend that `system.attention=auto` chooses for this layer."""
        return choose_attention("auto", device="cpu", low_precision=False, model=self.model)[0]

    @cached_property
    def op(self) -> Op:
        """The description of attention from which formulas compute FLOPs and bytes."""
        s = MicroBatch(model=self.model, attention=self.backend)
        return next(op for op in operations(s).block if op.name == "attention")

    @cached_property
    def pairs(self) -> int | None:
        """The number of (query, key) pairs that the mask leaves visible; None for a kind that keeps
        a state instead of keys."""
        rule = self.model.attention.rule(self.context)
        if rule is None:
            return None
        if not rule.documents:
            return rule.pairs(self.context)
        whole, rest = divmod(self.context, self.document or self.context)
        return sum(n * (n + 1) // 2 for n in [*[self.document or self.context] * whole, rest])

    @property
    def computed_flops(self) -> float:
        """The FLOPs of forward and backward that the backend computes, hidden pairs included."""
        forward = sum(2 * matmul.M * matmul.N * matmul.K * matmul.group
                      for matmul in self.op.pairs)
        return forward * self.op.pairs_share * (1 + self.op.backward_pairs)

    @property
    def needed_flops(self) -> float:
        """The FLOPs of forward and backward that the visible pairs need: 4 per pair, head and head
        dimension in forward, times FLASH_PRODUCTS."""
        if self.pairs is None:
            return self.computed_flops
        return 4 * self.pairs * self.heads * self.head_dim * FLASH_PRODUCTS

    @property
    def saved_bytes(self) -> float:
        """Bytes kept for backward, by formula: q, k, v and the other tensors that attention
        saves."""
        return self._of_attention({op.name: op.saved_bytes for op in operations(
            MicroBatch(model=self.model, attention=self.backend)).block})

    def measured_bytes(self) -> int:
        """Return the bytes kept for backward, counted in autograd."""
        training = Training.build(self.config, data=RandomTokens(self.config))
        batch = replace(training.batch(0), document_ids=self._documents)
        saved = saved_bytes(training.model, lambda: training.loss(training.model, batch),
                            ignore=batch.tensors)
        return self._of_attention(saved.operations)

    @staticmethod
    def _of_attention(held: Mapping[str, float]) -> float:
        """Return the sum of the bytes under attention's operations."""
        return sum(nbytes for name, nbytes in held.items()
                   if name in ("attention", "attention.qkv", "attention.out"))

    @property
    def _documents(self) -> Tensor | None:
        """The document id of each token, (1, context); None for kinds that do not read ids."""
        if not KINDS[self.kind.name].reads_ids:
            return None
        return (torch.arange(self.context) // (self.document or self.context))[None]

    def runner(self) -> Callable[[], None]:
        """Return a function that runs forward and backward of attention alone. Its arguments are
        those that the model's layer passes to its `attend` function: they are recorded once."""
        training = Training.build(self.config, data=RandomTokens(self.config))
        module = training.model.blocks[0].attention
        attend, given = module.attend, []

        def record(*args: object) -> Tensor:
            given.extend(args)
            return args[0]

        module.attend = record
        module(torch.randn(1, self.context, self.model.D), None, None, 0, self._documents)
        args = [argument.detach().contiguous().requires_grad_(argument.is_floating_point())
                if isinstance(argument, Tensor) else argument for argument in given]
        dy = torch.randn_like(args[0])

        def run() -> None:
            attend(*args).backward(dy)
            for argument in args:
                if isinstance(argument, Tensor):
                    argument.grad = None

        return run


def seconds(layers: Sequence[Layer], *, rounds: int, within_seconds: float = math.inf,
            watch: Watch = iter) -> list[float]:
    """Return the seconds of forward and backward of each layer, with one thread: the shortest of
    the rounds, since other work on the machine can only add time. The layers take turns."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times_by_layer = interleaved_seconds([layer.runner() for layer in layers], rounds=rounds,
                                             within_seconds=within_seconds, watch=watch)
    finally:
        torch.set_num_threads(threads)
    return [min(times) for times in times_by_layer]


def finite(tokens: float) -> float | None:
    """Return `tokens`, or None if it is infinite, for a `Row`, which needs a finite number.
    Infinity stands for "at none of the tried contexts" (see `crossing`)."""
    return tokens if math.isfinite(tokens) else None


def reached(tokens: float | None) -> str:
    """Return the text of a table cell for a result of `crossing`; "" for None."""
    if tokens is None:
        return ""
    return f"{tokens:,.0f}" if math.isfinite(tokens) else "beyond these"


def crossing(kind: Mapping[int, float], full: Mapping[int, float], share: float) -> float:
    """Return the context length from which on `kind` costs at most `share` of what `full` costs.
    Both map tried contexts to a cost (seconds, bytes, ...). Between two contexts, the logarithm of
    the ratio is interpolated linearly in the logarithm of the context. Infinity: at the longest
    tried context, `kind` still costs more."""
    log = [(math.log(T), math.log(kind[T] / (share * full[T]))) for T in sorted(kind)]
    above = [i for i, (_, over) in enumerate(log) if over > 0]
    if not above:
        return min(kind)
    if above[-1] == len(log) - 1:
        return math.inf
    (left, high), (right, low) = log[above[-1]:above[-1] + 2]
    return math.exp(left + (right - left) * high / (high - low))


def reach(kind: Settings, layers: int) -> float:
    """Return the largest distance from which information can reach a token through `layers` layers
    of this kind: layers * (window - 1). Infinite for kinds without a window, or with global
    tokens."""
    size = getattr(kind, "size", None)
    return math.inf if size is None or kind.global_tokens else layers * (size - 1)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What a model learned: its training losses, and its answers to n test questions."""

    losses: tuple[float, ...]           # nats per answer, of each step
    distances: Tensor                   # (n,): places back to the answer (`Drawn.distances`)
    right: Tensor                       # (n,) bool: whether the model's answer is right

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.right.double().mean().item()

    def beyond(self, distance: float) -> float:
        """Return the share of right answers to questions whose answer is more than `distance`
        places back."""
        return self.right[self.distances > distance].double().mean().item()

    def within(self, distance: float) -> float:
        """Return the share of right answers to questions whose answer is at most `distance` places
        back."""
        return self.right[self.distances <= distance].double().mean().item()

    def by_distance(self, bin: int) -> dict[float, float]:
        """Return the share of right answers by distance, in bins of `bin` places. A key is the
        middle of a bin."""
        of = self.distances // bin
        return {(b + 0.5) * bin: self.right[of == b].double().mean().item()
                for b in of.unique().tolist()}


def learn(kinds: Mapping[str, Settings], task: Task, *, context: int, steps: int,
          seeds: int = 1) -> dict[str, list[Learned]]:
    """Train tiny models with each kind of attention on `task` for `steps` steps, and test each on
    questions that it was not trained on. Return the results by kind, one per seed."""
    config = Config().replace(LEARNING | {"model.vocab": task.vocab, "model.context": context})
    settings = {key: value for key, value in vars(task).items() if key != "name"}
    drawn = [POLICIES[task.name].load()(batch=config.global_batch, context=context, seed=seed,
                                        **settings) for seed in range(seeds)]

    def study(training: Training) -> Learned:
        losses = torch.stack([training.update(step).loss for step in range(steps)])
        far, right = [], []
        for step in range(ASKED, ASKED + QUESTIONS):
            batch = training.data.batch(step)
            answers = training.logits(batch.tokens).argmax(-1)
            questions = batch.weights > 0
            far.append(training.data.distances(batch)[questions])
            right.append((answers == batch.targets)[questions])
        return Learned(losses=tuple(losses.tolist()), distances=torch.cat(far),
                       right=torch.cat(right))

    return _all(study, kinds, config.replace({"steps": steps}), drawn)


def read(kinds: Mapping[str, Settings], config: Config, *, steps: int,
         seeds: int = 1) -> dict[str, list[float]]:
    """Train tiny models with each kind of attention on the text of `config` for `steps` steps.
    Return their validation losses in nats per token by kind, one per seed."""
    config = config.replace(LEARNING | {"steps": steps, "model.vocab": 256,
                                        "global_batch": config.global_batch})

    def study(training: Training) -> float:
        for step in range(steps):
            training.update(step)
        return training.evaluate()

    return _all(study, kinds, config, [None] * seeds)


def _all(study: Callable[[Training], T], kinds: Mapping[str, Settings], config: Config,
         data: Sequence[DataPolicy | None]) -> dict[str, list[T]]:
    """Return the results of `study` by kind, one per seed. As many models train at the same time as
    there are cores. Each uses one thread, so the results equal those of separate runs. The models
    are built one after the other, because they draw their weights from PyTorch's global generator.
    """
    trainings = [Training.build(_attending(config.replace({"seed": seed}), kind), data=policy)
                 for kind in kinds.values() for seed, policy in enumerate(data)]
    with ThreadPoolExecutor(cores()) as pool:
        results = pool.map(study, trainings)
        return {name: [next(results) for _ in data] for name in kinds}


def _attending(config: Config, kind: Settings) -> Config:
    """Return the config with this kind of attention, and document ids if the kind reads them."""
    policy = "random-documents" if KINDS[kind.name].reads_ids else "random-windows"
    return replace(config, model=replace(config.model, attention=kind),
                   data=replace(config.data, policy=policy))


# ---- Figures

SEEN, HIDDEN = "#004488", "#eef1f5"
Curve = Mapping[float, float]


def mask_view(context: int) -> Callable[..., dict]:
    """Return a function for an Explorer that draws the mask (context, context) of a kind of
    attention. Its arguments are the kind, the length of a document, and settings by name, of which
    a kind uses those that it has."""
    def show(kind: str, document: int, **settings: int) -> dict:
        row = KINDS[kind]
        has = {field.name for field in fields(row.settings)}
        given = {key: value for key, value in settings.items() if key in has}
        rule_ = replace(row.settings, name=kind, **given).rule(context)
        if rule_ is None:
            raise ConfigError(f"{kind} attention hides no key, so it has no mask to draw: it adds "
                              f"up all of the past in one state; choose a kind with softmax")
        seen = [[bool(rule_.sees(i, j)) and not (rule_.documents and i // document != j // document)
                 for j in range(context)] for i in range(context)]
        count, all_ = sum(map(sum, seen)), context * (context + 1) // 2
        used = {"document": document} if rule_.documents else given
        words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in used.items())
        return figure(
            [{"type": "heatmap", "z": [[int(visible) for visible in line] for line in seen],
              "zmin": 0, "zmax": 1, "colorscale": [[0, HIDDEN], [1, SEEN]], "showscale": False,
              "xgap": 1, "ygap": 1, "hovertemplate": "query %{y}, key %{x}<extra></extra>"}],
            f"{kind}{f', {words}' if words else ''}: {count:,} pairs, {count / all_:.0%} of full",
            height=460, margin={"t": 48}, xaxis=axis("key", constrain="domain"),
            yaxis=axis("query", autorange="reversed", scaleanchor="x", constrain="domain"))

    return show


def cost_figure(formula: Mapping[str, Curve], measured: Mapping[str, Curve], *, unit: str,
                title: str = "", others: float = 0.0) -> dict:
    """Return the plotly spec of a cost in `unit` over the context length, both axes logarithmic:
    for each kind, a line by formula and markers as measured. The legend shows the markers, because
    kinds of the same colour have different markers. `others`: the share of the cores that other
    processes used during the measurement."""
    data, lines = [], lines_of(measured)
    for name, curve in measured.items():
        data.append(scatter(formula[name], formula[name].values(), "", hover=None, showlegend=False,
                            line=lines[name], legendgroup=name))
        data.append(scatter(curve, curve.values(), name, lines[name]["color"], mode="markers",
                            marker={"symbol": SYMBOLS[lines[name]["dash"]]}, legendgroup=name,
                            hover=f"%{{x:,}} tokens: %{{y:.3s}}{unit}", **SECONDS))
    contexts = sorted({T for curve in measured.values() for T in curve})
    return figure(data, title, others=others, height=440,
                  xaxis=axis("tokens in a sequence", type="log", tickvals=contexts,
                             ticktext=[f"{T:,}" for T in contexts]),
                  yaxis=axis(f"attention of one layer, {unit}", type="log", dtick=1,
                             exponentformat="SI", ticksuffix=unit))


def recall_figure(shares: Mapping[str, Sequence[Curve]], *, chance: float,
                  ends: Mapping[str, float], title: str = "") -> dict:
    """Return the plotly spec of the share of right answers over the distance: for each kind, a line
    through the means over the seeds, and a marker for each seed.

    shares: by kind, for each seed the share of right answers by distance
    chance: the share of right answers of a model that guesses; a horizontal line
    ends: the reach of kinds (`reach`), by kind; vertical lines
    """
    data, lines = [], lines_of(shares)
    for name, seeds in shares.items():
        means = {far: sum(curve[far] for curve in seeds) / len(seeds) for far in seeds[0]}
        data.append(scatter(means, means.values(), name, hover="%{x:g} back: %{y:.0%}",
                            line=lines[name], legendgroup=name))
        for curve in seeds:
            data.append(scatter(curve, curve.values(), "", lines[name]["color"], mode="markers",
                                hover=None, showlegend=False, legendgroup=name,
                                marker={"size": 5, "opacity": 0.6}))
    shapes = [rule(y=chance, colour=FAINT)]
    shapes += [rule(x=end, colour=lines[name]["color"]) for name, end in ends.items()]
    return figure(data, title, height=400, shapes=shapes,
                  xaxis=axis("places between a question and its answer", rangemode="tozero"),
                  yaxis=axis("right answers", tickformat=".0%", range=[-0.03, 1.05]))


# ---- Exercises

# Each decorated function is the reference answer of an exercise. The decorator has test cases, and
# for each hint a typical wrong answer: `lessons.judging.judge.Exercise`.

EXERCISES: dict[str, Exercise] = {}
exercise = adding_to(EXERCISES)

# Exercises: the pairs that a query sees.

@exercise("13.window_pairs", (4, 8), (4, 2), (1, 1), (4096, 256),
          draw=lambda r: (r.randint(1, 9000), r.randint(1, 600)), minutes=5,
          mistakes={"the first queries have fewer keys than the window":
                        lambda T, window: T * window,
                    "a window may be longer than the sequence": lambda T, window:
                        window * (window + 1) // 2 + (T - window) * window,
                    "that is full attention": lambda T, window: T * (T + 1) // 2})
def window_pairs(T: int, window: int) -> int:
    window = min(window, T)
    return window * (window + 1) // 2 + (T - window) * window   # first queries, then the others


# Exercises: a mask, and a state instead of a mask.

def _lengths(r: Random) -> tuple[Tensor]:
    return (torch.tensor([r.randint(1, 5) for _ in range(r.randint(1, 5))]),)


def _ids(lengths: Tensor) -> Tensor:
    return torch.arange(len(lengths)).repeat_interleave(lengths)


@exercise("13.document_mask", (torch.tensor([1, 2]),), (torch.tensor([3]),), draw=_lengths,
          tolerance=0, minutes=8,
          mistakes={"a token does not see the future of its document": lambda lengths:
                        _ids(lengths)[:, None] == _ids(lengths)[None],
                    "a document does not see the one before it": lambda lengths:
                        torch.ones(int(lengths.sum()), int(lengths.sum())).tril().bool(),
                    "a token sees itself": lambda lengths: document_mask(lengths).tril(-1)})
def document_mask(lengths: Tensor) -> Tensor:
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    return (ids[:, None] == ids[None]).tril()


def _mapped(r: Random, T: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    T, features = T or r.randint(1, 6), r.randint(1, 4)
    return (normal(r, T, features).exp(), normal(r, T, features).exp(),
            normal(r, T, r.randint(1, 4)))


def _unnormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T).tril() @ v


def _of_the_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ (k.T @ v) / (q @ k.sum(0))[:, None]


def _after_reading(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.T).tril(-1)
    return weights @ v / weights.sum(-1, keepdim=True).clamp(min=1e-30)


@exercise("13.linear_attention",
          (torch.ones(2, 1), torch.ones(2, 1), torch.tensor([[1.0], [3.0]])),
          _mapped(Random(1), 256), draw=_mapped, tolerance=1e-5, minutes=12, stars=2,
          most_bytes=lambda q, k, v: max(2 * len(q) ** 2, 1 << 14),     # half of a (T, T) matrix
          mistakes={"weights add up to 1: divide by their sum": _unnormalised,
                    "a token sees only its past and itself": _of_the_whole,
                    "a token sees itself: add it to the state before you read": _after_reading})
def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, total, out = torch.zeros(k.shape[1], v.shape[1]), torch.zeros(k.shape[1]), []
    for t in range(len(q)):
        state = state + k[t][:, None] * v[t]
        total = total + k[t]
        out.append(q[t] @ state / (q[t] @ total))
    return torch.stack(out)
