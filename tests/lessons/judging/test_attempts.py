"""Attempts that mean harm, or loop, crash and exit: each is a sentence and never "right", this
process lives, and the next right answer is judged right. What goes with a function from a notebook,
and what does not.

Only these tests catch: a judge that an answer can end, blind, fill or talk into "right", a process
or file that an answer leaves behind, and a function of a notebook that travels without what it
uses.
"""

import contextlib
import functools
import json
import math
import socket
import textwrap
import time

import psutil
import pytest
import torch

from lessons.judging import attempts, judge, puzzles
from lessons.judging.attempts import Answer, Attempt, Parcel, Unknown, asked, pack, unpack
from lessons.judging.judge import Verdict
from lessons.judging.learner import check
from lpkit.machine_facts import cores
from tests.attack import patience
from tests.lessons.judging.course import EXERCISES

SECONDS = 2.0
RIGHT = b'{"status": "right", "detail": ""}'
HOSTILE = {
    "right verdicts into every file": f"for fd in range(256):\n    try: os.write(fd, "
                                      f"{RIGHT + chr(10).encode()!r})\n    except OSError: pass",
    "garbage into every file": "for fd in range(256):\n    try: os.write(fd, os.urandom(99))\n    "
                               "except OSError: pass",
    "answers of nothing into every file": """
        from lessons.judging.attempts import pack
        for fd in range(3, 256):
            try: os.write(fd, 300 * pack([None, "", "", False]))
            except OSError: pass""",
    "answers without an end": "from lessons.judging.attempts import pack\nwhile True: os.write(3, "
                              "pack(['x' * 10**6, '', '', False]))",
    "half an answer": "os.write(3, b'\\xff' * 7)\nos._exit(0)",
    "os._exit": "os._exit(0)",
    "sys.exit": "sys.exit(0)",
    "GeneratorExit": "raise GeneratorExit",
    "StopIteration": "raise StopIteration",
    "a loop that hears no signal": "for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile "
                                   "True: pass",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 26))",
    "tensors": "kept = []\nwhile True: kept.append(torch.zeros(1 << 24))",
    "a fork bomb": "while True: os.fork()",
    "a fork that leaves": "if os.fork() == 0:\n    os.setsid()\n    while True: time.sleep(0.1)",
    "a program that stays": "subprocess.Popen(['sleep', '1000'], start_new_session=True)",
    "no files": "os.closerange(0, 1 << 16)",
    "its pipe closed": "os.close(3)",
    "another program": "os.execv('/bin/true', ['true'])",
    "json replaced": f"json.dumps = lambda *_, **__: {RIGHT.decode()!r}\njson.loads = lambda *_, "
                     f"**__: {{'status': 'right', 'detail': ''}}",
    "the comparison replaced": """
        from lessons.judging import puzzles
        from lessons.judging import judge
        judge.difference = judge.verdict = puzzles.difference = lambda *_, **__: ""
        torch.equal = torch.allclose = torch.testing.assert_close = torch.Tensor.isclose = lambda \
*_, **__: True""",
    "its own frames": """
        frame = sys._getframe()
        while frame:
            if "want" in frame.f_locals: return frame.f_locals["want"]
            frame = frame.f_back""",
    "its own objects": """
        import gc
        for thing in gc.get_objects():
            if type(thing) is dict and "want" in thing: return thing["want"]""",
    "the judge killed": "os.kill(os.getppid(), 9)\ntime.sleep(9)",
    "the judge stopped and killed": "os.kill(os.getppid(), signal.SIGSTOP)\nos.kill(os.getppid(), "
                                    "9)\ntime.sleep(9)",
    "all above killed": "import psutil\nfor process in psutil.Process().parents()[1::-1]: "
                        "process.kill()\ntime.sleep(9)",
    "the judge's files": f"""
        for fd in range(256):
            try:
                with open(f"/proc/{{os.getppid()}}/fd/{{fd}}", "wb", buffering=0) as file: \
file.write({RIGHT!r})
            except OSError: pass""",
    "the judge's memory": "open(f'/proc/{os.getppid()}/mem', 'r+b')",
    "its own memory": "with open('/proc/self/mem', 'r+b', buffering=0) as file:\n    "
                      "file.seek(id(None))\n    file.write(bytes(4096))",
    "what is called at its end": f"atexit.register(lambda: os.write(3, {RIGHT!r}))\nos._exit = "
                                 f"lambda code: None",
    "megabytes printed": "while True: print('x' * 1_000_000)",
    "a thread that writes": f"threading.Thread(target=lambda: [os.write(3, {RIGHT!r}) for _ in "
                            f"range(9999)], daemon=True).start()\ntime.sleep(0.2)",
    "a thread that stays": "threading.Thread(target=time.sleep, args=(1000,)).start()",
    "a handler": "signal.signal(signal.SIGALRM, lambda *_: "
                 "os._exit(0))\nsignal.setitimer(signal.ITIMER_REAL, 0.2)\nwhile True: pass",
    "a crash": "ctypes.string_at(8)",
    "no end of calls": "def call(): call()\ncall()",
}
MODULES = "import atexit, ctypes, json, os, signal, subprocess, sys, threading, time, torch\n"


