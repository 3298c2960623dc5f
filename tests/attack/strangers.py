"""Files of strangers: models, adapters, tokenizers and texts that are damaged, hostile or no files
at all.

A trial is one file or key of a good folder that was made wrong, and the commands that read it:
`lpkit import`, with `--base` for an adapter, then `lpkit sample`, `lpkit data prepare` and `lpkit
export` with the run where the import accepted the folder. A command takes at most CPU_SECONDS of
processors, its children's too, and WAITS seconds. It ends in exit code 0, or in exit code 2 and one
sentence. A refused command leaves nothing behind, and an accepted run has no weight that is NaN or
infinite. Every tenth trial has a full disk: no file may grow beyond a drawn size.
"""

import getpass
import json
import math
import os
import random
import resource
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lessons.rows import adapters as adapters
from lpkit.config import Config
from lpkit.exchange.export import export
from lpkit.exchange.imported import written
from lpkit.training import build
from tests.attack import Outcome, patience
from tests.attack._nursery import Nursery, nursery

COUNT, FEW = 132, 12        # files
# of a command: of processors; and by the clock, where the machine does nothing else
CPU_SECONDS, WAITS = 20.0, 40.0
MEMORY_BYTES = 16 << 30     # of addresses, for a command
# what every command may leave
KEPT = {"cache", "output.txt", "cpu.txt", f"torchinductor_{getpass.getuser()}"}
ESCAPE = "\x1b[31mred\nlpkit: done"
MODEL = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.layers": 2, "model.width": 32, "model.heads": 4,
         "model.vocab": 340, "model.context": 32, "model.tied": False, "precision.recipe": "fp32"}
WEIGHTS, ADAPTER, ADAPTER_WEIGHTS = ("model.safetensors", "adapter_config.json",
    "adapter_model.safetensors")
Harm = Callable[[Path, random.Random], object]      # makes the file of a path wrong


# ---- good folders

def prepare(folder: Path) -> None:
    """`model`, `lora` and `prompt` as transformers and peft write them, `base`, the run of the
    model, and `text`."""
    from tests.inputs.tokenizers import byte_level

    torch.manual_seed(0)
    config, library = Config().replace(MODEL), json.loads(byte_level().to_str())
    tensors = {f"model/{name}": p.detach() for name, p in build.initial_model(config,
        "plain").named_parameters()}
    base = written(config, {"name": "bpe", "model": library}, folder / "base", tensors=tensors)
    export(base, folder / "model")
    for name, values in (("generation_config.json", {"eos_token_id": 0}),
                         ("special_tokens_map.json", {"eos_token": "<|endoftext|>"})):
        (folder / "model" / name).write_text(json.dumps(values))
    about = {"task_type": "CAUSAL_LM", "bias": "none", "inference_mode": True}
    pairs = {f"base_model.model.model.layers.{i}.self_attn.{projection}_proj.lora_{ab}.weight":
             torch.randn(*shape) for i in range(2) for projection in "qv"
             for ab, shape in (("A", (4, 32)), ("B", (32, 4)))}
    _adapter(folder / "lora", about | {"peft_type": "LORA", "r": 4, "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"]}, pairs)
    _adapter(folder / "prompt", about | {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 5,
        "token_dim": 32, "num_layers": 2,
                                         "num_attention_heads": 4, "num_transformer_submodules": 1},
        {"prompt_embeddings": torch.randn(5, 32)})
    (folder / "text").mkdir()
    for name in ("a.txt", "b.md"):
        (folder / "text" / name).write_text("".join(f"{i} bottles of {name} on the wall\n"
            for i in range(400)))
    (folder / "text" / "c.jsonl").write_text("".join(f'{{"text": "{i} bottles"}}\n'
        for i in range(400)))


def _adapter(folder: Path, about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / ADAPTER).write_text(json.dumps(about))
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


# ---- files that are no files, or not whole

def _link(target: str) -> Harm:
    def harm(path: Path, rng: random.Random) -> None:
        path.unlink()
        path.symlink_to(target)

    return harm


def _socket(path: Path, rng: random.Random) -> None:
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)       # a socket's name is short
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path.name)
    os.chdir(here)


