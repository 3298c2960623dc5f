"""Measure what only a GPU can show, the most valuable first, on a machine where nothing can be
installed and that is available for 15 minutes.

    lpkit bench evidence --out DIR                          three calls, within 12 minutes
    lpkit bench evidence --out DIR --call 1                 the first call, within 4 minutes
    lpkit bench evidence --out DIR --seconds 480            stop after 8 minutes; repeat to continue
    lpkit bench evidence --out DIR --pieces smoke,linear    these pieces, in this order
    lpkit bench evidence --out DIR --wheels FOLDER          with the peers that FOLDER has as wheels

Call 1 tests that recipes learn, and measures FP8 and GPT-2. Call 2 measures the kernels whose code
changed since their newest record. Call 3 runs notebooks at their GPU size. The other pieces run
only if --pieces names them.

A piece has a budget of seconds, and one or more cases. A case is a command in its own process. If a
piece has several cases, each gets at most half of the budget. When a case ends, evidence appends
its JSON line to DIR/PIECE.jsonl; a case that has a line does not run again, and a case that failed
has its error in its line. A case that ran out of time is an error if it had half of the budget,
else it runs again at the next call. DIR/measured has the records of the benches, as data/measured
has them. On a CPU all sizes are tiny, as a rehearsal.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from lpkit.errors import ConfigError, named, pick
from lpkit.files import PACKAGE, append_lines
from lpkit.machine_facts import cores, gpus
from lpkit.techniques.recipes import RECIPES
from tests.bench import code, fused, smoke
from tests.bench.command import keep
from tests.bench.fp8 import runs_here
from tests.bench.harness import Result, paired, provenance
from tests.pages.kernels import MEASURED, module_of

NAME, FOLDER = "evidence", Path("runs/evidence")
PEERS = "peers"         # in DIR: the unpacked wheels
LEAST_SECONDS = 20      # left, for a case to begin
MOST_SAID = 60_000      # characters of what is no JSON
TESTS = PACKAGE.parent / "tests"
KERNEL_TESTS = ("test_kernels", "test_cast_operand", "test_flash_attention")
Found = dict[str, Any]
Commands = dict[str, tuple[str, ...]]       # by case, the arguments of Python
CALL_SECONDS = 240
COURSE = ("25", "06", "05", "07", "12", "20", "24")     # notebooks that a GPU changes most
WIDTHS = ("4096", "1664")       # of fp8-step

TRAIN = ("grad_accum_steps=1", "model.context=1024", "global_batch=16",
         "eval_every=0", "eval_batches=1", "checkpoint_every=0")
SMALL = ("model.layers=2", "model.context=512", "global_batch=8", "steps=4")
TINY = ("model.layers=2", "model.width=128", "model.heads=2", "model.context=128",
        "model.vocab=512", "global_batch=1", "steps=3", "data.tokenizer=bytes")
LOWS = [name for name, recipe in RECIPES.items() if recipe.products]
FIRST = ("linear-cross-entropy", "cross-entropy", "rms-norm", "flash-attention", "cast-tensor",
         "adamw", "swiglu")     # of kernels


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`seconds`: the budget. `call`: the call that runs the piece; 0: only --pieces runs it."""

    commands: Callable[[torch.device], Commands]
    seconds: int
    call: int = 0


def _lpkit(*words: str) -> tuple[str, ...]:
    return ("-m", "lpkit", *words, "--json")


def _bench(*words: str) -> Callable[[torch.device], Commands]:
    return lambda on: {words[0]: _lpkit("bench", *words)}


def _tests(on: torch.device) -> Commands:
    """The kernels', which compute on a GPU where there is one, and the GPU's own; none where this
    is no checkout. By several processes where pytest-xdist is there: most of it is compilation. A
    CPU's interpreter takes minutes for the kernels': there they are only found."""
    paths = {path.stem: path for path in sorted(TESTS.rglob("test_*.py"))}
    marked = [name for name, path in paths.items()
              if re.search(r"^pytestmark.*mark\.gpu|^@pytest\.mark\.gpu|"
                           r"pytest\.mark\.gpu,\s+pytest", path.read_text(), re.M)]
    which = {name: ("-m", "not slow") for name in KERNEL_TESTS if name in paths}
    which |= dict.fromkeys(sorted(marked, key=lambda name: name != "test_gpu"), ("-m", "gpu"))
    only = (("--collect-only",) if on.type == "cpu" else
            ("-n", str(min(8, cores()))) if find_spec("xdist") else ())
    return {name: ("-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "-p",
                   "no:benchmark", *only, *words, str(paths[name]))
            for name, words in which.items()}


def _train(*settings: str) -> tuple[str, ...]:
    """Returns the command of a run. A setting replaces an earlier one of its key: the command line
    refuses two values."""
    last = dict(setting.split("=", 1) for setting in (*TRAIN, *settings))
    return _lpkit("train", "gpt2-124m", *(f"{key}={value}" for key, value in last.items()))


