"""Run notebooks without a browser: declared parameters only, and a record of what happened that
survives a crash.

papermill runs the cells. It would execute the *names* of parameters as code, take "false" for a
true value, and write `completed` over every cell of a kernel that was killed. So this module reads
what the cell tagged `parameters` declares from its syntax tree, converts what was asked by
annotation, and keeps its own record: NAME.json beside NAME.ipynb, replaced whole at the start, as
each cell begins and at the end. Seconds and bytes throughout.

A notebook claims something: the comment that opens its cell tagged `claim` says it in one line, the
assert below it holds it.
"""

import ast
import contextlib
import copy
import importlib
import io
import itertools
import json
import logging
import multiprocessing
import os
import platform
import re
import signal
import sys
import threading
import time
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import psutil

from lpkit.errors import ConfigError, nearest, pick
from lpkit.files import resource, write_atomically
from lpkit.machine_facts import cores, status_bytes, versions
from lpkit.values import convert

if TYPE_CHECKING:
    from nbformat import NotebookNode

FORMAT = "lpkit-notebook-run"
SAMPLE_SECONDS = 0.1
KINDS = {"int": int, "float": float, "bool": bool, "str": str}
PEAK_HOW = ("resident bytes of the kernel and its children, sampled every 0.1 s, shared pages "
            "counted in each; at least the kernel's own VmHWM")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One line of a parameters cell: `steps: int = 200  # updates`."""

    kind: Any  # int, float, bool, str, None, Literal[...], tuple[int, ...] or a union of these
    annotation: str         # as written
    default: Any
    comment: str


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


# --- what a notebook declares

def course() -> list[Path]:
    """The notebooks of the course, in order: `notebooks/` here, or the project's own."""
    for place in (Path.cwd() / "notebooks", resource("notebooks")):
        if place.is_dir():
            return sorted(place.glob("*.ipynb"))
    raise ConfigError("there is no notebooks/ folder here; run this in the repository, or give the "
                      "path of a notebook")


def find(name: str) -> Path:
    """'00_start_here', '00', 'start_here' or a path -> the file. Raises ConfigError with the
    nearest name."""
    if name.endswith(".ipynb") or os.sep in name:
        if not Path(name).is_file():
            raise ConfigError(f"there is no notebook {name!r}; `lpkit notebook --list` shows the "
                              f"course")
        return Path(name).resolve()
    known: dict[str, Path] = {}
    for path in course():
        number, _, rest = path.stem.partition("_")
        known |= {path.stem: path, number: path, rest or number: path}
    return pick(known, name, "notebook")


def needed(package: str) -> Any:
    """The imported package. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(f"notebooks need the package {package}, which is not installed; "
                          f"pip install {package}") from None


def read(path: Path) -> "NotebookNode":
    nbformat = needed("nbformat")
    try:
        book = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise ConfigError(f"{path.name} is not a notebook: {str(error).splitlines()[0]}") from None
    kernel = book.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        raise ConfigError(f"{path.name} asks for the kernel {kernel!r}; only python3 is started "
                          f"here")
    return book


def tagged(book: "NotebookNode", tag: str) -> list["NotebookNode"]:
    """The code cells that carry `tag`."""
    return [cell for cell in book.cells if cell.cell_type == "code"
            and tag in cell.metadata.get("tags", [])]


def parameters(book: "NotebookNode") -> dict[str, Parameter]:
    """What the parameters cell declares: `name: annotation = literal  # comment`, and nothing else,
    unexecuted."""
    return declared("".join(cell.source for cell in tagged(book, "parameters")[:1]))


def declared(source: str) -> dict[str, Parameter]:
    """Parse a parameters cell. Raises ConfigError with the line that is more than a declaration."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(
            f"the parameters cell does not parse: line {error.lineno}: {error.msg}") from None
    comments = {token.start[0]: token.string.lstrip("#").strip()
                for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT}
    found = {}
    for node in tree.body:
        line = ast.unparse(node)
        if line == "from typing import Literal":    # the annotations need it
            continue
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
                and node.value is not None):
            raise ConfigError(f"a parameters cell holds only `name: type = literal  # comment`, "
                              f"not `{line}`")
        name, kind = node.target.id, _kind(node.annotation)
        try:
            default = ast.literal_eval(node.value)      # reads a literal, runs nothing
        except ValueError:
            raise ConfigError(f"the default of {name} must be a literal, not "
                              f"`{ast.unparse(node.value)}`") from None
        convert(default, kind, name)
        found[name] = Parameter(kind=kind, annotation=ast.unparse(node.annotation),
                                default=default, comment=comments.get(node.end_lineno, ""))
    return found


