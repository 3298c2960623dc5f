"""Run notebooks without a browser, and write a record of each run that survives a crash.

nbclient runs the cells. (papermill would mark every cell of a killed kernel as `completed`, and
would treat a notebook that ends early with `sys.exit(0)` as a success.) This module counts the
cells that ran. The record is NAME.json next to NAME.ipynb. The runner replaces the record
atomically at the start of the run, at the start of each cell, and at the end of the run. The
record's units are seconds and bytes.

A notebook has a claim: its cell tagged `claim` contains `with claim("..."):`, whose text is the
claim and whose asserts test it. The cell is also tagged `raises-exception`, so that the cells below
it run if an assert fails; the notebook then still counts as failed. The card of the claim shows
whether the claim holds, fails, or cannot be decided on this machine. The record copies this from
the card.
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
PEAK_HOW = ("resident bytes of the kernel and its children, sampled every 0.1 s, with shared pages "
            "counted in each process; at least the kernel's VmHWM")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A notebook to run with checked parameters. `label`: the name of its two files in `out`."""

    path: Path
    label: str
    asked: Mapping[str, Any]
    values: Mapping[str, Any]       # the value of every declared parameter
    out: Path

    @property
    def output(self) -> Path:
        return self.out / f"{self.label}.ipynb"

    @property
    def record(self) -> Path:
        return self.out / f"{self.label}.json"


