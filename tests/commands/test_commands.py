"""`key=value` and `--set key=value` have the same meaning in every command that takes settings; and
the messages of every command for wrong words and paths.

Only these tests catch: a setting that a command takes in one form only, two values of which the
last is taken silently, a folder whose name controls the terminal, and an error message that
waits for the import of PyTorch.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lpkit
from lpkit import cli
from lpkit.commands import options, train
from lpkit.errors import ConfigError
from lpkit.presets import resolve
from lpkit.training import runs

NOTEBOOK = str(Path(__file__).parents[2] / "notebooks" / "00_start_here.ipynb")
# words before a setting, words after it, a setting that changes the answer, and the same setting
# with a typing mistake
COMMANDS = {
    "predict": (["gpt2-124m"], ["--devices", "2"], "model.layers=4", "model.layes=4",
                "model.layers"),
    "advise": (["gpt2-124m"], ["--machine", "h200"], "model.layers=4", "model.layes=4",
               "model.layers"),
    "plan": (["--model", "gpt2-124m"], ["--tokens", "1e9", "--devices", "2"], "model.layers=4",
             "model.layes=4", "model.layers"),
    "measure": (["cpu-3m"], ["--save", "mine.yaml"], "model.layers=3", "model.layes=3",
                "model.layers"),
    "train": (["cpu-3m"], ["--out", "somewhere"], "steps=3", "stepz=3", "steps"),
    "launch": (["cpu-3m"], ["--processes", "2"], "steps=3", "stepz=3", "steps"),
    "notebook": ([NOTEBOOK], ["--tier", "smoke"], "seed=3", "sede=3", "seed"),
}


@pytest.fixture
def answer(capsys, monkeypatch, tmp_path):
    """Return (exit code, what the command returned or was about to do, standard error)."""
    def stop(what, **options):
        raise ConfigError(f"ready {what}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lpkit.training.background.train", stop)
    monkeypatch.setattr("hosting.runner.run_all", stop)
    monkeypatch.setattr("lpkit.measure.row", lambda config, command: stop(config), raising=False)

    def ask(*words):
        code = cli.main([*words, "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else out, err

    return ask


@pytest.mark.parametrize("name", COMMANDS)
def test_both_spellings_mean_the_same_wherever_they_stand(name, answer):
    before, after, setting, _, _ = COMMANDS[name]
    first = answer(name, *before, setting, *after)
    assert first != answer(name, *before, *after), "the setting changes the answer"
    assert first[0] == 0 or "lpkit: ready" in first[2]
    for words in ([*before, *after, setting], [*before, "--set", setting, *after],
                  ["--set", setting, *before, *after]):
        assert answer(name, *words) == first


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("spelling", [[], ["--set"]])
def test_a_slip_is_told_the_nearest_name(name, spelling, answer):
    before, after, _, wrong, right = COMMANDS[name]
    code, out, err = answer(name, *before, *spelling, wrong, *after)
    assert (code, out) == (2, "") and f"did you mean '{right}'?" in err and err.count("\n") == 1


def test_a_run_that_goes_on_takes_a_setting_without_a_target(answer):
    code, _, err = answer("train", "--resume", "--out", "nowhere", "steps=3")
    assert code == 2 and "'nowhere' holds no run" in err
    assert "cannot read a=b.yaml" in answer("train", "a=b.yaml")[2], "a file's name may hold an ="


def parsers(name):
    """Return the parsers of a command and of each of its subcommands."""
    parser = cli._Parser(prog=f"lpkit {name}")
    cli.module_of(name).arguments(parser)
    below = [action.choices for action in parser._actions
             if isinstance(action, argparse._SubParsersAction)]
    return {name: parser, **{f"{name} {sub}": parser for choices in below
                             for sub, parser in choices.items()}}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_words_that_argparse_refuses_are_one_sentence(name, capsys):
    """Yield the arguments that can be wrong: options with choices or a number, options with a
    value that must not be empty, missing words, and an option that does not exist."""
    for prog, parser in parsers(name).items():
        words = prog.split()
        wrong = [[*words, "--nothing-of-the-kind"]]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                wrong.append([*words, "huge"])
            elif action.option_strings and (action.choices or number(action)):
                wrong += [[*words, f"{action.option_strings[-1]}=huge"],
                          [*words, action.option_strings[-1]]]
            elif action.required and action.nargs != "*":
                wrong.append(words)
        for line in wrong:
            with pytest.raises(SystemExit) as left:
                sys.exit(cli.main(line))
            out, err = capsys.readouterr()
            assert ((left.value.code, out) == (2, "") and err.count("\n") == 1
                    and err.startswith("lpkit: ")), (line, err)
            assert any(way_out in err for way_out in (f"; see `lpkit {name}", "; choose one of ",
                "; did you mean ", "; write it as ")), err


def number(action):
    return getattr(action.type, "__origin__", action.type) in (int, float)


NO_NUMBERS = ["", "8,000", "40%", "0x10", "None"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_text_that_is_no_number_is_named_with_the_rule_and_the_way_out(name, capsys):
    for prog, parser in parsers(name).items():
        for action in parser._actions:
            for text in NO_NUMBERS if number(action) and action.option_strings else ():
                option = action.option_strings[-1]
                with pytest.raises(SystemExit) as left:
                    sys.exit(cli.main([*prog.split(), f"{option}={text}"]))
                out, err = capsys.readouterr()
                kind = ("a whole number" if getattr(action.type, "__origin__", action.type) is int
                        else "a number")
                assert ((left.value.code, out) == (2, "")
                        and err.startswith(f"lpkit: {option} must be {kind}, got {text!r}; write "
                                           f"it as ")), err


@pytest.mark.parametrize("words, message", [
    (["predict", "cpu-3m", "--devices", "1.6e1"], None),
    (["plan", "--model", "llama-8b", "--tokens", "1,500B", "--devices", "8"], None),
    (["plan", "--model", "llama-8b", "--tokens", "1,5T", "--devices", "8"], "--tokens '1,5T' is "
        "not a number of tokens"),
    (["plan", "--model", "llama-8b", "--tokens", "1T", "--budget", "$1,00"], "--budget '$1,00' is "
        "not a number of dollars"),
    (["predict", "cpu-3m", "steps=5", "steps=6"], "steps is both '5' and '6'; give one"),
    (["predict", "cpu-3m", "--set", "steps=5", "steps=6"], "steps is both '6' and '5'"),
    (["predict", "cpu-3m", "--set", "steps=5", "--set", " steps = 6"], "steps is both '5' and '6'"),
    (["predict", "cpu-3m", "optimizer=lion", "optimizer.name=adamw"], "optimizer is both 'lion' "
        "and 'adamw'"),
    (["predict", "cpu-3m", "model.changes=lora:rank=8:rank=4"], "rank is both '8' and '4'"),
    (["predict", "cpu-3m", "--devices", "1", "--dev", "2"], "--devices is both '1' and '2'"),
    (["predict", "cpu-3m", "--machine", "h100", "--machine=h200"], "--machine is both "),
    (["train", "cpu-3m", "--out", "x", "--out", "y"], "--out is both "),
    (["notebook", "00", "--tier", "cpu", "--tier", "smoke"], "--tier is both "),
    (["predict", "cpu-3m", "optimizer=lion", "--optimizer", "adamw"], "optimizer is both 'lion' "
        "and '--optimizer'"),
    (["predict", "cpu-3m", "--optimizer", "lion"], None),
    (["predict", "cpu-3m", "precision.recipe.name=fp32", "--precision", "bf16"], "precision.recipe "
        "is both "),
    (["predict", "cpu-3m", "parallel.tensor=2", "--devices", "4"], "parallel.tensor is both '2' "
        "and '--devices'"),
    (["predict", "cpu-3m", "parallel.data=2", "parallel.zero=3", "--zero", "1"], "parallel.zero is "
        "both "),
    (["predict", "cpu-3m", "memory.recompute=block", "--recompute", "none"], "memory.recompute is "
        "both "),
    (["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8", "model.context=64",
      "--context", "32"], "model.context is both "),
    (["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8", "global_batch=4",
      "--batch-tokens", "1M"], "global_batch is both "),
    (["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8", "grad_accum_steps=2"],
     "plan does not use grad_accum_steps"),
])
def test_of_two_values_for_one_thing_neither_is_taken(words, message, capsys):
    """Earlier, the last value was taken silently. A number of tokens may be written in any of
    its forms."""
    code = cli.main(words)
    out, err = capsys.readouterr()
    assert ((code == 0 and out and not err) if message is None else (code, out) == (2, "")
            and err.startswith(f"lpkit: {message}")), (code, err)


def test_a_wrong_choice_is_told_what_there_is(capsys):
    for words, message in ((["notebook", "00", "--tier", "huge"],
                         "there is no tier 'huge'; choose one of cpu, gpu, smoke"),
                        (["notebook", "00", "--tier", "smok"],
                         "there is no tier 'smok'; did you mean 'smoke'?"),
                        (["data", "sho"], "there is no action 'sho'; did you mean 'show'?"),
                        (["plan"], "the following arguments are required: --model, --tokens; see"),
                        (["predict"], "the following arguments are required: "
                                      "PRESET|config.yaml|RUN|config.json|FOLDER; see")):
        with pytest.raises(SystemExit):
            sys.exit(cli.main(words))
        assert message in capsys.readouterr().err


def test_a_row_of_options_is_an_argument():
    parser = argparse.ArgumentParser(prog="lpkit x")
    options({"run RUN": "a", "name? NAME": "b", "--out! DIR": (Path, "c"), "--top N=10": (int, "d"),
             "--set... KEY": "e", "--kind {p,q}=p": (("p", "q"), "f"), "--flag": "g"},
            lambda more: more.add_argument("--more"))(parser)
    given = vars(parser.parse_args(["r", "--out", "d", "--set", "a", "--set", "b", "--top", "3"]))
    assert given == {"run": "r", "name": None, "out": Path("d"), "top": 3, "set": ["a", "b"],
                     "kind": "p", "flag": False, "more": None}
    assert vars(parser.parse_args(["r", "n", "--out=d", "--flag", "--kind=q"])) == {
        "run": "r", "name": "n", "out": Path("d"), "top": 10, "set": None, "kind": "q",
        "flag": True, "more": None}
    assert "--out DIR" in parser.format_usage() and "[--kind {p,q}]" in parser.format_usage()
    with pytest.raises(SystemExit):     # without --out
        parser.parse_args(["r"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_arguments_are_read_is_no_traceback(number, monkeypatch, capsys):
    """argparse asks for the usage just before it stores what it must restore. If a signal
    interrupted it there, it would restore nothing."""
    usage = argparse.ArgumentParser.format_usage

    def interrupted(parser):
        os.kill(os.getpid(), number)
        return usage(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "format_usage", interrupted)
    # a shell lets background processes ignore SIGINT
    before = signal.signal(number, signal.default_int_handler)
    try:
        assert cli.main(["predict", "cpu-3m", "--json"]) == 128 + number
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err.splitlines()[-1].startswith("lpkit: ")


# ---- paths

NO_PATHS = ["~nobody-here/x", "~nobody-here/x.yaml", "d\udcff/x.yaml", "d\udcff.ipynb"]
TAKES_A_PATH = [
    "predict {}", "predict cpu-3m --machine {}", "predict cpu-3m run={}", "advise {}",
    "advise cpu-3m --machine {}",
    "plan --model {} --tokens 1e9 --devices 8", "measure {}", "measure cpu-3m --save {}",
    "train {}", "train cpu-3m steps=1 --out {}", "train cpu-3m steps=1 data.source={}",
    "train --resume --out {}", "sample {}", "export {} --out o", "export x --out {}",
    "data prepare {}", "data prepare text.txt --out {}",
    "data prepare text.txt --tokenizer {}", "data show {}", "notebook {}",
    "notebook 00 --out {} nothing=1", "notebook 00 --on {}",
    "notebook 00 --tier {}", "new experiment x --out {}", "new experiment {}",
    "notebook 00 seed={}", "lab --course {} --reset 00", "lab --course work --reset {}", "bench {}",
    "bench nothing --out {}", "claims {}", "doctor {}", "launch {}", "launch cpu-3m --out {}",
    "pack {}", "{}"]


@pytest.mark.parametrize("line", TAKES_A_PATH)
def test_a_home_of_nobody_and_bytes_that_are_no_utf8_are_sentences(line, capsys, monkeypatch,
        tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("text")
    for path in NO_PATHS:
        words = [word.replace("{}", path) for word in line.split()]
        try:
            code = cli.main(words)
        except SystemExit as left:
            code = left.code
        err = capsys.readouterr().err
        sentences = [line for line in err.splitlines() if line.startswith("lpkit: ")]
        assert code == 2 and len(sentences) == 1 and err.replace("\n", "").isprintable(), (words,
            err)
    assert {path.name for path in tmp_path.iterdir()} <= {"text.txt", "cache",
        "work"}, "nothing is left behind"


@pytest.mark.parametrize("variable, value", [
    ("XDG_CACHE_HOME", "~nobody-here/x"), ("XDG_DATA_HOME", "\udcff"), ("HOME", "/dev/null/x"),
    ("HOME", "~nobody-here/x")])
def test_so_they_are_in_the_environment(variable, value, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for other in ("XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(variable, value)
    (tmp_path / "text.txt").write_text("some text that is long enough\n" * 20_000)
    for words in (["data", "prepare", "text.txt"], ["lab", "--reset", "00"]):
        code = cli.main(words)
        err = capsys.readouterr().err
        assert code in (0, 2) and "Traceback" not in err
    assert not (tmp_path / "~nobody-here").exists()


@pytest.mark.parametrize("text", [b"data: {source: \xff}", b'data: {source: "\\udcff"}'],
                         ids=["bytes", "an escape"])
@pytest.mark.parametrize("words", [["train", "a.yaml"], ["predict", "a.yaml"],
                                   ["predict", "cpu-3m", "--machine", "a.yaml"]])
def test_so_they_are_in_yaml(text, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_bytes(text)
    assert cli.main(words) == 2 and capsys.readouterr().err.count("lpkit: ") == 1


NAMED = "a\x1b]0;owned\x07\nlpkit: forged \u202e"
TINY = ("model.layers=1 model.width=32 model.heads=2 model.context=32 steps=2 global_batch=4 "
        "eval_every=0 eval_batches=1 checkpoint_every=2 "
       "precision.recipe=fp32 system.device=cpu system.threads=1").split()


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_the_name_of_a_folder_moves_no_terminal(options, capfd, monkeypatch, tmp_path):
    """Every command that names a folder, when it succeeds and when it fails: control characters
    are escaped, and a name cannot forge a line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "".join(f"{i} bottles of beer\n" for i in range(40_000))
    (tmp_path / f"{NAMED}.txt").write_text(text)

    def say(*words: str) -> int:
        code = cli.main([*words, *options])
        out, err = capfd.readouterr()
        for line in f"{out}\n{err}".replace("\r", "\n").split("\n"):
            assert line.isprintable() and not line.startswith("lpkit: forged"), (words, line)
        return code

    def damage(name: str) -> None:
        with (tmp_path / NAMED / name).open("ab") as file:
            file.write(b"torn\n")

    train = ["train", "cpu-3m", f"data.source={NAMED}.txt", *TINY, "--out", NAMED]
    assert [say(*train), say(*train), say("train", "--resume", "--out", NAMED, "seed=5")] == [0, 2,
        2]
    damage("metrics.jsonl")
    assert [say("train", "--resume", "--out", NAMED, "steps=3"),
            say("train", "--resume", "--out", f"{NAMED}x")] == [0, 2]
    assert [say("sample", NAMED, "--tokens", "3"), say("sample", f"{NAMED}x"),
            say("sample", NAMED, "--prompt", "\udcff")] == [0, 2, 2]
    assert [say("export", NAMED, "--out", f"{NAMED}e"), say("export", NAMED, "--out", f"{NAMED}e"),
            say("export", "x", "--out", NAMED)] == [0, 2, 2]
    prepare = ["data", "prepare", f"{NAMED}.txt", "--out", f"{NAMED}d"]
    assert [say(*prepare), say(*prepare), say("data", "show", f"{NAMED}d"),
            say("data", "show", f"{NAMED}x")] == [0, 2, 0, 2]
    assert [say("lab", "--course", f"{NAMED}l", "--update"),
            say("lab", "--course", NAMED, "--update")] == [0, 2]
    assert [say("notebook", f"{NAMED}.ipynb"), say("predict", f"{NAMED}.yaml"),
            say("predict", "cpu-3m", "--machine", f"{NAMED}.yaml")] == [2] * 3
    for path in (tmp_path / NAMED / "checkpoints").glob("step-*"):
        damage(f"checkpoints/{path.name}/manifest.json")
    assert [say("sample", NAMED), say("train", "--resume", "--out", NAMED, "steps=4")] == [2, 0]
    damage("config.yaml")
    assert [say("sample", NAMED), say("train", "--resume", "--out", NAMED)] == [2, 2]


