"""Start, watch and end the ranks of a run on this machine.

    caller            a notebook or a command. It may hold a GPU and threads, so it never forks.
      keeper          lpkit/processes.py: ends all processes below when the caller is gone
        warm parent   lpkit/parallel/supervisor.py: imports what ranks need, once, and forks
          supervisor  one for each `Processes`: forks the ranks, watches them, and reports
            ranks     function(place, argument)

    with Processes("package.module:function", {"lr": 0.1}, world=2) as ranks:
        values = ranks.wait()       # what each rank returned; or raises a failed rank's error

Ranks find each other through a file in the keeper's private folder, without a network port. This
module does not import torch.
"""

import mmap
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from lpkit.config import Config
from lpkit.errors import ConfigError, GoneError, shown, unpacked
from lpkit.files import lockable
from lpkit.processes import Channel, Children, end, new_folder
from lpkit.techniques.layouts import refuse_untrainable

MEETING = "meeting the others"      # the first phase of a rank: see `Place.at`
STRANGER = ("another program of this machine may have taken a rank's place on its socket; start "
            "again, and tell the administrator of the machine if the error comes again")
BEAT_SECONDS = 0.25
# Longest time without a beat. A rank whose beats stop was stopped by a signal, or is in a call that
# holds Python's global interpreter lock.
TIMEOUT_SECONDS = 30.0
# longest time in which no rank progresses; torch.compile may take minutes
PROGRESS_SECONDS = 600.0

# The page of memory that a supervisor and its ranks share has a SLOT for each rank:
# BEATS: the number of beats, which show that the rank's process runs
# NOTED: written by `Place.at`: number of calls, step, number of calls in this step, phase
# last byte: 1 while the rank waits for a message
SLOT, BEATS, NOTED = map(struct.Struct, ("<QQqQ40s?", "<Q", "<QqQ40s"))


def new_page(world: int) -> mmap.mmap:
    """Return memory with a slot for each of `world` ranks. Forked processes share it."""
    return mmap.mmap(-1, world * SLOT.size)


