"""Files of strangers that a folder to import, an adapter or a corpus may hold: one sentence, at
once, and nothing is left.

The attack `strangers` (tests/attack) draws many more of them; here are the kinds that once ended in
a traceback, waited for ever, or were accepted without a word.

Only these tests catch: a file of strangers that is opened, read whole, tried without a limit,
imported with numbers that are none, or named raw in a terminal.
"""

import json
import os
import random
import resource
import shutil
import signal
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from lpkit import cli
from lpkit.datasets import tokenizers
from lpkit.datasets.prepared import open_tokens
from lpkit.errors import ConfigError, GoneError, RunFailedError, packed, unpacked
from lpkit.training.sampling import choose
from tests.attack import patience, strangers

pytest.importorskip("tokenizers")
SECONDS = 10


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    strangers.prepare(folder)
    return folder


@pytest.fixture
def theirs(good, tmp_path):
    """Copies of the good folders, which a test may damage."""
    for name in ("model", "lora", "prompt", "text"):
        shutil.copytree(good / name, tmp_path / name)
    return tmp_path


def refused(capsys, tmp_path, words, *parts):
    """Run a command that must be refused within SECONDS. Return its message, which must be one line
    that contains `parts`. The command must leave no file. An alarm ends a command that hangs."""
    before, _ = {*tmp_path.rglob("*")}, capsys.readouterr()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("it waits")))
    signal.alarm(round(SECONDS * patience()))
    try:
        code = cli.main([str(word) for word in words])
    finally:
        signal.alarm(0)
    printed = capsys.readouterr().err
    assert (code == 2 and printed.startswith("lpkit: ") and printed.count("\n") == 1
            and printed[:-1].isprintable()), printed
    assert all(part in printed for part in parts), printed
    assert {*tmp_path.rglob("*")} == before
    return printed


def import_words(theirs, good, subject):
    return ["import", theirs / subject, "--out", theirs / "out",
            *(["--base", good / "base"] if subject != "model" else [])]


NO_FILE = {"a named pipe": "is a named pipe, not a file",
           "an endless device": "is a device, not a file", "a folder": "a folder"}


@pytest.mark.parametrize("subject, file, kind", [
    *((*subject, "a named pipe") for subject in (
        ("model", strangers.WEIGHTS), ("model", "tokenizer.json"),
        ("model", "tokenizer_config.json"), ("model", "generation_config.json"),
        ("lora", strangers.ADAPTER), ("lora", strangers.ADAPTER_WEIGHTS))),
    ("model", "tokenizer.json", "an endless device"),
    ("lora", strangers.ADAPTER_WEIGHTS, "an endless device"),
    ("model", strangers.WEIGHTS, "a folder"), ("lora", strangers.ADAPTER, "a folder")])
def test_what_is_no_file_is_never_opened(good, theirs, capsys, subject, file, kind):
    strangers.NO_FILES[kind](theirs / subject / file, random.Random(0))
    refused(capsys, theirs, import_words(theirs, good, subject), file, NO_FILE[kind])


@pytest.mark.parametrize("subject, file, value", [
    ("model", strangers.WEIGHTS, "NaN"), ("model", strangers.WEIGHTS, "minus infinity"),
    ("lora", strangers.ADAPTER_WEIGHTS, "infinity"), ("prompt", strangers.ADAPTER_WEIGHTS, "NaN")])
def test_weights_that_are_no_numbers_are_refused_by_name(good, theirs, capsys, subject, file,
        value):
    strangers.TENSORS[value](theirs / subject / file, random.Random(1))
    [name] = [key for key, t in load_file(theirs / subject / file).items()
              if not torch.isfinite(t).all()]
    refused(capsys, theirs, import_words(theirs, good, subject), f"{name} in ", file,
            "has NaN or infinity among its numbers")


@pytest.mark.parametrize("dtype, name",
                         [(torch.int64, "I64"), (torch.float64, "F64"),
                          (torch.float8_e4m3fn, "F8_E4M3")])
def test_an_adapter_has_the_dtypes_of_models(good, theirs, capsys, dtype, name):
    path = theirs / "lora" / strangers.ADAPTER_WEIGHTS
    save_file({key: t.clone().to(dtype) for key, t in load_file(path).items()}, path)
    refused(capsys, theirs, import_words(theirs, good, "lora"),
            f"is in {name}; this kit begins from weights in F32, BF16, F16")


def test_an_adapter_in_a_pickle_is_refused_as_a_model_is(good, theirs, capsys):
    (theirs / "lora" / strangers.ADAPTER_WEIGHTS).rename(theirs / "lora" / "adapter_model.bin")
    refused(capsys, theirs, import_words(theirs, good, "lora"),
            "has its weights in adapter_model.bin, a pickle")


def test_only_a_small_share_of_an_adapter_is_read(good, theirs, capsys):
    """A file with 20,000 tensors that fit no layer is refused by its header. Reading each tensor
    would take minutes."""
    path = theirs / "lora" / strangers.ADAPTER_WEIGHTS
    save_file({f"{i}": torch.ones(1) for i in range(20_000)}
              | {key: t.clone() for key, t in load_file(path).items()}, path)
    refused(capsys, theirs, import_words(theirs, good, "lora"),
            "by r, use_dora and target_modules it should be 'not there'")


# ---- tokenizers

@pytest.mark.parametrize("harm, message", [
    ("the pattern (a+)+$", "retry-limit-in-match over"),
    ("a normalizer that hangs", "retry-limit-in-match over"),
    ("an id of 10^9", "an id of 1,000,000,000, and at most 1,048,576 are read"),
    ("a normalizer that grows", "not a tokenizer"), ("an id of 2^32", "not a tokenizer")])
