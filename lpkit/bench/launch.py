"""Ranks that fail in every way, and how soon the right one is named; and what their start costs.

`rank` is the function that they run, also in tests/test_launch.py: it reduces a tensor at every
step, and one of them meets a fault on the way.
"""

import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from lpkit.bench.harness import ROUNDS, Result, paired, recorded, steps_in_turns
from lpkit.errors import ConfigError
from lpkit.files import resource
from lpkit.measure import parity
from lpkit.parallel.processes import Place, Processes, WarmParent
from lpkit.parallel.ranks import joined
from lpkit.presets import preset
from lpkit.tables import markdown_table
from lpkit.techniques.layouts import GATHERED, REDUCTIONS, STAGES, UNSHARDED
from lpkit.training.runs import RunFailedError
from lpkit.training.training import Training

TRIALS = 20
END_SECONDS = 5.0           # from a rank's death to the error
TIMEOUT_SECONDS = 2.0       # for a rank without a sign of life;
NAMED_SECONDS = 2.0         # and so much later it is named
START_SECONDS = 3.0         # the first step of two ranks after that of one process
ONE_RANK = 1.02             # at most, times the step without ranks
MARK = "LPKIT_BENCH_LAUNCH"     # in the environment of all that a trial starts
STEP = 5                    # where the fault is
NOTES = 100_000             # calls of `Place.at`
START = """
import sys
import lpkit
config = lpkit.preset("cpu-3m").replace({{
    "steps": 3, "system.device": "cpu", "system.threads": 1, "precision.recipe": "fp32"}})
more = {{"out": sys.argv[1], "observers": [lambda record: print(record.step, flush=True)]}}
{begin}
"""
ONE, TWO = "lpkit.train(config, **more)", "lpkit.launch(config, processes=2, **more).result()"


def _wait(place: Place) -> None:
    while True:
        time.sleep(1)


def _raise(place: Place) -> None:
    raise ValueError("a fault that was planted")


def _refuse(place: Place) -> None:
    raise ConfigError("a setting that cannot be; choose another")


def _fill(place: Place) -> None:
    raise MemoryError


FAULTS: dict[str, Callable[[Place], Any]] = {
    "raises": _raise,
    "refuses": _refuse,
    "meets the end of memory": _fill,
    "exits": lambda place: os._exit(9),
    "is killed": lambda place: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda place: ctypes.string_at(0),
    "is stopped": lambda place: os.kill(os.getpid(), signal.SIGSTOP),
    "holds the lock": lambda place: ctypes.PyDLL(None).sleep(1000),
    "never calls": _wait,
}


def rank(place: Place, told: dict[str, Any]) -> int:
    """Reduce `told["steps"]` times; rank 1 meets `told["fault"]` at STEP."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=place.store, rank=place.rank,
                            world_size=place.world)
    for step in range(1, told.get("steps", 1000) + 1):
        place.at(step, "forward")
        if place.rank == 1 and step == STEP and "fault" in told:
            place.tell({"fault_at": time.monotonic()})
            FAULTS[told["fault"]](place)
        place.at(step, "reduce")
        x = torch.ones(1000)
        dist.all_reduce(x)
        place.tell({"step": step, "sum": float(x[0])})
    return place.rank


def run(rounds: int = ROUNDS) -> list[Result]:
    trials = max(1, round(TRIALS * rounds / ROUNDS))
    results = [_faults("is killed", trials, END_SECONDS, "died at step 5 in forward of SIGKILL"),
               _faults("is stopped", trials, TIMEOUT_SECONDS + NAMED_SECONDS,
                       "gave no sign of life", timeout_seconds=TIMEOUT_SECONDS)]
    starts = [[_first_step(begin) for begin in (ONE, TWO)] for _ in range(rounds)]
    alone, ours = zip(*starts)
    late = [two - one for one, two in zip(alone, ours, strict=True)]
    place = Place()
    noted = timeit.timeit(lambda: place.at(1, "forward"), number=NOTES) / NOTES
    return [*results, paired(
        "launch", ours=late, peer=[START_SECONDS] * rounds, peer_name="allowed", target=1,
        better="lower", case="the first step of two ranks, later than one process's",
        facts={"one_process_seconds": alone, "two_ranks_seconds": ours, "note_seconds": noted}),
        _one_rank(rounds)]


def _faults(fault: str, trials: int, within_seconds: float, sentence: str, **limits: float
            ) -> Result:
    """How often rank 1 was not named in time, or something was left behind."""
    wrong, seconds = [], []
    for trial in range(trials):
        error, took, left = _trial(fault, **limits)
        seconds.append(round(took, 2))
        if not error.startswith(f"rank 1 of 2 {sentence}") or took > within_seconds or left:
            wrong.append(f"trial {trial}, after {took:.2f} s: {error}; left: {left}")
    return paired("launch", ours=[len(wrong)], peer=[trials], peer_name="trials", target=0,
                  better="lower", unit="times", facts={"seconds": seconds, "failures": wrong},
                  case=f"a rank {fault}: not named within {within_seconds:g} s, or something left")


def _trial(fault: str, **limits: float) -> tuple[str, float, list[str]]:
    """The error, how many seconds after the fault it came, and what was left."""
    begun: list[float] = []
    error, mark = "none", secrets.token_hex()
    with patch.dict(os.environ, {MARK: mark}), WarmParent() as parent, Processes(
            f"{__name__}:rank", {"fault": fault}, world=2, parent=parent,
            heard=lambda _, said: begun.append(said.get("fault_at", 0)), **limits) as ranks:
        try:
            ranks.wait()
        except RunFailedError as raised:
            error = str(raised)
        took = time.monotonic() - max(begun)
    left = [str(parent.folder)] if parent.folder.exists() else []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                left.append(" ".join(process.cmdline()))
    return error, took, left


def _first_step(begin: str) -> float:
    """Seconds until a fresh interpreter has taken a step."""
    with tempfile.TemporaryDirectory() as place:
        begun = time.monotonic()
        with subprocess.Popen([sys.executable, "-c", START.format(begin=begin), f"{place}/run"],
                              stdout=subprocess.PIPE, text=True) as process:
            said, seconds = process.stdout.readline(), time.monotonic() - begun
            process.stdout.read()
    if said.strip() != "1":
        raise ConfigError(f"a run did not begin, and said {said!r}; what went wrong is above")
    return seconds


def _one_rank(rounds: int) -> Result:
    """A world of one rank beside no ranks, an update of one after an update of the other: losses
    and weights are the same bits."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    config = preset("gpt2-124m" if gpu else "cpu-3m").replace({
        "global_batch": 4, "grad_accum_steps": 1, "model.context": 256})
    with tempfile.TemporaryDirectory() as place, joined(
            config, rank=0, world=1, local_rank=0, local_world=1,
            init_method=f"file://{place}/store") as ranks:
        runs = {"ours": Training.build(config, ranks=ranks), "peer": Training.build(config)}
        seconds, losses = steps_in_turns(runs, 5 * rounds, warm_up=3)
    weights = [torch.cat([p.detach().flatten() for p in run.model.parameters()])
               for run in runs.values()]
    if losses["ours"] != losses["peer"] or not torch.equal(*weights):
        raise AssertionError(f"one rank and none differ: {losses}")
    return paired("launch", **seconds, peer_name="no ranks", target=ONE_RANK, better="lower",
                  case="a step of one rank, to the bit that of none", device=gpu)