def _pipe(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _flipped(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _pickle(path: Path, rng: random.Random) -> None:
    """Weights as a pickle under the name that people have it by."""
    torch.save(_copies(path) if path.suffix == ".safetensors" else {}, path)
    if rng.random() < 0.5:
        path.rename(path.with_name({WEIGHTS: "pytorch_model.bin",
                                    ADAPTER_WEIGHTS: "adapter_model.bin"}.get(path.name,
                                        path.name)))


def _bytes(make: Callable[[bytes, random.Random], bytes]) -> Harm:
    return lambda path, rng: path.write_bytes(make(path.read_bytes(), rng))


NO_FILES: dict[str, Harm] = {
    "a named pipe": _pipe, "a socket": _socket, "a folder": _folder,
    "an endless device": _link("/dev/zero"), "a device that waits": _link("/dev/ptmx"),
    "a loop of links": lambda path, rng: _link(path.name)(path, rng),
    "a link to nothing": _link("nowhere"), "a link to memory": _link("/proc/self/mem"),
    "empty": _bytes(lambda old, rng: b""),
    "cut": _bytes(lambda old, rng: old[:rng.randrange(len(old))]),
    "noise": _bytes(lambda old, rng: rng.randbytes(5000)),
    "flipped bits": _flipped, "64 GiB of holes": lambda path, rng: os.truncate(path, 1 << 36),
    "a pickle": _pickle,
    "of UTF-16": _bytes(lambda old, rng: "text".encode("utf-16")),
    "a page of HTML": _bytes(lambda old, rng: b"<!doctype html><title>404</title>")}


# ---- tensors

def _copies(path: Path) -> dict[str, torch.Tensor]:
    """Tensors that are not mapped, so that their file may be written again."""
    return {name: t.clone() for name, t in load_file(path).items()}


def _tensors(change: Callable[[dict[str, torch.Tensor], str, random.Random], object]) -> Harm:
    """`change` is given the dict, which it alters in place, and a name of it."""
    def harm(path: Path, rng: random.Random) -> None:
        state = _copies(path)
        change(state, rng.choice(sorted(state)), rng)
        save_file({name: t.contiguous() for name, t in state.items()}, path,
                  metadata={"format": "pt"})

    return harm


def _number(value: float) -> Harm:
    def change(state: dict[str, torch.Tensor], name: str, rng: random.Random) -> None:
        flat = state[name].flatten()
        flat[rng.choice((0, -1, rng.randrange(len(flat))))] = value
        state[name] = flat.view_as(state[name])

    return _tensors(change)


def _cast(dtype: torch.dtype) -> Harm:
    return _tensors(lambda state, name, rng: state.update(
        {key: t.to(dtype) for key, t in state.items() if rng.random() < 0.8 or key == name}))


def _header(change: Callable[[dict[str, Any], str], object]) -> Harm:
    """Alters what a file says of its tensors."""
    def harm(path: Path, rng: random.Random) -> None:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8:8 + length])
        change(header, rng.choice(sorted(header.keys() - {"__metadata__"})))
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length:])

    return harm


