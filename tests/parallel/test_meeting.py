"""Only these tests catch ranks that read a pickle, that others can connect to, or that compute with
a stranger; and an error of a rank that is another error on its way to the caller."""

import ast
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

import lpkit
from lpkit import cli, train
from lpkit.errors import ConfigError, RunFailedError, packed, unpacked
from lpkit.parallel import meeting
from lpkit.parallel.processes import Processes
from lpkit.training import loop
from lpkit.training.runs import Run
from tests.parallel.meeting_ranks import OBJECTS, no_space, reached
from tests.parallel.test_parallel import SMALL

pytestmark = pytest.mark.dist
PACKAGE = Path(lpkit.__file__).parent


def ranks(parent, function, job=None, world=2, messages=None, **limits):
    messages = [] if messages is None else messages
    with Processes(f"tests.parallel.meeting_ranks:{function}", job, world=world, parent=parent,
                   heard=lambda *pair: messages.append(pair), **limits) as running:
        return running.wait()


def names(tree):
    """All that a module imports or looks up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (getattr(node, "module", None) or "").split(".")
            for alias in node.names:
                yield from alias.name.split(".")


FORBIDDEN = {*OBJECTS, "pickle", "cPickle", "dill", "cloudpickle", "_tensor_to_object",
             "FileSystemReader", "FileSystemWriter"}


def test_no_module_reads_a_pickle_or_lets_ranks_send_objects():
    """DCP plans by object collectives, and keeps its plans in a pickle."""
    for path in PACKAGE.rglob("*.py"):
        forbidden = FORBIDDEN & set(names(ast.parse(path.read_text())))
        assert not forbidden, f"{path}: {forbidden}"
    assert "torch.distributed.checkpoint" not in "".join(
        line for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines()
        if "import" in line)
    assert FORBIDDEN & set(names(ast.parse("dist.gather_object(1)")))


def test_a_run_that_trains_saves_and_goes_on_reads_no_pickle(parent, tmp_path):
    settings = [{"steps": 1, "parallel.shard": 2}, {"steps": 2, "parallel.data": 2},
                {"steps": 3, "parallel.shard": 2, "parallel.zero": 1}]
    ranks(parent, "chain", {
        "config": SMALL.replace({"checkpoint_every": 1}).to_dict(),
        "runs": [{"settings": changes, "out": str(tmp_path / "run"), "resume": changes["steps"] > 1}
                 for changes in settings]})
    run = Run(tmp_path / "run")
    assert run.summary["status"] == "complete"
    assert [line["step"] for line in run.metrics] == [1, 2, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc, SO_ATTACH_FILTER")
def test_ranks_of_one_machine_listen_on_loopback_and_nobody_connects_to_a_run(parent):
    """Also where the environment names an interface that others reach, as the host's name may."""
    others = [name for name, addresses in psutil.net_if_addrs().items()
              if name not in meeting.LOOPBACKS
              and any(address.family.name == "AF_INET" for address in addresses)]
    messages = []

    def heard(rank, words):
        messages.append(words)
        if len(messages) == 2:
            asked(running, messages)

    with Processes("tests.parallel.meeting_ranks:wait", {"interface": [*others, ""][0]}, world=2,
                   parent=parent, heard=heard) as running:
        assert running.wait() == [[2.0] * 3] * 2
    assert all(set(message["all"]) <= {"127.0.0.1", "::1"} and message["at"]
               for message in messages)


def asked(running, messages):
    """Both ranks wait: look at them, and let them go on. What raises here is raised by `wait`."""
    for message in messages:
        seen = {(connection.laddr.ip, connection.laddr.port)
                for connection in psutil.Process(message["pid"]).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN}
        assert seen == {tuple(at) for at in message["at"]} and not any(reached(*at) for at in seen)
    running.stop()


@pytest.mark.parametrize("family, at, filters", [
    ("AF_INET", "127.0.0.1", True), ("AF_INET", "127.0.0.1", False), ("AF_INET6", "::1", True)],
    ids=["a filter", "filters are root's alone", "IPv6"])
def test_what_listens_can_be_reached_before_it_is_shut(monkeypatch, family, at, filters):
    own = socket.socket.setsockopt

    def hardened(sock, level, option, value):
        if not filters and (level, option) == (socket.SOL_SOCKET, meeting.SO_ATTACH_FILTER):
            raise PermissionError(1, "Operation not permitted")
        own(sock, level, option, value)

    monkeypatch.setattr(socket.socket, "setsockopt", hardened)
    try:
        server = socket.create_server((at, 0), family=getattr(socket, family))
    except OSError:
        pytest.skip(f"no {family} here")
    with server:
        before = meeting._listening()
        assert server.fileno() in before.values() and reached(*server.getsockname()[:2])
        meeting._shut(server.fileno())
        assert not reached(*server.getsockname()[:2])


