"""What a hostile learner does, in a kernel of a room or, with an account, elsewhere on the machine.
The standard library alone.

`python -m tests.attack._guest UID FIRST END SHARE PORT ...` becomes that user, and takes ports
until its input ends: the named ones, and of the range as many as it gets, to the SHARE; the others
it takes and lets go without end. Then it prints what it got and heard.
"""

import glob
import http.client
import json
import os
import random
import resource
import select
import socket
import sys
import threading
import time
from contextlib import closing, suppress

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 3\r\n\r\nEVE"
PLACES = ("127.0.0.1", "0.0.0.0", "::1")


# ---- ports

class Taker:
    """Ports that it took, and what it heard there. Whoever asks is told `ANSWER`."""

    def __init__(self):
        self.taken: dict[int, tuple[socket.socket, int]] = {}
        self.heard: list[str] = []
        self.look, self.over = select.epoll(), False

    def take(self, port: int, place: str = PLACES[0]) -> socket.socket | None:
        listener = socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET)
        try:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
            listener.bind((place, port))
            listener.listen()
            listener.setblocking(False)
        except OSError:
            listener.close()
            return None
        return listener

    def keep(self, port: int, place: str = PLACES[0]) -> bool:
        if listener := self.take(port, place):
            self.taken[listener.fileno()] = listener, listener.getsockname()[1]
            self.look.register(listener.fileno(), select.EPOLLIN)
        return bool(listener)

    def serve(self) -> None:
        for fd, _ in self.look.poll(0):
            listener, port = self.taken[fd]
            with suppress(OSError):
                end, _ = listener.accept()
                with end:
                    end.settimeout(0.2)
                    self.heard.append(f"{port}: {end.recv(4096)[:200]!r}")
                    end.sendall(ANSWER)

    def run(self, ports: list[int], held: int = 0, churned: tuple[int, ...] = ()) -> None:
        """Until it is over: take the ports again and again, hold up to `held` of the others, and
        take and let go the rest."""
        ports, wanted = {*ports}, list(churned)
        random.shuffle(wanted)
        keeping, turning = wanted[:held], wanted[held:]
        for port in keeping:
            self.keep(port)
        while not self.over:
            for port in ports - {port for _, port in self.taken.values()}:
                for place in PLACES:
                    self.keep(port, place)
            for port in random.sample(turning, min(len(turning), 200)):
                if listener := self.take(port):
                    listener.close()
            self.ready = True
            self.serve()
            time.sleep(0 if turning else 0.001)

    def begin(self, ports: list[int], held: int = 0, churned: tuple[int, ...] = ()) -> "Taker":
        self.ready = False
        self.thread = threading.Thread(target=self.run, args=(ports, held, churned), daemon=True)
        self.thread.start()
        return self

    def end(self) -> dict:
        self.over = True
        self.thread.join()
        got = sorted({port for _, port in self.taken.values()})
        for listener, _ in self.taken.values():
            listener.close()
        return {"taken": got, "heard": self.heard}


# ---- sockets of root's