TENSORS: dict[str, Harm] = {
    "1e38": _tensors(lambda state, name, rng: state.update(
        {key: torch.full_like(t, 1e38) for key, t in state.items()})), "NaN": _number(float("nan")),
    "infinity": _number(float("inf")), "minus infinity": _number(float("-inf")),
    "1e39 in 64 bits": _tensors(
        lambda state, name, rng: state.update({name: torch.full_like(state[name], 1e39,
            dtype=torch.float64)})),
    **{str(dtype).removeprefix("torch."): _cast(dtype)
       for dtype in (torch.int8, torch.int64, torch.uint8, torch.bool, torch.float64, torch.float16,
                     torch.bfloat16,
                                                                      torch.float8_e4m3fn,
                     torch.complex64)},
    "transposed": _tensors(lambda state, name, rng: state.update({name: state[name][None].mT})),
    "no rows": _tensors(lambda state, name, rng: state.update({name: state[name][:0]})),
    "a number": _tensors(lambda state, name, rng: state.update({name: torch.tensor(1.0)})),
    "without a tensor": _tensors(lambda state, name, rng: state.pop(name)),
    "another tensor": _tensors(lambda state, name, rng: state.update({"more": torch.ones(2)})),
    "a name that paints": _tensors(lambda state, name, rng: state.update(
        {f"{name}{ESCAPE}": state.pop(name)})),
    "a longer name that paints": _tensors(
        lambda state, name, rng: state.update({f"{name}{ESCAPE * 9000}": torch.ones(2)})),
    "a shape of 2^80": _header(lambda header, name: header[name].update(shape=[2**40, 2**40])),
    "a shape below 0": _header(lambda header, name: header[name].update(shape=[-4, -8])),
    "offsets beyond": _header(lambda header, name: header[name].update(data_offsets=[0, 2**62])),
    "two in one place": _header(
        lambda header, name: [entry.update(data_offsets=header[name]["data_offsets"])
                              for key, entry in header.items() if key != "__metadata__"]),
    "a header of 2^62": _bytes(lambda old, rng: (2**62).to_bytes(8, "little") + old[8:]),
    "another dtype": _header(lambda header, name: header[name].update(dtype="F4"))}


# ---- keys of JSON

KINDS = {"a word": "wide", "a list": [1], "null": None, "a bool": True, "an object": {"a": 1},
         "NaN": float("nan"), "infinity": float("inf"), "0": 0, "-1": -1, "2.5": 2.5,
         "10^400": 10**400, "10^9": 10**9, "a name that paints": ESCAPE,
         "a long word": "x" * 100_000}


def _key(path: Path, rng: random.Random) -> str:
    values = json.loads(path.read_text())
    key, kind = rng.choice(sorted(values)), rng.choice(sorted([*KINDS, "missing"]))
    if kind == "missing":
        del values[key]
    else:
        values[key] = KINDS[kind]
    path.write_text(json.dumps(values))
    return f"{key} is {kind}"


def _more(path: Path, rng: random.Random) -> None:
    values = json.loads(path.read_text()) | {ESCAPE: ESCAPE, f"use_{ESCAPE}": True}
    path.write_text(json.dumps(values))


JSON: dict[str, Harm] = {
    **{f"a key, {i}": _key for i in range(12)}, "more keys": _more,
    "nested": lambda path, rng: path.write_text("[" * 200_000),
    "nested objects": lambda path, rng: path.write_text('{"a":' * 200_000),
    "a list": lambda path, rng: path.write_text("[1]"),
    "a long number": lambda path, rng: path.write_text(f'{{"r": {"9" * 100_000}}}')}


# ---- tokenizers

def _library(change: Callable[[dict[str, Any]], object]) -> Harm:
    def harm(path: Path, rng: random.Random) -> None:
        spec = json.loads(path.read_text())
        change(spec)
        path.write_text(json.dumps(spec))

    return harm


def _split(pattern: str) -> Harm:
    return _library(lambda spec: spec.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        spec["pre_tokenizer"]]}))


def _normalizer(**values: Any) -> Harm:
    return _library(lambda spec: spec.update(normalizer=values))


def _entry(text: str, number: Any) -> Harm:
    return _library(lambda spec: spec["model"]["vocab"].update({text: number}))


def _added(**values: Any) -> Harm:
    return _library(lambda spec: spec["added_tokens"].append({**spec["added_tokens"][0], **values}))


def _template(number: int, **values: Any) -> Harm:
    return _library(lambda spec: spec.update(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}] * number,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"x": {"id": "x", "ids": [0], "tokens": ["x"], **values}}}))


