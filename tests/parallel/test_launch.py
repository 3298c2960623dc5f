"""Only these tests catch a launch that names the wrong rank, waits too long, loses a message or a
signal, or leaves a process behind: ranks raise, hang, are killed, run out of memory and are
stopped."""

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import suppress

import psutil
import pytest

import lessons.rows.linear_attention  # noqa: F401  adds rows
import lpkit
from lessons.figures.live import LiveRun
from lpkit import cli, preset
from lpkit.errors import ConfigError, GoneError
from lpkit.parallel.processes import Processes
from lpkit.training.runs import METRICS, RunFailedError
from tests.attack import patience, until
from tests.attack import processes as attack
from tests.bench.launch import STEP

pytestmark = pytest.mark.dist
RANK, HERE = "tests.bench.launch:rank", "tests.parallel.rank_functions"
AT = rf"at step {STEP} in forward"


def ranks(parent, function, job=None, *, world=2, messages=None, **limits):
    """What they returned, or the error."""
    messages = [] if messages is None else messages
    with Processes(function, job, world=world, parent=parent,
                   heard=lambda *pair: messages.append(pair), **limits) as running:
        try:
            return running.wait()
        except (ConfigError, RunFailedError) as error:
            return error


def failed(parent, job, **limits):
    """The error, and how many seconds after its cause it was there."""
    messages = []
    error = ranks(parent, RANK, job, messages=messages, **limits)
    return error, time.monotonic() - next(
        message["fault_at"] for _, message in messages if "fault_at" in message)


def test_each_rank_knows_its_place_and_is_heard(parent):
    messages = []
    results = ranks(parent, f"{HERE}:here", {"a": [1]}, world=3, messages=messages)
    assert results == [[0, 3, 0, 3], [1, 3, 1, 3], [2, 3, 2, 3]]
    assert sorted((rank, message["job"]) for rank, message in messages) == [
        (rank, {"a": [1]}) for rank in range(3)]
    pids = {message["pid"] for _, message in messages}
    assert len(pids) == 3 and not any(map(psutil.pid_exists, pids))


def test_nothing_that_is_said_is_lost(parent):
    messages = []
    ranks(parent, f"{HERE}:talk", {"lines": 3000}, messages=messages)
    for number in (0, 1):
        assert [message["number"] for rank, message in messages
                if rank == number] == list(range(3000))


@pytest.mark.parametrize("fault, kind, sentence", [
    ("raises", RunFailedError,
     rf"failed {AT}: ValueError: a fault that was planted\n\nTraceback (.|\n)*in _raise\n"),
    ("refuses", ConfigError, ": a setting that cannot be; choose another$"),
    ("meets the end of memory", RunFailedError, rf"ran out of memory {AT}: MemoryError\n"),
    ("exits", GoneError, rf"exited {AT} with code 9 and without an error$"),
    ("is killed", GoneError, rf"died {AT} of SIGKILL, from outside: where memory runs out"),
    ("crashes", GoneError, rf'died {AT} of SIGSEGV\n\n  File ".*", line \d+ in string_at\n'),
])
def test_who_fails_is_named_and_all_end(parent, fault, kind, sentence):
    """Rank 0 fails too, because the other is gone: "Connection closed by peer"."""
    error, seconds = failed(parent, {"fault": fault})
    assert type(error) is kind and re.match(rf"rank 1 of 2 ?{sentence}", str(error)), str(error)
    assert seconds < 5 * patience()


@pytest.mark.parametrize("layout, rank, room_bytes", [
    ({"data": 2}, 1, 32 << 20), ({"shard": 2, "zero": 3}, 0, 0)], ids=str)
