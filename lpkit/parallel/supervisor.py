"""The warm parent of ranks, and the supervisors that watch them.

    python -m lpkit.parallel.supervisor FOLDER SOCKET

The warm parent imports what ranks need, and forks a supervisor for each `Processes`. The supervisor
forks the ranks, and watches them until all have ended. When a rank ends or hangs, it decides which
rank is to blame, and ends the others:

- A rank that fails sends a record of its error before it exits (`_record`). The record has the
  time, because exit codes arrive late, and because a rank that waits for a dead rank fails as well.
- A rank that ends without a record is judged by its exit code or signal.
- Hung ranks are judged by what `Place.at` wrote on the shared page.

The warm parent and the supervisor have only one thread and use no GPU, because neither threads nor
a CUDA context survive a fork.
"""

import atexit
import ctypes
import faulthandler
import gc
import itertools
import math
import os
import pkgutil
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lpkit.errors import out_of_memory, packed
from lpkit.parallel.processes import BEAT_SECONDS, MEETING, SLOT, STRANGER, Place, new_page
from lpkit.processes import Channel, adopt_orphans, end_with_parent, sweep

TICK_SECONDS = 0.05         # longest interval between two checks of the ranks
# wait between the first failure and the decision which rank caused it, because reports of other
# ranks may still arrive
SETTLE_SECONDS = 0.25
NATURAL_SECONDS = 1.0       # wait between the outcome's decision and SIGTERM to the remaining ranks
POLITE_SECONDS = 1.0        # wait between SIGTERM and SIGKILL
TEARDOWN_SECONDS = 10.0     # added to NATURAL_SECONDS if all ranks have returned
STACK_SECONDS = 1.0         # longest time that ranks take to write their stacks
MOST_CHARACTERS = 20_000    # number of characters kept from the end of a traceback
# words in the errors of gloo and NCCL when another rank has ended
PEER = ("gloo/transport", "remote process exited", "ncclRemoteError", "NCCL communicator was abort")


# --- in a rank

def run_rank(function: Callable[[Place, dict], Any], place: Place, argument: dict,
             stacks: Path) -> None:
    """Call `function(place, argument)`, send its result or its error to the supervisor, and exit.
    Does not return. `stacks`: the file into which this rank writes its stack on SIGUSR1."""
    end_with_parent()
    file = open(stacks, "w")
    faulthandler.enable(file)       # also writes the stack of a crash in C
    faulthandler.register(signal.SIGUSR1, file)
    threading.Thread(target=_beat, args=(place,), daemon=True).start()
    code = 1
    try:
        place.channel.send("done", [function(place, argument)])
        code = 0
        # The result has been sent, so an abort from here on does no harm.
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:          # also SystemExit: a rank that exits has not finished
        if code:
            place.channel.send("failed", _record(error))
    finally:
        # `os._exit` skips the teardown of Python's modules, which takes half a second with torch.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _beat(place: Place) -> None:
    while True:
        place.beat()
        time.sleep(BEAT_SECONDS)


def _record(error: BaseException) -> dict[str, Any]:
    """Return what the supervisor needs to know of an error: packed (type and text), error (one
    line), at (time), traceback, peer (another rank had ended before), memory (out of memory)."""
    # tb_next: leave out the frame of `run_rank`
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    return {"packed": packed(error), "error": f"{type(error).__name__}: {error}".rstrip(": "),
            "at": time.monotonic(), "traceback": "".join(lines)[-MOST_CHARACTERS:],
            "peer": _lost_a_peer(error), "memory": out_of_memory(error)}


def _lost_a_peer(error: BaseException) -> bool:
    """Return whether the error, or an error that caused it, says that another rank has ended."""
    lost: tuple[type, ...] = ()
    if dist := sys.modules.get("torch.distributed"):
        lost = (dist.DistError,)
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, lost) or any(words in str(below) for words in PEER):
            return True
        below = below.__cause__ or below.__context__
    return False


# --- in the warm parent

