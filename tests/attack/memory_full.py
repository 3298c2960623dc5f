"""Runs whose memory ends at a random moment: each says so, its newest checkpoint is whole, and it
goes on as if nothing had happened.

The moment is an operation of PyTorch's, by its number from the start of `train`. There it fails by
itself, in the words of one of the allocators; or from there on the process may have no more memory
than it has (RLIMIT_AS), and fails where it wants more.
"""

import json
import random
import traceback
from collections import Counter
from pathlib import Path

from lpkit.config import Config
from lpkit.training import checkpoint
from lpkit.training.runs import Run
from tests.attack import Outcome
from tests.attack._nursery import Nursery, nursery

COUNT, FEW = 25, 2      # runs
TINY = {"model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64,
        "global_batch": 16, "steps": 12,
        "eval_every": 4, "eval_batches": 1, "checkpoint_every": 2, "precision.recipe": "fp32",
        "schedule.warmup_steps": 1,
        "system.device": "cpu", "system.threads": 1, "system.compile": False}
ERRORS = ("OutOfMemoryError", "RuntimeError", "MemoryError")


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, rng, ends = Outcome(), random.Random(seed), Counter()
    (folder / "corpus.txt").write_text("".join(f"{i} bottles of beer on the wall\n"
        for i in range(4000)))
    settings = TINY | {"data.source": str(folder / "corpus.txt"), "data.val_fraction": 0.5}
    (folder / "config.yaml").write_text(Config().replace(settings).to_yaml())
    # large tensors are the system's again at once, so that a limit is felt in the next operation
    with nursery(folder, "tests.attack.memory_full:child", MALLOC_MMAP_THRESHOLD_="65536") as forks:
        whole = _run(forks, folder / "whole", {})
        want = _end(folder / "whole")
        for trial in range(count):
            job = {"at": rng.randrange(1, whole["operations"]), "error": rng.choice((*ERRORS, "")),
                   "room": rng.randrange(2**21)}
            out = folder / str(trial)
            result = _run(forks, out, job)
            problem = _problem(result, out)
            begun = "the run" if (out / "summary.json").exists() else "what comes before"
            ends[problem or f"{begun} ended: {result['end']}"] += 1
            if problem is None:
                result = _run(forks, out, {})
                if result["end"] != "complete" or _end(out) != want:
                    problem = "does not go on bit for bit"
            if problem is not None:
                outcome.failed(problem,
                               f"seed {seed}, trial {trial}, {job}: {result['message'][-1500:]}")
            outcome.tried += 1
    outcome.facts |= ends
    return outcome


def _run(forks: Nursery, out: Path, job: dict) -> dict:
    if code := forks.lpkit(json.dumps(job | {"out": str(out)})):
        return {"end": "died", "message": f"exit code {code}: {forks.printed}", "operations": 0}
    return json.loads(forks.printed.splitlines()[-1])


def _end(out: Path) -> tuple:
    loaded, _ = checkpoint.load_latest(Run.open(out).checkpoints)
    return [line["loss"] for line in Run.open(out).metrics], {name: t.tolist()
        for name, t in loaded.tensors.items()}


def _problem(result: dict, out: Path) -> str | None:
    """What is wrong with how a run ended whose memory did."""
    if result["end"] not in ("complete", "a sentence"):
        return f"ended in {result['end']}"
    if result["end"] == "complete" or not (out / "config.yaml").exists():
        return None         # there was enough; or it had not begun
    run = Run.open(out)
    if run.metrics and not run.summary:
        return "left no summary"
    if run.summary and run.summary["status"] != "failed":
        return f"left the status {run.summary['status']}"
    report = run.summary.get("out_of_memory")
    if (run.summary and not (report and report["held"].get("weights")
                             and report["predicted"]["peak_bytes"] and report["ways"])):
        return "left no report"
    for newest in checkpoint.folders(run.checkpoints)[:1]:
        try:
            checkpoint.verify(newest)
        except Exception:
            return "left a damaged checkpoint"
    return None


# ---- in the nursery

def child(words: list[str]) -> None:
    """A run whose memory ends as the job in `words` says; prints how that went, last."""
    from lpkit.errors import ConfigError
    from lpkit.training.background import train
    from lpkit.training.runs import RunFailedError

    job, message = json.loads(words[0]), ""
    fails = _ends(job)
    try:
        with fails:
            train(Config.from_yaml(Path("config.yaml").read_text()), out=job["out"], resume=True)
        end = "complete"
    except (ConfigError, RunFailedError) as error:
        end, message = "a sentence", str(error)
    except BaseException as error:
        end, message = f"a traceback of {type(error).__name__}", traceback.format_exc()
    fails.lift()
    print("\n" + json.dumps({"end": end, "message": message, "operations": fails.operations}))


def _ends(job: dict):
    """A mode in which memory ends at the operation of that number."""
    import resource

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from lpkit.machine_facts import status_bytes

    errors = {"OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to "
        "allocate 2.00 GiB"),
           "RuntimeError": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. "
                                                "DefaultCPUAllocator: "
                                                "can't allocate memory: you tried to allocate "
                                                "2147483648 bytes"),
           "MemoryError": MemoryError}

    class Ends(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            if self.operations == job.get("at"):
                if job["error"]:
                    raise errors[job["error"]]()
                resource.setrlimit(resource.RLIMIT_AS,
                                   (status_bytes("VmSize") + job["room"], resource.RLIM_INFINITY))
            return func(*args, **(kwargs or {}))

        def lift(self) -> None:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return Ends()