def _kind(node: ast.expr) -> Any:
    """An annotation's type from its syntax, by a table of names. Nothing is evaluated."""
    match node:
        case ast.Name(id=name) if name in KINDS:
            return KINDS[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(op=ast.BitOr()):
            return _kind(node.left) | _kind(node.right)
        case ast.Subscript(value=ast.Name(id="Literal")):
            choices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if all(isinstance(choice, ast.Constant) for choice in choices):
                return Literal[tuple(choice.value for choice in choices)]
        case ast.Subscript(value=ast.Name(id="tuple"),
                           slice=ast.Tuple(elts=[kind, ast.Constant(value=last)])):
            if last is Ellipsis:
                return tuple[_kind(kind), ...]
    raise ConfigError(f"the annotation `{ast.unparse(node)}` is none of {', '.join(KINDS)}, None, "
                      f"Literal[...], tuple[..., ...] or a union of these")


def claim(book: "NotebookNode") -> str:
    """What the notebook claims: the comment that opens each cell tagged `claim`, in one line."""
    claims = []
    for cell in tagged(book, "claim"):
        comment = re.match(r"(#.*\n?)*", cell.source.lstrip())[0]
        claims.append(" ".join(line.lstrip("#").strip() for line in comment.splitlines()))
    return "; ".join(filter(None, claims))


# --- what was asked

def choose(known: Mapping[str, Parameter], asked: Mapping[str, Any],
           tier: str | None = None) -> dict[str, Any]:
    """Every declared parameter with its value. Only declared names pass; text is converted by
    annotation."""
    if tier is not None:
        if "tier" not in known:
            raise ConfigError("this notebook declares no parameter `tier`, so --tier cannot choose "
                              "its size")
        if asked.get("tier", tier) != tier:
            raise ConfigError(f"--tier {tier} and tier={asked['tier']} contradict each other; give "
                              f"one")
        asked = {**asked, "tier": tier}
    values = {name: parameter.default for name, parameter in known.items()}
    for name, value in asked.items():
        if name not in known:
            raise ConfigError(f"this notebook has no parameter {name!r}; "
                              + (nearest(name, known) if known else "it declares none"))
        values[name] = convert(value, known[name].kind, name)
        try:
            ast.literal_eval(repr(values[name]))        # reads a literal, runs nothing
        except ValueError:
            raise ConfigError(f"{name} cannot be {values[name]!r}: a parameter is a finite "
                              f"number, text, true/false, none or a list") from None
    return values


def grid(known: Mapping[str, Parameter], settings: Iterable[str]) -> list[dict[str, str]]:
    """['lr=1e-3,3e-4', 'steps=10', 'steps=20'] -> the four combinations. A repeated key makes a
    grid, and so do commas, unless the parameter itself is text or a tuple."""
    axes: dict[str, list[str]] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"expected key=value, got {setting!r}")
        kind = known[key].kind if key in known else str
        kinds = (kind, *get_args(kind))
        whole = str in kinds or tuple in map(get_origin, kinds)
        parts = [value] if whole else value.split(",")
        axes.setdefault(key, []).extend(part.strip() for part in parts)
    return [dict(zip(axes, point)) for point in itertools.product(*axes.values())]


