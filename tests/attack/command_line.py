"""Wrong command lines: each ends within 10 s in exit code 2 and one sentence, leaves nothing
behind, writes nowhere else, and needs no torch, which takes seconds to import. How soon they are
answered is a fact of the attack.

A trial is a list of arguments, drawn by rules from a seed. Paths name the files of `odd_files`,
which are no files, or hold what no reader should believe.
"""

import gzip
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lpkit.config import Config, flat
from tests.attack import Outcome, patience
from tests.attack._nursery import nursery, tell_of_writes

COUNT, FEW = 600, 26        # two of each rule
SECONDS = 10.0
TORCH = "torch was imported"
ESCAPE = "\x1b[31mred\x1b[0m \u202egnp.exe \u200b"
STRANGE = ["", " ", ESCAPE, "x" * 5000, "a\nb", "\udcff", "-", "..", "%s%n", "{0}", "None",
           "\u0661"]
NO_NUMBERS = ["", "x", "nan", "inf", "1e400", "-1", "9" * 5000, "1;5", "0x10", ESCAPE, "true", "--",
              "1.5.2", "-inf", "1e-400"]
NO_COUNTS = [*NO_NUMBERS, "0", "1.5", "99999999999999999999"]
YAMLS = {
    "bomb": "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
    "deep": "model: " + "[" * 3000, "deeper": "{a: " * 3000, "twice": "steps: 1\nsteps: 2\n",
    "list": "[1, 2]", "word": "hello",
    "tag": "!!python/object/apply:os.system ['touch hacked']", "alias": "steps: *none",
    "tab": "model:\n\tlayers: 2", "quote": 'a: "',
    "escape": 'steps: "\\e[31mred"', "escaped_key": '"\\e[31m\\n": 1',
    "digits": f"steps: {'9' * 5000}", "infinite": "optimizer: {lr: .inf}",
    "date": "steps: 2001-99-99", "long": f"steps: {'x' * 60_000}", "large": "# \n" * 100_000,
    "text": "model: {layers: many}",
    "nothing": "model: null", "negative": "seed: -1", "key": "? [a]\n: 1", "bool": "steps: true",
    "base60": "steps: " + "1:" * 500 + "1",
    "merge": "<<: {steps: 1, steps: 2}", "newer": "version: 99",
    "older": "version: 1\nmodel: " + "{a: " * 12 + "1" + "}" * 12,
}


def odd_files(folder: Path) -> None:
    """What paths may name. Configs end in .yaml, because nothing else is taken for one."""
    folder.mkdir()
    for name, text in YAMLS.items():
        (folder / f"{name}.yaml").write_text(text)
    for suffix in (".yaml", ".txt", ".ipynb", ".jsonl", ".gz", ".zst", ".parquet", ""):
        os.mkfifo(folder / f"fifo{suffix}")
        (folder / f"folder{suffix}").mkdir()
        (folder / f"zero{suffix}").symlink_to("/dev/zero")
        (folder / f"loop{suffix}").symlink_to(folder / f"loop{suffix}")
        (folder / f"dangling{suffix}").symlink_to(folder / "nowhere")
        (folder / f"binary{suffix}").write_bytes(random.Random(0).randbytes(4000) + b"\0")
        (folder / f"empty_file{suffix}").write_bytes(b"")
        (os.mknod(folder / f"socket{suffix}", 0o600 | 0o140000) if os.geteuid() == 0
         else _socket(folder / f"socket{suffix}"))
    (folder / "esc\x1b[31m\nape.yaml").write_text("steps: 0")
    (folder / "bomb.txt.gz").write_bytes(gzip.compress(b"a" * (80 << 20), 1))
    (folder / "cut.txt.gz").write_bytes(
        gzip.compress(random.Random(0).randbytes(9000).hex().encode())[:-900])
    (folder / "deep.jsonl").write_text("[" * 100_000)
    (folder / "deep.ipynb").write_text("[" * 100_000)
    (folder / "list.ipynb").write_text("[1]")
    for name in ("short.txt", "esc\x1b[31m.txt"):
        (folder / name).write_text("short")
    for name, header in (("fifo", None), ("list", "[1]"), ("deep", "[" * 100_000),
                         ("huge", '{"format": "lpkit-tokens", "version": 1e999}')):
        place = folder / f"header_{name}"
        place.mkdir()
        if header is None:
            os.mkfifo(place / "header.json")
        else:
            (place / "header.json").write_text(header)
    for name in ("bomb", "deep", "word"):
        place = folder / f"run_{name}"
        place.mkdir()
        (place / "config.yaml").write_text(YAMLS[name])


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