def _recipes(on: torch.device) -> Commands:
    """Some updates by each, as it is chosen here: right, before fast."""
    size = SMALL if on.type == "cuda" else TINY
    return {name: _train(*size, f"precision.recipe={name}") for name in ("bf16", *LOWS)}


def _steps(on: torch.device) -> Commands:
    """GPT-2 124M, 16 x 1024 tokens an update."""
    if on.type == "cpu":
        return {"eager": _train(*TINY, "system.compile=false")}
    hows = {"blocks": (), "model": ("system.compile=model",), "eager": ("system.compile=false",),
            "blocks, chunked loss": ("memory.cross_entropy=chunked",
                                     "memory.cross_entropy.chunk_tokens=4096"),
            **{f"blocks, {name}": (f"precision.recipe={name}",) for name in runs_here(on)}}
    base = ("steps=40", "precision.recipe=bf16", "system.compile=blocks")
    return {how: _train(*base, *changes) for how, changes in hows.items()}


def _kernels(on: torch.device) -> Commands:
    names = [name for name in dict.fromkeys((*FIRST, *fused.kernels()))
             if on.type == "cuda" or name != "flash-attention"]
    return {name: _lpkit("bench", "kernels", "--kernel", name) for name in names}


def _changed(on: torch.device) -> Commands:
    """The kernels whose code is not the code of their newest record of a GPU."""
    records = sorted((json.loads(path.read_text()) for path in MEASURED.glob("kernels-*.json")),
                     key=lambda record: record["date"])
    newest = {case["case"].partition(",")[0]: record for record in records
              for case in record["cases"] if record["device"] != record["cpu"]}
    return {name: words for name, words in _kernels(on).items()
            if code.changed(newest.get(name, {}), module_of(name)) != []}


def _course(on: torch.device) -> Commands:
    tier = "gpu" if on.type == "cuda" else "smoke"
    return {name: _lpkit("notebook", name, "--tier", tier) for name in COURSE}


PIECES: dict[str, Piece] = {        # in order of value: right, before fast
    "smoke": Piece(seconds=45, call=1, commands=lambda on: {
        "smoke": ("-m", smoke.__name__, "--seconds", "35")}),
    "linear": Piece(commands=_bench("fp8-linear"), seconds=55, call=1),
    "fp8-step": Piece(seconds=80, call=1, commands=lambda on: {
        width: _lpkit("bench", "fp8-step", "--pieces", width, "--rounds", "3")
        for width in WIDTHS}),
    "nanogpt": Piece(commands=_bench("train-nanogpt"), seconds=60, call=1),
    "changed": Piece(commands=_changed, seconds=240, call=2),
    "course": Piece(commands=_course, seconds=240, call=3),
    "tests": Piece(commands=_tests, seconds=200),
    "kernels": Piece(commands=_kernels, seconds=300),
    "recipes": Piece(commands=_recipes, seconds=60),
    "steps": Piece(commands=_steps, seconds=120),
    "doctor": Piece(commands=lambda on: {"doctor": _lpkit("doctor")}, seconds=90),
    "products": Piece(commands=_bench("fp8-products", "--rounds", "1"), seconds=80),
    # one GPU has nobody to shard over, and CPUs say nothing of GPUs
    "fsdp2": Piece(commands=lambda on: _bench("fsdp2")(on) if gpus() > 1 else {}, seconds=60),
    "ledger": Piece(commands=lambda on: {"ledger": _lpkit(
        "bench", "ledger", "--configs", "2" if on.type == "cpu" else "6")}, seconds=220),
    "launch": Piece(commands=_bench("launch", "--rounds", "3"), seconds=470),
}