def with_parameters(book: "NotebookNode", asked: Mapping[str, Any],
                    tier: str | None = None) -> "NotebookNode":
    """A copy of `book` with a cell after its parameters cell that sets what was asked. It is not
    papermill's: that turns a tuple into text and warns about annotations that it cannot parse."""
    from nbformat.v4 import new_code_cell

    known = parameters(book)
    values = choose(known, asked, tier)
    lines = [f"{name} = {values[name]!r}" for name in known if values[name] != known[name].default]
    book = copy.deepcopy(book)
    if lines:
        at = book.cells.index(tagged(book, "parameters")[0]) + 1
        book.cells.insert(at, new_code_cell("\n".join(["# Parameters", *lines]),
                                            id="injected-parameters",
                                            metadata={"tags": ["injected-parameters"]}))
    return book


# --- running

def plan(path: Path, settings: Iterable[str] = (), *, tier: str | None = None,
         out: Path) -> list[Job]:
    """One job for each point of the grid, all of them checked before the first one starts."""
    known = parameters(read(path))
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
    if old["status"] == "running" and old["pid"] != os.getpid() and psutil.pid_exists(old["pid"]):
        raise ConfigError(f"process {old['pid']} is still writing {job.record.name} in {job.out}; "
                          f"wait for it, or choose another --out")


