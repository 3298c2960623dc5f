"""Commands in processes that cost milliseconds: one imports what they need, and forks for each of
them."""

import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_SECONDS = 120
# The smallest training that has everything a run has.
SMALL = {"model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32, "steps": 120,
         "global_batch": 4,
         "eval_every": 0, "eval_batches": 1, "checkpoint_every": 2, "precision.recipe": "fp32",
         "system.device": "cpu", "system.threads": 1}


# What changes files, as Python's own audit says it, and which of its arguments are their paths.
WRITES = {"os.mkdir": (0,), "os.remove": (0,), "os.rename": (0, 1), "os.rmdir": (0,),
          "os.truncate": (0,), "os.symlink": (1,),
          "os.link": (1,), "os.chmod": (0,), "os.chown": (0,)}
HARMLESS = ("/dev/null", "/dev/tty")


class Nursery:
    def __init__(self, process: subprocess.Popen, folder: Path):
        self._process, self.output, self._wrote = (process, folder / "output.txt",
            folder / "wrote.txt")

    def begin(self, *words: object) -> int:
        """Run `lpkit WORDS`; its process."""
        self._process.stdin.write(json.dumps([[str(word) for word in words], str(self.output)])
                                  + "\n")
        self._process.stdin.flush()
        self._pid = int(self._process.stdout.readline())
        return self._pid

    def end(self) -> int:
        """Wait for it; its exit code, or minus the signal. What takes too long is killed."""
        over = threading.Timer(LONGEST_SECONDS, os.kill, (self._pid, signal.SIGKILL))
        over.start()
        try:
            return int(self._process.stdout.readline())
        finally:
            over.cancel()

    def lpkit(self, *words: object) -> int:
        self.begin(*words)
        return self.end()

    @property
    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def wrote(self) -> str:
        """What the last one, if it called `tell_of_writes`, wrote outside the folder."""
        return self._wrote.read_text(errors="replace")


def tell_of_writes() -> None:
    """In a child of the nursery, before what it does: this folder is where it may write."""
    folder = os.getcwd()
    log = os.open("wrote.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(event: str, arguments: tuple) -> None:
        places = [arguments[i] for i in WRITES.get(event, ())]
        if (event == "open" and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            places = [arguments[0]]
        for place in places:
            if isinstance(place, (str, bytes, os.PathLike)):
                path = os.path.abspath(os.fsdecode(place))
                if not path.startswith((f"{folder}/", *HARMLESS)):
                    os.write(log, f"{event} {path!r}\n".encode())

    sys.addaudithook(hook)


@contextmanager
def nursery(folder: Path, main: str = "lpkit.cli:main", warm: str = "tests.attack._nursery:warm",
            **environment: str) -> Iterator[Nursery]:
    """Its commands, or another function of words, run in `folder` and keep their caches there.
    `warm` is called before the first."""
    # of whoever imported a compiler
    own = {name: value for name, value in os.environ.items() if not name.endswith("_CACHE_DIR")}
    environment = dict(own, XDG_CACHE_HOME=str(folder / "cache"), OMP_NUM_THREADS="1",
                       PYTHONDONTWRITEBYTECODE="1", **environment)
    with subprocess.Popen([sys.executable, "-m", "tests.attack._nursery", str(folder), main, warm],
                          stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        yield Nursery(process, folder)
        process.stdin.close()


def prepare(folder: Path, **settings: object) -> Path:
    """A corpus and a config in `folder`; the config."""
    from lpkit.config import Config

    (folder / "corpus.txt").write_text("".join(f"{i} bottles of beer on the wall\n"
        for i in range(20_000)))
    config = Config().replace(SMALL | {"data.source": str(folder / "corpus.txt")} | settings)
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder / "config.yaml"


def wait_until(there, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (seen := there()) and time.monotonic() < deadline:
        time.sleep(0.0002)
    return bool(seen)


def saving(run: Path) -> bool:
    return any(run.glob("checkpoints/.*.tmp"))


# ---- in the nursery

def _child(main: Callable[[list[str]], int], words: list[str], output: str) -> None:
    # a shell's background child ignores it,
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)                # and what nohup began, this
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, file, file)):
        os.dup2(fd, number)
    code = 1
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def warm() -> None:
    """All that a fork would import."""
    import torch
    import torch._dynamo
    import tqdm  # noqa: F401

    import lpkit.commands.train
    import lpkit.measure
    import lpkit.measure.advice
    import lpkit.training.loop
    import lpkit.training.sampling  # noqa: F401
    from hosting import notebooks
    from hosting.commands.notebook import describe

    describe(notebooks.find("00"))    # what reads a notebook is imported then
    torch.set_num_threads(1)


def _serve(folder: str, main: str, warm: str) -> None:
    called = pkgutil.resolve_name(main)
    pkgutil.resolve_name(warm)()
    os.chdir(folder)
    for line in sys.stdin:
        words, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(called, words, output)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