def test_a_run_is_opened_by_its_name(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} bottles of beer\n" for i in range(20_000)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cli.main(["train", "cpu-3m", "data.source=text.txt", *TINY, "--out", "runs/six"]) == 0
    for place in ("runs/six", Path("runs/six"), tmp_path / "runs" / "six"):
        assert (lpkit.Run(place).summary["status"] == "complete"
                and lpkit.Run(place).path == Path(place))
    for wrong, message in (("runs/sixx", "holds no run .*; did you mean 'six'"),
                        ("nowhere/x", "holds no run"), ("", "is empty"),
                        (5, "path must be"), ("~nobody-here/x", "does not know")):
        with pytest.raises(ConfigError, match=message):
            lpkit.Run(wrong)


WRONG = [
    ("advise cpu-3m --recipe bf16", "there is no recipe that casts 'bf16'"),
    ("advise cpu-3m --machine mi300", "did you mean 'mi300x'"),
    ("sample nowhere", "holds no run"), ("sample nowhere --top-k 0", "--top-k must be positive"),
    ("sample nowhere --cache int9", "did you mean 'int8'"),
    ("export nowhere --out x", "holds no run"),
    ("train cpu-3m steps=many", "whole number"),
    ("train --resume --out nowhere", "holds no run"),
    ("train cpu-3m parallel.tensor=2", "takes 2 processes, and this is one"),
    ("train cpu-3m data.source=nowhere", "there is no file, folder or glob 'nowhere'"),
    ("train cpu-3m --out six", "already holds a run"),
    ("train --resume --out six seed=5", "with other settings: seed was 0 and is 5"),
    ("train six", "continue its run by --resume --out six, or start from its weights with a preset "
                  "and start.run=six"),
    ("train cpu-3m --processes 1 --out six", "already holds a run"),
    ("train cpu-3m --out papers", "holds no run"),
    ("warm cpu-3m parallel.shard=2", "takes 2 processes, and this is one"),
    ("bench imports", "did you mean 'import'"),
    ("bench import --kernel x", "--kernel is for kernels alone"),
    ("lab --port 70000 --no-browser", "between 0 and 65535"),
    ("lab --reset 42", "choose one of 00, 01"),
    ("notebook 42", "there is no notebook '42'; choose one of 00, 01, 02, "),
    ("notebook 00 sede=1", "did you mean 'seed'"),
    ("data prepare nowhere", "nowhere")]