def run(job: Job, *, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run one notebook in a fresh kernel and return its record, which lies in `job.out` all the
    while. A failing cell and a killed kernel are results, not exceptions: status `failed`, and
    `error` says which cell. An interrupt is recorded as `killed` and goes on upwards."""
    papermill = needed("papermill")
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    from lpkit.ui import without_widgets

    book, started = read(job.path), time.perf_counter()
    job.out.mkdir(parents=True, exist_ok=True)
    # The process id keeps a second run from writing into this one's temporary file.
    unfinished = job.out / f".{job.label}.{os.getpid()}.ipynb"
    code = [cell.id for cell in book.cells if cell.cell_type == "code"]
    record, kernel = _asked(job) | {"claim": claim(book), "cells": len(code)}, _Kernel()

    def update(**changes: Any) -> None:
        record.update(changes, seconds=time.perf_counter() - started,
                      peak_rss_bytes=kernel.peak_rss_bytes)
        _save(job, record)

    def cell_starts(cell, cell_index):
        if cell.get("id") in code:
            number = code.index(cell.id) + 1
            update(cell=number, line=next(iter(cell.source.splitlines()), ""))
            say(f"{job.label}: cell {number} of {len(code)}")

    # everything that it would say is in the record
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    update(status="running")
    ending: dict[str, Any] = {"status": "killed"}
    try:
        with kernel.measured():
            papermill.execute_notebook(
                with_parameters(book, job.values),
                str(unfinished).replace("{", "{{").replace("}", "}}"), kernel_name="python3",
                progress_bar=False, store_widget_state=False, kernel_manager_class=kernel.manager(),
                resources={"metadata": {"path": str(job.path.parent)}}, on_cell_start=cell_starts)
        ending = {"status": "done"}
    except PapermillExecutionError as error:
        ending = _failed(record, error.ename, error.evalue)
    except DeadKernelError:
        ending = _failed(record, "DeadKernelError", f"the kernel died while cell {record['cell']} "
                         f"ran{kernel.cause_of_death()}")
    except RuntimeError as error:       # the kernel did not start
        ending = _failed(record, type(error).__name__, str(error))
    finally:
        if unfinished.exists():
            # without the kernel a widget's view is an error message; the figures lie beside it
            still = without_widgets(json.loads(unfinished.read_text()))
            write_atomically(job.output, json.dumps(still, indent=1))
            unfinished.unlink()
        update(**ending, end=_now())
    return record


def _asked(job: Job) -> dict[str, Any]:
    """The record of a run that has not begun."""
    packages = versions(("lpkit", "torch", "ipykernel", "papermill"))
    found = {name: version or "not installed" for name, version in packages.items()}
    return {"format": FORMAT, "version": 1, "notebook": job.path.stem, "label": job.label,
            "status": "asked", "claim": "", "tier": job.values.get("tier"),
            "asked": dict(job.asked), "parameters": dict(job.values), "start": _now(), "end": None,
            "seconds": 0.0, "cell": 0, "cells": 0, "line": "", "error": None, "peak_rss_bytes": 0,
            "peak_rss_how": PEAK_HOW, "output": str(job.output), "pid": os.getpid(),
            "versions": {"python": platform.python_version(), **found}}


def _failed(record: dict[str, Any], kind: str, message: str,
            status: str = "failed") -> dict[str, Any]:
    return {"status": status, "error": {"cell": record["cell"], "line": record["line"],
                                        "kind": kind, "message": message}}


def _save(job: Job, record: dict[str, Any]) -> None:
    write_atomically(job.record, json.dumps(record, indent=1, allow_nan=False))


def run_all(jobs: list[Job], *, processes: int = 1,
            say: Callable[[str], None] = lambda line: None) -> list[dict]:
    """Run jobs side by side, each in a process of its own, and return their records in order.
    Raises ConfigError when the output cannot be written."""
    needed("papermill")     # before a process is started for each job
    try:
        if processes == 1:
            return [run(job, say=say) for job in jobs]
        return _side_by_side(jobs, processes, say)
    except OSError as error:
        raise ConfigError(f"cannot write to {jobs[0].out}: {error.strerror or error}; free some "
                          f"space, or choose another --out") from None


def _side_by_side(jobs: list[Job], processes: int, say: Callable[[str], None]) -> list[dict]:
    """The record on disk is the only channel, so a worker that is killed costs its own job and no
    other."""
    threads = max(1, cores() // processes)
    spawn = multiprocessing.get_context("spawn")
    workers, over = [], threading.Event()

    def supervise(job: Job) -> dict | None:
        if over.is_set():
            return None
        worker = spawn.Process(target=_work, args=(job, threads))
        worker.start()
        workers.append(worker)
        say(f"{job.label}: started as process {worker.pid}")
        worker.join()
        record = json.loads(job.record.read_text()) if job.record.exists() else _asked(job)
        if record["status"] in ("asked", "running") or record["pid"] != worker.pid:
            why = f"the process that ran it ended with exit code {worker.exitcode}"
            record |= _failed(record, "killed", why, "killed") | {"end": _now()}
            job.out.mkdir(parents=True, exist_ok=True)
            _save(job, record)
        say(f"{job.label}: {record['status']}")
        return record

    with ThreadPoolExecutor(processes) as pool:
        try:
            return list(pool.map(supervise, jobs))
        # an interrupt: the pool waits for its threads, so end what they wait for
        except BaseException:
            over.set()
            for worker in workers:
                worker.terminate()
            raise


def _work(job: Job, threads: int) -> None:
    """In a process of its own, whose kernel inherits its share of the processor."""
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with unwinding():
        run(job)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Within, SIGTERM unwinds like an interrupt: the kernel is shut down and the record says
    `killed`. Exits 143."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Kernel:
    """What the front door must know about the kernel beneath papermill: its process, its memory,
    how it ended."""

    def __init__(self):
        self.process: Any = None
        self.peak_rss_bytes = 0

    def manager(self) -> type:
        """A kernel manager for this run: encrypted where it can be (ipykernel warns otherwise)."""
        from jupyter_client import AsyncKernelManager

        kernel = self

        class Manager(AsyncKernelManager):
            async def start_kernel(self, **options):
                if self.has_trait("transport_encryption"):
                    self.transport_encryption = "auto"
                await super().start_kernel(**options)
                kernel.process = self.provisioner.process

        return Manager

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Within, look at the kernel's memory every SAMPLE_SECONDS."""
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


# --- what there is

def describe(path: Path) -> dict[str, Any]:
    """One notebook for `--list`: its title, claim and parameters, JSON-ready."""
    book = read(path)
    listed = [{"name": name, "annotation": p.annotation, "default": p.default,
               "comment": p.comment} for name, p in parameters(book).items()]
    headings = [line.lstrip("# ").strip() for cell in book.cells if cell.cell_type == "markdown"
                for line in cell.source.splitlines() if line.startswith("# ")]
    return {"name": path.stem, "title": next(iter(headings), ""), "claim": claim(book),
            "parameters": listed}
