"""Everything that only a GPU can tell, in order of value, for a machine on which nothing can be
installed and which is at hand for minutes.

    lpkit bench evidence --out DIR                  all of it
    lpkit bench evidence --out DIR --seconds 480    until then; the same command goes on

A piece is some commands, each a case and a process of its own. It ends within eight minutes,
whatever it runs into, and writes a JSON line for each case into DIR/PIECE.jsonl as it goes: a case
that is there is not run again, and an error is a line and not the end. A case that time ran out for
is an error if it had half a piece's; else it comes first the next time. On a CPU everything is
tiny: a rehearsal.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lpkit.bench import fused
from lpkit.bench.fp8 import runs_here
from lpkit.bench.harness import Result, paired, provenance
from lpkit.files import PACKAGE, append_lines
from lpkit.techniques.recipes import RECIPES

NAME, FOLDER, PIECE_SECONDS = "evidence", Path("runs/evidence"), 470
LEAST_SECONDS = 20      # left, for a case to begin
TESTS = PACKAGE.parent / "tests"
Found = dict[str, Any]
Commands = dict[str, tuple[str, ...]]       # by case, what Python is given

TRAIN = ("train", "gpt2-124m", "grad_accum_steps=1", "model.context=1024", "global_batch=16",
         "eval_every=0", "eval_batches=1", "checkpoint_every=0")
SMALL = ("model.layers=2", "model.context=512", "global_batch=8", "steps=4")
TINY = ("model.layers=2", "model.width=128", "model.heads=2", "model.context=128",
        "model.vocab=512", "global_batch=1", "steps=3", "data.tokenizer=bytes")
LOWS = [name for name, recipe in RECIPES.items() if recipe.products]


def _lpkit(*words: str) -> tuple[str, ...]:
    return ("-m", "lpkit", *words, "--json")


def _bench(*words: str) -> Callable[[torch.device], Commands]:
    return lambda on: {words[0]: _lpkit("bench", *words)}


def _tests(on: torch.device) -> Commands:
    """The GPU's own, file by file; none where this is no checkout."""
    return {path.stem: ("-m", "pytest", "-q", "-m", "gpu", "--tb=short", str(path))
            for path in sorted(TESTS.glob("test_*.py"))
            if re.search(r"^pytestmark.*mark\.gpu|^@pytest\.mark\.gpu", path.read_text(), re.M)}


def _recipes(on: torch.device) -> Commands:
    """Some updates by each, as it is chosen here: right, before fast."""
    size = SMALL if on.type == "cuda" else TINY
    return {name: _lpkit(*TRAIN, *size, f"precision.recipe={name}") for name in ("bf16", *LOWS)}


def _steps(on: torch.device) -> Commands:
    """GPT-2 124M, 16 x 1024 tokens an update."""
    if on.type == "cpu":
        return {"eager": _lpkit(*TRAIN, *TINY, "system.compile=false")}
    hows = {"blocks": (), "model": ("system.compile=model",), "eager": ("system.compile=false",),
            "blocks, chunked loss": ("memory.cross_entropy=chunked",
                                     "memory.cross_entropy.chunk_tokens=4096"),
            **{f"blocks, {name}": (f"precision.recipe={name}",) for name in runs_here(on)}}
    base = ("steps=40", "precision.recipe=bf16", "system.compile=blocks")
    return {how: _lpkit(*TRAIN, *base, *changes) for how, changes in hows.items()}


PIECES: dict[str, Callable[[torch.device], Commands]] = {       # in order of value
    "tests": _tests,
    "recipes": _recipes,
    "doctor": lambda on: {"doctor": _lpkit("doctor")},
    "nanogpt": _bench("train-nanogpt"),
    "launch": _bench("launch", "--rounds", "3"),
    "steps": _steps,
    "products": _bench("fp8-products"),
    "linear": _bench("fp8-linear"),
    "kernels": lambda on: {name: _lpkit("bench", "kernels", "--kernel", name)
                           for name in fused.kernels()},
    "fp8-step": _bench("fp8-step"),
    "ledger": lambda on: {"ledger": _lpkit("bench", "ledger", *(
        ("--configs", "2") if on.type == "cpu" else ()))},
}


def run(rounds: int = 1, *, out: Path | None = None, seconds: int | None = None) -> list[Result]:
    """`out`: where the pieces write. `seconds`: no piece goes on after these."""
    folder, end = out or FOLDER, time.monotonic() + (seconds or len(PIECES) * PIECE_SECONDS)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    on = torch.device("cuda" if gpu else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(
        json.dumps(provenance(("torch", "triton", "torchao", "numpy"), gpu), indent=1))
    rows, results = [("piece", "cases", "errors", "the first")], []
    facts = {"breakdown": rows, "folder": str(folder)}
    for name, commands in PIECES.items():
        cases = commands(on)
        _piece(name, cases, min(PIECE_SECONDS, end - time.monotonic()), folder)
        lines = _lines(folder, name)
        bad = [f"{case}: {line['error']}"[:100] for case, line in lines.items() if "error" in line]
        rows.append((name, f"{len(lines)} of {len(cases)}", str(len(bad)), next(iter(bad), "")))
        if cases:
            results.append(paired(NAME, ours=[len(lines)], peer=[len(cases)], case=name,
                                  better="lower", peer_name="all cases", unit="cases", device=gpu,
                                  facts=facts))
    return results


def _piece(name: str, cases: Commands, seconds: float, folder: Path) -> None:
    """The cases that are not there yet."""
    end, done = time.monotonic() + seconds, _lines(folder, name)
    for case, words in cases.items():
        start = time.monotonic()
        left = end - start
        if case in done or left < LEAST_SECONDS:
            continue
        print(f"evidence: {name}, {case}, {left:.0f} s at most ...", file=sys.stderr)
        found = _ended(words, left, folder)
        took = time.monotonic() - start
        if took < left or left > PIECE_SECONDS / 2:
            line = json.dumps({"case": case, **found, "took": took})
            append_lines(folder / f"{name}.jsonl", [f"{line}\n"])


def _ended(words: tuple[str, ...], seconds: float, folder: Path) -> Found:
    """What it said, or an error; all that it started is gone after `seconds`, and what it wrote
    into the folder that it was in."""
    path = {"TORCHINDUCTOR_CACHE_DIR": folder.resolve() / "inductor",
            "TRITON_CACHE_DIR": folder.resolve() / "triton",
            "PYTHONPATH": PACKAGE.parent}       # from a checkout, too
    with (TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as within,
          subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=within,
                           stderr=subprocess.PIPE, start_new_session=True,
                           env=os.environ | {key: str(one) for key, one in path.items()}) as child):
        try:
            said, problem = (text.strip() for text in child.communicate(timeout=seconds))
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return {"error": f"not done after {seconds:.0f} s"}
            raise
    if child.returncode == 0 and said.startswith("{"):
        return {"said": json.loads(said)}
    found = {"said": said[-4000:]}
    if child.returncode:
        found |= {"error": problem[-1000:] or "nothing was said", "exit_code": child.returncode}
    return found


def _lines(folder: Path, name: str) -> Mapping[str, Found]:
    """What each case has found."""
    path = folder / f"{name}.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {line["case"]: line for line in lines}
