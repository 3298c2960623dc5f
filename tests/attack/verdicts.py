"""Records of claims and sweeps, folders of runs that have begun, journals, and reports of learners:
cut, altered, exchanged, of another kind, or gone. The same command then ends with the same verdict,
the same trials or the same reports, and says what it passed over.

Losses are made up, by a formula of the config, so that a claim takes milliseconds; what reads
records is the real code. A record that its owner alters with a new checksum is found where two of
its values disagree, or its name or config is another; its seconds can be anything.
"""

import contextlib
import io
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lpkit import processes, records
from lpkit.beside import beside
from lpkit.claims import runs, sweep
from lpkit.claims.protocol import Claim
from lpkit.claims.settle import Settling
from lpkit.config import Config, flat
from lpkit.contracts import StepRecord
from lpkit.presets import preset
from lpkit.training.background import train
from tests.attack import Outcome
from tests.attack._nursery import prepare
from tests.attack.records import double, drop, edit, summed, swap

COUNT, FEW = 300, 14
STEPS = 8
SHARES = {"claim": 5, "sweep": 2, "pruned": 2, "reports": 4, "begun": 1}       # of 14 trials
LEARNERS, EACH = 4, 5
HUGE = 5 << 28      # bytes of a file with a hole


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng, look = Outcome(), random.Random(seed), runs.LOOK_SECONDS
    runs.LOOK_SECONDS = 1e-4
    try:
        config = Config.from_yaml(prepare(folder, steps=STEPS, eval_every=2,
            checkpoint_every=2).read_text())
        kinds = {name: KINDS[name](config, folder / name) for name in SHARES}
        turns = [name for name, share in SHARES.items() for _ in range(share)]
        noticed: dict[str, int] = {}
        while outcome.tried < count:
            _trial(kinds[turns[outcome.tried % len(turns)]], folder / "copy", rng, seed, outcome,
                   noticed)
    finally:
        runs.LOOK_SECONDS = look
    outcome.facts = {"trials": {name: turns.count(name) * count // len(turns) for name in SHARES},
                     "said": noticed}
    return outcome


def _trial(kind: "Kind", copy: Path, rng: random.Random, seed: int, outcome: Outcome,
           noticed: dict[str, int]) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(kind.folder, copy)
    victim = rng.choice(kind.victims(copy))
    name, mutate = rng.choice(list((LINES | FILES if victim.suffix == ".jsonl"
                                    else kind.values | FILES).items()))
    before, state = _contents(victim), rng.getstate()
    if mutate(victim, rng, kind) is False or (_contents(victim) == before and name != "exchange"):
        rng.setstate(state)
        rng.random()
        return
    outcome.tried += 1
    trial = f"seed {seed}, {outcome.tried}: {kind.name}, {name} of {victim.relative_to(copy)}"
    for again in (False, True):
        with contextlib.redirect_stderr(io.StringIO()) as words:
            try:
                result = kind.settled(copy)
            except BaseException as error:
                outcome.failed("stopped",
                               f"{trial}{', again' * again}: {type(error).__name__}: {error}"[:400])
                return
        heard = [*words.getvalue().splitlines(), *kind.problems]
        if not again:
            noticed[kind.name] = noticed.get(kind.name, 0) + bool(heard)
        if not (again and kind.name == "reports") and kind.differs(result, heard):
            outcome.failed("another result" if heard else "silent",
                           f"{trial}{', again' * again}: {str(result)[:200]}")
            return
        if again and words.getvalue():
            outcome.failed("said again", f"{trial}: {words.getvalue()[:300]}")
        # a journal, which nothing reads
        derived = victim.suffix == ".jsonl" and kind.name in ("sweep", "pruned")
        if not (again or heard or derived or name in ("remove", *kind.quiet)):
            outcome.failed("not said", trial)
        if any(line.count("lpkit: ") != 1 for line in words.getvalue().splitlines()):
            outcome.failed("not a sentence", f"{trial}: {words.getvalue()[:300]}")


def _contents(path: Path) -> Any:
    if path.is_file() and path.lstat().st_size < 1 << 28:
        return path.read_bytes()
    return path.lstat() if os.path.lexists(path) else None


# ---- what is mutated

class Kind:
    """A finished command in `folder`; `settled(copy)` is the same command in a copy of it."""

    name, values, quiet = "claim", {}, ()
    problems: tuple[str, ...] | list[str] = ()

    def __init__(self, config: Config, folder: Path):
        self.folder, self.config = folder, config
        folder.mkdir()
        self.make()
        self.truth = self.settled(folder)

    def make(self) -> None:
        """What `settled` needs."""

    def victims(self, copy: Path) -> list[Path]:
        return sorted(path for path in copy.iterdir() if path.suffix in (".json", ".jsonl"))

    def differs(self, result: Any, heard: list[str]) -> bool:
        return result != self.truth


class Claims(Kind):
    """A verdict of 4 seeds, whose first arm is a little worse."""

    def make(self) -> None:
        self.values = VALUES
        settings = {key: value for key, value in flat(self.config).items()
                    if value != flat(preset("cpu-3m"))[key] and key != "steps"}
        self.claim = Claim(settings=settings, arms={"adamw": {}, "lion": {"optimizer": "lion"}},
                           differ=("optimizer",), target="val_loss", effect=0.02,
                           budget={"steps": STEPS}, seeds=12, pilot=3, looks=1,
                           tuning={"optimizer.lr": [1e-3, 1e-2], "optimizer.weight_decay": [0.0]})

    def settled(self, copy: Path) -> Any:
        with runs.Workers(copy, processes.Children(), 2, made_up) as workers:
            return json.loads(json.dumps(Settling(self.claim,
                lambda what, configs: workers.finished(configs), lambda line: None).settle(False)))


class Sweeps(Kind):
    """Six trials, whose records and whose journal are mutated."""

    name, pruner, quiet = "sweep", "none", ()

    def make(self) -> None:
        self.values = VALUES
        settings = {key: value for key, value in flat(self.config).items()
                    if value != flat(preset("cpu-3m"))[key]}
        self.sweep = sweep.Sweep(settings=settings,
                                 search={"optimizer.lr": {"low": 1e-4, "high": 1e-1, "log": True}},
                                 trials=6, target="val_loss",
                                 at_once=2, pruner=self.pruner)

    def settled(self, copy: Path) -> Any:
        with runs.Workers(copy, processes.Children(), 2, made_up) as workers:
            result = sweep.settle(self.sweep, copy / "few",
                                  lambda what, configs, judges: workers.finished(configs,
                                     judges=judges))
        return json.loads(json.dumps(result | {"journal": Path(result["journal"]).name}))


class Pruned(Sweeps):
    name, pruner = "pruned", "median"


class Reports(Kind):
    """Reports of a room, as `lpkit progress` has them, and one more that comes then."""

    name, quiet = "reports", ("replace",)       # of pseudonyms, which are the same

    def make(self) -> None:
        self.values, self.progress = {}, beside("hosting.progress")
        (self.folder / "room.json").touch()
        store = self.progress.Store(self.folder)
        for i in range(LEARNERS * EACH):
            store.add(f"learner{i % LEARNERS}", [_report(i)])
            if i == LEARNERS - 1:
                shutil.copytree(self.folder, self.folder.with_name("reports-early"))

    def victims(self, copy: Path) -> list[Path]:
        return [copy / "progress.jsonl", copy / "progress.jsonl", copy / "pseudonyms.json"]

    def settled(self, copy: Path) -> Any:
        store = self.progress.Store(copy)
        events, self.problems = store.events(), store.problems
        names = store.pseudonyms()
        later = self.progress.Store(copy)       # the service, when it is started again
        later.add("learner0", [_report(99)])
        assert any(event["id"] == "99" for event in later.events())
        return [{key: event[key] for key in event if key != "pseudonym"}
                | {"who": {v: k for k, v in names.items()}.get(event["pseudonym"])}
                for event in events if event["id"] != "99"]

    def differs(self, result: Any, heard: list[str]) -> bool:
        return result != self.truth and not heard


def _report(i: int) -> dict[str, Any]:
    return {"id": str(i), "kind": "exercise", "notebook": "03", "name": f"03.{i}",
            "verdict": "right" if i % 2 else "not yet", "attempts": i,
            "seconds": 1.5 * i}


# what costs steps of a run that goes on, which the log of its worker says, and no number
LOSES_STEPS = ("exchange", "cut a line", "replace", "cut", "flip", "empty", "other JSON", "NaN",
               "text", "pipe", "folder", "link", "huge", "drop",
               "cut lines", "double", "swap", "edit", "a kind in a line", "another's values",
               "list")


class Begun(Kind):
    """A folder of a run that was killed after four of its steps, which is real: `runs.make` goes on
    with it."""

    name, quiet = "begun", LOSES_STEPS

    def make(self) -> None:
        self.other = self.config.replace({"optimizer": "lion"})
        for config in (self.config, self.other):
            path = self.folder / runs.name_of(config)

            def keep(record: StepRecord, path: Path = path) -> None:
                if record.step == 5:
                    shutil.copytree(path, path.with_name("kept"))

            train(config, out=path, observers=[keep])
            shutil.rmtree(path)
            (path.parent / "kept").rename(path)

    def victims(self, copy: Path) -> list[Path]:
        """Not an older checkpoint, which nothing reads."""
        return sorted(path for path in (copy / runs.name_of(self.config)).rglob("*")
                      if path.is_file() and path.name != ".lock"
                      and "step-00000002" not in path.parts)

    def settled(self, copy: Path) -> Any:
        with runs.Workers(copy, processes.Children(), 1, _in_here) as workers:
            rows = workers.finished([self.config, self.other])
        return [(row["val_loss"], row["evaluations"], row["config"]) for row in rows]

    def __init__(self, config: Config, folder: Path):
        folder.mkdir()
        self.folder, self.config = folder, config
        self.make()
        shutil.copytree(folder, whole := folder.with_name("whole"))
        for path in whole.iterdir():
            shutil.rmtree(path)
        self.truth = self.settled(whole)


KINDS = {"claim": Claims, "sweep": Sweeps, "pruned": Pruned, "reports": Reports, "begun": Begun}


def _in_here(*arguments: Any) -> Future:
    done: Future = Future()
    try:
        # of a worker, it is a log that nobody reads
        with contextlib.redirect_stderr(io.StringIO()):
            runs.make(*arguments)
        done.set_result(None)
    except BaseException as error:
        done.set_exception(error)
    return done


def made_up(where: str, imports: list[str], values: dict, restarts: int) -> Future:
    """Writes the record of a run whose losses are a formula of its config."""
    config, path = Config.from_dict(values), Path(where)
    rng = random.Random(f"{config.seed} {config.optimizer.name} {config.optimizer.lr}")
    least = 2 + abs(math.log10(config.optimizer.lr) + 3) + rng.gauss(0,
        0.02) - 0.02 * (config.optimizer.name == "lion")
    losses = [[step, least + math.exp(-step / 3)] for step in range(2, STEPS + 1, 2)]
    records.write(path.with_suffix(".json"), {
        "val_loss": losses[-1][1], "final_loss": least, "step_seconds": 0.5, "energy_wh": None,
        "step_joules": None, "error": None,
        "stopped_after": None, "name": path.name, "config": values, "evaluations": losses,
        "restarts": 0, "device": "a device", "seconds": 5.0})
    done: Future = Future()
    done.set_result(None)
    return done


# ---- mutations of a file, of a sealed record, and of lines

def _other(path: Path, rng: random.Random, kind: Kind) -> Path | None:
    """Another file of the same kind: of reports, that of an earlier moment."""
    if kind.name == "reports":
        return kind.folder.with_name("reports-early") / path.name
    if kind.name == "begun":
        theirs = kind.folder / runs.name_of(kind.other)
        return next(iter(theirs.rglob(path.name)), None)
    others = [other for other in path.parent.glob(f"*{path.suffix}") if other != path]
    return rng.choice(others) if others else None


def _write(make: Callable[[bytes, random.Random], bytes]) -> Callable:
    return lambda path, rng, kind: path.write_bytes(make(path.read_bytes(), rng)) and None


def _flip(text: bytes, rng: random.Random) -> bytes:
    many = bytearray(text)
    for _ in range(rng.choice([1, 1, 8])):
        many[rng.randrange(len(many))] ^= 1 << rng.randrange(8)
    return bytes(many)


def _replaced(path: Path, rng: random.Random, kind: Kind) -> Any:
    return bool((other := _other(path, rng, kind)) and shutil.copyfile(other, path))


def _exchanged(path: Path, rng: random.Random, kind: Kind) -> Any:
    """Two whole files, or the whole folders of two runs."""
    if kind.name == "reports":
        return False
    a = path if kind.name != "begun" else kind_folder(path, kind)
    others = [other for other in a.parent.iterdir() if other != a and other.suffix == a.suffix]
    if not others:
        return False
    b, aside = rng.choice(others), a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    return bool(aside.rename(b))


def kind_folder(path: Path, kind: Begun) -> Path:
    return next(folder for folder in path.parents if folder.name == runs.name_of(kind.config))


def _special(make: Callable[[Path], Any]) -> Callable:
    def mutate(path: Path, rng: random.Random, kind: Kind) -> None:
        path.unlink()
        make(path)

    return mutate


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


FILES: dict[str, Callable] = ({
    "replace": _replaced, "exchange": _exchanged,
    "cut": _write(lambda text, rng: text[:rng.randrange(len(text))]), "flip": _write(_flip),
    "empty": _write(lambda text, rng: b""),
    "other JSON": _write(lambda text, rng: rng.choice([b"[]", b"3", b"null", b'"x"', b"{}",
        b'{"sha256": 3}', b"[" * 100_000])),
    "NaN": _write(lambda text, rng: json.dumps(json.loads(text.splitlines()[0]
        if text.count(b'"line"') else b"{}") | {"val_loss": math.nan,
                                                                          "sha256": "0"}).encode()),
    "text": _write(lambda text, rng: rng.choice([b"\0" * 300, b"\xff\xfe", b"no JSON\n",
        b"val_loss: 1.0\n"])),
    "remove": _special(lambda path: None), "pipe": _special(os.mkfifo),
    "folder": _special(lambda path: path.mkdir()),
    "link": _special(lambda path: path.symlink_to("/dev/zero")), "huge": _special(_huge)})


def _value(change: Callable[[dict, random.Random, Path, Kind], Any]) -> Callable:
    """A record with a checksum that is right again."""
    def mutate(path: Path, rng: random.Random, kind: Kind) -> Any:
        record = records.read(path)
        if change(record, rng, path, kind) is False:
            return False
        return records.write(path, record)

    return mutate


def _of(path: Path, rng: random.Random, kind: Kind) -> dict:
    return records.read(_other(path, rng, kind))


def _curve(record: dict, rng: random.Random) -> None:
    rng.choice(record["evaluations"][-1:])[1] *= 0.9


VALUES: dict[str, Callable] = {
    "another name": _value(lambda record, rng, path, kind: record.update(name=_of(path, rng,
        kind)["name"])),
    "another config": _value(lambda record, rng, path, kind: record.update(config=_of(path, rng,
        kind)["config"])),
    "another's values": _value(lambda record, rng, path, kind: record.update(_of(path, rng,
        kind) | {"name": path.stem})),
    "a loss": _value(lambda record, rng, path, kind: record.update(val_loss=record["val_loss"]
        * rng.choice([0.9, 1.1, -1]))),
    "no loss": _value(lambda record, rng, path, kind: record.update(val_loss=None)),
    "a curve": _value(lambda record, rng, path, kind: _curve(record, rng)),
    "no curve": _value(lambda record, rng, path, kind: record.update(
        evaluations=rng.choice([[], None, 3, [3], [[1]], [["x", 1.0]]]))),
    "an error": _value(lambda record, rng, path, kind: record.update(error="loss=nan")),
    "a kind": _value(lambda record, rng, path, kind: record.update(
        {rng.choice(sorted(record.keys() - {"restarts"})): rng.choice([[], {}, "x", True])})),
    "no key": _value(lambda record, rng, path, kind: bool(
        record.pop(rng.choice(["val_loss", "seconds", "name", "config", "evaluations",
                                                                                "step_seconds"])))),
}


def _lines(change: Callable[[list[bytes], random.Random], Any]) -> Callable:
    def mutate(path: Path, rng: random.Random, kind: Kind) -> Any:
        lines = path.read_bytes().splitlines(keepends=True)
        if change(lines, rng) is False:
            return False
        return path.write_bytes(b"".join(lines)) and None

    return mutate


def _kind(lines: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    value[rng.choice(sorted(value.keys() - {records.LINE_SUM}))] = rng.choice([[], {}, "x", True,
        None])
    summed(lines, at, value)


def _values_of_another(lines: list[bytes], rng: random.Random) -> None:
    """The values of one line in the place of another's: a trial renumbered."""
    a, b = rng.sample(range(len(lines)), 2)
    first, second = json.loads(lines[a]), json.loads(lines[b])
    kept = {key: first[key] for key in (records.RUN, records.NUMBER, records.BEFORE, "trial",
                                        "settings") if key in first}
    summed(lines, a, second | kept)


LINES: dict[str, Callable] = {
    "drop": _lines(drop),
    "cut lines": _lines(lambda lines, rng: lines.__delitem__(slice(rng.randrange(len(lines)),
        None))),
    "cut a line": _lines(lambda lines, rng: lines.__setitem__(-1,
        lines[-1][:rng.randrange(1, len(lines[-1]))])), "double": _lines(double),
    "swap": _lines(swap), "edit": _lines(edit), "a kind in a line": _lines(_kind),
    "another's values": _lines(_values_of_another),
    "list": _lines(lambda lines, rng: lines.insert(rng.randrange(len(lines) + 1),
        rng.choice([b"[]\n", b"3\n", b"\n", b"{}\n", b"\xff\n"])))}
