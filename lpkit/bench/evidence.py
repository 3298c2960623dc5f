"""Everything that only a GPU can tell, in order of value, for a machine on which nothing can be
installed and which is at hand for minutes.

    lpkit bench evidence --out DIR                  all of it
    lpkit bench evidence --out DIR --seconds 480    until then; the same command goes on

A piece is a process of its own that ends within eight minutes, whatever it runs into. It writes a
JSON line for each case into DIR/PIECE.jsonl as it goes: a case that is there is not run again, an
error is a line and not the end, and a case that took its process down is named and passed over.
On a CPU everything is tiny: a rehearsal.
"""

import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lpkit import hardware
from lpkit.bench import fused
from lpkit.bench.fp8 import runs_here
from lpkit.bench.harness import Result, paired, provenance, summary
from lpkit.bench.nanogpt import Peer
from lpkit.config import Config
from lpkit.files import append_lines
from lpkit.precision.backends import BACKENDS
from lpkit.presets import preset
from lpkit.techniques.recipes import RECIPES
from lpkit.timing import interleaved_seconds
from lpkit.training.training import RandomTokens, Training

NAME, FOLDER, PIECE_SECONDS = "evidence", Path("runs/evidence"), 470
LEAST_SECONDS = 20      # left, for a piece to begin
WORKER = [sys.executable, "-m", "lpkit.bench.evidence"]
TESTS = Path(__file__).parents[2] / "tests"
Found = dict[str, Any]
Case = tuple[str, Callable[[], Found]]

# M tokens, K, N of a Linear: docs of the benches beside them, GPT-2 124M's and Llama 8B's
SHAPES = ((16_384, 4096, 16_384), (65_536, 1664, 6656), (16_384, 768, 3072), (8192, 4096, 28_672))
SMALL: Found = {"model.layers": 2, "model.width": 768, "model.heads": 12, "model.context": 512,
                "global_batch": 8}
TINY: Found = {"model.layers": 2, "model.width": 128, "model.heads": 2, "model.context": 128,
               "model.vocab": 512, "global_batch": 1}
RUN = ("global_batch=16", "grad_accum_steps=1", "model.context=1024",
       "eval_every=0", "eval_batches=1", "checkpoint_every=0")      # 16 x 1024 tokens, and its log
ACCUMULATED = {True: "fast accumulation", False: "full accumulation"}


@dataclass(frozen=True)
class Piece:
    """`cases(on)` of the device; `seconds` at most."""

    cases: Callable[[torch.device], Iterator[Case]]
    seconds: int = PIECE_SECONDS


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- commands that exist: what they print is the row

def _command(*words: str) -> Found:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    out = done.stdout.strip()
    if done.returncode == 0 and out.startswith("{"):
        return {"said": json.loads(out)}
    return {"exit_code": done.returncode, "said": out[-4000:], "error": done.stderr[-1000:]}


def _lpkit(*words: str, on_cpu: tuple[str, ...] = (), seconds: int = PIECE_SECONDS) -> Piece:
    def cases(on: torch.device) -> Iterator[Case]:
        yield " ".join(words[:2]), partial(_command, "lpkit", *words, "--json",
                                 *(on_cpu if on.type == "cpu" else ()))

    return Piece(cases, seconds)


def _tests(on: torch.device) -> Iterator[Case]:
    """The GPU's own, file by file; none where this is no checkout."""
    for path in sorted(TESTS.glob("test_*.py")):
        if re.search(r"^pytestmark.*mark\.gpu|^@pytest\.mark\.gpu", path.read_text(), re.M):
            yield path.stem, partial(_command, "pytest", "-q", "-m", "gpu", "--tb=short", str(path))


# ---- every recipe by every backend, before anything is timed

def _recipes(on: torch.device) -> Iterator[Case]:
    kinds = [("bf16", "auto"), *((name, backend) for name, row in RECIPES.items() if row.products
                                 for backend in ("scaled_mm", "torchao", "emulated"))]
    base = SMALL if on.type == "cuda" else TINY
    for compiled, (recipe, backend) in itertools.product((False, True), kinds):
        if not compiled or (on.type == "cuda" and backend != "emulated"):
            changes = {"precision.recipe": recipe, "precision.backend": backend,
                       "system.compile": compiled}
            yield (f"{recipe}, {backend}, {'compiled' if compiled else 'eager'}",
                   partial(_updates, Config(), {**base, **changes}, on, 3))