def test_a_tokenizer_that_would_hang_or_break_later_is_refused_at_import(good, theirs, capsys, harm,
        message):
    strangers.TOKENIZER[harm](theirs / "model" / "tokenizer.json", random.Random(0))
    begun = time.process_time()
    refused(capsys, theirs, import_words(theirs, good, "model"), message)
    assert time.process_time() - begun < SECONDS
    capsys.readouterr()
    refused(capsys, theirs, ["data", "prepare", good / "text", "--tokenizer", theirs / "model",
                             "--out", theirs / "tokens"], message)


def test_padding_of_any_length_is_off_before_a_text_is_read(good, theirs):
    """A text was once encoded with the file's padding, which took the memory of 10^12 tokens."""
    strangers.TOKENIZER["padding to 10^12"](theirs / "model" / "tokenizer.json", random.Random(0))
    assert (tokenizers.of_folder(theirs / "model").encode("bottles")
            == tokenizers.of_folder(good / "model").encode("bottles"))


def test_a_panic_of_the_library_is_a_sentence_where_only_the_text_brings_it(good):
    """The folder of another user's run has a valid checksum, and a pattern that fails on a text
    that is not among the probes. The library then raises PanicException, which is not an
    Exception."""
    library = json.loads((good / "model" / "tokenizer.json").read_text())
    library["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "(q+)+$"},
                             "behavior": "Isolated", "invert": False}
    tokenizer = tokenizers.BPE({"model": library})
    assert tokenizer.encode("bottles")
    with pytest.raises(ConfigError,
                       match=r"that reads any text .*retry-limit-in-match over.*; save it again"):
        tokenizer.encode("q" * 40 + "x")
    with pytest.raises(ConfigError, match="retry-limit-in-match over"):
        tokenizer.prompt("q" * 40 + "x")


# the call of subprocess, which is interrupted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_heard_while_a_tokenizer_is_tried(monkeypatch):
    """The process that tries the tokenizer may take ten seconds. Ctrl-C ends the command at once,
    and leaves no process."""
    monkeypatch.setattr(tokenizers, "TRY", "import time; time.sleep(100)")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    begun = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            tokenizers._try("{}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 5 * patience()
    while left := [child for child in psutil.Process().children()
                   if child.status() != psutil.STATUS_ZOMBIE
                   and "time.sleep(100)" in child.cmdline()]:
        assert time.monotonic() - begun < 5 * patience(), left


# ---- a full disk

@pytest.fixture
def small_disk():
    """No file of this process may be larger than 4 kB, as on a full disk."""
    # Python ignores the signal, so that a write fails
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("command, subject",
                         [("import", "model"), ("export", "model"), ("export", "lora")])
def test_a_disk_that_fills_is_one_sentence(good, theirs, capsys, small_disk, command, subject):
    words = import_words(theirs, good, subject)
    if command == "export":
        assert cli.main([*map(str, words)]) == 0
        capsys.readouterr()
        # merged, if there is an adapter
        words = ["export", theirs / "out", "--out", theirs / "again"]
    small_disk()
    refused(capsys, theirs, words, str(theirs), "File too large")


def test_logits_that_are_no_numbers_draw_no_token():
    for temperature in (0, 1):
        with pytest.raises(ConfigError,
                           match="the logits are NaN or infinite; sample a run whose loss is a "
                                 "number"):
            choose(torch.tensor([0.0, float("nan")]), temperature, None, torch.Generator())


def test_token_files_that_are_no_files_are_never_opened(good, theirs, capsys):
    """The header says that there are no tokens, and has a valid checksum."""
    from lpkit import records

    prepared = theirs / "made"
    assert cli.main(["data", "prepare", str(theirs / "text"), "--out", str(prepared)]) == 0
    header = records.read(prepared / "header.json")
    header["splits"]["train"]["tokens"] = 0
    (prepared / "header.json").write_text(records.sealed(header))
    (prepared / "train.bin").unlink()
    os.mkfifo(prepared / "train.bin")
    with pytest.raises(ConfigError, match=r"train\.bin is a named pipe"):
        open_tokens(prepared)


# ---- names and exit codes

def test_names_of_strangers_reach_no_terminal_raw(good, theirs, capsys):
    (theirs / "lora").rename(theirs / strangers.ESCAPE)
    printed = refused(capsys, theirs,
                      ["import", theirs / strangers.ESCAPE, "--out", theirs / "out"],
                      "holds no model of transformers")
    assert "\x1b" not in printed
    path = theirs / "model" / strangers.WEIGHTS
    save_file({key: t.clone() for key, t in load_file(path).items()}
              | {f"{strangers.ESCAPE}": torch.ones(1)}, path)
    refused(capsys, theirs, import_words(theirs, good, "model"), r"\x1b[31mred\nlpkit: done first")


def test_who_was_killed_is_no_wrong_input(monkeypatch, capsys):
    """The command line chooses the exit code by the type of the error, which comes from another
    process."""
    assert (issubclass(GoneError, RunFailedError)
            and type(unpacked(*packed(GoneError("gone")))) is GoneError)
    for error, code in ((GoneError("gone"), 1), (RunFailedError("the loss is NaN"), 2),
                        (ConfigError("wrong"), 2)):
        monkeypatch.setattr(cli, "_main", lambda argv, error=error: (_ for _ in ()).throw(error))
        assert cli.main([]) == code and capsys.readouterr().err == f"lpkit: {error}\n"