@dataclass
class Rank:
    """The state of a rank, as the supervisor knows it."""

    number: int
    pid: int
    channel: Channel
    stacks: Path        # the file into which the rank writes its stack
    failed: dict[str, Any] | None = None    # the record of its error, from `_record`
    done: list[Any] | None = None           # [its return value]
    status: int | None = None               # its exit code; for a signal, minus the signal's number
    ended_at: float = 0.0
    beats: int = 0
    silent_seconds: float = 0.0             # since the last change of its beats
    noted: tuple = (0, 0, 0)                # calls of `Place.at`; the step; calls in this step
    phase: str = "start"
    waits: bool = False         # it waits for a message of another rank
    asked_to_end: bool = False

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def working(self) -> bool:
        """True while its function runs."""
        return self.alive and not self.done and not self.failed

    @property
    def trouble_at(self) -> float | None:
        """The time at which it failed, or ended without a record; None if it did neither."""
        if self.failed:
            return self.failed["at"]
        return self.ended_at if not self.alive and not self.done else None

    @property
    def where(self) -> str:
        return f"at step {self.noted[1]} in {self.phase}"

    @property
    def end(self) -> str:
        """The end of its process in words, for an error message."""
        if self.status >= 0:
            return f"exited {self.where} with code {self.status} and without an error"
        name = signal.Signals(-self.status).name
        why = ", from outside: where memory runs out, the system kills a process" * (
            name == "SIGKILL")
        return f"died {self.where} of {name}{why}"

    @property
    def stopped(self) -> bool:
        """Whether a signal such as SIGSTOP has stopped the process."""
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def stack(self) -> str:
        """Return the last stack that the main thread wrote, without the frames of this module."""
        text = self.stacks.read_text(errors="replace")
        # faulthandler names threads by ident; a forked process keeps the ident of its main thread
        main = f"hread 0x{threading.get_ident():016x} "
        lines = text[text.rfind(main):].partition("\n\n")[0].splitlines()[1:]
        return "\n".join(itertools.takewhile(lambda line: run_rank.__name__ not in line, lines))

    def ask_for_stack(self) -> None:
        """Make the main thread write its stack, before it does anything else. Without `tgkill`,
        another thread may handle the signal. If the rank was stopped, its main thread then goes on
        before the stack is written."""
        if self.alive and hasattr(libc := ctypes.CDLL(None), "tgkill"):     # Linux
            libc.tgkill(self.pid, self.pid, signal.SIGUSR1)
        else:
            self.send(signal.SIGUSR1)

    def send(self, number: int) -> None:
        if self.alive:
            # the process has not been reaped, so its pid cannot have been reused
            os.kill(self.pid, number)


