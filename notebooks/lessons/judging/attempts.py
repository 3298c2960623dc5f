"""Runs a learner's code in a separate process, which cannot influence the verdict.

    notebook        sends the text of a function and the names that it uses (`Parcel`)
      warm process  has imported torch and the definitions; forks for each check
        judge       compares the answers; only the judge has the socket to the notebook
          attempt   has one pipe for its answers, and limits of time, memory, files and processes

The attempt may loop, crash, exit, use up its memory or write to any file; each of these becomes a
sentence for the learner. No verdict is written in the process that runs the attempt. Its pipe
carries only JSON and safetensors. The judge sends its verdict with a nonce, which it receives only
after every process of the attempt has ended.
Sources: prctl(2), PR_SET_DUMPABLE; capset(2).
"""

import __future__

import ast
import atexit
import contextlib
import ctypes
import inspect
import json
import linecache
import os
import pkgutil
import secrets
import select
import signal
import struct
import symtable
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import psutil
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from lpkit.errors import ConfigError
from lpkit.machine_facts import cores, status_bytes
from lpkit.parallel.processes import WarmParent
from lpkit.processes import end_with_parent

MEMORY_BYTES = 1 << 30          # most memory that an attempt may use
FILE_BYTES = 1 << 26            # most bytes that it may write: its output and its answers
PROCESSES = 16                  # most processes that it may start
SHOWN = 300                     # most characters of its output that are shown
NO_ANSWERS = "it wrote something to the judge that is not an answer"
TICK_SECONDS = 0.1
START_SECONDS = 60.0    # for importing torch on a busy machine
SECONDS = 20.0          # for all cases of an exercise
SIZES = struct.Struct("<II")
YOURS = "your "                 # prefix of the file name of a learner's text in a traceback


# Data that can be sent: numbers, text, tensors, and lists and dicts of these.

class Unknown:
    """A value of another type, of which only the repr was sent."""

    def __init__(self, words: str):
        self.words = words

    def __repr__(self) -> str:
        return self.words


def pack(value: Any, strict: bool = False) -> bytes:
    """Return a value as bytes: the sizes of both parts (SIZES), JSON, and the tensors as
    safetensors. A value of another type is packed as its repr; with `strict`, it raises
    TypeError."""
    tensors: dict[str, Tensor] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors[f"{len(tensors)}"] = value.detach().cpu().contiguous().clone()
            return {"tensor": f"{len(tensors) - 1}"}
        if hasattr(value, "tolist"):          # a numpy array or scalar
            value = value.tolist()
        if value is None or isinstance(value, bool | str):
            return value
        for kind in (int, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, Mapping):
            return {"dict": [[plain(key), plain(each)] for key, each in value.items()]}
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [plain(each) for each in value]}
        if strict:
            raise TypeError(f"{type(value).__name__} is no number, text, tensor, list or dict")
        words = f"a function {value.__name__}" if inspect.isfunction(value) else repr(value)
        return {"words": words[:SHOWN]}

    text = json.dumps(plain(value)).encode()
    blob = save_tensors(tensors) if tensors else b""
    return SIZES.pack(len(text), len(blob)) + text + blob


def unpack(frame: bytes) -> Any:
    """Return the value that `pack` made into these bytes. Raises any kind of Exception for other
    bytes."""
    size, _ = SIZES.unpack_from(frame)
    text, blob = frame[SIZES.size:SIZES.size + size], frame[SIZES.size + size:]
    tensors = load_tensors(blob) if blob else {}

    def value(packed: Any) -> Any:
        if not isinstance(packed, dict):
            return packed
        (kind, inside), = packed.items()
        return {"tensor": lambda: tensors[inside], "words": lambda: Unknown(str(inside)),
                "list": lambda: [value(each) for each in inside],
                "tuple": lambda: tuple(value(each) for each in inside),
                "dict": lambda: {value(key): value(each) for key, each in inside}}[kind]()

    return value(json.loads(text))