def _updates(base: Config, changes: Found, on: torch.device, count: int,
             of: Callable[[Training], Any] = lambda training: training) -> Found:
    """Of one Training on random tokens: losses, seconds, the most memory. `of`: who takes them."""
    config = base.replace({**changes, "system.device": str(on)})
    torch.manual_seed(0)
    training = Training.build(config, data=RandomTokens(config, on))
    run, done, seconds = of(training), [], []
    hardware.reset_peak(on)
    update = hardware.synchronised(lambda: done.append(run.update(len(done))), on)
    for _ in range(count):
        start = time.perf_counter()
        update()
        seconds.append(time.perf_counter() - start)
    # the first compile, and touch the memory
    late = statistics.median(seconds[min(4, count - 1):])
    return {"losses": [one.loss.item() for one in done], "seconds": seconds[:4],
            "grad_norm": done[-1].grad_norm.item(), "median_seconds": late,
            "tokens_per_second": config.tokens_per_step / late,
            "peak_bytes": hardware.peak_bytes(on), "chosen": training.decisions.record}


# ---- what bounds a Linear

def _products(on: torch.device) -> Iterator[Case]:
    yield "ceilings", lambda: vars(hardware.machine(str(on)))
    # each product once, under its first recipe
    kinds = {RECIPES[name].products["y"]: name for name in reversed(runs_here(on))}
    for M, K, N in SHAPES if on.type == "cuda" else ((64, 128, 256),):
        for product, shape in (("y", (M, K, N)), ("dx", (M, N, K)), ("dw", (N, M, K))):
            for name, fast in itertools.product(("bf16", *kinds.values()), (True, False)):
                yield (f"{product} {'x'.join(map(str, shape))}, {name}, {ACCUMULATED[fast]}",
                       partial(_product, name, shape, on, fast))


def _product(name: str, shape: tuple[int, int, int], on: torch.device, fast: bool) -> Found:
    (m, k, n), by = shape, BACKENDS["scaled_mm"]
    a, b = (torch.randn(rows, k, device=on, dtype=torch.bfloat16) for rows in (m, n))
    run: Callable[[], object] = partial(torch.mm, a, b.T)
    if name != "bf16":
        a, b = (by.cast(t, replace(cast, rounding="nearest-even"), t.dtype, amax=None, noise=None)
                for t, cast in zip((a, b), RECIPES[name].products["y"]))
        run = partial(by.product, a, b, torch.bfloat16, fast=fast)
    (seconds,) = interleaved_seconds([hardware.synchronised(run, on)], rounds=30, warm_up=3,
                                     within_seconds=0.5)
    return {"seconds": statistics.median(seconds), "best": min(seconds),
            "flops_per_second": 2 * m * n * k / statistics.median(seconds)}


# ---- kernels, each a case

def _kernels(on: torch.device) -> Iterator[Case]:
    for name in fused.kernels():
        yield name, lambda name=name: {"said": summary(fused.of(name))}


# ---- a whole update

def _steps(on: torch.device) -> Iterator[Case]:
    """GPT-2 124M by the trainer itself, and by nanoGPT from the same weights."""
    gpu = on.type == "cuda"
    base = (preset("gpt2-124m").replace(dict(setting.split("=") for setting in RUN)) if gpu
            else Config().replace(TINY))
    step = partial(_updates, base.replace({"precision.recipe": "bf16"}), on=on,
                   count=34 if gpu else 2)
    blocks = {"system.compile": "blocks"}
    hows: dict[str, Found] = {
        "blocks": blocks, "model": {"system.compile": "model"},
        "eager": {"system.compile": False},
        "blocks, chunked loss": {**blocks, "memory.cross_entropy": "chunked",
                                 "memory.cross_entropy.chunk_tokens": 4096},
        **{f"blocks, {name}": {**blocks, "precision.recipe": name} for name in runs_here(on)}}
    for how, changes in hows.items():
        if gpu or changes["system.compile"] is False:
            yield how, partial(step, changes)
    for how, compiled in (("nanoGPT", False), ("nanoGPT, compiled", True)):
        if gpu or not compiled:
            yield how, partial(step, hows["eager"], of=partial(Peer, compiled=compiled))


