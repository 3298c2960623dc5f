"""One process that has imported everything, and a fork of it for each trial: milliseconds instead of seconds.

A child may hang, die or write where it should not, and the next trial knows nothing of it. What it writes outside its folder
is told by Python's own audit events.
"""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WRITES = {"os.mkdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.rmdir": (0,), "os.truncate": (0,), "os.symlink": (1,),
          "os.link": (1,), "os.chmod": (0,)}
HARMLESS = ("/dev/null", "/dev/tty")


def forked(module: str, trials: list[Any], folder: Path, seconds: float) -> Iterator[dict[str, Any]]:
    """`module.trial(one)` for each in a fork: {code, out, err, seconds, wrote, died}; `code` is what it returned. It stands in
    `folder`/work, and has `folder`/home."""
    done = subprocess.run([sys.executable, "-m", "tests.attack._forks", module, str(folder), str(seconds)], cwd=ROOT, text=True,
                          input=json.dumps(trials), stdout=subprocess.PIPE, check=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    return map(json.loads, done.stdout.splitlines())


def _child(trial: Any, module: Any, folder: Path) -> None:
    os.setpgid(0, 0)
    os.chdir(folder / "work")
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    wrote = os.open(folder / "wrote", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, arguments: tuple) -> None:
        places = [arguments[i] for i in WRITES.get(event, ())]
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            places = [arguments[0]]
        for place in places:
            if isinstance(place, (str, bytes, os.PathLike)):
                path = os.path.abspath(os.fsdecode(place))
                if not path.startswith((f"{folder}/", *HARMLESS)):
                    os.write(wrote, f"{event} {path!r}\n".encode())

    sys.addaudithook(hook)
    code = module.trial(trial)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _trial(trial: Any, module: Any, folder: Path, seconds: float) -> dict[str, Any]:
    (folder / "work").mkdir()
    started, before = time.monotonic(), _tree(folder)
    child = os.fork()
    if not child:
        try:
            _child(trial, module, folder)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        os._exit(99)
    found, status = 0, 0
    while not found and time.monotonic() < started + seconds:
        found, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.001)
    took = time.monotonic() - started
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not found:
        os.waitpid(child, 0)
    told = {name: (folder / name).read_text(errors="backslashreplace") if (folder / name).exists() else ""
            for name in ("out", "err", "wrote")}
    left = [name for name in _tree(folder) if name not in {*before, "out", "err", "wrote"}]
    shutil.rmtree(folder / "work")
    return told | {"code": os.waitstatus_to_exitcode(status) if found else None, "seconds": took, "left": left}


def main() -> None:
    module, folder, seconds = importlib.import_module(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    home = folder / "home"
    home.mkdir(exist_ok=True)
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(home)}
    trials = json.load(sys.stdin)
    module.warm()
    for trial in trials:
        print(json.dumps(_trial(trial, module, folder, seconds)), flush=True)


if __name__ == "__main__":
    main()