@pytest.mark.parametrize("function, job, sentence", [
    *(("lie", {"lie": lie}, "rank [01] of 2: the process that answers rank [01] as rank [01] does "
                            "not know the secret of this launch: another program .*; start again")
      for lie in ("secret", "reflected", "group")),
    ("silent", None, "rank 0 of 2: rank 0 cannot make sure of the others: another program"),
    ("abort", None, "rank 1 of 2 died at step 0 in meeting the others of SIGABRT: another program"),
], ids=["secret", "reflected", "group", "silent", "abort"])
def test_a_stranger_is_refused_in_one_sentence(parent, function, job, sentence):
    """A rank that proves nothing is not waited for."""
    messages = []
    with pytest.raises(ConfigError, match=f"^{sentence}") as refusal:
        ranks(parent, function, job, messages=messages)
    assert "\n" not in str(refusal.value)
    assert function != "silent" or 0.9 < messages[0][1]["seconds"] < 20


@pytest.mark.parametrize("late", [0, 1])
def test_a_message_may_come_long_after_the_time_for_a_proof(parent, late):
    """gloo keeps that time for messages from rank to rank: of stages, of a ring, of what two stages
    have."""
    ranks(parent, "late", {"late": late})


def test_what_ranks_say_arrives_whole_and_has_a_bound(parent):
    messages = []
    with pytest.raises(RunFailedError,
                       match=r"RuntimeError: rank 0 says 202 bytes, and 100 are the most"):
        ranks(parent, "too_much", messages=messages)
    for rank in range(2):
        assert [message["error"] for each, message in messages if each == rank][:2] == [
            ["FileNotFoundError", "[Errno 2] No such file or directory: 'a' -> 'b'"],
            ["ConfigError", "a setting"]]
    assert [message["error"] for _, message in messages if "other" in message["error"][1]] in (
        [["KeyError", "'other'"], ["RuntimeError", "KeyError: 'other'"]],
        [["RuntimeError", "KeyError: 'other'"], ["KeyError", "'other'"]])


@pytest.mark.parametrize("error", [
    OSError(28, "No space left on device", "a"), OSError("no number"),
    PermissionError(13, "Permission denied", b"a"), OSError(9, "Bad file descriptor", 3),
    MemoryError(), RunFailedError("r")])
def test_an_error_is_the_same_on_the_other_side(error):
    other = unpacked(*packed(error))
    sentence = cli._of_system if isinstance(error, OSError) else str
    assert type(other) is type(error) and sentence(other) == sentence(error)


def test_a_ranks_system_error_is_the_sentence_of_one_process(parent, tmp_path, monkeypatch):
    """Also its exit code: the command line asks the type of the error alone."""
    with pytest.raises(OSError) as of_ranks:
        ranks(parent, "full_disk", {"config": SMALL.replace({"parallel.data": 2}).to_dict(),
                                    "out": str(tmp_path / "run"), "resume": False})
    monkeypatch.setattr(loop, "write_atomically", no_space)
    with pytest.raises(OSError) as of_one:
        train(SMALL, out=tmp_path / "run")
    assert type(of_ranks.value) is type(of_one.value) and of_ranks.value.args == of_one.value.args
    assert cli._of_system(of_ranks.value).startswith(
        f"{tmp_path / 'run' / 'config.yaml'}: No space left on device; free some space")


class Store(dict):
    """As torchrun's, where anybody may write."""

    def set(self, key, value):
        self[key] = value.encode()

    get = dict.__getitem__


def test_ranks_of_torchrun_on_one_machine_meet_in_a_private_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(meeting.tempfile, "tempdir", str(tmp_path))
    store = Store()
    assert isinstance(meeting._private(store, 0, 2), dist.FileStore)
    folder = Path(os.fsdecode(store["folder"]))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.geteuid()
    meeting._private(store, 1, 2)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "open").mkdir(mode=0o755)
    for other in ("link", "open", "absent"):
        with pytest.raises(ConfigError, match=r"rank 1 must meet the other ranks in '.*', which "
                                              r"is no private folder of this user"):
            meeting._private(Store(folder=os.fsencode(tmp_path / other)), 1, 2)


@pytest.mark.slow
def test_several_machines_still_meet(tmp_path):
    """Two agents of torchrun, each with a rank: to the ranks, they are two machines."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node),
         "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port),
         "-m", "lpkit", "train", "cpu-3m", "model.layers=1", "model.width=32", "model.heads=2",
         "model.context=32", "steps=3", "system.device=cpu", "precision.recipe=fp32",
         "parallel.shard=2", "--out", "run"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for node in range(2)]
    outputs = [agent.communicate(timeout=240)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert Run(tmp_path / "run").summary["status"] == "complete"