TOKENIZER: dict[str, Harm] = {
    **{f"the pattern {pattern}": _split(pattern) for pattern in (
        "(a+)+$", "(a|aa)+$", r"(\s*)*x", "(.*)*z", r"(\p{L}+\s?)+$", "((a{0,99}){0,99}){0,99}z",
        "(?=(a+))*b", "", "(", "[", r"(?<=a+)b", "(((((a)*)*)*)*)*$",
        "(?<n>a|b\\g<n>c)")},
    "a normalizer that hangs": _normalizer(type="Replace", pattern={"Regex": "(a+)+$"},
        content="b"),
    "a normalizer that replaces nothing": _normalizer(type="Replace", pattern={"String": ""},
        content="ab"),
    "a normalizer that grows": _normalizer(type="Sequence",
        normalizers=[{"type": "Replace", "pattern": {"Regex": "."}, "content": "." * 1000}] * 6),
    "a normalizer with a charsmap of noise": _normalizer(type="Precompiled",
        precompiled_charsmap="AAAA"),
    "a normalizer that puts 100 MB before": _normalizer(type="Prepend", prepend="x" * 100_000_000),
    "an id of 10^9": _entry("far", 10**9), "an id of 2^32": _entry("far", 2**32),
    "an id of 4,294,967,295": _entry("far", 2**32 - 1), "an id below 0": _entry("far", -1),
    "an id that is a word": _entry("far", "1"), "two of one id": _entry("far", 3),
    "an entry that paints": _entry(ESCAPE, 3), "a fractional id": _entry("far", 1.5),
    "an added id of 10^9": _added(id=10**9, content="<far>"),
    "an added id of 2^32 - 1": _added(id=2**32 - 1, content="<far>"),
    "an added word of 30 MB": _added(id=341, content="ab" * 15_000_000),
    "added words of nothing": _added(id=341, content=""),
    "an added word that paints": _added(id=341, content=ESCAPE), "100,000 added words": _library(
        lambda spec: spec["added_tokens"].extend({**spec["added_tokens"][0], "id": 340 + i,
            "content": f"<{i}>"} for i in range(100_000))),
    "1,100,000 entries": _library(lambda spec: spec["model"]["vocab"].update(
        {f"w{i}": 340 + i for i in range(1_100_000)})),
    "merges of no entries": _library(lambda spec: spec["model"]["merges"].append(["no", "entry"])),
    "merges of one": _library(lambda spec: spec["model"]["merges"].append(["a"])),
    "a template of other ids": _template(1, ids=[10**9]),
    "a template of 10^6 tokens": _template(1, ids=[0] * 10**6, tokens=["x"] * 10**6),
    "a template that repeats": _template(5000),
    "a template without its token": _template(1, id="y"),
    "nested pre-tokenizers": _library(lambda spec: spec.update(
        pre_tokenizer=_nested(spec["pre_tokenizer"], 60))),
    "pieces of length 0": _library(lambda spec: spec.update(pre_tokenizer={"type": "FixedLength",
        "length": 0})),
    "a decoder that strips 2^60": _library(lambda spec: spec.update(decoder={"type": "Strip",
        "content": "a", "start": 2**60, "stop": 2**60})),
    "a decoder that grows": _library(lambda spec: spec.update(decoder={"type": "Sequence",
        "decoders": [
        {"type": "Replace", "pattern": {"Regex": "."}, "content": "." * 1000}] * 6})),
    "padding to 10^12": _library(lambda spec: spec.update(padding={"strategy": {"Fixed": 10**12},
        "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                                                                  "pad_type_id": 0,
        "pad_token": "x"})),
    "truncation with a stride above its length":
    _library(lambda spec: spec.update(truncation={"max_length": 2, "stride": 9,
        "strategy": "LongestFirst", "direction": "Right"})),
    "a model that is another": _library(lambda spec: spec["model"].update(type="Unigram")),
    "Unigram without an unknown": _library(
        lambda spec: spec.update(model={"type": "Unigram", "unk_id": 10**9, "vocab": [["a", 0.0]],
                                       "byte_fallback": False})),
    "Unigram of NaN": _library(lambda spec: spec.update(model={"type": "Unigram", "unk_id": 0,
        "vocab": [["<unk>", float("nan")], ["a", 0.0]], "byte_fallback": False})),
    "WordLevel without entries": _library(lambda spec: spec.update(model={"type": "WordLevel",
        "vocab": {}, "unk_token": "x"})),
    "WordPiece of words of 2^60": _library(lambda spec: spec.update(model={"type": "WordPiece",
        "vocab": {"x": 0}, "unk_token": "x", "continuing_subword_prefix": "##",
                                                                         "max_input_chars_per_word":
        2**60})),
    "without added tokens": _library(lambda spec: spec.pop("added_tokens")),
    "without a model": _library(lambda spec: spec.pop("model"))}