class Frames:
    """Reads packed values from a pipe or a socket. `over`: True when the other end has closed."""

    def __init__(self, fd: int):
        # `_rest`: bytes of an incomplete frame; `_left`: bytes that may still arrive
        self.fd, self.over, self._rest, self._left = fd, False, bytearray(), FILE_BYTES

    def read(self) -> None:
        """Read the available bytes; wait for the first one. Raises ValueError if more than
        FILE_BYTES arrive."""
        with contextlib.suppress(ConnectionError):
            some = os.read(self.fd, 1 << 20)
            self._rest += some
            self._left -= len(some)
            self.over = not some
            if self._left < 0:
                raise ValueError(f"more than {FILE_BYTES:,} bytes arrived")
            return
        self.over = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the complete frames, unpacked."""
        while len(self._rest) >= SIZES.size:
            size = SIZES.size + sum(SIZES.unpack_from(self._rest))
            if len(self._rest) < size:
                return
            frame = bytes(self._rest[:size])
            del self._rest[:size]
            yield unpack(frame)


# The function and everything that it uses.

@dataclass
class Parcel:
    """A function of the notebook and the names that it uses there, as data that can be sent to
    another process. `entry` is the function's name."""

    entry: str = ""
    texts: dict[str, str] = field(default_factory=dict)     # sources by name; helpers come first
    imports: dict[str, str] = field(default_factory=dict)   # by name: "module" or "module:name"
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, function: Any) -> "Parcel":
        """Pack a function. Raises ConfigError for a value that cannot be sent."""
        name = getattr(function, "__name__", "")
        parcel = cls(entry=name if name.isidentifier() else "answer")
        if not callable(function):
            raise ConfigError(f"write it as a function in a cell, got {function!r:.100}")
        parcel._add(parcel.entry, function)
        return parcel

    @property
    def is_stub(self) -> bool:
        return self.entry in self.texts and is_stub(ast.parse(self.texts[self.entry]).body[0])

    def _add(self, name: str, value: Any) -> None:
        """Add a name that the function uses: as an import, as a source, or as a value."""
        if name in self.texts or name in self.imports or name in self.values:
            return
        if where := _imported_from(value):
            self.imports[name] = where
            return
        try:
            if callable(value):
                self._add_text(name, value)
            else:
                pack(value, strict=True)
                self.values[name] = value
        except (OSError, TypeError, ValueError, SyntaxError) as error:
            why = "" if isinstance(error, TypeError | OSError) else f" ({error})"
            raise ConfigError(
                f"`{name}` is a {type(value).__name__} of the notebook{why}, which cannot be sent "
                f"to the process where answers run; use numbers, text, tensors, lists and dicts of "
                f"these, imports, and functions written with def") from None

    def _add_text(self, name: str, function: Callable) -> None:
        """Add a function's source, and everything that the source uses before it."""
        text, node = text_of(function, name)
        known = inspect.unwrap(function)
        defined = getattr(node, "name", name)
        self.texts[defined] = text         # before the functions that it calls; they may call it
        # the function's globals, and its variables from enclosing functions
        cells = zip(known.__code__.co_freevars, known.__closure__ or ())
        names = {**known.__globals__, **{free: cell.cell_contents for free, cell in cells}}
        for used in _names_used(node) & names.keys() - {defined}:
            self._add(used, names[used])
        self.texts[defined] = self.texts.pop(defined)
        if defined != name:
            self.texts[name] = f"{name} = {defined}"


def text_of(function: Callable, name: str = "answer") -> tuple[str, ast.stmt]:
    """Return a function's source and its syntax tree. Empty lines before the source keep the line
    numbers of the cell. A lambda becomes `name = (lambda ...)`. Raises OSError, TypeError or
    SyntaxError if there is no such source."""
    lines, first = inspect.getsourcelines(function)
    text = textwrap.dedent("".join(lines))
    node, *more = ast.parse(text).body
    if not isinstance(node, ast.FunctionDef):
        lambdas = [child for child in ast.walk(node) if isinstance(child, ast.Lambda)]
        if len(lambdas) != 1:
            raise TypeError("it is not a function")
        text = f"{name} = ({ast.get_source_segment(text, lambdas[0])})"
        node = ast.parse(text).body[0]
    if more:
        raise TypeError("it is not a function")
    return "\n" * (first - 1) + text, node


