"""One flipped bit in any file of a run or of its tokens: no number changes silently, and what reads
the file says one sentence."""

import contextlib
import io
import random
import shutil
import warnings
from pathlib import Path

import torch

from lpkit.config import Config
from lpkit.datasets.prepared import open_tokens
from lpkit.datasets.tokens import prepare_into
from lpkit.errors import ConfigError
from lpkit.measure import telemetry
from lpkit.training import checkpoint
from lpkit.training.background import train
from lpkit.training.runs import Run, RunFailedError
from lpkit.training.sampling import trained
from tests.attack import Outcome
from tests.attack._nursery import SMALL

COUNT, FEW = 3000, 40
RESUMED = 20        # every 20th trial also trains on


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng = Outcome(), random.Random(seed)
    original, copy, source, config = (folder / "whole", folder / "flipped", folder / "tokens",
                                      settings(folder))
    run = train(config.replace({"steps": 4}), out=original)
    longer = folder / "longer"
    shutil.copytree(original, longer)
    losses = [line["loss"] for line in train(config, out=longer, resume=True).metrics]
    want = numbers(run.path, source)
    files = [path for path in (*sorted(original.rglob("*")), *sorted(source.rglob("*")))
             if path.is_file() and path.stat().st_size]
    for _ in range(count):
        victim = rng.choice(files)
        at, bit = rng.randrange(victim.stat().st_size), rng.randrange(8)
        base = original if original in victim.parents else source
        trial = f"seed {seed}: bit {bit} of byte {at} of {victim.relative_to(folder)}"
        _flipped(base, copy, victim.relative_to(base), at, bit)
        flipped = (copy, source) if base is original else (original, copy)
        outcome.tried += 1
        for name, value in numbers(*flipped).items():
            if isinstance(value, BaseException):
                if not isinstance(value, (ConfigError, RunFailedError)) or "\n" in str(value):
                    outcome.failed("not a sentence",
                                   f"{trial}: {name}: {type(value).__name__}: {value}"[:300])
            elif not same(name, value, want[name], flipped[0]):
                outcome.failed("a number changed silently", f"{trial}: {name}")
        if outcome.tried % RESUMED == 0 and base is original:
            _resume(copy, config, losses, trial, outcome)
        shutil.rmtree(copy)
    return outcome


def settings(folder: Path) -> Config:
    """A run of 6 steps with telemetry, whose tokens are prepared in `folder`."""
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{i} bottles of beer on the wall\n" for i in range(20_000)))
    config = Config().replace(SMALL | {"data.source": str(corpus), "steps": 6,
        "schedule": "constant", "schedule.warmup_steps": 2, "data.val_fraction": 0.3,
        "model.width": 16, "model.context": 16,
                                       "precision.telemetry_every": 3})
    prepare_into(folder / "tokens", config.data, config.model.vocab, folder / "cache")
    return config.replace({"data.source": str(folder / "tokens")})


def _flipped(base: Path, copy: Path, name: Path, at: int, bit: int) -> None:
    shutil.copytree(base, copy)
    data = bytearray((copy / name).read_bytes())
    data[at] ^= 1 << bit
    (copy / name).write_bytes(data)


def numbers(path: Path, source: Path) -> dict[str, object]:
    """What every reader says of a run, or what it raised."""
    run = Run(path)
    values = {}
    for name, read in {
        "config": lambda: run.config, "summary": lambda: {**run.summary, "run_dir": ""},
        "environments": lambda: run.environments,
        "tokenizer": lambda: run.tokenizer, "identity": lambda: run.identity,
        "metrics": lambda: run.metrics,
        "telemetry": lambda: _samples(path),
        "checkpoint": lambda: checkpoint.load_latest(run.checkpoints, quarantine=False),
        "weights": lambda: _weights(run), "html": lambda: run._repr_html_() and None,
        "tokens": lambda: [array.tolist() for array in (open_tokens(source).train,
            open_tokens(source).val)],
    }.items():
        try:
            values[name] = read()
        except BaseException as error:
            values[name] = error
    return values


def _weights(run: Run) -> tuple[dict, str]:
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        return trained(run).model.state_dict(), printed.getvalue()


def _samples(path: Path) -> tuple[list, bool]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return telemetry.read(path), bool(caught)


def same(name: str, value, want, path: Path) -> bool:
    if name == "metrics":       # fewer, if it is said
        return value == want or (all(line in want for line in value) and bool(Run(path).problems))
    if name == "telemetry":     # fewer, with a warning
        return value == want or (value[1] and all(sample in want[0] for sample in value[0]))
    if name == "checkpoint":
        loaded, problems = value
        if loaded is None:
            return bool(problems)
        return ((loaded.step == want[0].step or bool(problems))
                and (loaded.step != want[0].step or _equal(loaded.tensors, want[0].tensors)))
    if name == "weights":       # older ones, if it is said
        return bool(value[1]) or _equal(value[0], want[0])
    return value == want


def _equal(first: dict, second: dict) -> bool:
    return (first.keys() == second.keys()
            and all(torch.equal(first[name], second[name]) for name in first))


def _resume(copy: Path, config: Config, losses: list[float], trial: str, outcome: Outcome) -> None:
    try:
        resumed = [line["loss"] for line in train(config, out=copy, resume=True).metrics]
    except (ConfigError, RunFailedError):
        return
    except BaseException as error:
        outcome.failed("not a sentence", f"{trial}: resumed: {type(error).__name__}: {error}"[:300])
        return
    if resumed != losses and not (set(resumed) < set(losses) and Run(copy).summary["damaged"]):
        outcome.failed("a number changed silently", f"{trial}: resumed")