def _nested(inner: dict[str, Any], depth: int) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [_nested(inner, depth - 1)]} if depth else inner


# ---- texts

TEXTS: dict[str, Harm] = {
    "NUL": _bytes(lambda old, rng: old + b"\0"),
    "half a character": _bytes(lambda old, rng: old + b"\xe2\x82"),
    "one line of 4 MB": _bytes(lambda old, rng: b"a" * 4_000_000),
    "nested": _bytes(lambda old, rng: b"[" * 1_000_000),
    "control characters": _bytes(lambda old, rng: old + ESCAPE.encode() * 99),
    "a row that paints": _bytes(lambda old, rng: json.dumps({ESCAPE: 1}).encode()),
    "half a pair": _bytes(lambda old, rng: b'{"text": "\\ud800"}'),
    "another file's kind": lambda path, rng: path.rename(
        path.with_suffix(rng.choice((".parquet", ".txt.gz", ".jsonl")))),
    "a name that paints": lambda path, rng: _pipe_named(path)}


def _pipe_named(path: Path) -> None:
    os.mkfifo(path.with_name(f"{ESCAPE}.txt"))


# folder, file: what can be wrong with it
SUBJECTS: dict[str, dict[str, dict[str, Harm]]] = {
    "model": {"config.json": NO_FILES | JSON, WEIGHTS: NO_FILES | TENSORS,
              "tokenizer.json": NO_FILES | JSON | TOKENIZER,
              "tokenizer_config.json": NO_FILES | JSON,
              "generation_config.json": NO_FILES | JSON,
              "special_tokens_map.json": NO_FILES | JSON},
    "lora": {ADAPTER: NO_FILES | JSON, ADAPTER_WEIGHTS: NO_FILES | TENSORS},
    "prompt": {ADAPTER: NO_FILES | JSON, ADAPTER_WEIGHTS: NO_FILES | TENSORS},
    "text": dict.fromkeys(("a.txt", "b.md", "c.jsonl"), NO_FILES | TEXTS)}
# adapters and what only weights and tokenizers can hide more often
SHARES = [("model", WEIGHTS)] * 3 + [("model", "tokenizer.json")] * 4 + [("lora", ADAPTER),
    ("lora", ADAPTER_WEIGHTS)] * 3 + [
    (folder, file) for folder, files in SUBJECTS.items() for file in files]


def trials(count: int, seed: int) -> Iterator[tuple[str, str, str, random.Random]]:
    """Folder, file, harm, no two of them the same while there are others."""
    rng, decks = random.Random(seed), {}
    for number in range(count):
        folder, file = rng.choice(SHARES)
        deck = decks.setdefault((folder, file), [])
        if not deck:
            deck += rng.sample(sorted(SUBJECTS[folder][file]), len(SUBJECTS[folder][file]))
        yield folder, file, deck.pop(), random.Random(f"{seed} {number}")


# ---- commands

def command(words: list[str]) -> int:
    """In the nursery."""
    from lpkit.cli import main

    first, *words = words
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if most := int(first):      # the disk is full: Python ignores the signal, and the write fails
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        return main(words)
    finally:
        Path("cpu.txt").write_text(str(sum(os.times()[:4])))


def warm() -> None:
    import tokenizers  # noqa: F401

    import lpkit.commands.data
    import lpkit.commands.export
    import lpkit.datasets.tokens
    import lpkit.exchange.adapted
    import lpkit.exchange.export
    import lpkit.training.sampling  # noqa: F401
    from tests.attack import _nursery

    _nursery.warm()


def commands(folder: str, theirs: Path, out: Path, good: Path) -> Iterator[list[str]]:
    """What is done with it, one after the other while all goes well."""
    if folder == "text":
        yield ["data", "prepare", str(theirs), "--out", str(out), "--tokenizer", str(good / "base")]
        return
    yield ["import", str(theirs), "--out", str(out),
           *(["--base", str(good / "base")] if folder != "model" else [])]
    yield ["sample", str(out), "--tokens", "4", "--prompt", "a" * 40 + "b"]
    yield ["data", "prepare", str(good / "text"), "--tokenizer", str(out), "--out", f"{out}-tokens"]
    yield ["export", str(out), "--out", f"{out}-again",
           *(["--adapter"] if folder != "model" else [])]