def is_stub(node: ast.stmt) -> bool:
    """Whether a function's only statement, apart from its docstring, is a `raise`."""
    body = [line for line in getattr(node, "body", ()) if not isinstance(line, ast.Expr)]
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _imported_from(value: Any) -> str:
    """Return the name by which another process can import a value; empty if it cannot."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, torch.dtype):
        return str(value).replace(".", ":")
    name, main = getattr(value, "__qualname__", ""), sys.modules["__main__"]
    for module in (getattr(value, "__module__", None), *list(sys.modules)):
        holder: Any = sys.modules.get(module)
        for part in name.split(".") if holder is not main else "":
            holder = getattr(holder, "__dict__", {}).get(part)
        if name and holder is value:
            return f"{module}:{name}"
    return ""


def _names_used(node: ast.stmt) -> set[str]:
    """Return the global names that a function uses. Names in annotations are left out, since the
    attempt's process does not evaluate annotations."""
    node = ast.parse(ast.unparse(node)).body[0]
    for child in ast.walk(node):
        for annotated in {"annotation", "returns"} & set(child._fields):
            setattr(child, annotated,
                    ast.Constant(None) if isinstance(child, ast.AnnAssign) else None)
    tables, used = [symtable.symtable(ast.unparse(node), "notebook", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {symbol.get_name() for symbol in table.get_symbols()
                 if symbol.is_global() and symbol.is_referenced()}
    return used


def load(parcel: Parcel, **known: Any) -> Callable[..., Any]:
    """Define the function of a parcel and return it, in the attempt's process. Annotations are not
    evaluated. `known`: names that are defined in addition to the parcel's."""
    names: dict[str, Any] = {"__name__": "notebook", **known, **parcel.values}
    names |= {name: pkgutil.resolve_name(where) for name, where in parcel.imports.items()}
    for name, text in parcel.texts.items():
        file = f"{YOURS}{name}"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        # this runs the learner's code: in a process with limits, forked for this attempt
        exec(compile(text, file, "exec", __future__.annotations.compiler_flag, True), names)
    return names[parcel.entry]


# From the notebook to the judge.

@cache
def _warm() -> dict[str, WarmParent]:
    """Return this process's warm parents by environment. They stay until this process ends, so only
    the first check waits for the import of torch."""
    return {}


def asked(name: str, seconds: float, env: Mapping[str, str] | None = None,
          **job: Any) -> dict[str, Any]:
    """Send a job to the judge of this exercise and return the judge's finding. The judge is a fork
    of a warm process whose environment has `env`. Raises ConfigError if the job is too large.

    Protocol on the socket: the notebook sends the job; the judge sends `?` when every process of
    the attempt has ended; the notebook sends a nonce; the judge sends the nonce and its finding.
    Every process of the attempt has ended before the nonce is sent, so an attempt cannot forge a
    finding."""
    job = pack({"name": name, "seconds": seconds, **job})
    if len(job) > FILE_BYTES:
        raise ConfigError(f"your function uses values of the notebook that take {len(job) >> 20} "
                          f"MB; at most {FILE_BYTES >> 20} MB can be sent to the process where "
                          f"answers run")
    nonce, reply = secrets.token_hex(32).encode(), b""
    parents, key = _warm(), repr(env)
    if key not in parents:
        parents[key] = WarmParent("lessons.judging.judge_process", **env or {})
        atexit.register(parents[key].__exit__)
    with parents[key].start(name) as line:
        line.settimeout((START_SECONDS + 5 * seconds) * patience())
        with contextlib.suppress(OSError):
            line.sendall(job)
            if line.recv(1) == b"?":
                line.sendall(nonce)
                while some := line.recv(1 << 16):
                    reply += some
    if reply.startswith(nonce):
        return json.loads(reply.removeprefix(nonce))
    parents.pop(key).__exit__()     # the next check starts a new warm process
    return {"status": "wrong", "detail": "the judging process was ended, by your function or from "
                                         "outside"}


# Answers, and the process that gives them.

@dataclass(frozen=True)
class Answer:
    """An attempt's answer to one case, or a message that says why there is none."""

    value: Any = None
    why: str = ""
    line: str = ""          # the line of the attempt where it failed, for a message
    to_do: bool = False     # the stub's NotImplementedError was raised

    @classmethod
    def raised(cls, error: BaseException, words: str = "") -> "Answer":
        """Return the answer of an attempt that raised `error`. `words`: the message, by default the
        error's."""
        if isinstance(error, NotImplementedError) and not error.args:   # PyTorch's has a message
            return cls(to_do=True)
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            words = f"it took more than {MEMORY_BYTES >> 20} MB of memory"
        return cls(why=words or f"it raised {type(error).__name__}: {error}", line=line_of(error))


def line_of(error: BaseException | None) -> str:
    """Return the line of the learner's text that raised the error."""
    while error is not None:
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if frame.filename.startswith(YOURS) and frame.line:
                return f", in line {frame.lineno}: `{frame.line.strip()}`"
        error = error.__cause__
    return ""


def patience() -> float:
    """Factor on an attempt's time limit: on a busy machine, it gets only a share of the cores."""
    return max(1.0, os.getloadavg()[0] / cores())


class Attempt:
    """A fork in which `work` gives answers. At the end of the `with` block, the fork and all of its
    processes are killed. Iterate over the attempt to receive the answers.

    seconds: time limit for all answers, longer on a busy machine (`patience`)
    hung_up: a file descriptor that is readable when the caller no longer waits for answers
    """

    def __init__(self, work: Callable[[], Iterable[Answer]], seconds: float, hung_up: int = -1):
        self._seconds, self._deadline = seconds, time.monotonic() + seconds * patience()
        self._hung_up = [hung_up] if hung_up >= 0 else []
        self._printed = tempfile.TemporaryFile()
        reader, writer = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            _give(work, writer, self._printed.fileno())
        os.close(writer)
        self._frames = Frames(reader)

    @property
    def printed(self) -> str:
        # the fork may still print; `pread` leaves the shared file offset alone
        words = os.pread(self._printed.fileno(), 4 * SHOWN, 0).decode(errors="replace").strip()
        return words and f". It printed: {words[:SHOWN]}"

    def __iter__(self) -> Iterator[Answer]:
        """Yield the answers, and at the end the reason if there are too few."""
        looked = time.monotonic()
        while not self._frames.over:
            left = self._deadline - time.monotonic()
            if left <= 0:
                yield Answer(why=f"it did not end within {self._seconds:.0f} s")
                return
            ready, *_ = select.select([self._frames.fd, *self._hung_up], [], [],
                                      min(left, TICK_SECONDS))
            if set(ready) & set(self._hung_up):
                raise ConnectionError("nobody waits for answers")
            if time.monotonic() - looked > TICK_SECONDS:
                looked = time.monotonic()
                if len(psutil.Process(self._pid).children(recursive=True)) > PROCESSES:
                    yield Answer(why=f"it started more than {PROCESSES} processes")
                    return
            try:
                if ready:
                    self._frames.read()
                for value, why, line, to_do in self._frames:
                    yield Answer(value, str(why), str(line), bool(to_do))
            except GeneratorExit:
                raise
            except Exception:
                yield Answer(why=NO_ANSWERS)
                return
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        self._pid = 0
        how = f" ({signal.Signals(-status).name})" if status < 0 else ""
        yield Answer(why=f"it ended its process{how}")

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._pid:
            for end in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    end(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._frames.fd)
        self._printed.close()


def _give(work: Callable[[], Iterable[Answer]], writer: int, printed: int) -> None:
    """Send the answers of `work` to file descriptor 3 and end this process; does not return.
    `writer`: the pipe to the judge; `printed`: the file that receives the attempt's output."""
    leave = os._exit            # the attempt may replace os._exit
    try:
        end_with_parent()
        os.setsid()             # a separate process group, which `Attempt.__exit__` kills as a whole
        # stdin, stdout, stderr and the pipe are the only open files: not the judge's socket
        for number, open_one in enumerate((os.open(os.devnull, os.O_RDONLY), printed, printed)):
            os.dup2(open_one, number)
        os.dup2(writer, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        _limit("RLIMIT_FSIZE", FILE_BYTES)
        _limit("RLIMIT_CORE", 0)
        _alone()
        torch.set_num_threads(1)
        try:
            for answer in work():
                _send(answer)
        except SystemExit:
            pass
        except BaseException as error:
            _send(Answer.raised(error))
    finally:
        leave(0)


def _send(answer: Answer) -> None:
    """Write an answer to file descriptor 3. An answer that cannot be packed is sent as an error."""
    try:
        frame = pack([answer.value, answer.why, answer.line, answer.to_do])
    except Exception as error:
        frame = pack([None, *list(asdict(Answer.raised(error)).values())[1:]])
    while frame:
        frame = frame[os.write(3, frame):]


def limit_memory() -> None:
    """Limit this process to MEMORY_BYTES more than it has now. macOS enforces no such limit, so on
    macOS only the time is limited."""
    if taken := status_bytes("VmSize"):
        _limit("RLIMIT_AS", taken + MEMORY_BYTES)


def _limit(name: str, most: int) -> None:
    import resource  # missing on Windows, where notebooks can still be read
    resource.setrlimit(getattr(resource, name), (most, most))


def _alone() -> None:
    """Drop root's capabilities, so that even root in a container cannot read the judge's memory."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "capset"):         # Linux
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc.capset(header, none)
