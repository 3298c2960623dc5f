"""Training runs that others published, compared with the step times that `lpkit.predict.time`
predicts. None of these runs was measured by this project.

data/published has one CSV file for each page (a paper or a web page), with a row for each run.
sources.csv lists the pages, and whether the runs of a page are held out: no number of the formula
is fitted to held-out runs.

A cell is empty if the page does not state the value. The formula then assumes one sequence per
micro-batch, no recomputation, attention in a flash kernel, one rank along an axis of the layout,
kernels fused by a compiler, and for 8 bits one scale per tensor. A run whose machine, style or
schedule has no row cannot be predicted: `seconds` raises ConfigError with the reason. A stated
power limit is not used.

Two names differ: Megatron-LM's "selective" recomputation is lpkit's "core-attention", and
torchtitan's "selective-op" is lpkit's "selective" plus every second matmul.
"""

import csv
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from lpkit.config import Config, ModelConfig, PrecisionConfig, SystemConfig
from lpkit.errors import ConfigError, pick
from lpkit.files import resource
from lpkit.predict import evidence, recipes
from lpkit.predict.compare import Comparison, Row
from lpkit.predict.flops import recomputed_flops, training_flops
from lpkit.predict.params import parameter_count
from lpkit.predict.roofline import FLOOR, Efficiency
from lpkit.predict.time import StepTime, step_time
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine, find
from lpkit.values import Checked, Count, CountOrZero, Positive, Text

T = TypeVar("T")
FOLDER = resource("data/published")
# sources of the comparison `published`
SHOWN = ("narayanan", "korthikanti", "llama-3", "torchtitan-a100", "torchtitan-h200")
SHAPE = ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab", "context")
LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False}
STYLES = {"gpt": {}, "llama": {**LLAMA, "tied": False}, "llama-tied": LLAMA,
          # squared ReLU reads and writes as much as GELU
          "nemotron": {"position": "rope", "bias": False, "tied": False}}
# by schedule: chunks of layers per rank that are assumed if the page does not state them
SCHEDULES = {"1f1b": 1, "interleaved": None}
PRECISIONS = {"fp8": "fp8-tensorwise"}          # the page's name: lpkit's name
RECOMPUTE = {None: "none", "selective": "core-attention", "selective-op": "selective"}
# share of the matmuls' time that is added: a third of it is forward, and half of that is repeated
AGAIN = {"selective-op": 1 / 3 / 2}
RECOMPUTED = {"none": "nothing recomputed", "block": "all recomputed", "selective": "selective",
              "selective-op": "selective op"}
STACKS = {"Megatron-Core": "megatron", "Megatron-Bridge": "megatron", "NeMo": "megatron",
          "Transformer Engine": "megatron", "Primus": "megatron",
          "DeepSpeed ZeRO-3": "deepspeed-2021", "LLM Foundry": "llm-foundry",
          "Aleph Alpha, norms written out": "scaling", "Aleph Alpha": "scaling-sequence",
          "nanotron": "nanotron"}
# by stack: the row for runs without sequence parallelism
BEFORE = {"eager": "megatron-2021", "scaling-sequence": "scaling-kernel"}
COUNTED = {     # FLOPs of a step, by the way in which the page counts them
    "full": lambda m, batch: training_flops(m, batch=batch),
    "causal": lambda m, batch: training_flops(m, batch=batch, attention="causal"),
    "recomputed": lambda m, batch: (training_flops(m, batch=batch)
                                    + recomputed_flops(m, batch=batch)),
    "parameters": lambda m, batch: (6 * parameter_count(m)
                                    + 12 * m.L * m.H * m.E * m.T) * batch * m.T}


@dataclass(frozen=True, kw_only=True)
class Source(Checked):
    """A page with published runs, and how its cluster differs from the machines of the
    catalogue."""

    name: Text                                  # its file is data/published/NAME.csv
    title: Text
    url: Text
    held_out: bool                              # no number may be fitted to its runs
    link_gigabytes: Positive | None = None      # per second in a node, both directions together
    network_gigabits: Positive | None = None    # per second and device, one direction
    # False: tensor ranks repeat norms and additions, as before Korthikanti et al. 2022
    sequence_parallel: bool = True
    memory_gigabytes: Positive | None = None    # of a device

    def on(self, name: str) -> Machine:
        """Return the catalogue's machine, changed by what the page states."""
        machine, stated = find(name), {}
        if self.link_gigabytes:
            stated["link_bytes_per_second"] = self.link_gigabytes * 1e9
        if self.network_gigabits:
            stated["network_bytes_per_second"] = self.network_gigabits * 1e9 / 8
        if self.memory_gigabytes:
            stated["memory_bytes"] = self.memory_gigabytes * 1e9
        return replace(machine, **stated)


