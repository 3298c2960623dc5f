"""Launches, and a stranger who would be one of their ranks: another user, in the same network.

`python -m tests.attack._strangers FOLDER` makes a network namespace of its own, so that the
stranger meets no other launch of the machine. A line in is a trial; a line out is what came of it.
The first line says whether it can be done.
"""

import ctypes
import fcntl
import json
import os
import pickle
import random
import resource
import selectors
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY = 4, 20
NOBODY, FILES = 65534, 1024         # uid; what `ulimit -n` is where nobody raised it
HUGE = 5_950_667_431_827_801_216    # bytes that a rank was once told to make room for
# gloo counts a process's pairs from 0, and tells them apart by that
SEQUENCES = range(3)
FLOOD, FLOOD_SECONDS = 3000, 4.0
# gloo/transport/tcp/pair.h: a message is bytes, opcode, slot, offset, length, remote offset; then
# data
HEADER = struct.Struct("<6Q")
SEND, SEND_READY, RECEIVE_READY = 1, 2, 3


def own_network() -> str:
    """Enter a network namespace with a loopback that is up. Returns why it cannot be, or
    nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid():
        return "only root may become another user"
    if libc.unshare(CLONE_NEWNET):
        return f"no network namespace can be made here ({os.strerror(ctypes.get_errno())})"
    with socket.socket() as sock:
        request = fcntl.ioctl(sock, SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1] | IFF_UP
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags))
    return ""


# ---- the stranger

class Listening:
    """Who listens, as every user may ask: (family, address, port). /proc/net/tcp says it, too, a
    hundred times later."""

    def __init__(self):
        self.kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)

    def __call__(self) -> set[tuple[int, str, int]]:
        listeners = set()
        for family in (socket.AF_INET, socket.AF_INET6):
            # of <linux/sock_diag.h>: a dump (0x301) of the TCP sockets of a family in the state
            # LISTEN (10)
            asked = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 0, 1 << 10)
            self.kernel.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, 0x301, 0,
                                         0) + asked)
            over = False
            while not over:
                reply = self.kernel.recv(1 << 16)
                while reply:
                    length, kind = struct.unpack_from("=IH", reply)
                    over = over or kind != SOCK_DIAG_BY_FAMILY
                    if not over:
                        port, raw = struct.unpack_from("!H2x16s", reply, 20)
                        raw = raw[:4] if family == socket.AF_INET else raw
                        listeners.add((family, socket.inet_ntop(family, raw), port))
                    reply = reply[(length + 3) // 4 * 4:]
        return listeners


class Evil:
    """As a pickle, it runs."""

    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return open, (self.marker, "w")


class Guest:
    """A connection to a rank, which is told that it is the rank that belongs there."""

    def __init__(self, where, sequence: int, kind: str, payload: bytes, rng: random.Random):
        self.where, (family, address, port) = where, where
        self.kind, self.payload, self.rng = kind, payload, rng
        self.unread, self.heard, self.begun, self.sequence = b"", b"", False, sequence
        self.count, self.rest = b"", payload        # of bytes that are still to be said
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        with suppress(BlockingIOError):
            self.socket.connect((address, port))
            self.greet()

    def greet(self) -> None:
        """Be first."""
        self.begun = bool(self.socket.send(struct.pack("<q", self.sequence)))
        if self.kind == "garbage":
            self.socket.send(self.rng.randbytes(4096))
        elif self.kind == "huge header":
            self.socket.send(HEADER.pack(2**63, SEND, self.rng.randrange(2**63), 0, HUGE, 0))
        elif self.kind == "closes":
            self.socket.close()

    def act(self) -> bool:
        """Whether a rank took it for another."""
        with suppress(BlockingIOError):
            if not self.begun:
                self.greet()
            self.unread += self.socket.recv(1 << 16)
        spoken = bool(self.unread)
        while (len(self.unread) >= HEADER.size and self.kind not in ("silent", "garbage",
                "huge header")):
            _, opcode, slot, _, length, _ = HEADER.unpack_from(self.unread)
            data = length if opcode == SEND else 0
            if len(self.unread) < HEADER.size + data:
                break
            self.heard = self.unread[HEADER.size:HEADER.size + data] or self.heard
            self.unread = self.unread[HEADER.size + data:]
            if opcode == SEND_READY:
                self.socket.send(HEADER.pack(HEADER.size, RECEIVE_READY, slot, 0, length, 0))
            elif opcode == RECEIVE_READY:
                self.socket.send(HEADER.pack(HEADER.size, SEND_READY, slot, 0, length, 0)
                                 + HEADER.pack(HEADER.size + length, SEND, slot, 0, length,
                                               0) + self.answer(length))
        return spoken

    def answer(self, length: int) -> bytes:
        if self.kind == "replay":
            return self.heard[:length].ljust(length, b"\0")
        if not length:          # a barrier
            return b""
        # gloo cuts what it gathers: a number of bytes in two, and then so many bytes
        if length <= 8 and not self.count:
            self.count = struct.pack("<q", HUGE if self.kind == "huge length"
                                     else len(self.payload))
            self.rest = self.payload
        if length <= 8:
            data, self.count = self.count[:length], self.count[length:]
        else:
            data, self.rest = self.rest[:length], self.rest[length:]
        return data.ljust(length, b"\0")


def stranger(kind: str, marker: str, seed: str, go: int, report: int) -> None:
    """Does not return. Tells, when asked to end or when a flood is over, how often a rank spoke to
    it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FLOOD + 100, FLOOD + 100))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    rng, payload, known, taken = random.Random(seed), pickle.dumps(Evil(marker)), set(), 0
    look, listening = selectors.DefaultSelector(), Listening()
    if kind == "late flood":
        os.read(go, 1)          # when the ranks train
        where, end, guests = list(listening()), time.monotonic() + FLOOD_SECONDS, []
        while where and time.monotonic() < end and len(guests) < FLOOD:
            with suppress(OSError):
                guests.append(Guest(rng.choice(where), rng.randrange(2**62), kind, b"", rng))
        while time.monotonic() < end:
            time.sleep(0.05)
        for guest in guests:
            with suppress(OSError):
                guest.socket.getpeername()        # raises where it is not connected
                taken += 1
        os.write(report, b"%d %d\n" % (len(guests), taken))
        os._exit(0)
    os.set_blocking(go, False)
    spoke = set()
    while True:
        for where in listening() - known:
            known.add(where)
            for sequence in SEQUENCES:
                with suppress(OSError):
                    guest = Guest(where, sequence, kind, payload, rng)
                    look.register(guest.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, guest)
        for key, _ in look.select(0) if look.get_map() else ():
            guest = key.data
            try:
                spoke |= {guest.where} if guest.act() else set()
                look.modify(guest.socket, selectors.EVENT_READ, guest)
                over = guest.begun and guest.socket.fileno() < 0
            except (OSError, ValueError):
                over = True
            if over:
                look.unregister(key.fileobj)
                guest.socket.close()
        with suppress(BlockingIOError):
            os.read(go, 1)
            os.write(report, b"%d %d\n" % (len(known), len(spoke)))
            os._exit(0)


