"""Run notebooks without a browser, and keep a record of what happened that survives a crash.

nbclient runs the cells. papermill, which does, too, would write `completed` over every cell of a
kernel that was killed, and take a notebook that leaves half-way with `sys.exit(0)` for one that
succeeded. So this module counts the cells that ran, and keeps its own record: NAME.json beside
NAME.ipynb, replaced whole at the start, as each cell begins and at the end. Seconds and bytes
throughout.

A notebook claims something: `with claim("..."):` in its cell tagged `claim` says it in one line,
and the asserts within hold it. Such a cell is also tagged `raises-exception`: the cells below it
run, and the notebook fails all the same. Its card says whether the claim holds, fails, or cannot be
decided on this machine, and the record has it from the card.
"""

import ast
import contextlib
import copy
import dataclasses
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hosting import python
from hosting.notebooks import claim, read, tagged
from hosting.parameters import INJECTED, choose, grid, parameters, with_parameters
from lessons.claims import cards, verdict
from lessons.figures import WIDGET_MIME
from lpkit import processes
from lpkit.errors import ConfigError
from lpkit.files import write_atomically
from lpkit.machine_facts import cores, status_bytes, versions

if TYPE_CHECKING:
    from nbformat import NotebookNode

FORMAT = "lpkit-notebook-run"
SAMPLE_SECONDS = 0.1
UNFINISHED = ("asked", "running")
PEAK_HOW = ("resident bytes of the kernel and its children, sampled every 0.1 s, shared pages "
            "counted in each; at least the kernel's own VmHWM")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One notebook to run with checked parameters; `label` names its two files in `out`."""

    path: Path
    label: str
    asked: Mapping[str, Any]
    values: Mapping[str, Any]       # every declared parameter
    out: Path

    @property
    def output(self) -> Path:
        return self.out / f"{self.label}.ipynb"

    @property
    def record(self) -> Path:
        return self.out / f"{self.label}.json"


def plan(path: Path, settings: Iterable[str] = (), *, tier: str | None = None,
         out: Path) -> list[Job]:
    """Makes a job for each point of the grid, all checked before the first one starts."""
    book = read(path)
    known, _ = parameters(book), claim(book)
    points = grid(known, settings)
    jobs = []
    for i, point in enumerate(points, 1):
        label = path.stem if len(points) == 1 else f"{path.stem}-{i:03}"
        jobs.append(Job(path=path, label=label, asked=point, values=choose(known, point, tier),
                        out=Path(out).resolve()))
        _refuse_strangers(jobs[-1])
    return jobs


def _refuse_strangers(job: Job) -> None:
    """A notebook in `out` may be replaced only by a run of the same notebook, and not while that
    run goes on."""
    if job.out.exists() and not job.out.is_dir():
        raise ConfigError(f"--out {job.out.name} is a file; give a folder")
    recorded = job.record.exists()
    if job.output.exists() and (job.output.samefile(job.path) or not recorded):
        raise ConfigError(f"{job.output.name} in {job.out} is not the output of a run; choose "
                          f"another --out")
    if not recorded:
        return
    try:
        old = json.loads(job.record.read_text())
        ours = old["format"] == FORMAT and old["notebook"] == job.path.stem
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ConfigError(f"{job.record.name} in {job.out} is not a record of {job.path.stem}; "
                          f"choose another --out")
    if old["status"] in UNFINISHED and old["pid"] != os.getpid() and psutil.pid_exists(old["pid"]):
        raise ConfigError(f"process {old['pid']} is still writing {job.record.name} in {job.out}; "
                          f"wait for it, or choose another --out")


class Attempt:
    """A run of one notebook in a fresh kernel of this process. A failing cell and a killed kernel
    are results, not exceptions: status `failed`, and `error` says which cell; an interrupt is
    recorded as `killed` and goes on upwards. The record lies in `job.out` all the while, and says
    `done` only when every code cell ran to its end; its first ending is the one that counts, so
    that also another thread may end it. `folder` is private: for the kernel's keys and data."""

    def __init__(self, job: Job, folder: Path, say: Callable[[str], None]):
        self.job, self.folder, self.say = job, folder, say
        self.book, self.started = read(job.path), time.perf_counter()
        self.executed: NotebookNode | None = None       # a copy of `book`, with outputs
        self.code = [cell.id for cell in self.book.cells
                     if cell.cell_type == "code" and INJECTED not in cell.metadata.get("tags", [])]
        self.ran: set[str] = set()
        self.failure: dict[str, Any] = {}       # the first: cells may run after it
        self.claims: list[dict[str, str]] = []  # as their cards say
        self.kernel, self.lock = _Kernel(), threading.RLock()
        self.record = _asked(job) | {"claim": claim(self.book), "cells": len(self.code)}

    def update(self, **changes: Any) -> None:
        with self.lock:
            if self.record["end"] is None:
                ran = len(self.ran.intersection(self.code))     # not the cell that sets parameters
                self.record.update(changes, seconds=time.perf_counter() - self.started, ran=ran,
                                   peak_rss_bytes=self.kernel.peak_rss_bytes)
                _save(self.job, self.record)

    def end(self, **ending: Any) -> None:
        with self.lock:
            if self.record["end"] is None and self.executed is not None:
                write_atomically(self.job.output, self.written())
            state, why = verdict(self.claims, len(tagged(self.book, "claim")))
            self.update(**ending, result=state, why=why, claims=self.claims, end=_now())

    def written(self) -> str:
        """The notebook as it is now. Without the kernel a widget's view is an error message; the
        figures lie beside it."""
        import nbformat  # which `read` has imported: an end that is asked for is quick

        for _ in range(50):
            with contextlib.suppress(RuntimeError):     # its thread has changed a dict meanwhile
                return nbformat.writes(without_widgets(self.executed))
        raise OSError(f"{self.job.output.name} is never whole")

    def cell_starts(self, cell: "NotebookNode", cell_index: int) -> None:
        if cell.get("id") in self.code:
            number = self.code.index(cell.id) + 1
            self.update(cell=number, line=next(iter(cell.source.splitlines()), ""))
            self.say(f"{self.job.label}: cell {number} of {len(self.code)}")

    def cell_ended(self, cell: "NotebookNode", cell_index: int,
                   execute_reply: Mapping[str, Any]) -> None:
        content = execute_reply["content"]
        if "claim" in cell.metadata.get("tags", []):
            self.claims += cards(cell.outputs)
        if content["status"] == "ok":
            self.ran.add(cell.get("id"))
        elif not self.failure:
            self.failure = _failed(self.record, content.get("ename", "error"),
                                   content.get("evalue", ""))

    def run(self) -> dict[str, Any]:
        from jupyter_client import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        manager = AsyncKernelManager(kernel_name="python3",
                                     connection_file=str(self.folder / "kernel.json"))
        if manager.has_trait("transport_encryption"):       # ipykernel warns where it has none
            manager.transport_encryption = "auto"
        env = os.environ | {
            "PYTHONOPTIMIZE": "",   # with it Python drops every assert, and with them every claim
            # what a person guessed and solved is neither shown here nor written
            "XDG_DATA_HOME": str(self.folder / "data")}
        self.job.out.mkdir(parents=True, exist_ok=True)
        self.update(status="running")
        self.job.output.unlink(missing_ok=True)     # of an earlier run
        self.executed = with_parameters(self.book, self.job.values)
        client = NotebookClient(
            self.executed, manager, store_widget_state=False, raise_on_iopub_timeout=True,
            resources={"metadata": {"path": str(self.job.path.parent)}}, iopub_timeout=60,
            on_notebook_start=lambda notebook: self.kernel.started(manager.provisioner.process),
            on_cell_start=self.cell_starts, on_cell_executed=self.cell_ended)
        ending: dict[str, Any] = {"status": "killed"}
        try:
            with self.kernel.measured(), contextlib.suppress(CellExecutionError):
                client.execute(env=env, cleanup_kc=True)
            ending = self.failure or self.completed()
        except DeadKernelError:
            ending = _failed(self.record, "DeadKernelError", f"the kernel died while cell "
                             f"{self.record['cell']} ran{self.kernel.cause_of_death()}")
        except Exception as error:
            ending = _failed(self.record, type(error).__name__, str(error))
            if not isinstance(error, RuntimeError):     # no kernel that did not start: a full disk
                raise
        finally:
            self.end(**ending)
        return self.record

    def completed(self) -> dict[str, Any]:
        """Returns the ending of a run in which no cell failed. A cell may have left the notebook, or
        its tag may have skipped it."""
        sources = {cell.id: cell.source.strip() for cell in self.book.cells}
        missing = [number for number, id in enumerate(self.code, 1)
                   if id not in self.ran and sources[id]]
        if not missing:
            return {"status": "done"}
        left = ", ".join(map(str, missing))
        return _failed(self.record, "CellsDidNotRun", f"the notebook ended in cell "
                       f"{self.record['cell']} without an error, and these cells did not run to "
                       f"their end: {left}")


