"""How far off predictions are on runs of practitioners: one or a few GPUs, adapters, small models.

data/published/practitioners.csv has a row a run: the shape, the adapters, the stack that is nearest
to its program, and a time, a peak of memory, or both. Rows of `tests.bench.fit.PRACTISED` may be
fitted, all other rows are held out. `lpkit bench published` has the results.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lpkit.config import Config
from lpkit.files import resource
from lpkit.predict import evidence
from lpkit.predict.prediction import Prediction, predict
from lpkit.predict.time import StepTime, step_time
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import find
from lpkit.values import Checked, Count, CountOrZero, Positive, Text

FILE = resource("data/published") / "practitioners.csv"
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope"}
SIZES = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocab", "context",
         "mlp", "tied", "qk_norm", "bias")


@dataclass(frozen=True, kw_only=True)
class Practice(Checked):
    """A row. `published` in `unit`, seconds of a step or tokens/s of a device; `memory_gib`: peak
    of a device."""

    source: Text
    url: Text
    model: Text
    layers: Count
    width: Count
    heads: Count
    kv_heads: Count
    head_dim: Count | None = None
    mlp_width: Count
    vocab: Count
    context: Count
    mlp: Text
    tied: bool
    qk_norm: bool
    bias: bool
    tune: Text                      # full, lora
    rank: Count | None = None
    targets: Text | None = None
    base: Text | None = None        # nf4
    weights: Text
    precision: Text
    recompute: Text
    micro_batch: Count
    accum: Count
    devices: Count
    shard: Count = 1
    zero: CountOrZero = 0
    machine: Text
    stack: Text
    unit: Text | None = None
    published: Positive | None = None
    memory_gib: Positive | None = None
    memory_kind: Text | None = None
    oom: bool = False
    at: Text
    note: str = ""

    def config(self, **changed: Any) -> Config:
        """Returns the config that its author would write down."""
        changes = []
        if self.tune == "lora":
            changes.append({"name": "lora", "rank": self.rank, "targets": [self.targets]})
            changes += [{"name": "quantised-base", "format": self.base}] * bool(self.base)
        return Config().replace({
            **{f"model.{name}": getattr(self, name) for name in SIZES}, **LLAMA,
            "model.changes": changes, "memory.param_dtype": self.weights,
            "memory.recompute": self.recompute, "precision.recipe": self.precision,
            "global_batch": self.micro_batch * self.accum * self.devices,
            "grad_accum_steps": self.accum * self.devices, "system.stack": self.stack, **changed})

    @property
    def layout(self) -> Layout:
        return Layout(shard=self.shard, zero=self.zero)

    def predicted(self, **changed: Any) -> Prediction:
        """Returns what `lpkit predict` prints. Raises ConfigError."""
        return predict(self.config(**changed), self.machine, layout=self.layout)

    def step(self, numbers: Mapping[str, float]) -> StepTime:
        """Returns the step at these `numbers` of `lpkit.predict.evidence`."""
        on, config = find(self.machine), self.config()
        return step_time(config, on, self.layout, efficiency=evidence.reached(
            evidence.generation_of(on), config.system.stack, numbers))

    @property
    def published_seconds(self) -> float | None:
        if self.published is None or self.unit == "seconds":
            return self.published
        return self.micro_batch * self.accum * self.context / self.published


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What `lpkit predict` prints of a run: `error` of the step with the nearest stack named, and
    whether the run is inside its range; `inside_one` of the ranges printed without a stack."""

    run: Practice
    kind: str
    error: float
    inside: bool
    inside_one: bool
    default_error: float
    small: bool


def asked(run: Practice) -> Asked:
    named, plain = run.predicted(), run.predicted(**{"system.stack": "auto"})
    true, step = run.published_seconds, named.step
    ranges = [plain.step.seconds_range,
              *(stack["step_seconds_range"] for stack in plain.other_stacks)]
    return Asked(run=run, kind=step.kind, error=true / step.step_seconds - 1,
                 inside=_within(true, step.seconds_range),
                 inside_one=any(_within(true, interval) for interval in ranges),
                 default_error=true / plain.step.step_seconds - 1,
                 small=named.parameters < evidence.SMALL)


def _within(value: float, limits: tuple[float, float]) -> bool:
    return limits[0] <= value <= limits[1]


def rows() -> Iterator[Practice]:
    """Yields the rows. Raises ConfigError."""
    from lessons.published import _read

    return _read(FILE, Practice)