def test_a_rank_out_of_memory_is_named_with_the_rows_of_its_ledger(parent, tmp_path, layout, rank,
                                                                    room_bytes):
    """Planted, or with no more address space: a micro-batch of 64 times the tokens does not fit."""
    config = preset("cpu-3m").replace({
        "model.layers": 2, "global_batch": 4, "steps": 5, "system.device": "cpu",
        "system.threads": 1, "precision.recipe": "fp32",
        "eval_every": 0, "checkpoint_every": 2,
        **{f"parallel.{axis}": n for axis, n in layout.items()}})
    job = {"config": config.to_dict(), "out": str(tmp_path / "run"), "resume": False, "rank": rank,
           "room_bytes": room_bytes}
    raised = ranks(parent, "tests.parallel.training_ranks:out_of_memory", job)
    error = "RuntimeError: .*can't allocate memory.*" if room_bytes else "MemoryError"
    # ZeRO cuts no moments in int8
    size, way = r"[\d.]+ [kMG]?B", "moment_format=int8" if "data" in layout else "recompute=block"
    assert isinstance(raised, RunFailedError) and re.match(
        rf"rank {rank} of 2: out of memory after step 2 \({error}\); held were {size} "
        rf"\(.*(weights|optimizer state) {size}.*\), and predicted {size} at the peak "
        rf"\(.*{size}.*; it would fit with --set memory.{way} .*; kept: step-00000002",
        str(raised)), raised


@pytest.mark.parametrize("fault, limit, sentence, more", [
    ("is stopped", "timeout_seconds", "gave no sign of life",
     rf"in reduce\n\nrank 1 is {AT}, stopped by a signal\n(.|\n)*in <lambda>"),
    ("holds the lock", "timeout_seconds", "gave no sign of life", "in <lambda>"),
    ("never calls", "progress_seconds", "got no further", r"in reduce(.|\n)*in _wait"),
])
def test_who_hangs_is_named_with_its_stack(parent, fault, limit, sentence, more):
    error, seconds = failed(parent, {"fault": fault}, **{limit: 2})
    assert re.match(rf"rank 1 of 2 {sentence} for 2 s {AT}, and rank 0 is at (.|\n)*{more}",
                    str(error)), error
    assert "run_rank" not in str(error) and seconds < (2 + 2 + 3) * patience()


def test_who_waits_for_no_message_is_to_blame(parent):
    error = str(ranks(parent, f"{HERE}:wait_for_one", progress_seconds=1))
    assert error.startswith("rank 1 of 2 got no further for 1 s at step 3 in reduce, and rank 0 is "
                            "at step 3 in reduce, waiting\n"), error


def test_all_that_wait_for_one_another_are_named(parent):
    error = str(ranks(parent, f"{HERE}:stand_still", progress_seconds=1))
    assert error.startswith("ranks 0 and 1 of 2 got no further for 1 s: they wait for one another")
    assert error.count("in stand_still") == 2 and "rank 0 is at step 3 in reduce" in error


def test_an_abort_after_the_work_is_done_is_a_success(parent):
    assert ranks(parent, f"{HERE}:abort_at_exit") == [0, 1]


def test_who_leaves_by_exit_has_not_finished(parent):
    assert re.match("rank [01] of 2 failed at step 0 in start: SystemExit: no more",
                    str(ranks(parent, f"{HERE}:exit_early")))


@pytest.mark.parametrize("function", ["tests.no_such:module", f"{HERE}:no_such_function"])
def test_what_cannot_be_imported_is_said(parent, function):
    error = ranks(parent, function)
    assert (isinstance(error, RunFailedError)
            and str(error).startswith(f"cannot import {function}: "))


def test_they_are_asked_to_pause_go_on_and_stop(parent):
    """Nobody stands still who was asked to; and a stop stays one when the pause is over."""
    seen = []

    def heard(rank, message):
        seen.append(message.get("seen"))
        if seen.count("") == 2 and not seen.count("pause"):
            running.pause()
        if seen.count("pause") == 2:
            time.sleep(2)
            running.stop("SIGINT")
            running.resume()

    with Processes(f"{HERE}:obey", world=2, parent=parent, heard=heard,
                   progress_seconds=1) as running:
        results = running.wait()
    assert results == [["", "pause", "SIGINT"]] * 2


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_killed_they_are_gone_at_once(parent, own):
    pids = []

    def heard(rank, message):
        pids.append(message.get("pid"))
        if len(list(filter(None, pids))) == 2:
            running.kill()

    with Processes(f"{HERE}:obey", world=2, parent=None if own else parent,
                   heard=heard) as running, \
            pytest.raises(RunFailedError, match=r"ended by kill\(\)"):
        running.wait()
    assert not any(psutil.pid_exists(pid) for pid in pids if pid)