PIECES: dict[str, Piece] = {        # in order of value
    "tests": Piece(_tests, 240),
    "recipes": Piece(_recipes, 300),
    "doctor": _lpkit("doctor", seconds=240),
    "steps": Piece(_steps),
    "products": Piece(_products, 240),
    "linear": _lpkit("bench", "fp8-linear", seconds=240),
    "kernels": Piece(_kernels),
    "train": _lpkit("train", "gpt2-124m", "steps=60", *RUN, seconds=240,
                    on_cpu=("steps=3", "data.tokenizer=bytes",
                            *(f"{key}={value}" for key, value in TINY.items()))),
    "fp8-step": _lpkit("bench", "fp8-step"),
    "ledger": _lpkit("bench", "ledger", on_cpu=("--configs", "2")),
}


# ---- resumable

def run(rounds: int = 1, *, out: Path | None = None, seconds: int | None = None) -> list[Result]:
    """`out`: where the pieces write. `seconds`: no piece goes on after these."""
    folder, end = out or FOLDER, time.monotonic() + (seconds or sum(
        2 * piece.seconds for piece in PIECES.values()))
    folder.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    (folder / "provenance.json").write_text(
        json.dumps(provenance(("torch", "triton", "torchao", "numpy"), gpu), indent=1))
    for name, piece in PIECES.items():
        _piece(name, min(piece.seconds, end - time.monotonic()), folder)
    rows, results = [("piece", "cases", "errors", "the first")], []
    facts = {"breakdown": rows, "folder": str(folder)}
    for name, piece in PIECES.items():
        count, lines = sum(1 for _ in piece.cases(_device())), _lines(folder, name)
        bad = [f"{case}: {line['error']}"[:100] for case, line in lines.items() if "error" in line]
        rows.append((name, f"{len(lines)} of {count}", str(len(bad)), next(iter(bad), "")))
        if count:
            results.append(paired(NAME, ours=[len(lines)], peer=[count], case=name, better="lower",
                                  peer_name="all cases", unit="cases", device=gpu, facts=facts))
    return results


def _piece(name: str, seconds: float, folder: Path) -> None:
    """In processes of its own, one after the other while cases are left and each gets one further:
    a case may take its process down."""
    end = time.monotonic() + seconds
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str((folder / "inductor").resolve()),
                   "TRITON_CACHE_DIR": str((folder / "triton").resolve())}
    while (left := end - time.monotonic()) > LEAST_SECONDS or left == seconds:
        before = len(_lines(folder, name))
        print(f"evidence: {name}, {left:.0f} s at most ...", file=sys.stderr)
        code = _ended([*WORKER, name, str(folder), f"{left:.0f}"], left, environment)
        lines = _lines(folder, name)
        for case, line in lines.items():
            if "begun" in line:
                _write(folder, name, case, {"error": f"its process ended with {code}"})
        if code == 0 or len(lines) == before:
            return


def _ended(command: list[str], seconds: float, environment: dict[str, str]) -> int:
    """The exit code; all that it started is gone after `seconds`."""
    with subprocess.Popen(command, env=environment, start_new_session=True) as child:
        try:
            return child.wait(max(seconds, 1))
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return child.wait()
            raise


def _work(name: str, folder: Path, seconds: float) -> int:
    """The child: the cases that are not there yet."""
    end, done = time.monotonic() + 0.9 * seconds, _lines(folder, name)
    for case, measure in PIECES[name].cases(_device()):
        if case in done:
            continue
        if time.monotonic() > end:
            return 0
        _write(folder, name, case, {"begun": time.time()})
        start = time.perf_counter()
        try:
            found = measure()
        except Exception as error:
            where = [f"{Path(frame.filename).name}:{frame.lineno}"
                     for frame in traceback.extract_tb(error.__traceback__)[-4:]]
            found = {"error": f"{type(error).__name__}: {str(error)[:400]}", "where": where}
        _write(folder, name, case, {**found, "took": time.perf_counter() - start})
        print(f"  {case}: {found.get('error', 'done')}"[:150], file=sys.stderr, flush=True)
        if "CUDA error" in found.get("error", ""):      # this process's GPU answers no more
            return 3
        torch.compiler.reset()
    return 0


def _write(folder: Path, name: str, case: str, found: Found) -> None:
    line = json.dumps({"case": case, **found}, default=str)
    append_lines(folder / f"{name}.jsonl", [f"{line}\n"])


def _lines(folder: Path, name: str) -> dict[str, Found]:
    """What each case has found; "begun" in it, where that is all there is."""
    path = folder / f"{name}.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {line["case"]: line for line in lines}


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