@dataclass(frozen=True, kw_only=True)
class Run(Checked):
    """A published run: a row of a page's CSV file. None: the page does not state the value.

    `published` is the run's speed in `unit`: tokens/s and TFLOP/s per device, sequences/s of all
    devices together, or the seconds of a step. Batches are in sequences, the context in tokens."""

    source: Source
    model: Text
    layers: Count | None = None
    width: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    mlp_width: Count | None = None
    vocab: Count | None = None
    context: Count | None = None
    style: Text | None = None           # one of STYLES, or another name
    global_batch: Count | None = None
    micro_batch: Count | None = None
    devices: Count
    data: Count | None = None
    shard: Count | None = None
    tensor: Count | None = None
    pipeline: Count | None = None
    context_parallel: Count | None = None
    zero: CountOrZero | None = None
    interleave: Count | None = None
    schedule: Text | None = None
    recompute: Text | None = None
    precision: Text
    attention: Literal["plain", "flash"] | None = None
    kernels: Literal["eager", "compiled"] | None = None
    stack: Text
    machine: Text                       # in the catalogue, or another name
    watts: Positive | None = None       # power limit of a device
    published: Positive
    unit: Literal["tokens/s", "sequences/s", "TFLOP/s", "seconds"]
    # how the page counts TFLOP/s: a key of COUNTED
    counted: Literal["full", "causal", "recomputed", "parameters"] | None = None
    memory: Positive | None = None      # peak memory of a device
    memory_unit: Literal["GiB", "GB"] | None = None
    at: Text                            # where on the page: a line or a table
    note: str = ""

    def __post_init__(self):
        super().__post_init__()
        if self.layout and self.layout.devices != self.devices:
            raise ConfigError(f"devices={self.devices}, but the layout has {self.layout.devices}: "
                              f"{self.layout}; correct one of them")
        for field_name, other in (("memory", "memory_unit"), ("memory_unit", "memory")):
            if getattr(self, field_name) and not getattr(self, other):
                raise ConfigError(f"{field_name} needs {other}; give both or none")
        if (self.unit == "TFLOP/s") != (self.counted is not None):
            raise ConfigError(f"counted must be given if and only if the unit is TFLOP/s; got "
                              f"counted={self.counted!r} and unit={self.unit!r}")

    @property
    def name(self) -> str:
        """The name of the run in figures and tables."""
        words = [self.model, f"{self.devices:,} GPUs", f"{self.context:,} tokens",
                 RECOMPUTED.get(self.recompute, "")]
        return ", ".join(filter(None, words))

    @property
    def stack_row(self) -> str:
        """The row of `evidence.STACKS` for the run's stack."""
        plain = "eager" if self.kernels == "eager" else "compiled"
        row = next((row for name, row in STACKS.items() if self.stack.startswith(name)), plain)
        return row if self.source.sequence_parallel else BEFORE.get(row, row)

    @property
    def how(self) -> dict[str, str]:
        """The run's precision and recomputation, by lpkit's names."""
        return {"precision": PRECISIONS.get(self.precision, self.precision),
                "recompute": RECOMPUTE.get(self.recompute, self.recompute)}

    @property
    def limited(self) -> bool:
        """True if the run had less power than the catalogue's machine."""
        rated = find(self.machine).watts
        return "power limited" in self.note or bool(self.watts and self.watts < rated)

    @property
    def layout(self) -> Layout | None:
        """The layout; None if the page does not state how several devices share the work."""
        axes = {"data": self.data, "shard": self.shard, "tensor": self.tensor,
                "pipeline": self.pipeline, "context": self.context_parallel}
        if self.devices > 1 and not any(axes.values()):
            return None
        chunks = self.interleave or 1
        return Layout(**{axis: ranks or 1 for axis, ranks in axes.items()}, zero=self.zero or 0,
                      interleave=chunks, schedule="interleaved" if chunks > 1 else "1f1b")

    @property
    def config(self) -> Config:
        """The run's config. Raises ConfigError if the page does not state a size, or if STYLES
        lacks the run's style."""
        style = pick(STYLES, self.style or "gpt", "style")
        missing = [name for name in (*SHAPE, "global_batch") if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"the page does not state {', '.join(missing)}")
        attention = "plain" if self.attention == "plain" else "auto"
        return Config(global_batch=self.global_batch,
                      grad_accum_steps=self.global_batch // (self.micro_batch or 1),
                      system=SystemConfig(attention=attention, stack=self.stack_row),
                      # the products run on the run's stack, not on lpkit's
                      precision=PrecisionConfig(backend="transformer-engine"),
                      model=ModelConfig(**{name: getattr(self, name) for name in SHAPE}, **style))

    @property
    def published_seconds(self) -> float:
        """The seconds of a step. Raises ConfigError as `config` does."""
        config, value = self.config, self.published
        if self.unit == "seconds":
            return value
        if self.unit == "sequences/s":
            return config.global_batch / value
        if self.unit == "tokens/s":
            return config.tokens_per_step / value / self.devices
        return COUNTED[self.counted](config.model, config.global_batch) / (
            value * 1e12 * self.devices)


