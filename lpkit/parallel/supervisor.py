"""The warm parent of ranks, and those who watch them.

    python -m lpkit.parallel.supervisor FOLDER SOCKET

Whose fault it is when a rank ends or hangs is judged by each rank's own record, which is written
before the rank exits: exit codes come late, and who waited for a dead rank fails, too. A rank that
left no record is judged by its end; of those that hang, by what they noted on the shared page.
Until the ranks run there is one thread and no GPU is touched: neither would survive a fork.
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
SETTLE_SECONDS = 0.25       # after the first trouble, for the records of what caused it
NATURAL_SECONDS = 1.0       # for the others to fail by themselves, and write that down;
POLITE_SECONDS = 1.0        # then from SIGTERM to SIGKILL
TEARDOWN_SECONDS = 10.0     # once all are done
STACK_SECONDS = 1.0         # to write stacks, at most
MOST_CHARACTERS = 20_000    # of a traceback: its end
# what is raised when another rank has gone: by gloo, by NCCL
PEER = ("gloo/transport", "remote process exited", "ncclRemoteError", "NCCL communicator was abort")


# --- in a rank

def run_rank(function: Callable[[Place, dict], Any], place: Place, told: dict,
             stacks: Path) -> None:
    """Does not return."""
    end_with_parent()
    file = open(stacks, "w")
    faulthandler.enable(file)       # a crash in C leaves its stack, too
    faulthandler.register(signal.SIGUSR1, file)
    threading.Thread(target=_beat, args=(place,), daemon=True).start()
    code = 1
    try:
        place.channel.send("done", [function(place, told)])
        code = 0
        # from here on it may abort: it is done
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:          # also SystemExit: whoever exits has not finished
        if code:
            place.channel.send("failed", _record(error))
    finally:
        # all but the taking down of modules, for which torch takes half a second
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
    """True if it came since another rank had gone."""
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
    """A rank, as far as it is known."""

    number: int
    pid: int
    channel: Channel
    stacks: Path        # where it writes its stack
    failed: dict[str, Any] | None = None    # its record: of `_record`
    done: list[Any] | None = None           # [what it returned]
    status: int | None = None               # its exit code; of a signal, minus its number
    ended_at: float = 0.0
    beats: int = 0
    silent_seconds: float = 0.0             # since a beat was seen
    noted: tuple = (0, 0, 0)                # how often in all; the step; how often in that
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
        """The time when it failed, or was gone without a record."""
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
        """The one that was written last: of the main thread, without what is ours."""
        text = self.stacks.read_text(errors="replace")
        main = f"hread 0x{threading.get_ident():016x} "     # a fork's is its parent's
        lines = text[text.rfind(main):].partition("\n\n")[0].splitlines()[1:]
        return "\n".join(itertools.takewhile(lambda line: run_rank.__name__ not in line, lines))

    def ask_for_stack(self) -> None:
        """The main thread writes it before it does anything else. Where another may answer, one
        that was stopped goes on meanwhile."""
        if self.alive and hasattr(libc := ctypes.CDLL(None), "tgkill"):     # Linux
            libc.tgkill(self.pid, self.pid, signal.SIGUSR1)
        else:
            self.send(signal.SIGUSR1)

    def send(self, number: int) -> None:
        if self.alive:
            os.kill(self.pid, number)       # not yet buried, so it is no other's


class Supervisor:
    def __init__(self, ranks: list[Rank], page: Any, caller: Channel, *,
                 timeout_seconds: float, progress_seconds: float):
        self.ranks, self.page, self.caller = ranks, page, caller
        self.timeout_seconds, self.progress_seconds = timeout_seconds, progress_seconds
        self.asked = ""             # of the ranks: "", "pause" or "stop"
        self.outcome: tuple[str, Any] | None = None
        self.since = math.inf       # when the outcome was known
        self.trouble = math.inf     # when the first rank was found to have failed
        self.still_seconds = 0.0    # in which no rank got further

    def watch(self) -> None:
        """Until no rank is left."""
        wakes, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)      # a rank that ends wakes us
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
            if self.caller.over:    # nobody waits for an outcome
                for rank in self.ranks:
                    rank.send(signal.SIGKILL)
            for rank in self.ranks:
                self._bury(rank)
            now = time.monotonic()
            # where this process was held up, the ranks may have been, too
            self._look(min(now - before, 4 * TICK_SECONDS))
            before = now
            self._judge(now)
            self._end(now)
            for channel in (self.caller, *(rank.channel for rank in self.ranks)):
                channel.flush()

    def conclude(self) -> None:
        """The last word, unless nobody waits for one."""
        if self.outcome:
            self.caller.send(*self.outcome)

    def obey(self, messages: list[tuple[str, list[str]]]) -> None:
        for kind, ask in messages:
            if self.asked != "stop":        # who stops a paused run wakes it up, too
                self.asked = ask[0]
                for rank in self.ranks:
                    rank.channel.post(kind, ask)

    def _hear(self, rank: Rank) -> bool:
        """Returns whether it said something."""
        messages = rank.channel.receive()
        for kind, value in messages:
            if kind == "told":
                self.caller.post(kind, [rank.number, value])
            else:
                setattr(rank, kind, value)
        return bool(messages)

    def _bury(self, rank: Rank) -> None:
        if rank.alive and (ended := os.waitpid(rank.pid, os.WNOHANG))[0]:
            while self._hear(rank):     # its last words
                pass
            rank.status, rank.ended_at = os.waitstatus_to_exitcode(ended[1]), time.monotonic()

    def _look(self, seconds: float) -> None:
        """Looks at the shared page, after so many seconds."""
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
        """Judges whether it is over, and why."""
        if self.outcome or self.caller.over:
            return
        working = [rank for rank in self.ranks if rank.working]
        if failed := [rank for rank in self.ranks if rank.trouble_at]:
            self.trouble = min(self.trouble, now)
            if now - self.trouble > SETTLE_SECONDS or not working:
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
        """Blames a rank that failed, or is gone without a word."""
        error = rank.failed
        if rank.phase == MEETING and rank.status == -signal.SIGABRT:    # gloo's: it heard nonsense
            self._fail([rank], f" {rank.end}: {STRANGER}", kind="ConfigError")
        elif error is None:
            self._fail([rank], f" {rank.end}", rank.stack(), "GoneError")
        elif (kind := error["packed"][0]) in ("ConfigError", "DamagedError", "RunFailedError"):
            self._fail([rank], f": {error['packed'][1]}", kind=kind)
        elif kind == "OSError" and not (error["memory"] or error["peer"]):
            self._decide("error", error["packed"])    # what one process raises
        else:
            how = "ran out of memory" if error["memory"] else "failed"
            self._fail([rank], f" {how} {rank.where}: {error['error']}", error["traceback"])

    def _hung(self, ranks: list[Rank], how: str) -> None:
        """Their stacks are asked for; then they are ended, since they would not hear SIGTERM."""
        stopped = [rank for rank in ranks if rank.stopped]
        for rank in ranks:
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
        """Ends those that are left, once the outcome is known."""
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
    """Fork ranks and watch them, until nothing of them is left."""
    end_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    messages: list[tuple[str, Any]] = []
    while not messages:
        messages = caller.receive(wait=True)
        if caller.over:         # it has changed its mind
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
        sweep()                 # what ranks have left
        shutil.rmtree(folder, ignore_errors=True)
    supervisor.conclude()


def main(folder: str, calls: str) -> int:
    """Fork a supervisor for each call: the name of a function, and a socket."""
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
                function = pkgutil.resolve_name(name.decode())      # with all that it imports
            except Exception as error:
                record = _record(error)
                sentence = f"cannot import {name.decode()}: {record['error']}"
                caller.send("error", ["RunFailedError", f"{sentence}\n\n{record['traceback']}"])
            else:
                gc.freeze()     # what the ranks share stays shared
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