@dataclass
class Place:
    """The place of a rank among all ranks, and its connection to the process that started it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0     # the number of this rank on this machine
    local_world: int = 1    # how many ranks are on this machine
    store: str = "env://"   # the argument `init_method` of torch.distributed.init_process_group
    page: mmap.mmap = field(default_factory=lambda: new_page(1), repr=False)
    channel: Channel | None = field(default=None, repr=False)   # to the supervisor

    def __post_init__(self):
        self._times = self._within = 0      # number of calls of `at`: since the start, in this step
        # the last request of the caller: ["", "pause" or "stop", who stopped: see `asked_by`]
        self._step, self._asked = 0, ["", ""]
        self._slot = self.local_rank * SLOT.size
        self._noted = self._slot + BEATS.size

    @property
    def among(self) -> dict[str, Any]:
        """The place as keyword arguments of the functions of `lpkit.parallel.meeting`."""
        return {"rank": self.rank, "world": self.world, "local_world": self.local_world,
                "init_method": self.store}

    def tell(self, report: Mapping[str, Any]) -> None:
        """Send `report` to the caller, as JSON in which NaN and infinity are allowed."""
        self.channel.send("report", report)

    def at(self, step: int, phase: str) -> None:
        """Record this rank's step and phase on the shared page, in less than 2 us. If no rank
        progresses, the supervisor blames the rank that is furthest behind: of the ranks that do not
        wait for a message, the rank with the smallest (step, number of calls in this step). So all
        ranks must call `at` with the same phases."""
        self._times += 1
        self._within = self._within + 1 if step == self._step else 1
        self._step = step
        NOTED.pack_into(self.page, self._noted, self._times, step, self._within, phase.encode())

    def waits(self, for_message: bool) -> None:
        """Record whether this rank waits for a message of another rank."""
        self.page[self._slot + SLOT.size - 1] = for_message

    def asked(self) -> str:
        """Return the last request of the caller: "", "pause" or "stop". It may arrive at ranks at
        different times, so one rank must decide for all ranks."""
        for _, ask in self.channel.receive():
            self._asked = ask
        return self._asked[0]

    @property
    def asked_by(self) -> str:
        """What made the caller request a stop: "stop", or the name of a signal, as "SIGINT"."""
        return self._asked[1]

    def beat(self) -> None:
        """Show the supervisor that this process still runs."""
        BEATS.pack_into(self.page, self._slot, BEATS.unpack_from(self.page, self._slot)[0] + 1)


class WarmParent:
    """A process that imports once what ranks need, and then forks. Only its first ranks wait for
    the imports. If you start ranks only once, you do not need a WarmParent. At the end of a `with`
    block, all processes that it started are ended.

    module: the module to run. Its arguments are a private folder, and the file descriptor of a
            socket that receives calls. For each call (a function's name, and a socket to the
            caller) it forks a process
    """

    def __init__(self, module: str = "lpkit.parallel.supervisor", **env: str):
        if not hasattr(os, "fork"):
            raise ConfigError("several processes need fork, which this system does not have; train "
                              "with one process, without `processes`")
        self.folder = new_folder()
        # ranks meet through a file in this folder, which they lock
        lockable(self.folder.parent, by="TMPDIR")
        # give the child the same import path
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        self._calls, theirs = socket.socketpair()
        with theirs:
            self._keeper = Children().start(
                [sys.executable, "-P", "-m", module, self.folder, theirs.fileno()],
                self.folder, fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path} | env)

    def start(self, name: str) -> socket.socket:
        """Make the module fork a process for `name`, for a supervisor the name of the ranks'
        function. Return the socket to that process."""
        ours, theirs = socket.socketpair()
        # OSError: the warm parent has ended. No process holds `theirs`, so a read from `ours`
        # returns end of file.
        with theirs, suppress(OSError):
            socket.send_fds(self._calls, [name.encode()], [theirs.fileno()])
        return ours

    def end(self) -> None:
        """End all processes within 2 s, without waiting for that. Any thread may call it, also more
        than once."""
        end(self._keeper)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()
        self._keeper.wait()
        self._keeper.stdout.close()
        self._calls.close()


class Processes:
    """`world` ranks, each of which calls `function(place, argument)`.

    function:         "package.module:name"; what it returns must be None or become JSON
    argument:         a dict of values that become JSON, the same for all ranks
    timeout_seconds:  if a rank sends no beat for this long, all ranks are ended
    progress_seconds: if no rank calls `Place.at` for this long, all ranks are ended
    heard:            f(rank, report), called in the caller's process by `wait`, for each report
                      that a rank sent by `Place.tell`
    parent:           the WarmParent that forks the ranks; None: start one for these ranks
    """

    def __init__(self, function: str, argument: Mapping[str, Any] | None = None, *, world: int,
                 timeout_seconds: float = TIMEOUT_SECONDS,
                 progress_seconds: float = PROGRESS_SECONDS,
                 heard: Callable[[int, dict], None] = lambda rank, report: None,
                 parent: WarmParent | None = None):
        self._heard, self._killed = heard, False
        self._own = None if parent else WarmParent()
        self._channel = Channel((parent or self._own).start(function))
        self._channel.send("job", {"world": world, "argument": dict(argument or {}),
                                   "timeout_seconds": timeout_seconds,
                                   "progress_seconds": progress_seconds})

    def wait(self) -> list[Any]:
        """Wait until all processes have ended, and return what `function` returned on each rank.

        Raises ConfigError and OSError if a rank raised them, and RunFailedError for any other
        error, with the rank, its step and phase, and its traceback.
        """
        outcome = "", None
        while not self._channel.over:
            for kind, value in self._channel.receive(wait=True):
                if kind == "report":
                    self._heard(*value)
                else:
                    outcome = kind, value
        self._end()
        if outcome[0] == "values":
            return outcome[1]
        if outcome[0] == "error":
            raise unpacked(*outcome[1])
        raise GoneError("the ranks were ended by kill()" if self._killed else
                        "the process that watched the ranks was killed, as the system does when "
                        "memory runs out; go on with --resume")

    def stop(self, by: str = "stop") -> None:
        """Ask the ranks to stop: see `Place.asked`. `by`: see `Place.asked_by`."""
        self._channel.send("ask", ["stop", by])

    def pause(self) -> None:
        self._channel.send("ask", ["pause", ""])

    def resume(self) -> None:
        self._channel.send("ask", ["", ""])

    def kill(self) -> None:
        """End all ranks now; `wait` then raises GoneError. May be called more than once."""
        self._killed = True
        self._channel.finish()
        if self._own:
            self._own.end()

    def _end(self) -> None:
        """Waits until no process is left."""
        self._channel.close()
        if self._own:
            self._own.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends all processes of the block."""
        self.kill()
        while not self._channel.over:       # until the supervisor has ended them
            self._channel.receive(wait=True)
        self._end()


def ranks_from_environment(config: Config) -> dict[str, int]:
    """Return this process's place among all ranks: `rank`, `world` (number of ranks), `local_rank`
    and `local_world` (the same two numbers on this machine). torchrun and other launchers write
    them into environment variables. Without the variables, the place is rank 0 of 1.

    Raises ConfigError for a layout that cannot be trained, and if the layout needs several
    processes and `world` is 1.
    """
    layout = config.parallel
    place = {key: _number(name, default) for key, name, default in (
        ("world", "WORLD_SIZE", 1), ("rank", "RANK", 0), ("local_rank", "LOCAL_RANK", 0),
        ("local_world", "LOCAL_WORLD_SIZE", 1))}
    refuse_untrainable(config)
    if place["world"] == 1 and layout.devices > 1:
        raise ConfigError(
            f"parallel: {layout} takes {layout.devices} processes, and this is one; start them "
            f"with `lpkit train --processes {layout.devices}`, in Python with lpkit.launch, or by "
            f"`torchrun --nproc-per-node {layout.devices} -m lpkit train` (on CPUs `accelerate "
            f"launch --cpu` starts a single process and says nothing)")
    return place


def _number(name: str, default: int) -> int:
    """Return the number in environment variable `name`. Raises ConfigError for other text."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"environment variable {name} must be a number, got {shown(value)}; "
                          f"start all ranks with torchrun, or unset {name}")
    return int(value)