# The page docs/parallel.md.

INTRODUCTION = """\
# Several processes

    lpkit train cpu-3m --processes 2
    lpkit train cpu-3m --processes 2 parallel.shard=2 parallel.zero=3
    lpkit train gpt2-124m --processes 8 parallel.shard=8 parallel.gathered=fp8 \\
        precision.recipe=fp8-tensorwise
    torchrun --nproc-per-node 8 -m lpkit train gpt2-124m parallel.shard=8

and in a notebook `handle = lpkit.launch(config, processes=2)`, which returns what `lpkit.start` does.
A checkpoint goes on in any layout: `--resume` with another `parallel`. `lpkit.predict_trace(config,
world, layout=...)` rehearses a layout in one process, and `lpkit.predict.messages` has what its
ranks send. `accelerate launch --multi_gpu --num_processes 2 -m lpkit train` does what torchrun does,
also on CPUs; there `accelerate launch --cpu` starts one process and says nothing, and `lpkit` then
refuses, and says how to start two. `--processes` holds no port; where torchrun ends with EADDRINUSE,
`--standalone` finds a free one.

## Where model states lie

`parallel.data` counts replicas, `parallel.shard` the ranks that keep a part each, by
`parallel.zero`. With both, a model is sharded inside groups, and the groups are replicas (hybrid
sharding).

"""


RECORDED = {
    "launch": "\n## Faults and starts\n\n`lpkit bench launch` kills and stops ranks, and counts how "
              "often the right one was not named in time, or a process or a folder was left.\n\n",
    "fsdp2": "\n## Beside accelerate\n\n`lpkit bench fsdp2` takes the same updates by ZeRO 3 and by "
             "accelerate's FSDP2, in turns; their losses are held to one another. Seconds are medians; "
             "what is met is the median of the ratios of pairs.\n\n"}


def page() -> str:
    """Parity is computed now, by up to 4 processes; faults and starts are as last recorded."""
    rows = lambda table: [(f"`{name}`", row.why, row.source) for name, row in table.items()]
    refused = [(f"`{row.key}`", f"`{row.only}`", f"ZeRO {row.stage}" if row.stage else "any",
                row.why) for row in UNSHARDED]
    parts = [
        INTRODUCTION,
        markdown_table(("`parallel.zero`", "", ""), rows(STAGES)),
        "\n\nWhole gradients (ZeRO 0 and 1) travel by `parallel.reduction`:\n\n",
        markdown_table(("`parallel.reduction`", "", "source"), rows(REDUCTIONS)),
        "\n\nand weights that are gathered (ZeRO 2 and 3) as `parallel.gathered` says:\n\n",
        markdown_table(("`parallel.gathered`", "", "source"), rows(GATHERED)),
        "\n\nNot everything goes with several ranks yet:\n\n",
        markdown_table(("setting", "must be", "from", "because it"), refused),
        "\n\n## The same numbers\n\n", parity.page(parity.measure())]
    for bench, words in RECORDED.items():
        parts += _recorded(bench, words)
    return "".join(parts).rstrip("\n") + "\n"


def _recorded(bench: str, words: str) -> list[str]:
    """Nothing where nobody has measured it."""
    parts = []
    for path in sorted(resource("data/measured").glob(f"{bench}-*.json")):
        result = json.loads(path.read_text())
        lines = [(one["case"], f"{one['ours_median']:.3g} {one['unit']}",
                  f"{one['peer_median']:.3g} {one['peer']}", one["verdict"])
                 for one in result["cases"]]
        parts += ["#", "\n".join(recorded(result)), "\n",
                  markdown_table(("", "median", "beside", ""), lines), "\n"]
    return [words, *parts] if parts else []


if __name__ == "__main__":
    print(page(), end="")
