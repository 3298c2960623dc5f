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
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lpkit import hardware
from lpkit.bench import BENCHES
from lpkit.bench.harness import Result, paired, provenance
from lpkit.config import Config
from lpkit.files import append_lines
from lpkit.precision.backends import BACKENDS
from lpkit.presets import preset
from lpkit.techniques.recipes import RECIPES
from lpkit.timing import interleaved_seconds
from lpkit.training.loop import fit
from lpkit.training.training import RandomTokens, Training

NAME, FOLDER, PIECE_SECONDS = "evidence", Path("runs/evidence"), 470
LEAST_SECONDS = 20      # left, for a piece to begin
WORKER = [sys.executable, "-m", "lpkit.bench.evidence"]
TESTS = Path(__file__).parents[2] / "tests"
Case = tuple[str, Callable[[], dict[str, Any]]]

# M tokens, K, N of a Linear: docs of the benches beside them, GPT-2 124M's and Llama 8B's
SHAPES = ((16_384, 4096, 16_384), (65_536, 1664, 6656), (16_384, 768, 3072), (8192, 4096, 28_672))
SMALL: dict[str, Any] = {"model.layers": 2, "model.width": 768, "model.heads": 12,
                         "model.context": 512, "global_batch": 8}
TINY: dict[str, Any] = {"model.layers": 2, "model.width": 128, "model.heads": 2,
                        "model.context": 128, "model.vocab": 512, "global_batch": 1}