class Supervisor:
    """Watches the ranks of one `Processes`. `page`: see `processes.SLOT`. `caller`: the channel to
    the process that called `Processes`."""

    def __init__(self, ranks: list[Rank], page: Any, caller: Channel, *,
                 timeout_seconds: float, progress_seconds: float):
        self.ranks, self.page, self.caller = ranks, page, caller
        self.timeout_seconds, self.progress_seconds = timeout_seconds, progress_seconds
        self.asked = ""             # the last request to the ranks: "", "pause" or "stop"
        # the message to the caller: ("values", results by rank) or ("error", [type, text])
        self.outcome: tuple[str, Any] | None = None
        self.since = math.inf       # time at which the outcome was decided
        self.trouble = math.inf     # time at which this process noticed the first failed rank
        self.still_seconds = 0.0    # time since a rank last progressed

    def watch(self) -> None:
        """Run until every rank has exited."""
        wakes, writer = os.pipe()
        os.set_blocking(writer, False)
        # When a rank ends, SIGCHLD writes a byte to this pipe, which ends the wait of `select`.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        before = time.monotonic()
        while any(rank.alive for rank in self.ranks):
            speaking = [rank for rank in self.ranks if not rank.channel.over]
            ready, *_ = select.select([wakes, self.caller, *(rank.channel for rank in speaking)],
                                      [], [], TICK_SECONDS)
            if wakes in ready:
                os.read(wakes, 512)
            if self.caller in ready:
                self.obey(self.caller.receive())
            for rank in speaking:
                if rank.channel in ready:
                    self._hear(rank)
            if self.caller.over:    # the caller has ended
                for rank in self.ranks:
                    rank.send(signal.SIGKILL)
            for rank in self.ranks:
                self._reap(rank)
            now = time.monotonic()
            # At most 4 ticks count: if this process was suspended for longer (a laptop that
            # sleeps), the ranks may have been suspended as well, and are not to blame.
            self._look(min(now - before, 4 * TICK_SECONDS))
            before = now
            self._judge(now)
            self._end(now)
            for channel in (self.caller, *(rank.channel for rank in self.ranks)):
                channel.flush()

    def conclude(self) -> None:
        """Send the outcome to the caller. Without an outcome, the caller has ended."""
        if self.outcome:
            self.caller.send(*self.outcome)

    def obey(self, messages: list[tuple[str, list[str]]]) -> None:
        """Pass the caller's requests on to the ranks."""
        for kind, ask in messages:
            if self.asked != "stop":        # after a stop, requests are ignored
                self.asked = ask[0]
                for rank in self.ranks:
                    rank.channel.post(kind, ask)

    def _hear(self, rank: Rank) -> bool:
        """Read the messages of a rank, and return whether there were any. A report is sent on to
        the caller; "done" and "failed" become fields of the Rank."""
        messages = rank.channel.receive()
        for kind, value in messages:
            if kind == "report":
                self.caller.post(kind, [rank.number, value])
            else:
                setattr(rank, kind, value)
        return bool(messages)

    def _reap(self, rank: Rank) -> None:
        """If the process of a rank has ended, record its exit status and the time."""
        if rank.alive and (ended := os.waitpid(rank.pid, os.WNOHANG))[0]:
            while self._hear(rank):     # messages that the rank sent before it ended
                pass
            rank.status, rank.ended_at = os.waitstatus_to_exitcode(ended[1]), time.monotonic()

    def _look(self, seconds: float) -> None:
        """Read the shared page. `seconds`: time since the last call."""
        moved = self.asked == "pause"
        for rank in self.ranks:
            beats, *noted, phase, rank.waits = SLOT.unpack_from(
                self.page, rank.number * SLOT.size)
            rank.silent_seconds = 0 if beats != rank.beats else rank.silent_seconds + seconds
            moved |= tuple(noted) != rank.noted
            rank.beats, rank.noted = beats, tuple(noted)
            rank.phase = phase.rstrip(b"\0").decode(errors="replace") or rank.phase
        self.still_seconds = 0 if moved else self.still_seconds + seconds

    def _judge(self, now: float) -> None:
        """Decide whether the run is over, and why."""
        if self.outcome or self.caller.over:
            return
        working = [rank for rank in self.ranks if rank.working]
        if failed := [rank for rank in self.ranks if rank.trouble_at]:
            self.trouble = min(self.trouble, now)
            if now - self.trouble > SETTLE_SECONDS or not working:
                # Ranks that failed only because another rank had ended are not the cause.
                causes = [rank for rank in failed if not (rank.failed and rank.failed["peer"])]
                self._blame(min(causes or failed, key=lambda rank: rank.trouble_at))
        elif not working:
            self._decide("values", [rank.done[0] for rank in self.ranks])
        elif silent := [rank for rank in working if rank.silent_seconds > self.timeout_seconds]:
            self._hung(silent, f"gave no sign of life for {self.timeout_seconds:g} s")
        elif self.still_seconds > self.progress_seconds:
            # A rank that waits for a message is held up by another rank. Of the others, those that
            # are furthest behind (step, calls of `Place.at` in this step) are to blame.
            free = [rank for rank in working if not rank.waits] or working
            least = min(rank.noted[1:] for rank in free)
            self._hung([rank for rank in free if rank.noted[1:] == least],
                       f"got no further for {self.progress_seconds:g} s")

    def _blame(self, rank: Rank) -> None:
        """Decide that the outcome is the error of `rank`, which failed or ended without a record.
        """
        error = rank.failed
        # While ranks connect, gloo aborts its process when another program sends it a message.
        if rank.phase == MEETING and rank.status == -signal.SIGABRT:
            self._fail([rank], f" {rank.end}: {STRANGER}", kind="ConfigError")
        elif error is None:
            self._fail([rank], f" {rank.end}", rank.stack(), "GoneError")
        elif (kind := error["packed"][0]) in ("ConfigError", "DamagedError", "RunFailedError"):
            self._fail([rank], f": {error['packed'][1]}", kind=kind)
        elif kind == "OSError" and not (error["memory"] or error["peer"]):
            # for example a full disk: the caller gets the same OSError
            self._decide("error", error["packed"])
        else:
            how = "ran out of memory" if error["memory"] else "failed"
            self._fail([rank], f" {how} {rank.where}: {error['error']}", error["traceback"])

    def _hung(self, ranks: list[Rank], how: str) -> None:
        """Decide that hung `ranks` are the outcome, with their stacks, and kill them. SIGTERM would
        have no effect, because Python runs its handler only between two instructions."""
        stopped = [rank for rank in ranks if rank.stopped]
        for rank in ranks:
            # a rank that a signal has stopped writes its stack only after SIGCONT
            rank.ask_for_stack()
            rank.send(signal.SIGCONT)
        sizes, before, deadline = [], [0], time.monotonic() + STACK_SECONDS
        while (sizes != before or 0 in sizes) and time.monotonic() < deadline:
            time.sleep(2 * TICK_SECONDS)
            before, sizes = sizes, [rank.stacks.stat().st_size for rank in ranks]
        where = {rank.number: f"rank {rank.number} is {rank.where}{', waiting' * rank.waits}"
                 for rank in self.ranks}
        if rest := [where[rank.number] for rank in self.ranks
                    if rank.working and rank not in ranks]:
            how += f" {ranks[0].where}, and {', '.join(rest)}"
        elif len(ranks) > 1:
            how += ": they wait for one another, or compute for longer than that"
        if not stopped and all(rank.phase == MEETING for rank in ranks):
            self._fail(ranks, f" {how}: {STRANGER}", kind="ConfigError")
        else:
            stacks = [f"{where[rank.number]}{', stopped by a signal' * (rank in stopped)}\n"
                      f"{rank.stack()}" for rank in ranks]
            self._fail(ranks, f" {how}", "\n\n".join(stacks))
        for rank in ranks:
            rank.send(signal.SIGKILL)

    def _fail(self, ranks: list[Rank], how: str, text: str = "", kind: str = "RunFailedError"
              ) -> None:
        """Decide that the outcome is an error of type `kind`, with a sentence of the numbers of
        `ranks` and `how` they failed, and then `text`: a traceback or stacks."""
        *most, last = (str(rank.number) for rank in ranks)
        who = f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
        sentence = f"{who} of {len(self.ranks)}{how}\n\n{text}".strip()
        self._decide("error", [kind, sentence])

    def _decide(self, *outcome: Any) -> None:
        self.outcome, self.since = outcome, time.monotonic()

    def _end(self, now: float) -> None:
        """After the outcome is decided, end the ranks that are left: after NATURAL_SECONDS by
        SIGTERM, after POLITE_SECONDS more by SIGKILL."""
        passed = now - self.since
        if "values" in (self.outcome or ()):
            passed -= TEARDOWN_SECONDS
        for rank in self.ranks:
            if passed > NATURAL_SECONDS + POLITE_SECONDS:
                rank.send(signal.SIGKILL)
            elif passed > NATURAL_SECONDS and not rank.asked_to_end:
                rank.asked_to_end = True
                rank.send(signal.SIGTERM)