def hostile(head, body, last):
    code = MODULES + textwrap.dedent(body).strip() + chr(10) + last
    return f"{head}\n{textwrap.indent(code, '    ')}\n"


def unharmed():
    """The next right answer is right, and nothing of an attempt is left."""
    assert check(EXERCISES["00.uniform_loss"], math.log) == Verdict("right")
    deadline = time.monotonic() + 10 * patience()
    while (left := judges()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


def judges():
    """What the warm processes of this one have forked."""
    forked = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            forked += (process.children()
                       if "lessons.judging.judge_process" in " ".join(process.cmdline()) else [])
    return forked


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_an_answer_does_is_a_sentence_and_the_next_is_judged(kind):
    source = hostile("def uniform_loss(vocab):", HOSTILE[kind], "return 0.0")
    verdict = asked("00.uniform_loss", SECONDS,
                    parcel=vars(Parcel(entry="uniform_loss", texts={"uniform_loss": source})))
    assert (verdict["status"] == "wrong" and len(verdict["detail"]) > 10
            and "Traceback" not in verdict["detail"]), verdict
    unharmed()


# A kernel runs in the same process as an answer: what differs is what it finds there.
# (test_kernel_exercises.py has loops, crashes and memory.)
@pytest.mark.parametrize("kind", ("right verdicts into every file", "json replaced",
                                  "the comparison replaced", "its own frames", "its own objects"))
def test_whatever_a_kernel_does_is_a_sentence_and_the_next_is_judged(kind):
    verdict, = puzzles.run([("10.copy", hostile("def copy(x, y, n, BLOCK):", HOSTILE[kind],
        "return"))], seconds=SECONDS)
    assert (verdict["status"] == "wrong" and len(verdict["detail"]) > 10
            and "Traceback" not in verdict["detail"]), verdict
    unharmed()


RANKS = ("right verdicts into every file", "os._exit", "memory", "the judge killed",
         "the comparison replaced", "its own frames")


@pytest.mark.parametrize("kind", RANKS)
def test_whatever_an_answer_does_on_ranks_is_a_sentence(kind, monkeypatch):
    from lessons.ranks import on_ranks, rank_exercises

    monkeypatch.setattr(rank_exercises, "PROGRESS_SECONDS", 3.0)
    source = hostile("def eight_bit_gather(rows, rank, ranks, all_reduce_max, all_gather_bytes):",
                     HOSTILE[kind], "return rows")
    monkeypatch.setattr(on_ranks, "as_text", lambda *_: source)
    verdict = EXERCISES["15.eight_bits"].judged(None)
    assert verdict.status == "wrong" and len(verdict.detail) > 10, verdict


# sentences

def from_a_notebook(text, name, **names):
    """A function as a cell defines it: its source is known by lines, and its module is nobody's to
    import."""
    import linecache

    linecache.cache["cell"] = len(text), None, text.splitlines(True), "cell"
    names |= {"__name__": "__main__", "torch": torch, "math": math}
    exec(compile(text, "cell", "exec"), names)
    return names[name]


def verdict_of(text, name="answer", exercise="00.uniform_loss", **names):
    return EXERCISES[exercise].judged(from_a_notebook(textwrap.dedent(text), name, **names))


def test_the_line_of_an_exception_is_that_of_the_cell():
    verdict = verdict_of("""
        unused = 3

        def helper(x):
            return x / 0

        def answer(vocab):
            return helper(vocab)
        """)
    assert (verdict.detail == "for vocab=2 it raised ZeroDivisionError: division by zero, in line "
                              "5: `return x / 0`")


def test_what_it_prints_goes_with_a_wrong_verdict():
    assert verdict_of("def answer(vocab):\n    print('half way')\n    return 1").detail.startswith(
        "for vocab=2 expected 0.693147, got 1. It printed: half way\nhalf way")


def test_one_that_does_not_end_names_its_case(monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 1.0)
    began = time.monotonic()
    verdict = verdict_of(
        "def answer(vocab):\n    while vocab > 2: pass\n    return math.log(vocab)")
    assert verdict.detail == "for vocab=256 it did not end within 1 s"
    assert time.monotonic() - began < 10 * patience()


def test_beside_other_work_it_has_more_time(monkeypatch):
    """A right answer that had to wait for a core is no wrong answer."""
    def slow():
        time.sleep(1)
        yield Answer(3)
        time.sleep(60)

    for load, expected in ((0.0, [""]), (20.0, [3, ""])):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load * cores(), 0, 0))
        with Attempt(slow, 0.2) as attempt:
            answers = list(attempt)
        assert ([answer.value or "" for answer in answers] == expected
                and answers[-1].why == "it did not end within 0 s")


