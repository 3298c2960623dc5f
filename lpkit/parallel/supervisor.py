"""The warm parent of ranks, and the supervisors that watch them.

    python -m lpkit.parallel.supervisor FOLDER SOCKET

When a rank ends or hangs, the supervisor decides which rank is to blame. It trusts the record that
each rank writes before it exits: exit codes arrive late, and a rank that waited for a dead rank
fails, too. A rank without a record is judged by its exit code or signal, and hung ranks are judged
by their notes on the shared page. Until the ranks run, there is only one thread and no GPU is used,
because neither threads nor a CUDA context survive a fork.
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

TICK_SECONDS = 0.05
SETTLE_SECONDS = 0.25       # after the first failure, to receive the records of its cause
NATURAL_SECONDS = 1.0       # for the other ranks to fail by themselves, and write their records;
POLITE_SECONDS = 1.0        # then from SIGTERM to SIGKILL
TEARDOWN_SECONDS = 10.0     # after all ranks are done
STACK_SECONDS = 1.0         # longest time to write stacks
MOST_CHARACTERS = 20_000    # kept of a traceback: its end
# what gloo and NCCL raise when another rank has gone
PEER = ("gloo/transport", "remote process exited", "ncclRemoteError", "NCCL communicator was abort")


# --- in a rank

def run_rank(function: Callable[[Place, dict], Any], place: Place, argument: dict,
             stacks: Path) -> None:
    """Runs a rank's function, and exits. Does not return."""
    end_with_parent()
    file = open(stacks, "w")
    faulthandler.enable(file)       # also writes the stack of a crash in C
    faulthandler.register(signal.SIGUSR1, file)
    threading.Thread(target=_beat, args=(place,), daemon=True).start()
    code = 1
    try:
        place.channel.send("done", [function(place, argument)])
        code = 0
        # the result is sent, so from here on an abort does no harm
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:          # also SystemExit: a rank that exits has not finished
        if code:
            place.channel.send("failed", _record(error))
    finally:
        # skips the teardown of modules, which takes half a second for torch
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _beat(place: Place) -> None:
    while True:
        place.beat()
        time.sleep(BEAT_SECONDS)


def _record(error: BaseException) -> dict[str, Any]:
    # without the frame of `run_rank`
    lines = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
    return {"packed": packed(error), "error": f"{type(error).__name__}: {error}".rstrip(": "),
            "at": time.monotonic(), "traceback": "".join(lines)[-MOST_CHARACTERS:],
            "peer": _lost_a_peer(error), "memory": out_of_memory(error)}


def _lost_a_peer(error: BaseException) -> bool:
    """Returns whether the error, or its cause, says that another rank had gone."""
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
    noted: tuple = (0, 0, 0)                # notes in all; the step; notes in this step
    phase: str = "start"
    waits: bool = False         # for a message
    asked_to_end: bool = False

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def working(self) -> bool:
        return self.alive and not self.done and not self.failed

    @property
    def trouble_at(self) -> float | None:
        """The time at which it failed, or ended without a record."""
        if self.failed:
            return self.failed["at"]
        return self.ended_at if not self.alive and not self.done else None

    @property
    def where(self) -> str:
        return f"at step {self.noted[1]} in {self.phase}"

    @property
    def end(self) -> str:
        if self.status >= 0:
            return f"exited {self.where} with code {self.status} and without an error"
        name = signal.Signals(-self.status).name
        why = ", from outside: where memory runs out, the system does so" * (name == "SIGKILL")
        return f"died {self.where} of {name}{why}"

    @property
    def stopped(self) -> bool:
        with suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    def stack(self) -> str:
        """Returns the main thread's last stack, without the frames of this module."""
        text = self.stacks.read_text(errors="replace")
        # a forked thread keeps its parent's ident
        main = f"hread 0x{threading.get_ident():016x} "
        lines = text[text.rfind(main):].partition("\n\n")[0].splitlines()[1:]
        return "\n".join(itertools.takewhile(lambda line: run_rank.__name__ not in line, lines))

    def ask_for_stack(self) -> None:
        """Makes the main thread write its stack before it does anything else. Without `tgkill`,
        another thread may handle the signal, and a stopped rank then continues meanwhile."""
        if self.alive and hasattr(libc := ctypes.CDLL(None), "tgkill"):     # Linux
            libc.tgkill(self.pid, self.pid, signal.SIGUSR1)
        else:
            self.send(signal.SIGUSR1)

    def send(self, number: int) -> None:
        if self.alive:
            # it has not been reaped, so its pid cannot have been reused
            os.kill(self.pid, number)