def _asked(job: Job) -> dict[str, Any]:
    """The record of a run that has not begun."""
    packages = versions(("lpkit", "torch", "ipykernel", "nbclient"))
    installed = {name: version or "not installed" for name, version in packages.items()}
    return {"format": FORMAT, "version": 1, "notebook": job.path.stem, "label": job.label,
            "status": "asked", "claim": "", "claims": [], "result": "", "why": "",
            "tier": job.values.get("tier"), "asked": dict(job.asked),
            "parameters": dict(job.values), "start": _now(), "end": None, "seconds": 0.0,
            "cell": 0, "cells": 0, "ran": 0, "line": "", "error": None,
            "peak_rss_bytes": 0, "peak_rss_how": PEAK_HOW, "output": str(job.output),
            "record": str(job.record), "pid": os.getpid(),
            "versions": {"python": platform.python_version(), **installed}}


def _failed(record: dict[str, Any], kind: str, message: str,
            status: str = "failed") -> dict[str, Any]:
    return {"status": status, "error": {"cell": record["cell"], "line": record["line"],
                                        "kind": kind, "message": message}}


def _save(job: Job, record: dict[str, Any]) -> None:
    write_atomically(job.record, json.dumps(record, indent=1, allow_nan=False))


def run_all(jobs: list[Job], *, at_once: int = 1,
            say: Callable[[str], None] = lambda line: None,
            children: processes.Children | None = None) -> list[dict]:
    """Run each job in a process of its own, and return their records in order. The record on disk
    is the only channel, so a process that is killed costs its own job and no other. No process,
    kernel or private file outlives this process, also when it is killed; another thread may end
    them all through `children`. Raises ConfigError when the output cannot be written."""
    children, share = children or processes.Children(), {}
    if at_once > 1:     # of the processor
        threads = str(max(1, cores() // at_once))
        share = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)

    try:
        with ThreadPoolExecutor(at_once) as pool:
            try:
                return list(pool.map(partial(_supervise, children, share, say), jobs))
            except BaseException:       # the pool waits for its threads: end what they wait for
                children.end()
                raise
    except OSError as error:
        raise ConfigError(f"cannot write to {jobs[0].out}: {error.strerror or error}; free some "
                          f"space, or choose another --out") from None


def _supervise(children: processes.Children, share: Mapping[str, str],
               say: Callable[[str], None], job: Job) -> dict[str, Any]:
    """The record of one job, done in a process of its own."""
    record, folder = _asked(job), processes.new_folder()
    if children.over:
        return record
    job.out.mkdir(parents=True, exist_ok=True)
    _save(job, record)
    job.output.unlink(missing_ok=True)      # of an earlier run: this record is not about it
    fields = {field: str(value) if isinstance(value, Path) else value
              for field, value in dataclasses.asdict(job).items()}
    with children.start([*python("hosting.runner"), folder], folder, files={"job": repr(fields)},
                        env=os.environ | share) as keeper:
        exit_code = keeper.wait()
    # read anew: it is the process's own by now
    record = json.loads(job.record.read_text())
    if record["status"] in UNFINISHED:
        why = f"the process that ran it ended with exit code {exit_code}"
        record |= _failed(record, "killed", why, "killed") | {"end": _now()}
        _save(job, record)
    say(f"{job.label}: {record['status']}")
    return record


def main() -> None:
    """Do one job, whose private folder is the argument of this process. Its keeper ends it with
    SIGTERM. The kernel is left to the keeper then: nothing is waited for."""
    folder = Path(sys.argv[1])
    fields = ast.literal_eval((folder / "job").read_text())     # reads literals, runs nothing
    fields |= {name: Path(fields[name]) for name in ("path", "out")}
    attempt = Attempt(Job(**fields), folder, processes.tell)

    def stop() -> None:
        attempt.end(status="killed")
        os._exit(128 + signal.SIGTERM)

    processes.hear(attempt.run, stop)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Kernel:
    """The kernel's process, as the record must know it: its memory, and how it ended."""

    process: Any = None
    peak_rss_bytes = 0

    def started(self, process: Any) -> None:
        self.process = process

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Looks at the kernel's memory every SAMPLE_SECONDS while it lasts."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(SAMPLE_SECONDS):
                self.sample()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def sample(self) -> None:
        if self.process is None:
            return
        total = 0
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):     # gone since it was listed
                    total += process.memory_info().rss
        # the kernel's own high-water mark is what sampling misses between two looks
        own = status_bytes("VmHWM", self.process.pid) or 0
        self.peak_rss_bytes = max(self.peak_rss_bytes, total, own)

    def cause_of_death(self) -> str:
        code = self.process.poll() if self.process else None
        if code == -signal.SIGKILL:
            return (f" (killed by SIGKILL, as the system does when memory runs out; "
                    f"it held up to {self.peak_rss_bytes / 1e6:,.0f} MB)")
        if code is not None and code < 0:
            return f" (killed by {signal.Signals(-code).name})"
        return "" if code is None else f" (it left with exit code {code})"


def without_widgets(notebook: dict) -> dict:
    """A copy of an executed notebook (nbformat 4, as a dict) for where no kernel is: the widget
    state goes, and so do the views of outputs that have a picture to show instead, so that
    JupyterLab and sphinx draw the stored figures. A control without a picture keeps its view, by
    which the site knows to say where controls work.
    """
    notebook = copy.deepcopy(notebook)
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if set(output.get("data", {})) - {WIDGET_MIME, "text/plain"}:
                output["data"].pop(WIDGET_MIME, None)
    return notebook