def test_helpers_imports_numbers_closures_defaults_and_decorators_travel():
    assert verdict_of("""
        import functools
        from math import log as ln

        ONE, TABLE, FP8 = 1.0, {"base": [torch.ones(1)]}, torch.float8_e4m3fn
        half = lambda x: x / 2

        def even(n):
            return True if n == 0 else odd(n - 1)

        def odd(n):
            return False if n == 0 else even(n - 1)

        def maker(k):
            @functools.cache
            def answer(vocab: model, more=ONE) -> model:
                vocab.numerator         # an attribute that is called like what cannot travel
                model = TABLE["base"][0].to(FP8).float().item()
                return 2 * half(ln(vocab)) * more * model * k if even(4) else 0
            return answer

        class model: pass
        numerator = model()
        answer = maker(1)
        """) == Verdict("right")


@pytest.mark.parametrize("value, words", [
    (torch.nn.Linear(1, 1), "`thing` is a Linear of the notebook, which cannot be sent"),
    (functools.partial(math.log), "`thing` is a partial of the notebook, which cannot be sent"),
    (object(), "`thing` is a object of the notebook, which cannot be sent"),
    (torch.zeros(1 << 25), "take 128 MB; at most 64 MB can be sent"),
])
def test_what_cannot_travel_is_a_sentence_and_no_wrong_answer(value, words):
    verdict = verdict_of(
        "def answer(vocab):\n    return math.log(vocab) if thing is not None else 0", thing=value)
    assert verdict.status == "to do" and words in verdict.detail


def test_a_name_that_is_nowhere_is_the_learner_s_error():
    verdict = verdict_of("def answer(vocab):\n    return nowhere(vocab)")
    assert "NameError: name 'nowhere' is not defined, in line 2" in verdict.detail


def test_a_stub_starts_nothing(monkeypatch):
    monkeypatch.setattr(judge, "asked", None)
    assert (verdict_of('def answer(vocab):\n    """What?"""\n    raise NotImplementedError').status
            == "to do")


def test_every_solution_is_right_where_attempts_run():
    """The definitions travel as text does: by what they use."""
    for name, exercise in EXERCISES.items():
        if type(exercise) is judge.Exercise:
            assert exercise.judged(exercise.answer) == Verdict("right"), name


# what travels

@pytest.mark.parametrize("value", [None, True, 3, 10**30, -0.0, math.inf, "text", [1, (2, "a")],
                                   {1: [2], "b": None}, []])
def test_plain_values_travel(value):
    assert repr(unpack(pack(value))) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64,
                                   torch.bool])
def test_tensors_travel_bit_by_bit(dtype):
    x = torch.tensor([[0.0, -1.5], [2.0, 1.0]]).to(dtype).T
    got, nan = unpack(pack([x, torch.tensor(0x7FC0BEEF, dtype=torch.int32).view(torch.float32)]))
    assert (got.dtype == dtype and torch.equal(got.float(), x.float())
            and nan.view(torch.int32).item() == 0x7FC0BEEF)


def test_of_something_else_its_words_travel():
    assert isinstance(unpack(pack({1, 2})), Unknown) and repr(unpack(pack({1, 2}))) == "{1, 2}"
    with pytest.raises(TypeError):
        pack({1, 2}, strict=True)


@pytest.mark.parametrize("damage", [b"\xff" * 20, pack([1])[:-1], pack(torch.ones(2))[:-1],
                                    attempts.SIZES.pack(2, 0) + b"{}",
                                    attempts.SIZES.pack(14, 0) + b'{"tensor":"0"}'])
def test_damaged_frames_are_refused(damage):
    # of any kind: the judge takes all of them alike
    with pytest.raises(Exception):     # noqa: B017
        unpack(damage)


def test_a_verdict_without_the_nonce_is_none(monkeypatch):
    """Whatever a process writes that is not the judge."""
    class Fake:
        def start(self, name):
            ours, self.theirs = socket.socketpair()
            self.theirs.sendall(b"?" + json.dumps({"status": "right", "detail": ""}).encode())
            self.theirs.shutdown(socket.SHUT_WR)
            return ours

        def __exit__(self, *_):
            self.theirs.close()

    monkeypatch.setattr(attempts, "_warm", lambda: {"None": Fake()})
    assert asked("00.uniform_loss", 1.0)["status"] == "wrong"
