"""Command lines as people type them, each in a fresh folder: exit code 0 and the right answer, or
exit code 2, one sentence and nothing written.

Only these cases catch: words that are taken for another number, target or folder than their author
meant.
"""

import contextlib
import functools
import io
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from lpkit import cli

# blocks, embeddings, the last norm
GPT2 = 12 * (12 * 768**2 + 13 * 768) + (50_304 + 1024) * 768 + 2 * 768
CPU_3M = 4 * (12 * 256**2 + 13 * 256) + (256 + 256) * 256 + 2 * 256
SMALL = 3 * (12 * 64**2 + 13 * 64) + (256 + 256) * 64 + 2 * 64
LINES = "".join(f"{i} bottles of beer on the wall\n" for i in range(20_000))
SMALL_MODEL = "model.layers=3 model.width=64 model.heads=2"
TRAIN = ("train cpu-3m model.layers=1 model.width=32 model.heads=2 model.context=32 steps=2 "
         "global_batch=4 eval_every=0 eval_batches=1 "
         "checkpoint_every=0 precision.recipe=fp32 system.device=cpu system.threads=1 "
         "data.source=text.txt system.attention=plain "
         "system.compile=false system.kernels=pytorch")
PLAN = "plan --model llama-8b --tokens 1e11 --devices 64 --json"

Right = Callable[[dict], bool]


def has(**values: object) -> Right:
    """True of a result with these entries."""
    return lambda result: {key: result[key] for key in values} == values


def plan_of(tokens: float, **of_first: object) -> Right:
    return lambda result: result["tokens"] == tokens and has(**of_first)(result["plans"][0])


