"""What ranks of tests/parallel/test_meeting.py do; each is `f(place, job)`."""

import hmac
import os
import pickle
import socket
import time
from datetime import timedelta
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist

from lpkit.errors import ConfigError
from lpkit.parallel import meeting, ranks
from lpkit.parallel.context import Ring
from lpkit.parallel.pipeline import Pipeline
from lpkit.parallel.processes import MEETING
from lpkit.parallel.sharding import Sharding
from lpkit.training import loop
from lpkit.training.rank import train
from tests.parallel.training_ranks import chains


def _refuse(*args, **more):
    raise AssertionError("a pickle was read")


class Unpickler(pickle.Unpickler):
    """Others may derive from it, as torch 2.11 does; nobody makes one."""

    def __init__(self, *args, **more):
        _refuse()


OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
           "send_object_list", "recv_object_list")


def chain(place, job):
    """Runs, with nothing that reads a pickle; and nothing that makes one for the others."""
    c10d = dist.distributed_c10d
    for module in (dist, c10d):
        for name in OBJECTS:
            setattr(module, name, _refuse)
    c10d._object_to_tensor = c10d._tensor_to_object = c10d._unpickler = _refuse
    with (patch.object(pickle, "loads", _refuse), patch.object(pickle, "load", _refuse),
          patch.object(pickle, "Unpickler", Unpickler)):
        chains(place, job)


def wait(place, job):
    """Meet, where the environment names an interface that others reach; say so; wait until told to
    stop."""
    if job["interface"]:
        os.environ[meeting.INTERFACE] = job["interface"]
    with meeting.meeting("gloo", **place.among) as prove:
        prove("pair", dist.new_group([0, 1]))
    assert os.environ.get(meeting.INTERFACE, "") == job["interface"]
    connections = psutil.Process().net_connections("tcp")
    place.tell({"pid": os.getpid(),
                "at": sorted({(connection.laddr.ip, connection.laddr.port)
                              for connection in connections
                              if connection.status == psutil.CONN_LISTEN}),
                "all": sorted({connection.laddr.ip for connection in connections})})
    while place.asked() != "stop":
        time.sleep(0.01)
    x = torch.ones(3)
    dist.all_reduce(x)
    return x.tolist()


def lie(place, job):
    """Rank 1 is not who it says it is."""
    real = hmac.digest

    def digest(secret, text, kind):
        if job["lie"] == "secret":
            return real(b"another" + secret, text, kind)
        if job["lie"] == "reflected":      # the proof that it has just got
            return real(secret, text.replace(b"(1, 0)", b"(0, 1)"), kind)
        return real(secret, text.replace(b"pair", b"world"), kind)      # that of another group

    place.at(0, MEETING)
    with (patch.object(hmac, "digest", digest if place.rank else real),
          meeting.meeting("gloo", **place.among) as prove):
        prove("pair", dist.new_group([0, 1]))


def silent(place, job):
    """Rank 1 never proves anything."""
    if place.rank:
        meeting._prove = lambda *_: time.sleep(60)
    meeting.PROOF_TIMEOUT = timedelta(seconds=1)
    begun = time.monotonic()
    try:
        meeting.meet("gloo", **place.among)
    finally:
        place.tell({"seconds": time.monotonic() - begun})


def late(place, job):
    """Rank 1 sends each message, from rank to rank and of all, long after the time for a proof."""
    meeting.PROOF_TIMEOUT = timedelta(seconds=1)
    meeting.meet("gloo", **place.among)
    x = torch.ones(3)
    ring = Ring.__new__(Ring)
    ring.rank, ring.ranks = place.rank, 2
    ring.among = ranks.Ranks(groups={"context": dist.group.WORLD})
    order = {0: [(0, "F", 0)], 1: [(1, "F", 0)]}
    stages = Pipeline(order, place.rank, groups=[dist.group.WORLD] * 2)
    shared = Sharding(ranks=ranks.Ranks(groups={"pipeline": dist.group.WORLD}))
    shared.owned, shared.twice = {"w": torch.nn.Parameter(x.clone())}, {"w": 1 - place.rank}
    shared.owned["w"].grad = x.clone()
    for wait_for in (lambda: ring.passed(x)(), shared.reduce, lambda: dist.all_reduce(x),
                     lambda: stages.step(lambda stage, micro, given: x.clone(), x)):
        time.sleep(2 * (place.rank == job["late"]))
        wait_for()


def too_much(place, job):
    """Rank 0 says more than is heard: nobody makes room for it. Then what is said arrives, of every
    rank and whole."""
    meeting.meet("gloo", **place.among)
    assert (ranks.everybodys({"rank": place.rank, "text": "ä" * 1000})
            == [{"rank": i, "text": "ä" * 1000} for i in range(2)])
    for error in (FileNotFoundError(2, "No such file or directory", "a", None, "b"),
                  ConfigError("a setting"), KeyError("other")):
        try:
            ranks.by_first(_raise, error)
        except Exception as raised:
            place.tell({"error": [type(raised).__name__, str(raised)]})
    ranks.MOST_BYTES = 100
    ranks.everybodys("x" * (200 if place.rank == 0 else 1))


def _raise(error):
    raise error


def full_disk(place, job):
    with patch.object(loop, "write_atomically", no_space):
        train(place, job)


def no_space(path, text):
    raise OSError(28, "No space left on device", str(path))


def abort(place, job):
    """As gloo does when it hears nonsense."""
    place.at(0, MEETING)
    if place.rank:
        os.abort()
    meeting.meet("gloo", **place.among)


def reached(address, port):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as client:
        client.settimeout(0.5)
        return client.connect_ex((address, port)) == 0