def run(rounds: int = 1, *, out: Path | None = None, seconds: int | None = None,
        pieces: str | None = None, call: int | None = None,
        wheels: Path | None = None) -> list[Result]:
    """Run pieces; return a Result for each, the number of its cases that have a line.

    out:     the folder in which the pieces write
    seconds: all pieces end after these seconds
    pieces:  names of pieces, separated by commas
    call:    1, 2 or 3: the pieces of this call; None: of all three
    wheels:  a folder with wheels of peers; the commands can import them

    Raises ConfigError for an unknown piece or call, and for wheels that are missing."""
    calls = sorted({piece.call for piece in PIECES.values()} - {0})
    if call and (call not in calls or pieces is not None):
        raise ConfigError(f"--call must be {', '.join(map(str, calls))}, without --pieces; got "
                          f"{call}")
    names = ([name.strip() for name in pieces.split(",")] if pieces is not None else
             [name for name, piece in PIECES.items() if piece.call in ([call] if call else calls)])
    asked = {name: pick(PIECES, name, "piece of the evidence") for name in names}
    folder, start = out or FOLDER, time.monotonic()
    if wheels:
        unpack(wheels, folder)
    end = start + (seconds or sum(piece.seconds for piece in asked.values()))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    on = torch.device("cuda" if gpu else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(
        json.dumps(provenance(("torch", "triton", "torchao", "numpy"), gpu), indent=1))
    rows, results = [("piece", "cases", "errors", "the first")], []
    facts = {"breakdown": rows, "folder": str(folder)}
    for name, piece in asked.items():
        cases = piece.commands(on)
        _piece(name, cases, piece.seconds, end, folder)
        _record(folder, name, gpu)
        lines = _lines(folder, name)
        bad = [f"{case}: {line['error']}"[:100] for case, line in lines.items() if "error" in line]
        rows.append((name, f"{len(lines)} of {len(cases)}", str(len(bad)), next(iter(bad), "")))
        if cases:
            results.append(paired(NAME, ours=[len(lines)], peer=[len(cases)], case=name,
                                  better="lower", peer_name="all cases", unit="cases", device=gpu,
                                  facts=facts))
    if not results:
        raise ConfigError(f"on this machine there is nothing to run of {', '.join(asked)}; `lpkit "
                          f"bench evidence` runs {', '.join(PIECES)}")
    return results


def _piece(name: str, cases: Commands, budget: float, end: float, folder: Path) -> None:
    """The cases that are not there yet, until the budget is spent or `end` has come."""
    end, done = min(end, time.monotonic() + budget), _lines(folder, name)
    most = budget if len(cases) == 1 else budget / 2
    for case, words in cases.items():
        start = time.monotonic()
        left = min(most, end - start)
        if case in done or left < LEAST_SECONDS:
            continue
        print(f"evidence: {name}, {case}, {left:.0f} s at most ...", file=sys.stderr)
        result = _ended(words, left, folder)
        took = time.monotonic() - start
        if took < left or left >= budget / 2:
            line = json.dumps({"case": case, **result, "took": took})
            append_lines(folder / f"{name}.jsonl", [f"{line}\n"])


def _ended(words: tuple[str, ...], seconds: float, folder: Path) -> Found:
    """What it said, and an error where it had one; all that it started is gone after `seconds`, and
    what it wrote into the folder that it was in."""
    with (TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as within,
          subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=within,
                           stderr=subprocess.PIPE, start_new_session=True, errors="replace",
                           env=_environment(folder)) as child):
        try:
            output, problem = (text.strip() for text in child.communicate(timeout=seconds))
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                problem = (error.stderr or b"").decode(errors="replace").strip()
                return {"said": _object((error.output or b"").decode(errors="replace").strip()),
                        "error": f"not done after {seconds:.0f} s: "
                                 f"{_ends(problem) or 'nothing was said'}"}
            raise
    result: Found = {"said": _object(output)}
    if child.returncode:
        result |= {"error": _ends(problem) or "nothing was said", "exit_code": child.returncode}
    return result


def _ends(problem: str) -> str:
    """Its first and last 1,500 characters: compilers say what is wrong first, Python last."""
    return problem if len(problem) <= 3000 else f"{problem[:1500]}\n...\n{problem[-1500:]}"


def _object(text: str) -> Any:
    """Of JSON; of anything else the end of the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text[-MOST_SAID:]


def _environment(folder: Path) -> dict[str, str]:
    """With this checkout before what PYTHONPATH names, which a child finds from its own folder; and
    with what it compiles kept beside the pieces."""
    path = [str(PACKAGE.parent), *([str(folder / PEERS)] if (folder / PEERS).is_dir() else []),
            *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONUNBUFFERED": "1",
                         "PYTHONPATH": os.pathsep.join(map(os.path.abspath, path)),
                         "TORCHINDUCTOR_CACHE_DIR": str(folder.resolve() / "inductor"),
                         "TRITON_CACHE_DIR": str(folder.resolve() / "triton")}


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack the wheels of a folder into `folder`/peers. Raises ConfigError if there are none, or
    if a file is no wheel."""
    paths = sorted(wheels.glob("*.whl"))
    if not paths:
        raise ConfigError(f"--wheels: {named(wheels)} has no file *.whl; `pip download --no-deps "
                          f"-d {named(wheels)} torchao liger-kernel gfloat` fetches the peers")
    for path in paths:
        try:
            with ZipFile(path) as wheel:
                wheel.extractall(folder / PEERS)
        except BadZipFile as error:
            raise ConfigError(f"--wheels: {named(path)} is not a wheel ({error}); download it "
                              f"again") from None


def _record(folder: Path, name: str, gpu: str | None) -> None:
    """What benches of this GPU said, as `lpkit bench NAME --out` keeps it; of one bench in several
    cases a single record."""
    outputs = [line["said"] for line in _lines(folder, name).values() if "error" not in line]
    records = [output for output in outputs if isinstance(output, dict) and "cases" in output
               and gpu is not None and output["device"] == gpu]
    if records:
        worst = min(records, key=lambda record: record["met"])
        # a case's facts by size or recipe, such as losses
        facts = {key: {name: fact for record in records
                       for name, fact in record.get(key, {}).items()}
                 for key, value in worst.items() if isinstance(value, dict)}
        keep(folder / "measured", worst | facts | {"cases": [case for record in records
                                                             for case in record["cases"]]})


def _lines(folder: Path, name: str) -> Mapping[str, Found]:
    """What each case has found."""
    path = folder / f"{name}.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {line["case"]: line for line in lines}
