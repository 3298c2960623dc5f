"""Lesson 99, predict the unseen: its study, its figures and its exercises.

Draws a random run for each seed, asks for eleven numbers of it, and marks the predictions.

    case = draw(7)
    case.sheet                      # the given values: letters, choices, the machine
    mark(case, answers)             # answers(sheet) returns the numbers by name; shows "6 of 11"
    lpkit.predict_trace(case.config)        # counts the true bytes in a traced step

Bytes are those of PyTorch's kernels on a CPU, so that a trace can check them on any machine.
Seconds, the gain and the noise are for the case's machine.
"""

from __future__ import annotations

import functools
import html
import math
import numbers
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lessons import published
from lessons.activations import kept
from lessons.decoding import cache_bytes
from lessons.judging.judge import MARKS
from lessons.l06_fp8_training import predicted_db
from lessons.l14_data_parallel_and_zero import sent_bytes
from lessons.terms import sizes
from lpkit.config import Config, ModelConfig
from lpkit.predict.flops import training_flops
from lpkit.predict.ledger import LOSS, Memory, memory, model_states
from lpkit.predict.params import parameter_count
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.time import HOST, StepTime, step_time
from lpkit.predict.units import quantity
from lpkit.tables import html_table
from lpkit.techniques.machines import CATALOGUE, Machine
from lpkit.techniques.recipes import RECIPES

# the notebook imports these names of other modules from here
__all__ = ["FakeTensorMode", "FlopCounterMode", "kept"]

FP8 = tuple(name for name, row in RECIPES.items() if row.dtype == "fp8" and not row.history)
STYLES = ("gpt2", "llama")
CASTS = {       # bytes that a cast reads and writes per float32 number, as lesson 10 counts them
    "operation after operation": 35, "amax, and two casts": 14, "amax, and one cast to both": 10,
    "one kernel, the amax of the step before": 6}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training step on one device. `recipe` is an FP8 recipe that the step could use instead of
    its own; two questions ask for its speed-up and its noise."""

    style: str              # one of STYLES
    config: Config
    machine: Machine
    recipe: str             # one of FP8
    ranks: int = 2          # ranks of a ZeRO stage, with `micro_batches` each per batch
    zero: int = 0
    micro_batches: int = 1
    cast: str = "amax, and two casts"       # one of CASTS

    @property
    def sheet(self) -> dict[str, Any]:
        """The given values by name. Letters are those of docs/notation.md; speeds are in FLOP/s and
        bytes per second."""
        config, on = self.config, self.machine
        return {"style": self.style, **sizes(config.model, B=config.global_batch),
                "tied": config.model.tied, "precision": config.precision.recipe.name,
                "optimizer": config.optimizer.name, "recompute": config.memory.recompute.name,
                "machine": on.name, "bf16_flops": on.flops["bf16"], "fp8_flops": on.flops["fp8"],
                "bytes_per_second": on.bytes_per_second, "recipe": self.recipe,
                "ranks": self.ranks, "zero": self.zero, "micro_batches": self.micro_batches,
                "cast": self.cast}

    @functools.cached_property
    def memory(self) -> Memory:
        return memory(self.config, replace(self.machine, kind="cpu"))

    @functools.cached_property
    def bf16_seconds(self) -> float:
        return device_seconds(step_time(self.config, self.machine, precision="bf16"))

    def _repr_html_(self) -> str:
        return html_table((), [(name, f"{value:,.4g}" if isinstance(value, float) else value)
                               for name, value in self.sheet.items()])


def device_seconds(step: StepTime) -> float:
    """Return the seconds of the device, without the host's overhead."""
    return step.step_seconds - sum(row.seconds for row in step.rows if row.name == HOST)


def draw(seed: int) -> Case:
    """Return the same case for the same seed. Its peak is at the start of backward, the moment that
    01_memory_math derives; cases with another peak are drawn again."""
    chance = random.Random(seed)
    while True:
        case = _drawn(chance)
        if case.memory.peak_moment == LOSS:
            return replace(case, ranks=2**chance.randint(1, 6), zero=chance.choice((0, 1, 3)),
                           micro_batches=chance.choice((1, 2, 4)), cast=chance.choice([*CASTS]))