@dataclass(frozen=True)
class Piece:
    """`cases(on)` of the device; `seconds` at most."""

    cases: Callable[[torch.device], Iterator[Case]]
    seconds: int = PIECE_SECONDS


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _synchronise(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


# ---- commands that exist: what they print is the row

def _command(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    out = done.stdout.strip()
    if done.returncode == 0 and out.startswith("{"):
        return {"said": json.loads(out)}
    return {"exit_code": done.returncode, "said": out[-4000:], "error": done.stderr[-1000:]}


def _commands(on: torch.device, commands: dict[str, tuple[str, ...]]) -> Iterator[Case]:
    return ((key, partial(_command, *words)) for key, words in commands.items())


def _benches(names: tuple[str, ...], on: torch.device) -> Iterator[Case]:
    few = {"ledger": ("--configs", "2")} if on.type == "cpu" else {}
    return _commands(on, {name: ("lpkit", "bench", name, "--json", *few.get(name, ()))
                          for name in names if name in BENCHES})


def _tests(on: torch.device) -> Iterator[Case]:
    """The GPU's own, file by file; none where this is no checkout."""
    of_gpu = [path for path in sorted(TESTS.glob("test_*.py"))
              if re.search(r"^pytestmark.*mark\.gpu|^@pytest\.mark\.gpu", path.read_text(), re.M)]
    return _commands(on, {path.stem: ("pytest", "-q", "-m", "gpu", "--tb=short", str(path))
                          for path in of_gpu})


# ---- every recipe by every backend, before anything is timed

def _recipes(on: torch.device) -> Iterator[Case]:
    kinds = [("bf16", "auto"), *((name, backend) for name, row in RECIPES.items() if row.products
                                 for backend in ("scaled_mm", "torchao", "emulated"))]
    for compiled, (recipe, backend) in itertools.product((False, True), kinds):
        if compiled and (on.type == "cpu" or backend == "emulated"):
            continue
        changes = {"precision.recipe": recipe, "precision.backend": backend,
                   "system.compile": compiled}
        yield (f"{recipe}, {backend}, {'compiled' if compiled else 'eager'}",
               partial(_updates, {**(SMALL if on.type == "cuda" else TINY), **changes}, on, 3))


def _updates(changes: dict[str, Any], on: torch.device, count: int) -> dict[str, Any]:
    """Of one Training on random tokens: losses, seconds, the most memory."""
    config = Config().replace({**changes, "system.device": str(on)})
    torch.manual_seed(0)
    data = RandomTokens(config, on)
    assert data.drawn
    training, losses, seconds = Training.build(config, data=data), [], []
    hardware.reset_peak(on)
    for step in range(count):
        start = time.perf_counter()
        done = training.update(step)
        _synchronise(on)
        seconds.append(time.perf_counter() - start)
        losses.append(done.loss)
    late = seconds[min(4, count - 1):]      # the first compile, and touch the memory
    return {"losses": [loss.item() for loss in losses], "grad_norm": done.grad_norm.item(),
            "seconds": seconds[:4], "median_seconds": statistics.median(late),
            "tokens_per_second": config.tokens_per_step / statistics.median(late),
            "peak_bytes": hardware.peak_bytes(on), "chosen": training.decisions.record}


# ---- what bounds a Linear

def _products(on: torch.device) -> Iterator[Case]:
    gpu = on.type == "cuda"
    yield "ceilings", lambda: vars(hardware.machine(str(on)))
    for M, K, N in SHAPES if gpu else ((64, 128, 256),):
        for product, (m, k, n) in (("y", (M, K, N)), ("dx", (M, N, K)), ("dw", (N, M, K))):
            kinds = {"bf16": partial(hardware.product, (m, k), (k, n), "bf16", on),
                     "int8": partial(hardware.product, (m, k), (k, n), "int8", on)}
            for fast in (False, True):
                words = "fast accumulation" if fast else "full accumulation"
                kinds[f"fp8 a tensor, {words}"] = partial(
                    hardware.product, (m, k), (k, n), "fp8", on, fast=fast)
                kinds[f"fp8 a row, {words}"] = partial(_scaled, "row", m, k, n, on, fast)
            kinds["fp8 1x128"] = partial(_scaled, "1x128", m, k, n, on, False)
            for kind, make in kinds.items():
                yield f"{product} {m}x{k}x{n}, {kind}", partial(_product, make, 2 * m * n * k)


def _product(make: Callable[[], Callable[[], object]], flops: int) -> dict[str, float]:
    (seconds,) = interleaved_seconds([make()], rounds=30, warm_up=3, within_seconds=2)
    return {"seconds": statistics.median(seconds), "best": min(seconds),
            "flops_per_second": flops / statistics.median(seconds)}


def _scaled(how: str, m: int, k: int, n: int, on: torch.device,
            fast: bool) -> Callable[[], object]:
    a, b = (torch.randn(shape, device=on).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    if how == "row":
        rows, columns = torch.rand(m, 1, device=on) + 1, torch.rand(1, n, device=on) + 1
        return hardware.synchronised(lambda: torch._scaled_mm(
            a, b.T, rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast), on)
    kind = F.ScalingType.BlockWise1x128
    left, right = (torch.rand(k // 128, size, device=on).T + 1 for size in (m, n))
    # the sum with 1 keeps the strides: column by column, as cuBLASLt wants them
    return hardware.synchronised(lambda: F.scaled_mm(a, b.T, left, kind, right, kind,
                                                     output_dtype=torch.bfloat16), on)


# ---- a whole update, and a run

def _steps(on: torch.device) -> Iterator[Case]:
    """GPT-2 124M, 16 x 1024 tokens a micro-batch, by the trainer itself."""
    base = {**_gpt2(on), "precision.recipe": "bf16"}
    native = [name for name, row in RECIPES.items()
              if row.products and not BACKENDS["scaled_mm"].why_not(name, row, on)]
    hows: dict[str, dict[str, Any]] = {
        "blocks": {"system.compile": "blocks"}, "model": {"system.compile": "model"},
        "eager": {"system.compile": False},
        "blocks, chunked loss": {"system.compile": "blocks", "memory.cross_entropy": "chunked",
                                 "memory.cross_entropy.chunk_tokens": 4096},
        **{f"blocks, {name}": {"system.compile": "blocks", "precision.recipe": name}
           for name in native}}
    for how, changes in hows.items():
        if on.type == "cuda" or changes["system.compile"] is False:
            yield how, partial(_updates, {**base, **changes}, on, 34 if on.type == "cuda" else 2)


def _gpt2(on: torch.device) -> dict[str, Any]:
    """As changes of the plain Config."""
    from lpkit.config import flat

    if on.type == "cpu":
        return dict(TINY)
    there, plain = flat(preset("gpt2-124m")), flat(Config())
    return {**{key: value for key, value in there.items() if value != plain.get(key)},
            "global_batch": 16, "grad_accum_steps": 1, "model.context": 1024}


def _run(on: torch.device) -> Iterator[Case]:
    """Updates by the loop, with its data, its log and its energy."""
    def run() -> dict[str, Any]:
        config = Config().replace({**_gpt2(on), "system.device": str(on), "eval_every": 0,
                                   "eval_batches": 1, "checkpoint_every": 0,
                                   "steps": 60 if on.type == "cuda" else 3})
        with tempfile.TemporaryDirectory(prefix="lpkit-evidence-") as folder:
            done = fit(Training.build(config), Path(folder) / "run")
            return {"summary": {key: value for key, value in done.summary.items()
                                if key != "run_dir"},
                    "step_seconds": [line["step_seconds"] for line in done.metrics]}

    yield "train", run


PIECES: dict[str, Piece] = {        # in order of value
    "tests": Piece(_tests, 240),
    "recipes": Piece(_recipes, 300),
    "doctor": Piece(partial(_commands, commands={"doctor": ("lpkit", "doctor", "--json")}), 240),
    "steps": Piece(_steps),
    "products": Piece(_products, 240),
    "linear": Piece(partial(_benches, ("fp8-linear",)), 240),
    "kernels": Piece(partial(_benches, ("kernels",))),
    "train": Piece(_run, 240),
    "fp8-step": Piece(partial(_benches, ("fp8-step",))),
    "ledger": Piece(partial(_benches, ("ledger",))),
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
    for name, piece in PIECES.items():
        all_of_them, lines = [key for key, _ in piece.cases(_device())], _lines(folder, name)
        bad = [line for line in lines.values() if "error" in line]
        first = f"{bad[0]['case']}: {bad[0]['error']}"[:100] if bad else ""
        rows.append((name, f"{len(lines)} of {len(all_of_them)}", str(len(bad)), first))
        if all_of_them:
            results.append(partial(paired, NAME, ours=[len(lines)], peer=[len(all_of_them)],
                                   peer_name="all cases", case=name, better="lower",
                                   unit="cases", device=gpu))
    return [result(facts={"breakdown": rows, "folder": str(folder)}) for result in results]


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
        for case in _begun(folder, name) - _lines(folder, name).keys():
            _write(folder, name, case, {"error": f"its process ended with {code}"})
        if code == 0 or len(_lines(folder, name)) == before:
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


def _write(folder: Path, name: str, case: str, found: dict[str, Any]) -> None:
    line = json.dumps({"case": case, **found}, default=str)
    append_lines(folder / f"{name}.jsonl", [f"{line}\n"])


def _all(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _lines(folder: Path, name: str) -> dict[str, dict[str, Any]]:
    """What each case that ended has found."""
    return {line["case"]: line for line in _all(folder, name) if "begun" not in line}


def _begun(folder: Path, name: str) -> set[str]:
    return {line["case"] for line in _all(folder, name) if "begun" in line}


if __name__ == "__main__":
    sys.exit(_work(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