def test_a_supervisor_that_is_killed_is_no_wrong_input(parent):
    """The ranks end with it. The command line then exits with 1 (test_strangers)."""
    pids = []

    def heard(rank, message):
        if "pid" in message:
            pids.append(message["pid"])
            if len(pids) == 2:
                psutil.Process(pids[0]).parent().kill()

    with Processes(f"{HERE}:obey", world=2, parent=parent, heard=heard) as running, \
            pytest.raises(GoneError, match=r"^the process that watched the ranks was killed, .*; "
                                           r"go on with --resume$"):
        running.wait()
    deadline = time.monotonic() + 5 * patience()
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_rank_leaves_is_ended(parent):
    messages = []
    assert ranks(parent, f"{HERE}:leave_a_child", messages=messages) == [None, None]
    assert not any(psutil.pid_exists(message["pid"]) for _, message in messages)


CALLER = """
from lpkit.parallel.processes import Processes
with Processes("tests.parallel.rank_functions:tick", {job}, world=2,
               heard=lambda rank, message: print(rank, flush=True)) as ranks:
    ranks.wait()
"""


@pytest.mark.parametrize("sent, job", [(signal.SIGTERM, {"stopped": None}),
                                       (signal.SIGKILL, {"stopped": 1})], ids=str)
def test_nothing_outlives_its_caller(tmp_path, sent, job):
    for name in ("tmp", "runtime"):
        (tmp_path / name).mkdir()
    with subprocess.Popen([sys.executable, "-c", CALLER.format(job=job)], text=True,
                          stdout=subprocess.PIPE,
                          env=os.environ | {"TMPDIR": str(tmp_path / "tmp"),
                                            attack.MARK: str(tmp_path)}) as caller:
        for _ in range(20):
            assert caller.stdout.readline()
        # caller, keeper, warm parent, supervisor, two ranks
        until(lambda: len(family := attack.processes(tmp_path)) == 6
                 and sum(process.status() == psutil.STATUS_STOPPED for process in family)
                 == (job["stopped"] is not None))
        caller.send_signal(sent)
        begun = time.monotonic()
        assert attack.until_nothing(tmp_path, begun + 4 * patience()) == []


# a run

@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(importlib.import_module("lpkit.training.launch"), "TRAIN", f"{HERE}:train")
    monkeypatch.setattr(importlib.import_module("lpkit.training.launch"), "cores", lambda: 4)


def config(**changes):
    return preset("cpu-3m").replace({"system.device": "cpu",
                                     **{key.replace("__", "."): value
                                        for key, value in changes.items()}})


def test_a_handle_has_what_a_panel_shows(stand_in, tmp_path):
    handle = lpkit.launch(config(steps=5), processes=2, out=tmp_path / "run")
    live = LiveRun(handle)
    shown = []
    handle.subscribe(shown.append)
    run = handle.result()
    assert run.path == tmp_path / "run" and handle.done and handle.error is None
    assert [record.step for record in handle.records] == [1, 2, 3, 4, 5]
    assert handle.planned_steps == 5
    assert handle.config.parallel.data == 2
    assert handle.ranks == {rank: {"step": 5, "step_seconds": 0.1, "loss": 1.0,
                                   "peak_bytes": 1 << 30, "communication_share": 0.25}
                            for rank in (0, 1)}
    live._done()
    assert "done" in live.status.value
    cells = re.findall("<t[hd][^>]*>(.*?)</t[hd]>", live.ranks.value)
    assert cells[-6:] == ["1", "5", "1.000", "0.100", "1.07 GB", "25%"] and len(cells) == 3 * 6


def test_stop_and_pause_reach_the_ranks(stand_in, tmp_path):
    handle = lpkit.launch(config(steps=10**6), processes=2, out=tmp_path / "run")
    live = LiveRun(handle)
    until(lambda: handle.records)
    live.pause_button.click()
    assert handle.paused
    live.stop_button.click()
    assert handle.result().summary["stopped_by"] == "stop"