def _drawn(chance: random.Random) -> Case:
    style, width = chance.choice(STYLES), chance.choice((768, 1024, 1280, 1536, 2048))
    heads = width // chance.choice((64, 128))
    sizes = {"layers": chance.randint(4, 16), "width": width, "heads": heads,
             "context": chance.choice((512, 1024, 2048)),
             "vocab": chance.choice((32_000, 50_304, 65_536, 128_256))}
    if style == "llama":
        sizes |= published.STYLES[style] | {
            "kv_heads": heads // chance.choice((1, 2)), "tied": chance.random() < 0.5,
            "mlp_width": 256 * chance.randint(width // 100, width // 70)}
    recipe = chance.choice(FP8)
    config = Config(model=ModelConfig(**sizes)).replace({
        "system.attention": "sdpa", "global_batch": chance.choice((2, 4, 8, 16)),
        "optimizer": chance.choice(("adamw", "lion", "momentum", "sgd")),
        "memory.recompute": chance.choice(("none", "none", "block")),
        "precision.recipe": chance.choice(("fp32", "bf16", "bf16", recipe))})
    machine = CATALOGUE[chance.choice(("h100", "h200", "b200"))]
    return Case(style=style, config=config, machine=machine, recipe=recipe)


# The questions.

@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its text (`asked`), its unit and its right answer. `tolerance` is relative to
    the answer; for a unit of dB, it is in dB."""

    asked: str
    unit: str
    tolerance: float
    answer: Callable[[Case], float]

    def off(self, case: Case, given: float) -> float:
        """Return the error of the answer `given`, in the unit of `tolerance`; negative if the
        answer is too low."""
        right = self.answer(case)
        return given - right if self.unit == "dB" else given / right - 1

    def shown(self, value: float) -> str:
        if self.unit in ("dB", "times"):
            return f"{value:.4g} {self.unit}"
        return quantity(value, self.unit)

    def shown_off(self, off: float) -> str:
        return f"{off:+.1f} dB" if self.unit == "dB" else f"{off:+.1%}"


def _states(case: Case) -> float:
    rows = model_states(parameter_count(case.config.model), optimizer=case.config.optimizer.name,
                        precision=case.config.precision.recipe.name)
    return sum(row.bytes for row in rows)


def _activations(case: Case) -> float:
    p = PRECISIONS[case.config.precision.recipe.name]
    return kept(case.config.model, batch=case.config.global_batch, kind="cpu", attention="sdpa",
                recompute=case.config.memory.recompute.name, compute_bytes=p.compute_bytes,
                residual_bytes=p.residual_bytes,
                operand_bytes=p.low.number_bytes if p.low else None).total_bytes


def _gain(case: Case) -> float:
    # on a backend that has the recipe; lpkit's own backend emulates some recipes on some machines
    config = case.config.replace({"precision.backend": "transformer-engine"})
    cast = step_time(config, case.machine, precision=case.recipe)
    return case.bf16_seconds / device_seconds(cast)


def _sent(case: Case) -> float:
    nbytes = 4 * parameter_count(case.config.model)
    return sent_bytes(nbytes, case.ranks, case.zero, case.micro_batches)


QUESTIONS = {
    "parameters": Question(
        asked="parameters of the model", unit="parameters", tolerance=0.001,
        answer=lambda case: parameter_count(case.config.model)),
    "states": Question(
        asked="bytes of the weights, their gradients and the optimizer state", unit="bytes",
        tolerance=0.005,
        answer=_states),
    "activations": Question(
        asked="bytes that forward saves for backward", unit="bytes", tolerance=0.02,
        answer=_activations),
    "peak": Question(
        asked="peak memory of the step", unit="bytes", tolerance=0.03,
        answer=lambda case: case.memory.peak_bytes),
    "flops": Question(
        asked="FLOPs of forward and backward in one step, with attention over all pairs of tokens",
        unit="FLOPs", tolerance=0.01,
        answer=lambda case: training_flops(case.config.model, batch=case.config.global_batch)),
    "seconds": Question(
        asked="seconds of a step on the machine with matmuls in bf16, without the host's overhead",
        unit="s", tolerance=0.1,
        answer=lambda case: case.bf16_seconds),
    "gain": Question(
        asked="speed-up of the step by the FP8 recipe: seconds in bf16, over seconds with the "
              "recipe", unit="times", tolerance=0.04, answer=_gain),
    "noise": Question(
        asked="SQNR of a matmul under the FP8 recipe", unit="dB", tolerance=1.0,
        answer=lambda case: predicted_db(RECIPES[case.recipe], case.config)),
    "moved": Question(
        asked="bytes that the kernels of the cast move for one float32 tensor of B T rows and D "
              "columns", unit="bytes", tolerance=0.01,
        answer=lambda case: CASTS[case.cast] * case.config.tokens_per_step * case.config.model.D),
    "sent": Question(
        asked="bytes that each rank sends in an update with this stage of ZeRO and this number of "
              "micro-batches, all in float32", unit="bytes", tolerance=0.01, answer=_sent),
    "cache": Question(
        asked="bytes of the keys and values of B sequences of T tokens in all blocks, in 16 bits",
        unit="bytes", tolerance=0.01,
        answer=lambda case: cache_bytes(case.config.model, case.config.model.T,
                                        case.config.global_batch, itemsize=2)),
}
Answers = Callable[[dict[str, Any]], Mapping[str, float | None]]


# Marks.

@dataclass(frozen=True)
class Score:
    """The marks of one case. By question: the learner's answer (`answers`) and its mark, a key of
    `judge.MARKS`. `why`: a message if the learner's function gave no answers."""

    case: Case
    answers: Mapping[str, float | None]
    marks: Mapping[str, str]
    why: str = ""

    @property
    def right(self) -> int:
        return sum(mark == "right" for mark in self.marks.values())

    def __str__(self) -> str:
        wrong = [name for name, mark in self.marks.items() if mark == "wrong"]
        missed = f"; not within tolerance: {', '.join(wrong)}" if wrong else ""
        return f"{self.right} of {len(QUESTIONS)}{missed}{self.why}"

    def _repr_html_(self) -> str:
        rows = []
        for name, question in QUESTIONS.items():
            mark, given = self.marks[name], self.answers.get(name)
            allowed = question.shown_off(question.tolerance).replace("+", "±")
            known = ("", "", "")        # the right answer is hidden until there is an answer
            if mark != "to do":
                known = ((question.shown(given), question.shown(question.answer(self.case)),
                          question.shown_off(question.off(self.case, given)))
                         if _is_number(given) else (str(given), "", "not a number"))
            rows.append((f"{MARKS[mark][1]} {name}", question.asked, *known, allowed, mark))
        heads = ("", "question", "your answer", "the kit's", "error", "allowed error", "mark")
        return (f"<p><b>{self.right} of {len(QUESTIONS)}</b>{html.escape(self.why)}</p>"
                + html_table(heads, rows))


def mark(case: Case, answers: Answers) -> Score:
    """Mark the answers to a case. An error in `answers` is reported in the score and not raised, so
    that a notebook runs to its end."""
    try:
        given, why = dict(answers(case.sheet)), ""
    except NotImplementedError:
        given, why = {}, ": to do"
    except Exception as error:      # any error of the learner's function is shown
        given, why = {}, f": it raised {type(error).__name__}: {error}"
    marks = {}
    for name, question in QUESTIONS.items():
        value = given.get(name)
        if value is None or value is ...:
            marks[name] = "to do"
        else:
            close = _is_number(value) and abs(question.off(case, value)) <= question.tolerance
            marks[name] = "right" if close else "wrong"
    return Score(case=case, answers=given, marks=marks, why=why)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def check(answers: Answers, seeds: range) -> str:
    """Return one line: the average score on the cases of these seeds, and the first case that is
    not completely right."""
    scores = [mark(draw(seed), answers) for seed in seeds]
    full = len(QUESTIONS)
    missed = next((f"; first missed: seed {seed}, {score}" for seed, score in zip(seeds, scores)
                   if score.right < full), "")
    mean = sum(score.right for score in scores) / len(scores)
    whole = sum(score.right == full for score in scores)
    return f"{mean:.1f} of {full} on average, {whole} of {len(scores)} cases all right{missed}"
