"""Run notebooks without a browser: declared parameters only, and a record of what happened that
survives a crash.

nbclient runs the cells. papermill, which does, too, would execute the *names* of parameters as
code, take "false" for a true value, write `completed` over every cell of a kernel that was killed,
and take a notebook that leaves half-way with `sys.exit(0)` for one that succeeded. So this module
reads what the cell tagged `parameters` declares from its syntax tree, converts what was asked by
annotation, counts the cells that ran, and keeps its own record: NAME.json beside NAME.ipynb,
replaced whole at the start, as each cell begins and at the end. Seconds and bytes throughout.

A notebook claims something: `with claim("..."):` in its cell tagged `claim` says it in one line,
and the asserts within hold it. Such a cell is also tagged `raises-exception`: the cells below it
run, and the notebook fails all the same. Its card says whether the claim holds, fails, or cannot be
decided on this machine, and the record has it from the card.
"""

import ast
import contextlib
import copy
import dataclasses
import io
import itertools
import json
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import psutil

from lpkit import processes
from lpkit.config import key_and_value
from lpkit.course.claims import cards, verdict
from lpkit.errors import ConfigError, named, nearest, pick, shown
from lpkit.files import read_text, resource, write_atomically
from lpkit.machine_facts import cores, status_bytes, versions
from lpkit.values import convert

if TYPE_CHECKING:
    from nbformat import NotebookNode