# ---- the launches

def launched(kind: str, trial: dict, parent, seconds: float) -> dict:
    """What came of a launch beside a stranger."""
    import lpkit
    from lpkit.config import Config

    asked, go = os.pipe()
    report, write_end = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            while not kind:     # the launch is alone
                time.sleep(1)
            stranger(kind, trial["marker"], trial["seed"], asked, write_end)
        finally:
            os._exit(1)
    os.close(asked)
    os.close(write_end)
    begun = time.monotonic()
    handle = lpkit.launch(Config.from_dict(trial["config"]), processes=2, out=trial["out"],
                          parent=parent,
                          progress_seconds=seconds / 2)
    if kind == "late flood":
        while not handle.done and not handle.records:
            time.sleep(0.01)
        os.write(go, b"!")
        while not handle.done and not _readable(report):
            time.sleep(0.01)
        handle.stop()
    while not handle.done and time.monotonic() - begun < seconds:
        time.sleep(0.01)
    hung = not handle.done
    if hung:
        handle.kill()
    try:
        handle.result()
        error = ""
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    with suppress(OSError):
        os.write(go, b"!")
    words = os.read(report, 100).split() if kind and _readable(report, 5) else []
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(go)
    os.close(report)
    return {"hung": hung, "error": error, "seconds": time.monotonic() - begun,
            "met": [int(word) for word in words]}


def _readable(fd: int, seconds: float = 0) -> bool:
    with selectors.DefaultSelector() as look:
        look.register(fd, selectors.EVENT_READ)
        return bool(look.select(seconds))


def main(folder: str) -> None:
    why = own_network()
    print(json.dumps({"cannot": why}), flush=True)
    if why:
        return
    resource.setrlimit(resource.RLIMIT_NOFILE,
                       (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.umask(0o077)
    os.chdir(Path(folder))
    from lpkit.parallel.processes import WarmParent

    with WarmParent() as parent:
        for line in sys.stdin:
            trial = json.loads(line)
            print(json.dumps(launched(trial["kind"], trial, parent, trial["seconds"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