def plan(path: Path, settings: Iterable[str] = (), *, tier: str | None = None,
         out: Path) -> list[Job]:
    """Return a job for each combination of the settings. All jobs are checked here, before any of
    them starts."""
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
    """Raise ConfigError unless the job's files in `out` may be replaced: they must be the output of
    an earlier run of the same notebook, and that run must have ended."""
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
    """A run of one notebook in a new kernel of this process.

    A failing cell and a killed kernel are results, not exceptions: the status is `failed`, and
    `error` names the cell. An interrupt is recorded as `killed` and raised again. The record is in
    `job.out` from the start. Its status is `done` only if every code cell ran to its end. Only the
    first call of `end` counts, so that another thread may end the run. `folder` is private, for the
    kernel's keys and data.
    """

    def __init__(self, job: Job, folder: Path, say: Callable[[str], None]):
        self.job, self.folder, self.say = job, folder, say
        self.book, self.started = read(job.path), time.perf_counter()
        self.executed: NotebookNode | None = None       # a copy of `book`, with outputs
        self.code = [cell.id for cell in self.book.cells
                     if cell.cell_type == "code" and INJECTED not in cell.metadata.get("tags", [])]
        self.ran: set[str] = set()
        self.failure: dict[str, Any] = {}       # the ending after the first failed cell
        self.claims: list[dict[str, str]] = []  # from their cards
        self.kernel, self.lock = _Kernel(), threading.RLock()
        self.record = _asked(job) | {"claim": claim(self.book), "cells": len(self.code)}

    def update(self, **changes: Any) -> None:
        with self.lock:
            if self.record["end"] is None:
                # without the cell that sets parameters
                ran = len(self.ran.intersection(self.code))
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
        """Return the current notebook as text, without widgets, since a widget shows an error
        message if there is no kernel. Figures are also stored as pictures, which stay."""
        import nbformat  # already imported by `read`, so this is fast, also when a signal ends us

        for _ in range(50):
            with contextlib.suppress(RuntimeError):     # nbclient's thread changed a dict meanwhile
                return nbformat.writes(without_widgets(self.executed))
        raise OSError(f"{self.job.output.name} changes too often to be written")

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
        if manager.has_trait("transport_encryption"):       # else ipykernel warns
            manager.transport_encryption = "auto"
        env = os.environ | {
            "PYTHONOPTIMIZE": "",   # else Python may drop asserts, and the claims with them
            # a learner's guesses and answers are neither read nor written
            "XDG_DATA_HOME": str(self.folder / "data")}
        self.job.out.mkdir(parents=True, exist_ok=True)
        self.update(status="running")
        self.job.output.unlink(missing_ok=True)     # left by an earlier run
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
            # RuntimeError: the kernel did not start; others: a full disk
            if not isinstance(error, RuntimeError):
                raise
        finally:
            self.end(**ending)
        return self.record

    def completed(self) -> dict[str, Any]:
        """Return the ending of a run in which no cell failed. Some cells may not have run, because
        a cell ended the notebook, or because of their tags."""
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
    """Return the record of a run that has not begun."""
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
    """Run each job in a separate process, and return the records in order. Processes report only by
    the record on disk, so a killed process does not affect other jobs. Processes, kernels and
    private files are removed when this process ends, also if it is killed. Another thread can end
    all jobs through `children`. Raises ConfigError if the output cannot be written."""
    children, share = children or processes.Children(), {}
    if at_once > 1:     # share the cores
        threads = str(max(1, cores() // at_once))
        share = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)

    try:
        with ThreadPoolExecutor(at_once) as pool:
            try:
                return list(pool.map(partial(_supervise, children, share, say), jobs))
            # the pool waits for its threads, so end the processes that they wait for
            except BaseException:
                children.end()
                raise
    except OSError as error:
        raise ConfigError(f"cannot write to {jobs[0].out}: {error.strerror or error}; free some "
                          f"space, or choose another --out") from None


def _supervise(children: processes.Children, share: Mapping[str, str],
               say: Callable[[str], None], job: Job) -> dict[str, Any]:
    """Run one job in a separate process, and return its record."""
    record, folder = _asked(job), processes.new_folder()
    if children.over:
        return record
    job.out.mkdir(parents=True, exist_ok=True)
    _save(job, record)
    job.output.unlink(missing_ok=True)      # of an earlier run, which this record does not describe
    fields = {field: str(value) if isinstance(value, Path) else value
              for field, value in dataclasses.asdict(job).items()}
    with children.start([*python("hosting.runner"), folder], folder, files={"job": repr(fields)},
                        env=os.environ | share) as keeper:
        exit_code = keeper.wait()
    # read it again: the process has replaced it
    record = json.loads(job.record.read_text())
    if record["status"] in UNFINISHED:
        why = f"the process that ran it ended with exit code {exit_code}"
        record |= _failed(record, "killed", why, "killed") | {"end": _now()}
        _save(job, record)
    say(f"{job.label}: {record['status']}")
    return record


def main() -> None:
    """Run the job that is described in the private folder given as this process's argument. On
    SIGTERM from its keeper, this process exits at once, and the keeper kills the kernel."""
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
    """The facts about the kernel's process for the record: its peak memory, and how it ended."""

    process: Any = None
    peak_rss_bytes = 0

    def started(self, process: Any) -> None:
        self.process = process

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Sample the kernel's memory every SAMPLE_SECONDS during the block."""
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
                with contextlib.suppress(psutil.Error):     # it ended meanwhile
                    total += process.memory_info().rss
        # VmHWM includes peaks of the kernel between two samples
        own = status_bytes("VmHWM", self.process.pid) or 0
        self.peak_rss_bytes = max(self.peak_rss_bytes, total, own)

    def cause_of_death(self) -> str:
        code = self.process.poll() if self.process else None
        if code == -signal.SIGKILL:
            return (f" (killed by SIGKILL, as the system does when memory runs out; "
                    f"it used up to {self.peak_rss_bytes / 1e6:,.0f} MB)")
        if code is not None and code < 0:
            return f" (killed by {signal.Signals(-code).name})"
        return "" if code is None else f" (it ended with exit code {code})"


def without_widgets(notebook: dict) -> dict:
    """Return a copy of an executed notebook (nbformat 4, as a dict) for readers without a kernel.
    It has no widget state, and no widget views in outputs that also have a picture, so that
    JupyterLab and sphinx show the stored pictures. A control without a picture keeps its view; the
    site uses it to explain where controls work.
    """
    notebook = copy.deepcopy(notebook)
    notebook["metadata"].pop("widgets", None)
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if set(output.get("data", {})) - {WIDGET_MIME, "text/plain"}:
                output["data"].pop(WIDGET_MIME, None)
    return notebook