class Draw:
    """Wrong arguments, by rules."""

    def __init__(self, seed: str, odd: Path):
        self.random, self.odd = random.Random(seed), odd

    def choice(self, *options):
        return self.random.choice(options)

    def near(self, name: str) -> str:
        """`name` with something wrong in it."""
        i = self.random.randrange(len(name))
        return self.choice(name[:i] + name[i + 1:] + "~",
                           name[:i] + self.choice(*STRANGE[1:]) + name[i:],
                           name.upper() + "!", *STRANGE)

    def kind(self) -> str:
        return self.choice("fifo", "folder", "zero", "loop", "dangling", "binary", "socket",
                           "missing")

    def yaml(self) -> str:
        name = self.choice(*YAMLS, *[self.kind() for _ in range(12)], "esc\x1b[31m\nape")
        return str(self.odd / f"{name}.yaml")

    def target(self) -> str:
        return self.choice(self.near("cpu-3m"), self.near("gpt2-124m"), self.yaml(), self.yaml(),
                           self.yaml())

    def machine(self) -> str:
        return self.choice(self.near("h200"), self.yaml(), str(self.odd / "empty_file.yaml"))

    def setting(self) -> str:
        settings = flat(Config())
        key = self.choice(*settings)
        value = self.choice("~", ESCAPE, "x" * 5000, "9" * 5000, "nan", "[1]", "-1")
        text = {"data.source", "data.tokenizer", "transforms", "governors", "start.run"}
        if key in text or (isinstance(settings[key], tuple) and value == "-1"):
            key = "steps"
        return self.choice(f"{key}={value}", f"{self.near(key)}={value}", key, f"={value}",
                           f"{key}.{self.near('name')}={value}",
                           "model=1", "memory=x", "version=99", "global_batch=7,grad_accum_steps=2")

    def command(self) -> list[str]:
        """A command that is right as far as it goes."""
        return self.choice(["predict", "cpu-3m"], ["advise", "cpu-3m"], ["train", "cpu-3m"],
                           ["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8"])

    def source(self) -> str:
        files = [f"{self.kind()}{suffix}" for suffix in (".txt", ".jsonl", ".gz", ".zst",
            ".parquet", "")]
        files += ["bomb.txt.gz", "cut.txt.gz", "deep.jsonl", "short.txt", "esc\x1b[31m.txt",
                  "binary.txt", "binary.gz", "binary.parquet", "empty_file.txt",
                  "header_list", "*.nothing", "folder/*"]
        return self.choice(*(str(self.odd / name) for name in files), *STRANGE[:1], "x" * 5000,
                           ESCAPE, "hf:../etc", "hf:", "a\nb")


def unknown_commands(draw: Draw) -> list[str]:
    return [draw.near(draw.choice("train", "predict", "notebook")),
            *draw.choice([], ["--json"], ["cpu-3m"])]


def unknown_options(draw: Draw) -> list[str]:
    command = draw.choice(draw.command(), ["doctor"], ["lab"], ["bench", "import"],
                          ["data", "prepare", "x"], ["sample", "x"])
    return [*command, f"--{draw.near('steps').strip('-')}~", *draw.choice([], ["1"])]


def missing(draw: Draw) -> list[str]:
    return draw.choice(["train"], ["predict"], ["advise"], ["plan"],
                       ["plan", "--model", "llama-8b"], ["data"], ["data", "prepare"], ["sample"],
                       ["notebook"], ["train", "--resume"], ["export", "x"], ["data", "show"],
                       ["predict", "cpu-3m", "--devices"],
                       ["plan", "--model", "llama-8b", "--tokens", "1T"],
                       ["train", "cpu-3m", "--set"])


def wrong_targets(draw: Draw) -> list[str]:
    return draw.choice(["predict", draw.target()], ["advise", draw.target()],
                       ["train", draw.target()],
                       ["plan", "--model", draw.target(), "--tokens", "1e9", "--devices", "8"])