def watch(function: Callable, folder: Path, caller: Channel) -> None:
    """Fork the ranks of one `Processes`, and watch them until all of their processes have ended.

    function: the ranks' function
    folder:   the ranks' store and stacks; it is created here, and removed at the end
    caller:   the channel from which the job and later requests are read
    """
    end_with_parent()
    adopt_orphans()
    # the warm parent's handler waits for supervisors, which are not children of this process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    messages: list[tuple[str, Any]] = []
    while not messages:
        messages = caller.receive(wait=True)
        if caller.over:         # the caller has ended without sending a job
            return
    (_, job), *asks = messages
    world = job["world"]
    page, ranks = new_page(world), []
    folder.mkdir()
    for number in range(world):
        ours, theirs = map(Channel, socket.socketpair())
        stacks = folder / f"stacks-{number}"
        stacks.touch()
        if not (pid := os.fork()):
            # A channel ends when the last process that holds its other end has closed it. So a rank
            # closes all channels that it has inherited, except its own.
            for channel in (caller, ours, *(rank.channel for rank in ranks)):
                channel.close()
            place = Place(number, world, number, world, f"file://{folder}/store", page, theirs)
            run_rank(function, place, job["argument"], stacks)
        theirs.close()
        ranks.append(Rank(number, pid, ours, stacks))
    supervisor = Supervisor(ranks, page, caller, timeout_seconds=job["timeout_seconds"],
                            progress_seconds=job["progress_seconds"])
    supervisor.obey(asks)
    try:
        supervisor.watch()
    finally:
        sweep()                 # end processes that ranks have started and left behind
        shutil.rmtree(folder, ignore_errors=True)
    supervisor.conclude()


def main(folder: str, calls: str) -> int:
    """Fork a supervisor for each call, until the process that holds the other end of `calls` ends.

    folder: each call gets a folder in it
    calls:  file descriptor of a socket. A call is the name of the ranks' function, and the socket
            to the caller
    """
    end_with_parent()
    watching: set[int] = set()
    # Reap supervisors that have ended. Only these pids are waited for: `waitpid(-1)` could also
    # take the exit status of a child that an imported module has started.
    signal.signal(signal.SIGCHLD, lambda *_: watching.difference_update(
        [pid for pid in watching if os.waitpid(pid, os.WNOHANG)[0]]))
    with socket.socket(fileno=int(calls)) as heard:
        for call in itertools.count():
            name, fds, *_ = socket.recv_fds(heard, 4096, 1)
            if not name:        # the process that sends calls has ended
                break
            caller = Channel(fds[0])
            try:
                # imports the function's module, with all that this module imports
                function = pkgutil.resolve_name(name.decode())
            except Exception as error:
                record = _record(error)
                sentence = f"cannot import {name.decode()}: {record['error']}"
                caller.send("error", ["RunFailedError", f"{sentence}\n\n{record['traceback']}"])
            else:
                # Garbage collection in a fork would write to pages that it shares with this
                # process, and so copy them. `freeze` keeps existing objects out of collections.
                gc.freeze()
                if not (pid := os.fork()):
                    heard.close()
                    try:
                        watch(function, Path(folder, str(call)), caller)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(0)
                watching.add(pid)
            caller.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
