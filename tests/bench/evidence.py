"""Everything that only a GPU can tell, in order of value, for a machine on which nothing can be
installed and which is at hand for half an hour.

    lpkit bench evidence --out DIR                          all of it, within 30 minutes
    lpkit bench evidence --out DIR --seconds 480            until then; the same command goes on
    lpkit bench evidence --out DIR --pieces smoke,linear    these, in this order

A piece is some commands, each a case and a process of its own, and has a budget of seconds, of
which one of several cases gets half at most. It ends with its budget, whatever it runs into, and
writes a JSON line for each case into DIR/PIECE.jsonl as it goes: a case that is there is not run
again, and an error is a line and not the end. A case that time ran out for is an error if it had
half of the budget; else it comes first the next time. What benches of a GPU have recorded also lies
in DIR/measured, in the form of data/measured. On a CPU everything is tiny: a rehearsal.
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

import torch

from lpkit.errors import ConfigError, pick
from lpkit.files import PACKAGE, append_lines
from lpkit.machine_facts import cores, gpus
from lpkit.techniques.recipes import RECIPES
from tests.bench import fused, smoke
from tests.bench.command import keep
from tests.bench.fp8 import runs_here
from tests.bench.harness import Result, paired, provenance

NAME, FOLDER = "evidence", Path("runs/evidence")
LEAST_SECONDS = 20      # left, for a case to begin
MOST_SAID = 60_000      # characters of what is no JSON
TESTS = PACKAGE.parent / "tests"
KERNEL_TESTS = ("test_kernels", "test_cast_operand", "test_flash_attention")
Found = dict[str, Any]
Commands = dict[str, tuple[str, ...]]       # by case, what Python is given

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
    """`seconds`: its budget. `by_name`: it runs only when it is asked for."""

    commands: Callable[[torch.device], Commands]
    seconds: int
    by_name: bool = False


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


PIECES: dict[str, Piece] = {        # in order of value: right, before fast
    "smoke": Piece(seconds=80, commands=lambda on: {
        "smoke": ("-m", smoke.__name__, "--seconds", "50")}),
    "linear": Piece(commands=_bench("fp8-linear"), seconds=110),
    "nanogpt": Piece(commands=_bench("train-nanogpt"), seconds=160),
    "tests": Piece(commands=_tests, seconds=200),
    "kernels": Piece(commands=_kernels, seconds=300),
    "recipes": Piece(commands=_recipes, seconds=60),
    "steps": Piece(commands=_steps, seconds=120),
    "doctor": Piece(commands=lambda on: {"doctor": _lpkit("doctor")}, seconds=90),
    "products": Piece(commands=_bench("fp8-products", "--rounds", "1"), seconds=80),
    "fp8-step": Piece(commands=_bench("fp8-step", "--configs", "1", "--rounds", "3"),
                      seconds=320),
    # one GPU has nobody to shard over, and CPUs say nothing of GPUs
    "fsdp2": Piece(commands=lambda on: _bench("fsdp2")(on) if gpus() > 1 else {}, seconds=60),
    "ledger": Piece(commands=lambda on: {"ledger": _lpkit(
        "bench", "ledger", "--configs", "2" if on.type == "cpu" else "6")}, seconds=220),
    "launch": Piece(commands=_bench("launch", "--rounds", "3"), seconds=470, by_name=True),
}


def run(rounds: int = 1, *, out: Path | None = None, seconds: int | None = None,
        pieces: str | None = None) -> list[Result]:
    """`out`: where the pieces write. `seconds`: no piece goes on after these. `pieces`: these
    alone, by names with commas between. Raises ConfigError for an unknown name."""
    names = ([name.strip() for name in pieces.split(",")] if pieces is not None else
             [name for name, piece in PIECES.items() if not piece.by_name])
    asked = {name: pick(PIECES, name, "piece of the evidence") for name in names}
    folder, start = out or FOLDER, time.monotonic()
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
    path = [str(PACKAGE.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONUNBUFFERED": "1",
                         "PYTHONPATH": os.pathsep.join(map(os.path.abspath, path)),
                         "TORCHINDUCTOR_CACHE_DIR": str(folder.resolve() / "inductor"),
                         "TRITON_CACHE_DIR": str(folder.resolve() / "triton")}


def _record(folder: Path, name: str, gpu: str | None) -> None:
    """What benches of this GPU said, as `lpkit bench NAME --out` keeps it; of one bench in several
    cases a single record."""
    outputs = [line["said"] for line in _lines(folder, name).values() if "error" not in line]
    records = [output for output in outputs if isinstance(output, dict) and "cases" in output
               and gpu is not None and output["device"] == gpu]
    if records:
        worst = min(records, key=lambda record: record["met"])
        keep(folder / "measured", worst | {"cases": [case for record in records
                                                     for case in record["cases"]]})


def _lines(folder: Path, name: str) -> Mapping[str, Found]:
    """What each case has found."""
    path = folder / f"{name}.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {line["case"]: line for line in lines}