FORMAT = "lpkit-notebook-run"
INJECTED = "injected-parameters"
SET = "# Parameters"        # how the cell opens that sets them, papermill's too
TYPE_COMMENT = re.compile(r"type:\s*(\S+)\s*(.*)")       # papermill's, too: no space in the type
SAMPLE_SECONDS = 0.1
UNFINISHED = ("asked", "running")
MOST_BYTES = 1 << 28        # of a notebook
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
KINDS = {"int": int, "float": float, "bool": bool, "str": str}
PEAK_HOW = ("resident bytes of the kernel and its children, sampled every 0.1 s, shared pages "
            "counted in each; at least the kernel's own VmHWM")


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One line of a parameters cell: `steps: int = 200  # updates`, or, since papermill's own
    reader takes no quotes in an annotation, `name = "a"  # type: Literal["a","b"] a name`."""

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
            raise ConfigError(f"there is no notebook {shown(name)}; `lpkit notebook --list` shows "
                              f"the course")
        return Path(name).resolve()
    return by_name(course(), name)


def by_name(paths: Iterable[Path], name: str) -> Path:
    """The one of this stem, of the number that opens it, or of the rest. Raises ConfigError, with
    all numbers for a number."""
    known: dict[str, Path] = {}
    for path in paths:
        number, _, rest = path.stem.partition("_")
        known |= {path.stem: path, number: path, rest or number: path}
    if name.isdecimal():
        known = {number: path for number, path in known.items() if number.isdecimal()}
    return pick(known, name, "notebook")


def read(path: Path) -> "NotebookNode":
    book = parse(read_text(path, MOST_BYTES), path.name)
    kernel = book.metadata.get("kernelspec", {}).get("name")
    if kernel != "python3":
        raise ConfigError(f"{path.name} asks for the kernel {kernel!r}; only python3 is started "
                          f"here")
    return book


def parse(text: str, name: str) -> "NotebookNode":
    """Raises ConfigError, with the `name` of the file, for what is no notebook."""
    # jsonschema can do without it, and it takes longer to import than all the rest
    sys.modules.setdefault("rfc3987_syntax", None)
    import nbformat

    try:
        return nbformat.reads(text, as_version=4)
    # of JSON that is anything else, nbformat raises what it stumbles over
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError,
            nbformat.ValidationError) as error:
        why = named(str(error).partition("\n")[0])
        raise ConfigError(f"{named(name)} is not a notebook: {why}") from None


def tagged(book: "NotebookNode", tag: str) -> list["NotebookNode"]:
    """The code cells that carry `tag`."""
    return [cell for cell in book.cells if cell.cell_type == "code"
            and tag in cell.metadata.get("tags", [])]


def parameters(book: "NotebookNode") -> dict[str, Parameter]:
    """Returns what the parameters cell declares, line by line, unexecuted. Raises ConfigError for a
    second such cell, which would undo what is asked."""
    cells = tagged(book, "parameters")
    if len(cells) > 1:
        raise ConfigError(f"{len(cells)} cells are tagged `parameters`; declare all in one")
    found = declared("".join(cell.source for cell in cells))
    choose(found, {name: parameter.default for name, parameter in found.items()})
    return found


def declared(source: str) -> dict[str, Parameter]:
    """Parse a parameters cell. Raises ConfigError with the line that is more than a declaration.
    Whether a default is of its type is left to `choose`."""
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
        if ast.unparse(node) == "from typing import Literal":    # the annotations need it
            continue
        comment = comments.get(node.end_lineno, "")
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr()):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) if typed := TYPE_COMMENT.match(comment):
                annotation, comment = _annotation(typed[1]), typed[2]
            case _:
                raise ConfigError(f"a parameters cell holds only `name: type = literal  # comment` "
                                  f"and `name = literal  # type: ... comment`, not "
                                  f"`{ast.unparse(node)}`")
        kind = _kind(annotation)
        try:
            default = ast.literal_eval(node.value)      # reads a literal, runs nothing
        except ValueError:
            raise ConfigError(f"the default of {name} must be a literal, not "
                              f"`{ast.unparse(node.value)}`") from None
        found[name] = Parameter(kind=kind, annotation=ast.unparse(annotation), default=default,
                                comment=comment)
    return found


def _annotation(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ConfigError(f"the type comment `{text}` is no annotation") from None


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
    """Returns what the notebook claims, in one line. Raises ConfigError for a cell tagged `claim`
    that holds nothing: it is not Python alone (`%%script`), or asserts nothing unless something
    else is true."""
    return "; ".join(_claimed(cell.source) for cell in tagged(book, "claim"))


def _claimed(source: str) -> str:
    try:
        body = ast.parse(source).body
    except SyntaxError:
        body = []
    for node in body:
        match node:
            case ast.With(items=[ast.withitem(context_expr=ast.Call(
                    func=ast.Name(id="claim"), args=[ast.Constant(value=str(said))]))]) \
                    if any(isinstance(held, ast.Assert) for held in node.body):
                return said
    raise ConfigError(f"the cell tagged `claim` that opens with {source[:40]!r} holds nothing; it "
                      f"must be plain Python with an `assert` of its own in a `with claim(...):`")


# --- what was asked

def choose(known: Mapping[str, Parameter], asked: Mapping[str, Any],
           tier: str | None = None) -> dict[str, Any]:
    """Returns every declared parameter with its value. Only declared names pass; text is converted
    by annotation."""
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
            raise ConfigError(f"this notebook has no parameter {shown(name)}; "
                              + (nearest(name, known) if known else "it declares none"))
        values[name] = convert(value, known[name].kind, name)
        try:
            ast.literal_eval(repr(values[name]))        # reads a literal, runs nothing
        except ValueError:
            raise ConfigError(f"{name} cannot be {shown(values[name])}: a parameter is a finite "
                              f"number, text, true/false, none or a list") from None
    return values


def begin() -> None:
    """Make `lessons` importable from any folder, and check this notebook's parameters.

    A copy of the lessons in the kernel's own folder comes first. papermill sets any name to any
    value, and so may a person: this reads the declared and the set names from the cells that ran,
    and converts text. Raises ConfigError."""
    from IPython import get_ipython

    if (place := str(resource("notebooks"))) not in sys.path:
        sys.path.append(place)

    shell, known, names = get_ipython(), {}, []
    for source in shell.history_manager.input_hist_raw:
        if source.startswith(SET):
            names += [node.id for node in ast.walk(ast.parse(source))
                      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        else:
            with contextlib.suppress(ConfigError):      # any other cell
                known |= declared(source)
    asked = {name: shell.user_ns[name] for name in (*names, *known) if name in shell.user_ns}
    shell.user_ns.update(choose(known, asked))


def grid(known: Mapping[str, Parameter], settings: Iterable[str]) -> list[dict[str, str]]:
    """['lr=1e-3,3e-4', 'steps=10', 'steps=20'] -> the four combinations. A repeated key makes a
    grid, and so do commas, unless the parameter itself is text or a tuple."""
    axes: dict[str, list[str]] = {}
    for setting in settings:
        key, value = key_and_value(setting)
        kinds = (kind := known[key].kind if key in known else str, *get_args(kind))
        whole = str in kinds or tuple in map(get_origin, kinds)
        parts = [value] if whole else value.split(",")
        axes.setdefault(key, []).extend(part.strip() for part in parts)
    return [dict(zip(axes, point)) for point in itertools.product(*axes.values())]


def with_parameters(book: "NotebookNode", asked: Mapping[str, Any]) -> "NotebookNode":
    """A copy of `book` with a cell after its parameters cell that sets what was asked. It is not
    papermill's: that turns a tuple into text and warns about annotations that it cannot parse.
    What an earlier run set, in a notebook that is its output, is gone."""
    from nbformat.v4 import new_code_cell

    known = parameters(book)
    values = choose(known, asked)
    lines = [f"{name} = {values[name]!r}" for name in known if values[name] != known[name].default]
    book, earlier = copy.deepcopy(book), tagged(book, INJECTED)
    book.cells = [cell for cell in book.cells if cell not in earlier]
    if lines:
        at = book.cells.index(tagged(book, "parameters")[0]) + 1
        book.cells.insert(at, new_code_cell("\n".join([SET, *lines]),
                                            id=INJECTED, metadata={"tags": [INJECTED]}))
    return book


# --- running

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
        for _ in range(50):
            with contextlib.suppress(RuntimeError):     # its thread has changed a dict meanwhile
                return self.writes(without_widgets(self.executed))
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
        import nbformat
        from jupyter_client import AsyncKernelManager
        from nbclient import NotebookClient
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        # now: an end that is asked for must be quick
        self.writes = nbformat.writes
        manager = AsyncKernelManager(kernel_name="python3",
                                     connection_file=str(self.folder / "kernel.json"))
        if manager.has_trait("transport_encryption"):       # ipykernel warns where it has none
            manager.transport_encryption = "auto"
        env = os.environ | {
            "PYTHONOPTIMIZE": "",       # with it Python drops every assert, and with them every claim
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
            ending = self.failure or self.verdict()
        except DeadKernelError:
            ending = _failed(self.record, "DeadKernelError", f"the kernel died while cell "
                             f"{self.record['cell']} ran{self.kernel.cause_of_death()}")
        except RuntimeError as error:       # the kernel did not start
            ending = _failed(self.record, type(error).__name__, str(error))
        except Exception as error:          # a full disk: not the notebook's, and not an interrupt
            ending = _failed(self.record, type(error).__name__, str(error))
            raise
        finally:
            self.end(**ending)
        return self.record

    def verdict(self) -> dict[str, Any]:
        """No cell failed; but one may have left the notebook, or have been skipped by its tag."""
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
    found = {name: version or "not installed" for name, version in packages.items()}
    return {"format": FORMAT, "version": 1, "notebook": job.path.stem, "label": job.label,
            "status": "asked", "claim": "", "claims": [], "result": "", "why": "",
            "tier": job.values.get("tier"), "asked": dict(job.asked),
            "parameters": dict(job.values), "start": _now(), "end": None, "seconds": 0.0,
            "cell": 0, "cells": 0, "ran": 0, "line": "", "error": None,
            "peak_rss_bytes": 0, "peak_rss_how": PEAK_HOW, "output": str(job.output),
            "record": str(job.record), "pid": os.getpid(),
            "versions": {"python": platform.python_version(), **found}}


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
    told = {field: str(value) if isinstance(value, Path) else value
            for field, value in dataclasses.asdict(job).items()}
    # The modules are looked for where this process finds them, and not in the current folder.
    code = (f"import sys; sys.path[:] = {sys.path!r}; "
            f"from lpkit.course import notebooks; sys.exit(notebooks.work({str(folder)!r}))")
    with children.start(
            [sys.executable, "-P", "-c", code], folder, files={"job": repr(told)},
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


def work(folder: str) -> int:
    """The process of one job, which its keeper ends with SIGTERM. The kernel is left to the keeper
    then: nothing is waited for. Returns the exit code."""
    told = ast.literal_eval(Path(folder, "job").read_text())    # reads literals, runs nothing
    told |= {name: Path(told[name]) for name in ("path", "out")}
    attempt = Attempt(Job(**told), Path(folder), processes.tell)

    def stop() -> None:
        attempt.end(status="killed")
        os._exit(128 + signal.SIGTERM)

    processes.hear(attempt.run, stop)
    return 0


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


# --- what there is

def describe(path: Path) -> dict[str, Any]:
    """Describes one notebook for `--list`: its title, claim and parameters, JSON-ready."""
    book = read(path)
    listed = [{"name": name, "annotation": p.annotation, "default": p.default,
               "comment": p.comment} for name, p in parameters(book).items()]
    headings = [line.lstrip("# ").strip() for cell in book.cells if cell.cell_type == "markdown"
                for line in cell.source.splitlines() if line.startswith("# ")]
    return {"name": path.stem, "title": next(iter(headings), ""), "claim": claim(book),
            "parameters": listed}