# What is typed, and what is right of the object that --json prints, or a piece of the sentence.
TYPED: list[tuple[str, Right | str]] = [
    ("predict gpt2-124m --json", has(parameters=GPT2)),
    (f"predict cpu-3m {SMALL_MODEL} --json", has(parameters=SMALL)),
    (f"predict --json --set model.layers=3 cpu-3m --set=model.width=64 --set model.heads=2 "
     f"{SMALL_MODEL}", has(parameters=SMALL)),
    ("predict mine.yaml --json", has(parameters=SMALL)),
    ("predict cpu-3m --devices 1.6e1 --json", has(devices=16)),
    ("predict cpu-3m --devices 8_ --json",
     "--devices must be a whole number, got '8_'; write it as"),
    ("predict cpu-3m --devices 8,000", "--devices must be a whole number, got '8,000'; write it as "
                                       "8000 or 8e3"),
    ("predict cpu-3m --devices=-1", "devices must be positive, got -1"),
    ("predict cpu-3m --devices 7", "global_batch=16 sequences does not split over data=7"),
    ("predict cpu-3m --devices", "expected one argument"),
    ("predict cpu-3m --mfu 40%", "--mfu must be a number, got '40%'; write it as 0.4"),
    ("predict cpu-3m --mfu 40", "mfu is a fraction of the peak, above 0 and at most 1; got 40.0"),
    ("predict cpu-3m --mfu nan", "mfu is a fraction of the peak"),
    ("predict cpu-3m --mfu 0.4 --json", has(mfu=0.4)),
    ("predict cpu-3m --price-per-hour 1e400", "price_per_hour must be 0 or more, got inf"),
    ("predict cpu-3m --zero 4", "there is no ZeRO stage 4; choose 0, 1, 2 or 3"),
    ("predict cpu-3m --devices 1 --devices 2", "--devices is both '1' and '2'"),
    ("predict cpu-3m steps=5 steps=6", "steps is both '5' and '6'"),
    ("predict cpu-3m steps=5 steps=5 --json", has(parameters=CPU_3M)),
    ("predict cpu-3m start.map=a:b,a:c", "start.map must be a list of NEW:OLD with each NEW once"),
    ("predict cpu-3m model.layers=8,000", "model.layers must be a whole number, got '8,000'; write "
                                         "it as"),
    ("predict cpu-3m model.layers = 3", "expected key=value, got 'model.layers'"),
    ("predict cpu-3m model.layers", "expected key=value, got 'model.layers'"),
    ("predict cpu-3m =3", "expected key=value, got '=3'"),
    ("predict cpu-3m model.layes=3", "did you mean 'model.layers'?"),
    ("predict cpu-3m layers=3", "there is no setting 'layers'"),
    ("predict cpu-3m model=3", "'model' is a group of settings"),
    ("predict cpu-3m --layers 3", "unrecognized arguments: --layers"),
    ("predict cpu3m", "did you mean 'cpu-3m'?"),
    ("predict nowhere.yaml", "cannot read nowhere.yaml"),
    ("predict text.txt", "there is no preset 'text.txt'"),
    ("predict", "the following arguments are required: PRESET|config.yaml|RUN"),
    ("predict cpu-3m --machine mi300", "did you mean 'mi300x'?"),
    ("predcit cpu-3m", "did you mean 'predict'?"),
    (PLAN, plan_of(1e11, devices=64)),
    (PLAN.replace("1e11", "100B"), plan_of(1e11, devices=64)),
    (PLAN.replace("1e11", "100,000,000,000"), plan_of(1e11, devices=64)),
    (PLAN.replace("1e11", "1,5T"), "--tokens '1,5T' is not a number of tokens; write it as"),
    (PLAN.replace("1e11", "5x"), "--tokens '5x' is not a number of tokens"),
    (PLAN.replace("1e11", "0"), "--tokens must be above 0"),
    (f"{PLAN} --budget $1,5M", "--budget '$1,5M' is not a number of dollars"),
    (f"{PLAN} --deadline 30", "--deadline '30' is not a time; write it as 90min, 12h, 30d or 2w"),
    (f"{PLAN} --top 0", "--top must be positive, got 0"),
    (f"{PLAN} --show 999", "--show must be from 1 to "),
    ("plan --model llama-8b --tokens 1T", "a plan needs a limit"),
    (TRAIN + " --out run --json", lambda result: (result["steps"], result["status"]) == (2,
        "complete")),
    (TRAIN.replace("steps=2", "steps=2.5"), "steps must be a whole number, got '2.5'"),
    (TRAIN.replace("text.txt", "nowhere.txt"), "there is no file, folder or glob 'nowhere.txt'"),
    (TRAIN + " --out text.txt", "--out must be a folder, and "),
    (TRAIN + " --out ''", "--out is empty"),
    (TRAIN + " --processes 0", "processes must be positive, got 0"),
    (TRAIN + " --processes two", "--processes must be a whole number, got 'two'"),
    ("train", "what should lpkit train?"),
    ("train --resume", "--resume needs --out DIR"),
    ("train --resume --out nowhere", "holds no run"),
    ("launch cpu-3m --nodes 0", "nodes must be positive, got 0"),
    ("launch cpu-3m --processes 2 --json", lambda result: "--nproc-per-node 2 " in result["job"]),
    ("data prepare text.txt --out tokens --json",
     lambda result: sum(split["tokens"] for split in result["splits"].values()) >= len(LINES)),
    ("data prepare text.txt --vocab 8k", "--vocab must be a whole number, got '8k'"),
    ("data prepare text.txt --val-fraction 10%", "--val-fraction must be a number, got '10%'"),
    ("data prepare text.txt --val-fraction 1.0", "data.val_fraction must be above 0 and below 1, "
                                                "got 1.0"),
    ("data sho tokens", "did you mean 'show'?"),
    ("sample nowhere --temperature hot", "--temperature must be a number, got 'hot'"),
    ("import text.txt --check", "must be a folder"),
    ("import adapter --base run --check --out new", "needs --out DIR, without --check or "
                                                   "--tokenizer"),
    ("bench --all import", "--all runs every benchmark; leave out import"),
    ("notebook --all 00", "leave out '00'"),
    ("claims lion-faster --json", has(name="lion-faster")),
    ("notebook 00 --on processes=0", "processes must be positive, got 0"),
    ("notebook 00 seed=x", "seed"),
    ("room --learners 600", "--learners must be from 0 to 500, got 600"),
    ("--version", lambda result: result["stdout"].count(".") >= 1),
    ("", lambda result: "usage: lpkit COMMAND" in result["stdout"]),
]


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for line, due in TYPED:
        ends = due if isinstance(due, str) else "two steps"
        yield (f"train: {ends}" if line.startswith("train cpu") else line
               or "no words"), functools.partial(tried, line, due)


def tried(line: str, due: Right | str) -> str:
    """Returns "right" or the sentence."""
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as place:
        home, folder = Path(place) / "home", Path(place) / "folder"
        home.mkdir()
        folder.mkdir()
        (folder / "text.txt").write_text(LINES)
        (folder / "mine.yaml").write_text("model: {layers: 3, width: 64, heads: 2}\n")
        before = set(folder.rglob("*"))
        around = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), str(home))
        with (mock.patch.dict(os.environ, around), contextlib.chdir(folder),
              contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)):
            try:
                code = cli.main(shlex.split(line))
            except SystemExit as left:
                code = left.code
        written = set(folder.rglob("*")) - before
    if not isinstance(due, str):
        assert code == 0, f"exit code {code}: {err.getvalue()}"
        printed = out.getvalue()
        assert due(json.loads(printed) if "--json" in line
                   else {"stdout": printed}), f"another answer: {printed[:300]}"
        return "right"
    errors = [message for message in err.getvalue().splitlines() if message.startswith("lpkit: ")]
    assert (code, out.getvalue(), len(errors)) == (2, "",
        1), f"exit code {code}, {out.getvalue()[:200]!r}, {err.getvalue()[-300:]!r}"
    assert due in errors[0] and len(errors[0]) < 1000, f"another reason: {errors[0]}"
    assert not written, f"refused, and it left {written}"
    return errors[0].removeprefix("lpkit: ")
