"""Whole lines and whole files of a run that are lost, doubled, swapped, or exchanged with those of
another run or of another moment of the same: what reads the run names it, or its content is the
same."""

import contextlib
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from lpkit import records
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.training.background import train
from lpkit.training.runs import Run, RunFailedError
from tests.attack import Outcome
from tests.attack.bits import numbers, same, settings

COUNT, FEW = 500, 20
RESUMED = 10        # every 10th trial that was noticed also trains on
LINES = ("metrics.jsonl", "telemetry.jsonl")
FOLDERS = ("complete", "killed")                        # what is mutated
OTHERS = ("twin", "other", "early", "killed", "complete")       # where files and lines come from


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng, noticed = Outcome(), random.Random(seed), 0
    config = settings(folder)
    make(folder, config)
    truth = {name: numbers(folder / name, folder / "tokens") for name in FOLDERS}
    whole = {name: value for name, value in truth["complete"].items()
             if name not in ("summary", "environments")}
    copy = folder / "copy"
    while outcome.tried < count:
        base, (kind, mutate) = rng.choice(FOLDERS), rng.choice(list(MUTATIONS.items()))
        what = mutate(copy_of(folder / base, copy), folder, rng)
        if contents(copy) == contents(folder / base):
            continue
        outcome.tried += 1
        trial = f"seed {seed}, {base} {outcome.tried}: {kind}: {what}"
        problems = named(copy)
        noticed += bool(problems)
        if not problems:
            differing = differences(numbers(copy, folder / "tokens"), truth[base], copy)
            if differing and Run(copy).summary["status"] == "complete":
                outcome.failed("open says nothing", f"{trial}: {differing}")
        if not problems or outcome.tried % RESUMED == 0:
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    resumed = train(config, out=copy, resume=True)
            except (ConfigError, RunFailedError):
                continue
            differing = differences(numbers(copy, folder / "tokens"), whole, copy)
            if not resumed.summary["damaged"] and (problems or differing):
                outcome.failed("resume says nothing", f"{trial}: {problems or differing}")
    outcome.facts = {"noticed when opened": noticed}
    return outcome


def make(folder: Path, config: Config) -> None:
    """The same run early, complete after 4 steps; killed in step 6 of the next start; complete
    after 6. And two others."""
    def keep(name: str, step: int) -> Callable:
        return lambda record: record.step == step and copy_of(folder / "run", folder / name)

    copy_of(train(config.replace({"steps": 4}), out=folder / "run").path, folder / "early")
    copy_of(train(config, out=folder / "run", resume=True, observers=[keep("killed", 5)]).path,
            folder / "complete")
    train(config, out=folder / "twin")
    train(config.replace({"seed": 1}), out=folder / "other")


def copy_of(path: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(path, to)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*")
            if file.is_file()}


def named(path: Path) -> list[str]:
    try:
        return Run.open(path).problems
    except ConfigError as error:
        return [str(error)]


def differences(values: dict, truth: dict, path: Path) -> list[str]:
    """The readers that do not say what they said of the whole run. A summary has seconds, and an
    environment dates."""
    return [name for name, want in truth.items() if isinstance(values[name], BaseException) or not (
        _timeless(values[name]) == _timeless(want) if name in ("metrics", "summary", "environments")
        else
        values[name][0] == want[0] if name == "telemetry"
        else same(name, values[name], want, path))]


def _timeless(value: object) -> object:
    """Without what differs between two starts of one run."""
    if isinstance(value, dict):
        return {key: _timeless(entry) for key, entry in value.items()
                if not key.endswith(("seconds", "per_second", "bytes", "mfu"))
                and key not in ("date", "run_dir", "command", "started")}
    return [_timeless(element) for element in value] if isinstance(value, list) else value


# ---- mutations of the copy of a run: each says what it did

def _lines(change: Callable[[list[bytes], random.Random], str]) -> Callable:
    def mutate(copy: Path, folder: Path, rng: random.Random) -> str:
        path = copy / rng.choice(LINES)
        lines = path.read_bytes().splitlines(keepends=True)
        what = change(lines, rng)
        path.write_bytes(b"".join(lines))
        return f"{path.name}, {what}"

    return mutate


def drop(lines: list[bytes], rng: random.Random) -> str:
    at, many = rng.randrange(len(lines)), rng.choice([1, 1, 2, 3])
    del lines[at:at + many]
    return f"{many} from {at} on"


def cut(lines: list[bytes], rng: random.Random) -> str:
    many = rng.randrange(1, len(lines) + 1)
    del lines[-many:]
    return f"the last {many}"


def double(lines: list[bytes], rng: random.Random) -> str:
    at, to = rng.randrange(len(lines)), rng.randrange(len(lines) + 1)
    lines.insert(rng.choice([at, to]), lines[at])
    return f"{at}, to {to}"


def swap(lines: list[bytes], rng: random.Random) -> str:
    first, second = rng.sample(range(len(lines)), 2)
    lines[first], lines[second] = lines[second], lines[first]
    return f"{first} and {second}"


def edit(lines: list[bytes], rng: random.Random) -> str:
    """With a checksum that is right again."""
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    key = rng.choice([key for key, number in value.items() if isinstance(number, (int, float))
                      and key not in (records.NUMBER, "step", "time")])
    value[key] += 1
    summed(lines, at, value)
    return f"{key} of {at}"


def summed(lines: list[bytes], at: int, value: dict) -> None:
    """Puts the value there, with its checksum."""
    value.pop(records.LINE_SUM, None)
    value[records.LINE_SUM] = records.digest(value)[:records.MARK_DIGITS]
    lines[at] = json.dumps(value).encode() + b"\n"


def foreign(copy: Path, folder: Path, rng: random.Random) -> str:
    """A line by that of another run, at the same place: the same step."""
    name, of = rng.choice(LINES), rng.choice(OTHERS)
    lines = (copy / name).read_bytes().splitlines(keepends=True)
    theirs = (folder / of / name).read_bytes().splitlines(keepends=True)
    at = rng.randrange(min(len(lines), len(theirs)))
    lines[at] = theirs[at]
    (copy / name).write_bytes(b"".join(lines))
    return f"{name}, {at} of {of}"


def exchange(copy: Path, folder: Path, rng: random.Random) -> str:
    """A whole file by that of another run or of another moment."""
    name, of = rng.choice(sorted(contents(copy))), rng.choice(OTHERS)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(folder / of / name, copy / name)
    return f"{name} of {of}"


def exchange_checkpoint(copy: Path, folder: Path, rng: random.Random) -> str:
    """A whole checkpoint, of whatever step, under the name that it had or that of another step."""
    of = rng.choice(OTHERS)
    theirs, ours = (rng.choice(sorted(run.glob("checkpoints/step-*")))
                    for run in (folder / of, copy))
    copy_of(theirs, ours)
    return f"{ours.name} by {theirs.name} of {of}"


def remove(copy: Path, folder: Path, rng: random.Random) -> str:
    name = rng.choice(sorted(contents(copy)))
    (copy / name).unlink()
    return name


def remove_checkpoint(copy: Path, folder: Path, rng: random.Random) -> str:
    victim = rng.choice(sorted(copy.glob("checkpoints/step-*")))
    shutil.rmtree(victim)
    return victim.name


MUTATIONS = {"drop": _lines(drop), "cut": _lines(cut), "double": _lines(double),
             "swap": _lines(swap), "edit": _lines(edit),
             "foreign line": foreign, "exchange": exchange,
             "exchange a checkpoint": exchange_checkpoint, "remove": remove,
             "remove a checkpoint": remove_checkpoint}