def complaints(code: int, printed: str, seconds: float, left: set[Path]) -> list[str]:
    lines = [line for line in printed.split("\n") if line.strip() and "B/s]" not in line]
    sentences = [line for line in lines if line.startswith("lpkit: ")]
    problems = {
        "hangs": seconds > CPU_SECONDS,
        "a traceback": "Traceback" in printed or "panicked" in printed,
        "exit code": code not in (0, 2),
        "not one sentence": code == 2 and (len(sentences) != 1
            or any(line != sentences[0] and not line.startswith(" ") for line in lines)),
        "a long sentence": code == 2 and any(len(line) > 1500 for line in sentences),
        "control characters": not printed.replace("\n", "").replace("\r", "").isprintable(),
        "leaves something": code != 0 and bool(left)}
    return [what for what, so in problems.items() if so]


def unsound(out: Path) -> list[str]:
    """Names of the tensors of a run that are NaN or infinite somewhere."""
    return [name for path in out.glob("checkpoints/step-*/*.safetensors")
            for name, t in load_file(path).items() if not torch.isfinite(t.float()).all()]


def _ended(forks: Nursery, folder: Path, words: list[str], most: int) -> tuple[int, float]:
    """Exit code and seconds of processors; a command that waits is killed, and took for ever."""
    taken = folder / "cpu.txt"
    taken.unlink(missing_ok=True)
    over = threading.Timer(WAITS * patience(), os.kill, (forks.begin(most, *words), signal.SIGKILL))
    over.start()
    try:
        return forks.end(), float(taken.read_text()) if taken.exists() else math.inf
    finally:
        over.cancel()


def attack(count: int, seed: int, folder: Path) -> Outcome:
    outcome, ends, slowest = Outcome(), Counter(), (0.0, "")
    good, place = folder / "good", folder / "trial"
    good.mkdir()
    prepare(good)
    with nursery(folder, "tests.attack.strangers:command", "tests.attack.strangers:warm",
                 TMPDIR=str(folder)) as forks:
        for number, (subject, file, harm, rng) in enumerate(trials(count, seed)):
            place.mkdir()
            theirs = place / (ESCAPE if rng.random() < 0.2 else "theirs")
            shutil.copytree(good / subject, theirs, symlinks=True)
            full = number % 10 == 9     # the file is good, and the disk is full
            most, fills = rng.choice((4096, 9000, 20_000, 40_000)), rng.choice(("import",
                "export")) if subject != "text" else "data"
            detail = "a disk that is full" if full else SUBJECTS[subject][file][harm](theirs / file,
                rng)
            about = (f"seed {seed}, trial {number}: {subject}, {file}: "
                     f"{detail if isinstance(detail, str) else harm}")
            before, end = {*folder.rglob("*")}, "used"
            for words in commands(subject, theirs, place / "out", good):
                code, seconds = _ended(forks, folder, words, most * (full and words[0] == fills))
                left = {path for path in folder.rglob("*")
                        if not KEPT & {*path.relative_to(folder).parts[:1]}} - before
                wrong = complaints(code, forks.printed, seconds, left)
                slowest = max(slowest, (seconds, f"{about}: {words[0]}"))
                for what in wrong:
                    shown = [*map(str, left)] if what[0] == "l" else forks.printed[-700:]
                    outcome.failed(what, f"{about}: {words[0]} -> {code}, {seconds:.1f} s, "
                                         f"{shown!r}")
                if code == 0 and words[0] == "import" and (bad := unsound(place / "out")):
                    outcome.failed("weights that are no numbers", f"{about}: {bad[:3]}")
                if code or wrong:
                    end = "refused" if words[0] in ("import", "data") else f"refused by {words[0]}"
                    break
                before |= left
            ends[end] += 1
            outcome.tried += 1
            shutil.rmtree(place)
    outcome.facts |= (dict(ends) | {"slowest_cpu_seconds": round(slowest[0], 2),
                                    "slowest": slowest[1]})
    return outcome

