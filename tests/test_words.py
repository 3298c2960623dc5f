"""Only these tests catch: a value that controls a terminal or fills a screen, YAML that takes
minutes or means something else, an error without a message, and a command with a wrong exit
code."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lpkit import cli
from lpkit.config import Config, ModelConfig, SystemConfig
from lpkit.errors import ConfigError, nearest, printable, shown
from lpkit.files import read_text
from lpkit.plain_yaml import parse_yaml, read_yaml
from lpkit.values import Count, Place, annotated, checked
from tests.attack import command_line, patience

MEAN = ["\x1b[31mred", "\u202egnp.exe", "a\u200bb", "\x00", "\r\n", "\x9b2J", "\udcff", "\u2028"]


class Rude:
    def __repr__(self):
        return "\x1b[2J" * 100


loop: list = []
loop.append(loop)


@pytest.mark.parametrize("value", [*MEAN, "x" * 10**6, 10**5000, -10**400, [MEAN] * 1000,
                                   {"a": loop}, loop, Rude(), b"\xff" * 1000, None],
                         ids=lambda value: type(value).__name__)
def test_a_value_is_shown_short_and_harmless(value):
    started = time.process_time()
    assert len(shown(value)) <= 80 and shown(value).isprintable()
    assert time.process_time() - started < 0.5


def test_what_people_write_is_shown_as_it_is():
    for value in ("café 漢字", 0.001, None, ("a", 1)):
        assert shown(value) == repr(value)
    assert printable("two\nlines\tand a tab") == "two\nlines\tand a tab"
    assert str(ConfigError("x\x1b[2J")) == "x\\x1b[2J"


def test_few_names_are_suggested():
    many = [f"blocks.{i}.attention.query" for i in range(500)]
    message = nearest("blocks.7.atention.qery", [f"{name}.weight" for name in many])
    assert "blocks.7.attention.query.weight" in message and len(message) < 300
    assert nearest("x", ["b", "a"]) == "choose one of a, b"
    assert nearest("x" * 10**6, many).count("blocks") == 3


@pytest.mark.parametrize("make, sentence", [
    (lambda: Config(steps=2.5), "steps must be a whole number, got 2.5"),
    (lambda: Config(steps=True), "steps must be a whole number, got True"),
    (lambda: Config(seed=2**63), "seed must be at most 9,223,372,036,854,775,807"),
    (lambda: Config(steps=10**400), "must be at most 2,147,483,647, got a whole number of about"),
    (lambda: Config(optimizer={"beta2": float("nan")}), "must be 0 or more and below 1, got nan"),
    (lambda: ModelConfig(norm=["rmsnorm"]), "model.norm must be text"),
    (lambda: SystemConfig(threads=10**6), "system.threads must be from 1 to 1,024"),
    (lambda: SystemConfig(device="cuda:²"), "must be auto, cpu, cuda or cuda:N, got 'cuda:²'"),
    (lambda: Config().replace({"precision.recipe": "fp8-delayed", "precision.recipe.margin": "-1"}),
     "margin must be from 0 to 64"),
    (lambda: Config().replace({"model.layers": {"a": {}}}), "model.layers must be a whole number"),
    (lambda: Config(data={"source": ""}), "data.source is empty"),
])
def test_settings_are_checked_when_they_are_made(make, sentence):
    with pytest.raises(ConfigError) as error:
        make()
    assert sentence in str(error.value) and len(str(error.value)) < 400
    seed = 2**63 - 1     # all digits are kept
    assert Config().replace({"seed": str(seed)}).seed == seed == Config(seed=seed).seed


def test_arguments_are_read_as_settings_are():
    @checked
    def f(place: Place, count: Count = 1, *, config: Config | None = None):
        return place, count, config

    @checked
    def g(run: Config | Place):
        return run

    assert f("a", "1_000") == (Path("a"), 1000, None)
    assert g(Config()) == Config() and g("a") == Path("a")
    for wrong, sentence in ((("",), "place is empty"), (("a", 0), "count must be positive"),
                            ((5,), "place must be text or a path"),
                            (("x" * 300,), "part of more than 255 bytes")):
        with pytest.raises(ConfigError, match=sentence):
            f(*wrong)
    with pytest.raises(TypeError, match=r"'steps'; it takes place, count, config"):
        f("a", steps=3)
    with pytest.raises(ConfigError, match="config must be a Config or none, got 'cpu-3m'"):
        f("a", config="cpu-3m")


@pytest.mark.parametrize("name", [name for name in command_line.YAMLS if name not in (
    "list", "word", "escape", "escaped_key", "infinite", "text", "nothing", "negative", "bool",
    "newer", "base60", "long")])
def test_yaml_that_no_setting_needs_is_refused(name):
    started = time.process_time()
    with pytest.raises(ConfigError) as error:
        Config.from_yaml(command_line.YAMLS[name])
    assert time.process_time() - started < 2
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_yaml_errors_name_file_and_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("steps: 1\nseed: 2\nsteps: 3\n")
    with pytest.raises(ConfigError, match=r"mine.yaml .*, line 3: the key steps is there twice"):
        read_yaml(path)
    assert parse_yaml("") == {} and parse_yaml("a: [1, x, 2.5, null]") == {"a": [1, "x", 2.5, None]}
    config = Config().replace({"precision.recipe": "mxfp8",
                               "precision.recipe.high_precision_layers": ("first", "head")})
    # YAML that the kit writes contains no alias
    assert Config.from_yaml(config.to_yaml()) == config


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path, kind in ((tmp_path / "fifo", "a named pipe"), (tmp_path / "zero", "a device"),
                       (tmp_path, "a folder")):
        with pytest.raises(ConfigError, match=f"is {kind}, not a file"):
            read_text(path, 100)
    (tmp_path / "large").write_bytes(b"a" * 101)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_text(tmp_path / "large", 100)


# the command line

@pytest.fixture
def failing(monkeypatch):
    """A function (error) that runs a command which raises the error, and returns the exit code."""
    def run(error):
        def broken(args):
            raise error

        monkeypatch.setattr("lpkit.commands.predict.run", broken)
        return cli.main(["predict", "cpu-3m"])

    return run


class OutOfMemoryError(RuntimeError):
    """An error with the class name that torch uses."""


@pytest.mark.parametrize("error, code, sentence", [
    (OSError(errno.ENOSPC, "No space left on device", "/x/a\x1b.json"), 2,
     "/x/a\\x1b.json: No space left on device; free some space"),
    (PermissionError(errno.EACCES, "Permission denied", "/x"), 2,
     "/x: Permission denied; choose another path, or change its permissions"),
    (OutOfMemoryError("CUDA out of memory. Tried to allocate 3 TiB"), 2, "memory ran out; choose"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory"),
     2, "memory ran out"),
    (MemoryError(), 2, "memory ran out"), (RecursionError(), 2, "nests too deeply"),
    (KeyboardInterrupt(), 130, "interrupted"),
    (ConfigError("x must be y"), 2, "x must be y"),
])
def test_what_is_no_fault_of_lpkit_ends_in_a_sentence(failing, capsys, error, code, sentence):
    assert failing(error) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lpkit: ") and sentence in line


@pytest.mark.parametrize("error", [AssertionError("x"), RuntimeError("x")])
def test_a_fault_of_lpkit_keeps_its_traceback(failing, error):
    with pytest.raises(type(error)):
        failing(error)


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGHUP", 129)])
def test_signals_unwind(monkeypatch, capsys, name, code):
    undone = []

    def work(args):
        try:
            signal.raise_signal(getattr(signal, name))
        finally:
            undone.append(name)

    before = signal.getsignal(getattr(signal, name))
    monkeypatch.setattr("lpkit.commands.predict.run", work)
    assert cli.main(["predict", "cpu-3m"]) == code and undone == [name]
    assert capsys.readouterr().err == f"lpkit: stopped by {name}\n"
    assert signal.getsignal(getattr(signal, name)) == before


def test_argparse_repeats_its_input_short_and_harmless(capsys):
    for arguments in (["predict", "cpu-3m", "--\x1b[2J" + "x" * 10**5],
                      ["predict", "cpu-3m", "--devices", "9" * 5000],
                      ["plan", "--model", "llama-8b", "--tokens", "1e9", "--budget=--"]):
        with pytest.raises(SystemExit) as left:
            sys.exit(cli.main(arguments))
        err = capsys.readouterr().err
        assert left.value.code == 2 and "\x1b" not in err and len(err.splitlines()[-1]) < 700


def test_outputs_obey_no_terminal_either(monkeypatch, capsys):
    monkeypatch.setattr("lpkit.commands.predict.run", lambda args: {})
    monkeypatch.setattr("lpkit.commands.predict.text", lambda result: "a\x1b[2J\n\tb")
    assert cli.main(["predict", "cpu-3m"]) == 0 and capsys.readouterr().out == "a\\x1b[2J\n\tb\n"


def test_an_output_that_takes_nothing(tmp_path):
    """A full disk is reported; a reader that has closed the pipe is not. The interpreter's own
    exit adds no message."""
    command = [sys.executable, "-m", "lpkit", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("lpkit: No space left on device; free some space")
    assert done.stderr.count("\n") == 1
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# corpora

SLOW_TRAINING = """
import sys, time
from lpkit import cli
from lpkit.datasets import tokenizers
learn = sys.argv[1] + "/learn.py"
open(learn, "w").write('''
import sys, time
open(int(sys.argv[1])).readline()
print('begun', file=sys.stderr, flush=True)
time.sleep(60)
''')
tokenizers.LEARN = learn
sys.exit(cli.main(["data", "prepare", sys.argv[1] + "/text", "--tokenizer", "bpe"]))
"""


def test_a_signal_ends_the_preparation_of_a_corpus(tmp_path):
    """In this test, the child process that learns merges never answers. The library also does
    not answer while it merges."""
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i}.txt").write_text("the cat sat\n" * 9)
    command = [sys.executable, "-c", SLOW_TRAINING, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}) as process:
        assert process.stderr.readline() == "begun\n"
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143 and time.monotonic() - sent < 2 * patience()
        assert process.stderr.read() == "lpkit: stopped by SIGTERM\n"
    assert [path.name for path in (tmp_path / "cache/lpkit/tokens").iterdir()] == ["locks"]


def test_options_that_share_a_type_share_its_words():
    from lpkit.commands import a_folder

    with pytest.raises(ConfigError, match="--out is empty; give one"):
        annotated("", a_folder, "--out")
