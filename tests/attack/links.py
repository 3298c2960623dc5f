"""Links and planted files all over a run folder and the kernel cache. What trains, samples and
cleans up there changes nothing elsewhere, and each time does what is right or says one sentence."""

import faulthandler
import json
import os
import random
import shutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import lpkit.training.loop  # noqa: F401  (in the process that is forked, and not in each)
from lpkit import hardware
from lpkit.config import Config
from lpkit.datasets.tokens import prepare_into
from lpkit.errors import ConfigError
from lpkit.kernels import cast, compile_c
from lpkit.measure import telemetry
from lpkit.training.background import Handle, train
from lpkit.training.control import Control
from lpkit.training.runs import Run, RunFailedError
from lpkit.training.sampling import sample
from tests.attack import Outcome

COUNT, FEW = 100, 8
SECONDS = 60        # for a trial; a pipe would keep its reader for ever
SMALL = {"model.layers": 1, "model.width": 16, "model.heads": 2, "model.context": 16, "steps": 6,
         "global_batch": 2,
         "eval_every": 0, "eval_batches": 1, "checkpoint_every": 1, "keep_checkpoints": 2,
         "precision.recipe": "fp32",
         "precision.telemetry_every": 2, "system.device": "cpu", "system.threads": 1}
OLDER, NEWER, NEXT = "step-00000003", "step-00000004", "step-00000005"
NAMES = [
    "config.yaml", "environment.json", "metrics.jsonl", "summary.json", "tokenizer.json",
    "telemetry.jsonl", ".lock",
    ".config.yaml.ab12cd34.tmp", "checkpoints", "checkpoints/latest", "checkpoints/quarantine",
    f"checkpoints/{OLDER}", f"checkpoints/{NEWER}", f"checkpoints/{NEXT}",
    f"checkpoints/.{NEXT}.tmp", f"checkpoints/.{OLDER}.tmp",
    f"checkpoints/{NEWER}/manifest.json", f"checkpoints/{NEWER}/state.json",
    f"checkpoints/{NEWER}/tensors.safetensors",
    f"checkpoints/{OLDER}/state.json", f"checkpoints/{NEWER}/more", "checkpoints/.more.tmp"]


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, whole = Outcome(), folder / "whole"
    (folder / "corpus.txt").write_text("".join(f"{i} bottles of beer on the wall\n"
        for i in range(20_000)))
    config = Config().replace(SMALL | {"data.source": str(folder / "corpus.txt")})
    answer = _forked(lambda: _prepare(config, folder), folder)
    if answer != {"prepare": ["done", None]}:
        raise RuntimeError(answer)
    config = Config.from_yaml((whole / "run" / "config.yaml").read_text())
    want = _forked(lambda: _use(config, whole), folder)
    assert all(how == "done" for how, _ in want.values()), want
    for number in range(count):
        rng, trial = random.Random(f"{seed} {number}"), folder / "trial"
        shutil.copytree(folder / "half", trial, copy_function=shutil.copy2)
        _outside(trial)
        meanwhile, plants = None, []
        if number % 4 == 3:
            path, kind = trial / "run" / rng.choice(NAMES), rng.choice(
                sorted(ONLY_HERE & set(LINKS)))
            meanwhile = partial(LINKS[kind], path, trial / "outside", rng)
            plants.append(f"at step 5, {path.relative_to(trial)} becomes {kind}")
        else:
            plants += [_plant(trial, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
        about = f"seed {seed}, trial {number}: {'; '.join(plants)}"
        before, begun = _seen(trial / "outside"), time.monotonic()
        results = _forked(partial(_use, config, trial, meanwhile), folder)
        outcome.tried += 1
        slowest = max(time.monotonic() - begun, outcome.facts.get("slowest_trial_seconds", 0.0))
        outcome.facts["slowest_trial_seconds"] = round(slowest, 2)
        for what in sorted({*before} | {*(after := _seen(trial / "outside"))}):
            if before.get(what) != after.get(what):
                outcome.failed("something outside was changed",
                               f"{about}: {what}: {before.get(what)} {after.get(what)}"[:600])
        for what, (how, value) in results.items():
            if how == "sentence" and "\n" not in value:
                outcome.facts["sentences"] = outcome.facts.get("sentences", 0) + 1
            elif how != "done":
                outcome.failed(f"not a sentence: {how}", f"{about}: {what}: {value}"[-1500:])
            elif (what != "telemetry" and results["train"][0] == "done"
                  and [how, value] != want[what]):
                outcome.failed("a wrong result", f"{about}: {what}: {value} for {want[what]}"[:600])
        _remove(trial)
    return outcome


def _prepare(config: Config, folder: Path) -> dict[str, Any]:
    """`half` and `whole`: a run that was stopped after 4 steps, and a cache."""
    compile_c.load("cast")
    compiled = compile_c.own_cache()
    os.environ["XDG_CACHE_HOME"] = str(folder / "half" / "cache")
    if compiled.is_dir():
        shutil.copytree(compiled, compile_c.own_cache())
    source = prepare_into(folder / "tokens", config.data, config.model.vocab).folder
    control = Control()
    Handle(config.replace({"data.source": str(source)}), out=folder / "half" / "run",
           control=control,
           observers=[lambda record: control.stop() if record.step == 4 else None]).begin().result()
    shutil.copytree(folder / "half", folder / "whole")
    return {"prepare": ["done", None]}


def _use(config: Config, place: Path, meanwhile: Callable[[], None] | None = None) -> dict[str,
        Any]:
    """What an owner does with a run, while somebody else does `meanwhile`; and what came of it."""
    os.environ["XDG_CACHE_HOME"] = str(place / "cache")
    run, results = place / "run", {}

    def trained() -> list[float]:
        train(config, out=run, resume=True,
              observers=[lambda record: meanwhile and record.step == 5 and meanwhile()])
        return [line["loss"] for line in Run.open(run).metrics]

    for name, work in {
        "train": trained,
        "sample": lambda: sample(run, tokens=8), "telemetry": lambda: len(telemetry.read(run)),
        "checkpoint": lambda: Run.open(run).summary.get("last_checkpoint"),
    }.items():
        try:
            results[name] = ["done", work()]
        except (ConfigError, RunFailedError) as error:
            results[name] = ["sentence", str(error)]
        except Exception as error:
            results[name] = [type(error).__name__, traceback.format_exc()]
    return results


def _forked(work: Callable[[], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What `work` returns, from a process of its own that has been there only for it."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    sys.stdout.flush(), sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()      # one that dies is counted, and need not be described
        torch.set_num_threads(1)
        for known in (compile_c._opened, cast._library):    # else the cache is not looked at again
            known.cache_clear()
        # half a second, and nothing is attacked there
        hardware.peak_flops = lambda *_: (1e12, "not measured")
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        try:
            answer.write_text(json.dumps(work()))
        except BaseException:
            answer.write_text(json.dumps({"process": ["broken", traceback.format_exc()]}))
        os._exit(0)
    end = time.monotonic() + SECONDS
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return {"process": ["hung", f"after {SECONDS} seconds"]}
        time.sleep(0.005)
    if ended[1]:
        return {"process": ["died", f"{os.waitstatus_to_exitcode(ended[1])}"]}
    return json.loads(answer.read_text())


# ---- what nobody may touch

def _outside(trial: Path) -> None:
    outside = trial / "outside"
    shutil.copytree(trial / "run" / "checkpoints", outside / "checkpoints")
    (outside / "folder" / "deep").mkdir(parents=True)
    (outside / "folder" / "deep" / "file").write_text("deep")
    (outside / "victim").write_text('{"step": 1}\na line without its e')
    (outside / "private").write_text("private")
    (outside / "private").chmod(0o600)
    for path in [*sorted(outside.rglob("*"), reverse=True), outside]:
        os.utime(path, (1_000_000_000, 1_000_000_000))


def _seen(folder: Path) -> dict[str, Any]:
    """Names, kinds and modes, times and contents of all below and of itself."""
    seen = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        content = path.read_bytes().hex()[:2000] if stat.S_ISREG(status.st_mode) else None
        seen[str(path.relative_to(folder.parent))] = [oct(status.st_mode), status.st_mtime_ns,
            status.st_size, content]
    return seen


# ---- what is planted

def _plant(trial: Path, rng: random.Random) -> str:
    kinds = [*LINKS] * 3 + [*OTHERS]
    kind = rng.choice(kinds)
    if kind in OTHERS:
        return OTHERS[kind](trial, rng) or kind
    path = trial / "run" / rng.choice(NAMES)
    if path.parent.is_symlink() or not path.parent.is_dir():
        return "nothing"
    LINKS[kind](path, trial / "outside", rng)
    return f"{path.relative_to(trial)} is {kind}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link(path: Path, target: Path | str) -> None:
    _remove(path)
    path.symlink_to(target)


def _moved(path: Path, outside: Path, rng: random.Random) -> None:
    """What it was lies outside now, and is found through a link."""
    far = outside / f"moved-{rng.randrange(10**9)}"
    if os.path.lexists(path):
        path.rename(far)
    _link(path, far)


def _hard(path: Path, outside: Path, rng: random.Random) -> None:
    if path.is_file():
        os.link(path, outside / f"shared-{rng.randrange(10**9)}")
    else:
        _remove(path)
        os.link(outside / "victim", path)


def _pipe(path: Path, outside: Path, rng: random.Random) -> None:
    _remove(path)
    os.mkfifo(path)


def _folder(path: Path, outside: Path, rng: random.Random) -> None:
    _remove(path)
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_text("a file")
    (path / "link").symlink_to(outside / "folder")


def _loop(path: Path, outside: Path, rng: random.Random) -> None:
    other = path.with_name(f"{path.name}-other")
    _link(other, path)
    _link(path, other)


LINKS = {
    "a link to a file": lambda path, outside, rng: _link(path,
        outside / rng.choice(("victim", "private"))),
    "a link to a folder": lambda path, outside, rng: _link(path,
        outside / rng.choice(("folder", "checkpoints", f"checkpoints/{OLDER}"))),
    "a link up and down": lambda path, outside, rng: _link(path,
        os.path.relpath(outside / "victim", path.parent)),
    "a link to its folder": lambda path, outside, rng: _link(path, "."),
    "a dangling link": lambda path, outside, rng: _link(path, outside / "new"),
    "a link to what it was": _moved, "a hard link": _hard, "a loop": _loop, "a pipe": _pipe,
    "a folder with a link": _folder,
    "a link to a device": lambda path, outside, rng: _link(path,
        rng.choice(("/dev/null", "/dev/zero", "/dev/full"))),
}

# nothing is planted elsewhere too
ONLY_HERE = {*LINKS} - {"a link to what it was", "a hard link"}


def _latest(trial: Path, rng: random.Random) -> None:
    (trial / "run" / "checkpoints" / "latest").write_text(
        rng.choice(("../..\n", "/\n", "../../outside/checkpoints/" + OLDER, "\0")))


def _manifest(trial: Path, rng: random.Random) -> str:
    """A manifest that names a file elsewhere, or is itself elsewhere."""
    path = trial / "run" / "checkpoints" / NEWER / "manifest.json"
    if not path.is_file():
        return "nothing"
    manifest = json.loads(path.read_text())
    name = rng.choice(("../../../outside/victim", str(trial / "outside" / "victim"), "..",
                       "state.json/../../x"))
    manifest["files"][name] = manifest["files"].pop("state.json")
    path.write_text(json.dumps(manifest))
    return f"a manifest that names {name}"


def _quarantined(trial: Path, rng: random.Random) -> None:
    """A damaged checkpoint, and links where it would go."""
    root = trial / "run" / "checkpoints"
    if (root / NEWER).is_dir() and not (root / "quarantine").is_symlink() and not root.is_symlink():
        (root / NEWER / "state.json").write_text("{}")
        _remove(root / "quarantine")
        (root / "quarantine").mkdir()
        (root / "quarantine" / NEWER).symlink_to(
            rng.choice(("../../../outside/folder", "../../../outside/new")))


def _kernel(change: Callable[[Path, Path], Any]) -> Callable[[Path, random.Random], None]:
    def plant(trial: Path, rng: random.Random) -> None:
        for path in [*(trial / "cache" / "lpkit" / compile_c.own_cache().name).glob("*.so")]:
            if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                change(path, trial / "outside")

    return plant


def _given_away(path: Path, outside: Path) -> None:
    try:
        os.chown(path, 12345, -1)
    except PermissionError:     # only root may
        path.chmod(0o606)


OTHERS = {
    "latest leads up": _latest, "a manifest leads up": _manifest,
    "quarantine leads up": _quarantined,
    "a truncated kernel": _kernel(lambda path, outside: os.truncate(path,
        path.stat().st_size // 3)),
    "a kernel for all to write": _kernel(lambda path, outside: path.chmod(0o666)),
    "another's kernel": _kernel(_given_away),
    "a linked kernel": _kernel(lambda path, outside: _link(path, outside / "victim")),
    "an endless kernel": _kernel(lambda path, outside: _link(path, "/dev/zero")),
    "a kernel that is text": _kernel(lambda path, outside: path.write_text("text")),
    "a linked folder of kernels": _kernel(lambda path, outside: _moved(path.parent, outside,
        random.Random(0))),
}