def wrong_settings(draw: Draw) -> list[str]:
    return [*draw.command(), "--set", draw.setting()]


def wrong_machines(draw: Draw) -> list[str]:
    return [*draw.choice(["predict", "cpu-3m"], ["advise", "cpu-3m"],
                         ["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8"]),
            "--machine", draw.machine()]


def wrong_numbers(draw: Draw) -> list[str]:
    command, option, values = draw.choice(
        (["predict", "cpu-3m"], "--devices", NO_COUNTS),
        (["predict", "cpu-3m"], "--mfu", [*NO_NUMBERS, "0", "2"]),
        (["predict", "cpu-3m"], "--zero", [*NO_NUMBERS, "4", "1.0"]),
        (["predict", "cpu-3m"], "--price-per-hour", NO_NUMBERS[:-1]),
        (["advise", "cpu-3m", "--measure"], "--seeds", NO_COUNTS),
        (["advise", "cpu-3m", "--measure"], "--steps", NO_COUNTS),
        (["sample", "x"], "--tokens", NO_COUNTS),
        (["sample", "x"], "--temperature", NO_NUMBERS[:-1]),
        (["sample", "x"], "--top-k", NO_COUNTS),
        (["sample", "x"], "--seed", [*NO_NUMBERS, "1.5", "99999999999999999999"]),
        (["bench", "import"], "--rounds", NO_COUNTS),
        (["data", "prepare", str(draw.odd / "short.txt")], "--vocab", NO_COUNTS),
        (["data", "prepare", str(draw.odd / "short.txt")], "--val-fraction",
         [*NO_NUMBERS, "0", "1"]),
        *((["plan", "--model", "llama-8b", "--tokens", "1e9"], option, NO_COUNTS)
          for option in ("--devices", "--top", "--context")),
        *((["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8"], option,
           [*NO_NUMBERS, "0"])
          for option in ("--budget", "--batch-tokens", "--price-per-hour", "--factor", "--deadline",
                         "--show")),
        (["plan", "--model", "llama-8b", "--devices", "8"], "--tokens", [*NO_NUMBERS, "0", "5x"]),
        (["lab", "--no-browser"], "--port", [*NO_NUMBERS, "70000", "1.5"]))
    return [*command, f"{option}={draw.choice(*values)}"]


def wrong_names(draw: Draw) -> list[str]:
    return draw.choice(["predict", "cpu-3m", f"--precision={draw.near('bf16')}"],
                       ["predict", "cpu-3m", f"--optimizer={draw.near('adamw')}"],
                       ["predict", "cpu-3m", f"--recompute={draw.near('block')}"],
                       ["advise", "cpu-3m", f"--recipe={draw.near('mxfp8')}"],
                       ["plan", "--model", "llama-8b", "--tokens", "1e9", "--devices", "8",
                        f"--precision={draw.near('bf16')}"],
                       ["data", "prepare", str(draw.odd / "short.txt"),
                        f"--tokenizer={draw.near('bytes')}"],
                       ["bench", draw.near("import")], ["data", draw.near("show"), "x"],
                       ["claims", draw.near("lion-lighter")])


def wrong_corpora(draw: Draw) -> list[str]:
    source = draw.source()
    # bpe reads 2 MB/s, so the 64 MiB that a packed file may have for free take it half a minute
    tokenizer = draw.choice([], [], ["--tokenizer", "bpe"]) if "bomb" not in source else []
    return draw.choice(["data", "prepare", source, *tokenizer],
                       ["data", "show", str(draw.odd / draw.choice("header_fifo", "header_list",
                        "header_deep", "header_huge", draw.kind()))],
                       ["data", "prepare", str(draw.odd / "short.txt"), "--out",
                        draw.choice("", str(draw.odd), str(draw.odd / "fifo"), "/dev/null/x")])


def wrong_places(draw: Draw) -> list[str]:
    place = draw.choice("", str(draw.odd / draw.choice("fifo", "zero", "socket", "loop", "binary",
        "dangling")), "/dev/null", "x" * 5000, "x" * 300,
                        str(draw.odd / "binary" / "below"))
    return draw.choice(["train", "cpu-3m", "--out", place], ["notebook", "00", "--out", place],
                       ["train", "--resume", "--out", place],
                       ["bench", "import", "--rounds", "1", "--out", place])