def test_steps_that_are_written_and_not_told_are_kept(stand_in, monkeypatch, tmp_path):
    """A launch of a tiny model had 23 of them when its first signal came, and was killed."""
    monkeypatch.setattr(importlib.import_module("lpkit.training.launch"), "TRAIN", f"{HERE}:untold")
    handle = lpkit.launch(config(steps=10**6), processes=2, out=tmp_path / "run")
    # a shell's & makes its children deaf
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def press():
        until((tmp_path / "run" / METRICS).exists)
        time.sleep(0.3)     # the main thread waits for the result
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        assert handle.result().summary["stopped_by"] == "SIGINT" and handle.done
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_command_does_the_same(stand_in, tmp_path, capsys):
    words = ["train", "cpu-3m", "system.device=cpu", "steps=5", "--processes", "2", "--json",
             "--out", str(tmp_path / "a")]
    assert cli.main(words) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["steps"] == 5
    assert "5/5" in captured.err and "tokens/s" in captured.err
    assert cli.main([*words[:-1], str(tmp_path / "b"), "seed=13"]) == 2
    assert capsys.readouterr().err.strip().endswith("of 2: seed=13 brings bad luck; choose another")


@pytest.mark.parametrize("words, sentence", [
    (["--processes", "0"], "processes must be positive, got 0"),
    (["--processes", "two"], "--processes must be a whole number, got 'two'"),
    (["--processes", "5"], "processes=5 need as many cores, and there are 4; use processes=4"),
    # 16 sequences do not split over 3, so "set data=3" would be wrong
    (["--processes", "3", "parallel.data=2"], "is 2 devices, not 3; use 2 devices"),
    (["--processes", "4", "parallel.data=2"], "is 2 devices, not 4; set parallel.data=4"),
    (["--processes", "3"], "global_batch=16 sequences does not split over data=3"),
    (["--processes", "2", "parallel.pipeline=2"], "rank or more; set grad_accum_steps=2"),
])
def test_what_the_command_refuses_starts_nothing(stand_in, tmp_path, monkeypatch, capsys, words,
                                                  sentence):
    monkeypatch.setattr(subprocess, "Popen", None)
    try:
        code = cli.main(["train", "cpu-3m", *words, "--out", str(tmp_path / "a")])
    except SystemExit as left:      # argparse's
        code = left.code
    assert code == 2 and not any(tmp_path.iterdir())
    error = capsys.readouterr().err.splitlines()[-1]
    assert sentence in error and error.startswith("lpkit: "), error


COMMAND = """
import fcntl, importlib, sys, termios
from lpkit import cli
fcntl.ioctl(0, termios.TIOCSCTTY, 0)        # its terminal: what is typed there becomes a signal
launch = importlib.import_module("lpkit.training.launch")
launch.TRAIN, launch.cores = f"tests.parallel.rank_functions:{sys.argv[1]}", lambda: 2
sys.exit(cli.main(["train", "cpu-3m", "system.device=cpu", "steps=100000", "--processes", "2",
                   "--json", "--out", sys.argv[2]]))
"""


@pytest.mark.parametrize("function, keys, code, stopped_by", [
    ("deaf", 2, 130, None), ("train", 0, 129, "SIGHUP")], ids=["Ctrl-C twice", "closed"])
def test_the_terminal_of_the_command(tmp_path, function, keys, code, stopped_by):
    """A terminal that closes stops the run after the step at hand, as one Ctrl-C does; the second
    Ctrl-C stops it at once."""
    for name in ("tmp", "runtime"):
        (tmp_path / name).mkdir()
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    with open(ours, "r+b", buffering=0) as terminal, subprocess.Popen(
            [sys.executable, "-c", COMMAND, function, str(tmp_path / "run")], stdin=theirs,
            stdout=subprocess.PIPE, stderr=theirs, text=True, start_new_session=True,
            env=os.environ | {"TMPDIR": str(tmp_path / "tmp"),
                              attack.MARK: str(tmp_path)}) as command:
        os.close(theirs)
        shown = b""
        # a step; one after it was asked to stop
        for seen in [rb"loss", rb" ([2-9]|\d\d+)/100000"][:max(keys, 1)]:
            while not re.search(seen, shown):
                shown += terminal.read(4096)
            terminal.write(b"\3" * bool(keys))
        begun = time.monotonic()
        if not keys:
            terminal.close()
        with suppress(OSError, ValueError):     # until nobody has it any more
            while terminal.read(4096):
                pass
        assert command.wait(60) == code
        printed = command.stdout.read()
    assert attack.until_nothing(tmp_path, begun + 5 * patience()) == []
    assert (json.loads(printed)["stopped_by"] if printed else None) == stopped_by
