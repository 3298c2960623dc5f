"""Ranks: processes of this machine that compute together, and are started, watched and ended as one
group.

    caller            a notebook or a command. It may hold a GPU and threads, so it never forks.
      keeper          lpkit/processes.py: ends all processes below when the caller is gone
        warm parent   lpkit/parallel/supervisor.py: imports what ranks need, once, and forks
          supervisor  one for each `Processes`: forks the ranks, watches them, and reports
            ranks     function(place, argument)

    with Processes("package.module:function", {"lr": 0.1}, world=2) as ranks:
        values = ranks.wait()           # of each rank; or the error of the rank that is to blame

Ranks need no port to meet: their store is a file in the keeper's private folder. Nothing here
imports torch.
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

MEETING = "meeting the others"      # the first phase of ranks
STRANGER = ("another program of this machine may have taken a rank's place on its socket; start "
            "again, and tell whoever looks after the machine if that is refused, too")
BEAT_SECONDS = 0.25
# longest time without a beat: the rank is stopped, or in a call that holds Python's lock
TIMEOUT_SECONDS = 30.0
# longest time in which no rank progresses; torch.compile may take minutes
PROGRESS_SECONDS = 600.0

# A slot of the page that a supervisor and its ranks share. BEATS: the number of beats. NOTED, which
# `at` writes: the number of notes in all, the step, the number of notes in this step, the phase.
# The last byte: whether the rank waits for a message.
SLOT, BEATS, NOTED = map(struct.Struct, ("<QQqQ40s?", "<Q", "<QqQ40s"))


def new_page(world: int) -> mmap.mmap:
    """Makes a page of memory without a file, which forked processes share."""
    return mmap.mmap(-1, world * SLOT.size)


@dataclass
class Place:
    """A rank's number among all ranks, and its channel to the process that started it."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0     # the number of this rank on this machine
    local_world: int = 1    # how many ranks are on this machine
    store: str = "env://"   # the argument `init_method` of torch.distributed.init_process_group
    page: mmap.mmap = field(default_factory=lambda: new_page(1), repr=False)
    channel: Channel | None = field(default=None, repr=False)   # to the supervisor

    def __post_init__(self):
        self._times = self._within = 0      # calls of `at`: in all, and in this step
        self._step, self._asked = 0, ["", ""]
        self._slot = self.local_rank * SLOT.size
        self._noted = self._slot + BEATS.size

    @property
    def among(self) -> dict[str, Any]:
        """The place as arguments of `lpkit.parallel.meeting`."""
        return {"rank": self.rank, "world": self.world, "local_world": self.local_world,
                "init_method": self.store}

    def tell(self, report: Mapping[str, Any]) -> None:
        """Sends `said` to the caller, as JSON with NaN as Python writes it."""
        self.channel.send("told", report)

    def at(self, step: int, phase: str) -> None:
        """Records this rank's step and phase, in less than 2 us. If no rank progresses, the rank
        with the fewest notes in the smallest step is to blame, among ranks that do not wait for a
        message. So all ranks must note the same phases."""
        self._times += 1
        self._within = self._within + 1 if step == self._step else 1
        self._step = step
        NOTED.pack_into(self.page, self._noted, self._times, step, self._within, phase.encode())

    def waits(self, for_message: bool) -> None:
        self.page[self._slot + SLOT.size - 1] = for_message

    def asked(self) -> str:
        """Returns "", "pause" or "stop". Ranks may call it at different times, so that one rank
        must decide for all."""
        for _, ask in self.channel.receive():
            self._asked = ask
        return self._asked[0]

    @property
    def asked_by(self) -> str:
        """"stop", or the name of a signal that the caller received."""
        return self._asked[1]

    def beat(self) -> None:
        BEATS.pack_into(self.page, self._slot, BEATS.unpack_from(self.page, self._slot)[0] + 1)