def wrong_runs(draw: Draw) -> list[str]:
    place = str(draw.odd / draw.choice("run_bomb", "run_deep", "run_word", draw.kind(),
                                       *STRANGE[:4]))
    return draw.choice(["sample", place], ["train", "--resume", "--out", place],
                       ["export", place, "--out", str(draw.odd / "weights")])


def wrong_notebooks(draw: Draw) -> list[str]:
    odd = str(draw.odd / f"{draw.choice('deep', 'list', 'empty_file', draw.kind())}.ipynb")
    return draw.choice(["notebook", odd], ["notebook", odd, "--list"],
                       ["notebook", draw.near("start_here")], ["notebook", "--all", "00"],
                       ["notebook", "00", f"{draw.near('steps')}=1"],
                       ["notebook", "00", f"steps={draw.choice('x', 'nan', '1.5', ESCAPE)}"],
                       ["notebook", "00", "--on", draw.choice("", "threads=2", "processes=0",
                        "processes=x", ESCAPE, f"processes={'9' * 5000}")],
                       ["notebook", "00", "--tier", draw.near("cpu")],
                       ["notebook", "00", "--tier", "cpu", "tier=smoke"])


RULES: list[Callable[[Draw], list[str]]] = [
    unknown_commands, unknown_options, missing, wrong_targets, wrong_settings, wrong_machines,
    wrong_numbers, wrong_numbers, wrong_names,
    wrong_corpora, wrong_places, wrong_runs, wrong_notebooks]


def nothing() -> None:
    """So that a command is timed with all that it imports."""


def command(words: list[str]) -> int:
    """In the nursery."""
    from lpkit.cli import main

    tell_of_writes()
    try:
        return main(words)
    finally:
        if "torch" in sys.modules:
            print(TORCH)


def complaints(code: int, printed: str, seconds: float, left: set[Path],
               wrote: str = "") -> list[str]:
    """What is wrong about how a wrong command line ended."""
    lines = [line for line in printed.split("\n") if line.strip() and "B/s]" not in line]
    sentences = [line for line in lines if line.startswith("lpkit: ")]
    others = [line for line in lines if line not in sentences
              and not line.startswith((" ", "bench ", TORCH))]
    problems = {
        "hangs": seconds > SECONDS * patience(),
        "a traceback": "Traceback" in printed,
        "exit code": code != 2,
        "not one sentence": len(sentences) != 1 or bool(others),
        "a long sentence": any(len(line) > 1000 for line in sentences),
        "control characters": not printed.replace("\n", "").isprintable(),
        "leaves something": bool(left),
        "writes elsewhere": bool(wrote),
        "imports torch": TORCH in lines,
    }
    return [what for what, so in problems.items() if so]


def trials(count: int, seed: int, odd: Path) -> list[list[str]]:
    drawn = (Draw(f"{seed} {i}", odd) for i in range(count))
    return [RULES[i % len(RULES)](draw) for i, draw in enumerate(drawn)]


def attack(count: int, seed: int, folder: Path) -> Outcome:
    odd_files(folder / "odd")
    home = folder / "cache"
    home.mkdir()
    outcome, times = Outcome(), {}
    with nursery(folder, "tests.attack.command_line:command", "tests.attack.command_line:nothing",
                 HOME=str(home),
                 TMPDIR=str(home)) as forks:
        forks.lpkit("--help")       # and leaves the files that every command does
        for arguments in trials(count, seed, folder / "odd"):
            before, begun = set(folder.rglob("*")), time.monotonic()
            code, seconds = forks.lpkit(*arguments), time.monotonic() - begun
            left = {path for path in set(folder.rglob("*")) - before if home not in path.parents}
            outcome.tried += 1
            times[f"{arguments!r:.100}"] = round(seconds, 2)
            for what in complaints(code, forks.printed, seconds, left, forks.wrote):
                outcome.failed(what, f"{arguments!r:.300} -> {code} "
                                     f"{left or forks.wrote or forks.printed[-300:]!r}")
    slowest = max(times, key=times.get)
    outcome.facts |= {"median_seconds": statistics.median(times.values()),
                      "slowest_seconds": times[slowest], "slowest": slowest,
                      "p95_seconds": statistics.quantiles(times.values(), n=20,
                          method="inclusive")[-1] if len(times) > 1 else times[slowest]}
    return outcome