class Supervisor:
    def __init__(self, ranks: list[Rank], page: Any, caller: Channel, *,
                 timeout_seconds: float, progress_seconds: float):
        self.ranks, self.page, self.caller = ranks, page, caller
        self.timeout_seconds, self.progress_seconds = timeout_seconds, progress_seconds
        self.asked = ""             # the last request to the ranks: "", "pause" or "stop"
        self.outcome: tuple[str, Any] | None = None
        self.since = math.inf       # time at which the outcome was decided
        self.trouble = math.inf     # time at which the first failed rank was found
        self.still_seconds = 0.0    # in which no rank progressed

    def watch(self) -> None:
        """Runs until every rank has exited."""
        wakes, writer = os.pipe()
        os.set_blocking(writer, False)
        # the end of a rank interrupts the wait below
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
            if self.caller.over:    # the caller is gone
                for rank in self.ranks:
                    rank.send(signal.SIGKILL)
            for rank in self.ranks:
                self._bury(rank)
            now = time.monotonic()
            # if this process was suspended, the ranks may have been suspended, too
            self._look(min(now - before, 4 * TICK_SECONDS))
            before = now
            self._judge(now)
            self._end(now)
            for channel in (self.caller, *(rank.channel for rank in self.ranks)):
                channel.flush()

    def conclude(self) -> None:
        """Sends the outcome to the caller, unless the caller is gone."""
        if self.outcome:
            self.caller.send(*self.outcome)

    def obey(self, messages: list[tuple[str, list[str]]]) -> None:
        for kind, ask in messages:
            if self.asked != "stop":        # a stop also ends a pause; nothing follows a stop
                self.asked = ask[0]
                for rank in self.ranks:
                    rank.channel.post(kind, ask)

    def _hear(self, rank: Rank) -> bool:
        """Reads a rank's messages, and returns whether there were any."""
        messages = rank.channel.receive()
        for kind, value in messages:
            if kind == "told":
                self.caller.post(kind, [rank.number, value])
            else:
                setattr(rank, kind, value)
        return bool(messages)

    def _bury(self, rank: Rank) -> None:
        if rank.alive and (ended := os.waitpid(rank.pid, os.WNOHANG))[0]:
            while self._hear(rank):     # messages that it sent before it ended
                pass
            rank.status, rank.ended_at = os.waitstatus_to_exitcode(ended[1]), time.monotonic()

    def _look(self, seconds: float) -> None:
        """Reads the shared page, `seconds` after the last look."""
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
        """Decides whether the run is over, and why."""
        if self.outcome or self.caller.over:
            return
        working = [rank for rank in self.ranks if rank.working]
        if failed := [rank for rank in self.ranks if rank.trouble_at]:
            self.trouble = min(self.trouble, now)
            if now - self.trouble > SETTLE_SECONDS or not working:
                # prefer ranks that failed by themselves over ranks that only lost a peer
                own = [rank for rank in failed if not (rank.failed and rank.failed["peer"])]
                self._blame(min(own or failed, key=lambda rank: rank.trouble_at))
        elif not working:
            self._decide("values", [rank.done[0] for rank in self.ranks])
        elif silent := [rank for rank in working if rank.silent_seconds > self.timeout_seconds]:
            self._hung(silent, f"gave no sign of life for {self.timeout_seconds:g} s")
        elif self.still_seconds > self.progress_seconds:
            free = [rank for rank in working if not rank.waits] or working
            least = min(rank.noted[1:] for rank in free)
            self._hung([rank for rank in free if rank.noted[1:] == least],
                       f"got no further for {self.progress_seconds:g} s")

    def _blame(self, rank: Rank) -> None:
        """Reports a rank that failed, or ended without a record."""
        error = rank.failed
        # gloo aborts when it reads a message that is not gloo's
        if rank.phase == MEETING and rank.status == -signal.SIGABRT:
            self._fail([rank], f" {rank.end}: {STRANGER}", kind="ConfigError")
        elif error is None:
            self._fail([rank], f" {rank.end}", rank.stack(), "GoneError")
        elif (kind := error["packed"][0]) in ("ConfigError", "DamagedError", "RunFailedError"):
            self._fail([rank], f": {error['packed'][1]}", kind=kind)
        elif kind == "OSError" and not (error["memory"] or error["peer"]):
            # an error of one process, for example of its disk
            self._decide("error", error["packed"])
        else:
            how = "ran out of memory" if error["memory"] else "failed"
            self._fail([rank], f" {how} {rank.where}: {error['error']}", error["traceback"])

    def _hung(self, ranks: list[Rank], how: str) -> None:
        """Collects the stacks of hung ranks, then kills them: SIGTERM would not reach them."""
        stopped = [rank for rank in ranks if rank.stopped]
        for rank in ranks:
            # a rank that is stopped by a signal writes its stack only after SIGCONT
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
        *most, last = (str(rank.number) for rank in ranks)
        who = f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
        sentence = f"{who} of {len(self.ranks)}{how}\n\n{text}".strip()
        self._decide("error", [kind, sentence])

    def _decide(self, *outcome: Any) -> None:
        self.outcome, self.since = outcome, time.monotonic()

    def _end(self, now: float) -> None:
        """Ends the ranks that are left once the outcome is known: first by SIGTERM, then by
        SIGKILL."""
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
    """Forks ranks and watches them until no process of them is left."""
    end_with_parent()
    adopt_orphans()
    # the warm parent's handler waits for supervisors, which are not children of this process
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    messages: list[tuple[str, Any]] = []
    while not messages:
        messages = caller.receive(wait=True)
        if caller.over:         # the caller ended before it sent a job
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
            # A rank must hold only its own end: a channel ends when its last holder has closed it.
            for channel in (caller, ours, *(rank.channel for rank in ranks)):
                channel.close()
            place = Place(number, world, number, world, f"file://{folder}/store", page, theirs)
            run_rank(function, place, job["told"], stacks)
        theirs.close()
        ranks.append(Rank(number, pid, ours, stacks))
    supervisor = Supervisor(ranks, page, caller, timeout_seconds=job["timeout_seconds"],
                            progress_seconds=job["progress_seconds"])
    supervisor.obey(asks)
    try:
        supervisor.watch()
    finally:
        sweep()                 # processes that ranks left behind
        shutil.rmtree(folder, ignore_errors=True)
    supervisor.conclude()


def main(folder: str, calls: str) -> int:
    """Forks a supervisor for each call; a call is the name of a function and a socket."""
    end_with_parent()
    watching: set[int] = set()
    signal.signal(signal.SIGCHLD, lambda *_: watching.difference_update(
        [pid for pid in watching if os.waitpid(pid, os.WNOHANG)[0]]))
    with socket.socket(fileno=int(calls)) as heard:
        for call in itertools.count():
            name, fds, *_ = socket.recv_fds(heard, 4096, 1)
            if not name:        # the caller is gone
                break
            caller = Channel(fds[0])
            try:
                # with everything that it imports
                function = pkgutil.resolve_name(name.decode())
            except Exception as error:
                record = _record(error)
                sentence = f"cannot import {name.decode()}: {record['error']}"
                caller.send("error", ["RunFailedError", f"{sentence}\n\n{record['traceback']}"])
            else:
                # a collection would write to the pages that ranks share, and so copy them
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