class WarmParent:
    """A process that imports what ranks need once, so that only its first ranks wait for the
    import. You need none if you start ranks only once. At the end of a `with` block, all processes
    that it started are ended.

    module: the module that forks for each call. It is run with the folder, and with the socket that
            receives calls; a call is a name and a socket to the caller.
    """

    def __init__(self, module: str = "lpkit.parallel.supervisor", **env: str):
        if not hasattr(os, "fork"):
            raise ConfigError("several processes need fork, which this system does not have; train "
                              "on one, without `processes`")
        self.folder = new_folder()
        lockable(self.folder.parent, by="TMPDIR")       # ranks meet through a file there
        # give the child the same import path
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        self._calls, theirs = socket.socketpair()
        with theirs:
            self._keeper = Children().start(
                [sys.executable, "-P", "-m", module, self.folder, theirs.fileno()],
                self.folder, fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": path} | env)

    def start(self, name: str) -> socket.socket:
        """Starts what the module forks for `name` (a supervisor is given a function's name).
        Returns the socket to that process."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(OSError):     # the parent is gone, and nobody else has the other end
            socket.send_fds(self._calls, [name.encode()], [theirs.fileno()])
        return ours

    def end(self) -> None:
        """Ends all processes within 2 s. Any thread may call it again; it does not wait."""
        end(self._keeper)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()
        self._keeper.wait()
        self._keeper.stdout.close()
        self._calls.close()


class Processes:
    """`world` ranks of `function`, "package.module:name". It is called with a Place and `argument`, and
    returns a value that becomes JSON, or None.

    timeout_seconds:  if a rank gives no sign of life for this long, all ranks are ended
    progress_seconds: if no rank calls `Place.at` for this long, all ranks are ended
    heard:            called by the process that waits, with a rank and the message that it sent
    parent:           None: make a warm parent for these ranks
    """

    def __init__(self, function: str, argument: Mapping[str, Any] | None = None, *, world: int,
                 timeout_seconds: float = TIMEOUT_SECONDS,
                 progress_seconds: float = PROGRESS_SECONDS,
                 heard: Callable[[int, dict], None] = lambda rank, report: None,
                 parent: WarmParent | None = None):
        self._heard, self._killed = heard, False
        self._own = None if parent else WarmParent()
        self._channel = Channel((parent or self._own).start(function))
        self._channel.send("job", {"world": world, "told": dict(argument or {}),
                                   "timeout_seconds": timeout_seconds,
                                   "progress_seconds": progress_seconds})

    def wait(self) -> list[Any]:
        """Returns the value of each rank, once all processes have ended.

        Raises ConfigError and OSError when a rank raised them, and RunFailedError for every other
        error, with the rank, its step and phase, and its traceback.
        """
        outcome = "", None
        while not self._channel.over:
            for kind, value in self._channel.receive(wait=True):
                if kind == "told":
                    self._heard(*value)
                else:
                    outcome = kind, value
        self._end()
        if outcome[0] == "values":
            return outcome[1]
        if outcome[0] == "error":
            raise unpacked(*outcome[1])
        raise GoneError("the ranks were ended by kill()" if self._killed else
                        "the process that watched the ranks was killed, as a system does without "
                        "memory; go on with --resume")

    def stop(self, by: str = "stop") -> None:
        """Ask the ranks to stop: see `Place.asked`."""
        self._channel.send("ask", ["stop", by])

    def pause(self) -> None:
        self._channel.send("ask", ["pause", ""])

    def resume(self) -> None:
        self._channel.send("ask", ["", ""])

    def kill(self) -> None:
        """Ends all ranks now; `wait` then raises RunFailedError. May be called again."""
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


def told(config: Config) -> dict[str, int]:
    """Returns the rank and the number of ranks that torchrun, or another launcher, wrote into the
    environment. Without them, the process is alone.

    Raises ConfigError for a layout that cannot be trained, and if a layout of several processes is
    given to a process that is alone.
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
    """Reads a number from the environment. Raises ConfigError."""
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise ConfigError(f"environment variable {name} must be a number, got {shown(value)}; "
                          f"start all ranks with torchrun, or unset {name}")
    return int(value)