EACH = """
import contextlib, io, json, sys
from lpkit.cli import main
answers = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    answers.append([code, out.getvalue(), "torch" in sys.modules, err.getvalue()])
print(json.dumps(answers))
"""


def test_what_is_wrong_is_said_before_torch_is_imported(tmp_path):
    """Importing torch takes seconds. All cases run in one process that has imported nothing
    else. tests/attack/command_line.py draws wrong words and counts the same."""
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("mine")
    (tmp_path / "six").mkdir()
    (tmp_path / "six" / runs.CONFIG).write_text(runs.sealed_yaml(resolve("cpu-3m"), ""))
    lines = [line for line, _ in WRONG]
    done = subprocess.run([sys.executable, "-c", EACH, json.dumps(lines)], cwd=tmp_path, text=True,
                          capture_output=True, check=True,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]),
                                            "XDG_DATA_HOME": str(tmp_path)})
    for (line, message), (code, out, imported, err) in zip(WRONG, json.loads(done.stdout),
                                                        strict=True):
        assert (code, out, imported) == (2, "", False) and message in err, (line, err)


def test_the_summary_of_a_training_wraps_to_the_terminal(monkeypatch):
    choice = {"asked": "auto", "used": "bf16",
              "why": " ".join(["a reason that goes on and on"] * 9)}
    summary = {"run_dir": "runs/x", "status": "complete", "steps": 3, "tokens": 9,
               "chosen": {"precision": choice}}
    for columns in ("60", "80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = train.text(summary).splitlines()
        assert int(columns) - 12 < max(map(len, lines)) <= int(columns)
        at = lines[0].index("runs/x")
        assert all(line[at - 1] == " " and line[at] != " "
                   for line in lines), "one column of names, one of values"
        assert " ".join(line[at:] for line in lines).endswith(
            f"bf16 (requested: auto; {choice['why']})")