class OnSocket(http.client.HTTPConnection):
    path = ""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def asked(path: str, method: str, url: str, body: bytes | None = None, token: str = "",
          seconds: float = 20, **headers: str) -> tuple[int, bytes]:
    """Status and body of an answer on a Unix socket; 0 where none came."""
    connection = OnSocket("localhost", timeout=seconds)
    connection.path = path
    with closing(connection):
        try:
            connection.request(method, url, body,
                               ({"Authorization": f"token {token}"} if token else {}) | headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            return 0, b""


def replaced(path: str) -> list[str]:
    """Which ways to put something of our own in the place of this socket worked."""
    folder, worked = os.path.dirname(path), []
    ours = f"/tmp/eve-{os.getpid()}-{random.randrange(1 << 30)}"
    open(ours, "w").close()

    def bind(place: str) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(place)

    ways = {"unlink": lambda: os.unlink(path), "rename": lambda: os.rename(path, f"{path}.old"),
            "replace": lambda: os.rename(ours, path),
            "bind": lambda: bind(path), "link": lambda: os.symlink(ours, path),
            "open": lambda: open(path, "w"), "chmod": lambda: os.chmod(path, 0o777),
            "neighbour": lambda: bind(f"{path}-eve"),
            "folder": lambda: os.rename(folder, f"{folder}-old"),
            "make": lambda: os.mkdir(f"{folder}/51999")}
    for name, way in ways.items():
        with suppress(OSError):
            way()
            worked.append(name)
    with suppress(OSError):
        os.unlink(ours)
    return worked


# ---- reports

def report(number: object, **more: object) -> dict:
    return {"id": f"{os.getpid()}-{number}", "kind": "exercise", "notebook": "03_number_formats",
            "name": "03.eve", "verdict": "wrong", **more}


def odd_bodies(rng: random.Random, of_another: str) -> list[bytes]:
    """Bodies of requests, few of which are reports."""
    n = rng.randrange(1 << 40)
    wrong = [{"value": float("nan")}, {"value": float("inf")}, {"seconds": float("-inf")},
             {"notebook": 5}, {"name": 7}, {"name": None}, {"name": "\ud800"},
             {"name": [[[[]]]]}, {"held": "yes"}, {"attempts": True}, {"time": "now"},
             {"kind": "party"}, {"kind": ["guess"]}, {"id": ["1"]}, {"id": {}},
             {"value": 10**400}, {"name": "\x1b[2J\x00"}, {"name": "x" * 100_000},
             {"pseudonym": of_another, "name": "03.of-another"}, {"verdict": {}},
             {"factor": -10**299}, {"measured": 1e308}, {"name": "=HYPERLINK(1)"},
             {"name": "</script><script>alert(1)</script>"}, {"unit": "'\",\r\n"}]
    bodies = [json.dumps([report(f"{n}-{k}", **fields)]).encode() for k, fields in enumerate(wrong)]
    bodies += [b"[" * 100_000, b'{"a":' * 20_000, b"", b"[", b"null", b"7", b"{}",
               b'["' + b"x" * 130_000 + b'"]', b"\xff\xfe", rng.randbytes(5000),
               b'[{"value": 1e999, "id": "1", "kind": "guess", "name": "a", "notebook": "b"}]',
               b"[" + b"1" * 130_000 + b"]",
               b"[" + b",".join([b"{}"] * 40_000) + b"]", b"x" * (20 << 20)]
    rng.shuffle(bodies)
    return bodies


def burst(path: str, count: int, at_once: int = 800) -> dict:
    """Send so many reports in requests as large as they may be, on eight connections at once."""
    counts: list[int] = []
    starts = list(range(0, count, at_once))

    def send() -> None:
        while starts:
            with suppress(IndexError):
                first = starts.pop()
                body = json.dumps([{"id": f"{os.getpid()}b{first + n}", "kind": "guess",
                                    "notebook": "03", "name": "03.burst", "value": 1}
                                   for n in range(at_once)]).encode()
                status, answer = asked(path, "POST", "/services/progress/report", body, seconds=120)
                counts.append(json.loads(answer)["kept"] if status == 200 else 0)

    begun = time.monotonic()
    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"kept": sum(counts), "requests": len(counts), "seconds": time.monotonic() - begun}


def crowd(path: str, count: int, seconds: float = 20.0) -> list[socket.socket]:
    """Connections that begin a request and never end it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ends, deadline = [], time.monotonic() + seconds
    while len(ends) < count and time.monotonic() < deadline:
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        try:
            client.connect(path)
            client.send(b"POST /services/progress/report HTTP/1.1\r\nHost: a\r\nContent-Length: "
                        b"100\r\n\r\n[")
            ends.append(client)
        except OSError:     # too many wait to be accepted
            client.close()
            time.sleep(0.002)
    return ends


# ---- files

def secrets_seen(words: list[str]) -> list[str]:
    """Where these words can be read: of processes, and of the folders that all may write."""
    places = [*glob.glob("/proc/[0-9]*/environ"), *glob.glob("/proc/[0-9]*/cmdline")]
    for top in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
        for folder, _, names in os.walk(top):
            places += [f"{folder}/{name}" for name in names]
    seen = []
    for path in places:
        with suppress(OSError):
            if os.path.isfile(path) and not os.path.islink(path):
                with open(path, "rb") as file:
                    text = file.read(1 << 20)
                seen += [f"{path}: {word[:4]}..." for word in words if word.encode() in text]
    return seen


def main(uid: str, first: str, end: str, share: str, *ports: str) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    churned = tuple(range(int(first), int(end)))
    parts, ends = 1 + len(churned) // (most - 200), []     # processes: a port is a file
    for part in range(parts):
        reader, tell = os.pipe()
        if not os.fork():
            with open(tell, "w") as out:
                mine = churned[part::parts]
                taker = Taker().begin([int(port) for port in ports] if not part else [],
                                      round(float(share) * len(mine)), mine)
                while not taker.ready:
                    time.sleep(0.01)
                print("ready", file=out, flush=True)
                os.read(0, 1)
                print(json.dumps(taker.end()), file=out)
            os._exit(0)
        os.close(tell)
        ends.append(open(reader))
    if all(pipe.readline() for pipe in ends):
        print("ready", flush=True)
    reports = [json.loads(pipe.read()) for pipe in ends]
    print(json.dumps({key: [each for report in reports for each in report[key]]
                      for key in ("taken", "heard")}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