def runs(*names: str, folder: Path = FOLDER) -> tuple[Run, ...]:
    """Return the runs of the named sources (without names: of all sources), in the order of
    sources.csv. Raises ConfigError that names the file, the row and the field of a bad cell."""
    return tuple(run for source in sources(folder) if source.name in names or not names
                 for run in _read(folder / f"{source.name}.csv", Run, source=source))


def sources(folder: Path = FOLDER) -> tuple[Source, ...]:
    """Return the rows of sources.csv. Raises ConfigError as `runs` does."""
    return tuple(_read(folder / "sources.csv", Source))


def step(run: Run, calibration: float | None = None,
         numbers: Mapping[str, float] | None = None,
         efficiency: Efficiency | None = None) -> StepTime:
    """Predict the step of a run.

    calibration: factor on the predicted seconds
    numbers: replace the fitted numbers of `lpkit.predict.evidence`
    efficiency: replaces the efficiency that is computed from those numbers

    Raises ConfigError with the reason if the run cannot be predicted."""
    layout, schedule = run.layout, run.schedule or "1f1b"
    if layout is None:
        raise ConfigError("the page does not state the layout")
    chunks = pick(SCHEDULES, schedule, "schedule")
    if not (run.interleave or chunks):
        raise ConfigError(f"the page does not state the number of chunks of the {schedule} "
                          f"schedule")
    on = run.source.on(run.machine)
    reached = efficiency or evidence.reached(evidence.generation_of(on), run.stack_row,
                                             numbers or evidence.fitted()["numbers"])
    return step_time(run.config, on, layout, calibration=calibration, stack=run.stack_row,
                     efficiency=reached, **run.how)


def seconds(run: Run, calibration: float | None = None,
            numbers: Mapping[str, float] | None = None) -> float:
    """Return the predicted seconds of a step of the run, including the matmuls that
    "selective-op" recomputes. Raises ConfigError as `step` does."""
    predicted = step(run, calibration, numbers)
    linears = sum(part.seconds for part in predicted.rows
                  if part.name.startswith(("attention.", "mlp.")))
    return predicted.step_seconds + AGAIN.get(run.recompute, 0) * linears


def optimism(run: Run) -> dict[str, StepTime]:
    """Predict a step three times. "roofline": every ceiling is reached. "kernels alone": each
    kernel runs at its published speed, and messages overlap as much as possible. "in a step": a
    step keeps only the fitted share of these speeds. Raises ConfigError as `step` does."""
    numbers = evidence.fitted()["numbers"]
    alone = {name: 1.0 for name in numbers if name.endswith((" keeps", "overlap"))}
    alone |= {name: 0.0 for name in numbers if name.endswith("op_seconds")}
    return {"roofline": step(run, efficiency=FLOOR),
            "kernels alone": step(run, numbers={**numbers, **alone}), "in a step": step(run)}


def row(run: Run, calibration: float | None = None) -> Row:
    """Return the comparison of a run with its prediction, in the page's unit. Raises ConfigError as
    `step` does."""
    scale, unit = (1e12, "FLOP/s") if run.unit == "TFLOP/s" else (1, run.unit)
    measured = run.published * scale
    slower = seconds(run, calibration) / run.published_seconds
    return Row(name=run.name, unit=unit, measured=measured,
               formula=measured * slower if unit == "seconds" else measured / slower,
               where=f"{run.source.title}, {run.at}, {run.machine}, {run.precision}, "
                     f"{run.source.url}")


def published() -> Comparison:
    """Return the comparison of all runs of SHOWN that can be predicted."""
    return Comparison(tuple(comparison for _, comparison in taken(runs(*SHOWN), row)))


def calibrated() -> Comparison:
    """Return the comparison of the second and third run of Llama 3. All predictions are multiplied
    by one factor that makes the first run exact, as a short measured run would calibrate them."""
    first, *others = runs("llama-3")
    factor = first.published_seconds / seconds(first)
    return Comparison(tuple(row(run, factor) for run in others))


def table() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return two lists of dicts: a row for each run that can be predicted, and for each other run
    its place and the reason (`why`). "error" is predicted over published speed, minus 1."""
    compared, left_out = [], []
    for run in runs():
        of = {"source": run.source.name, "at": run.at}
        try:
            ratio, comparison = run.published_seconds / seconds(run), row(run)
        except ConfigError as error:
            left_out.append({**of, "why": re.split(r"[;,?] ", str(error))[0]})
            continue
        predicted = step(run)
        slower = predicted.spread
        compared.append({**of, "inside": slower.low <= ratio <= slower.high,
                         "generation": evidence.generation_of(predicted.machine),
                         "unit": comparison.unit, "published": comparison.measured,
                         "formula": comparison.formula, "error": ratio - 1,
                         "published_mfu": predicted.mfu / ratio,
                         "held_out": run.source.held_out, "machine": _machine(run),
                         "layout": evidence.shape_of(predicted.layout),
                         "precision": f"{_bits(predicted.precision)} bits",
                         "stack": re.sub(r" [\d.]+$", "", run.stack),
                         "kernels": run.kernels or "not stated"})
    for run_row in compared:
        run_row["flat_error"] = _flat_mfu(run_row, compared) / run_row["published_mfu"] - 1
    return compared, left_out


def _flat_mfu(run_row: dict[str, Any], compared: list[dict[str, Any]]) -> float:
    """Return the median MFU of the runs that may be fitted: of those with the same generation of
    device and the same bits as `run_row`; if there are none, of those with the same bits; if there
    are none, of all. It is the baseline that a formula must beat."""
    fitted = [other for other in compared if not other["held_out"]]
    alike = [other for other in fitted if other["precision"] == run_row["precision"]]
    same = [other for other in alike if other["generation"] == run_row["generation"]]
    return statistics.median(other["published_mfu"] for other in same or alike or fitted)


def _bits(precision: str) -> int:
    """Return the bits of the operands of a precision: 16, 8 or 4."""
    low = recipes.PRECISIONS[precision].low
    return low.bits if low else 16


def _machine(run: Run) -> str:
    """Return the name of the run's machine, with its power limit if that is lower than the rated
    power."""
    limited = run.watts and run.watts < find(run.machine).watts
    return f"{run.machine} at {run.watts:g} W" if limited else run.machine


def taken(some: Iterable[Run], of: Callable[[Run], T]) -> Iterator[tuple[Run, T]]:
    """Yield (run, of(run)) for each run; skip runs for which `of` raises ConfigError."""
    for run in some:
        try:
            yield run, of(run)
        except ConfigError:
            continue


def _read(path: Path, kind: type[Checked], **given: object) -> Iterator[Checked]:
    """Yield an instance of `kind` for each row of a CSV file. Its columns are the fields of `kind`
    except those in `given`. Empty cells become the defaults. Raises ConfigError."""
    columns = [field.name for field in fields(kind) if field.name not in given]
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"cannot read {path.name}: {error}") from None
    heads = lines[0] if lines else []
    if heads != columns:
        raise ConfigError(f"{path.name} has {'the columns ' if heads else 'no columns'}"
                          f"{', '.join(heads)}; it needs {', '.join(columns)}")
    for number, cells in enumerate(lines[1:], 1):
        try:
            if len(cells) != len(heads):
                raise ConfigError(f"it has {len(cells)} cells, but the file has {len(heads)} "
                                  f"columns")
            values = {name: cell for name, cell in zip(heads, cells) if cell}
            missing = [field.name for field in fields(kind)
                       if field.default is MISSING and field.name not in {*values, *given}]
            if missing:
                raise ConfigError(f"{missing[0]} is empty; this column needs a value")
            instance = kind(**values, **given)
        except ConfigError as error:
            raise ConfigError(f"{path.name}, row {number}: {error}") from None
        yield instance
