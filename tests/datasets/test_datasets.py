"""The data room against what must be true of it: texts come back, splits stay, batches are those of
a naive loop.

Only these tests catch: a text that comes back changed or lands in both splits, a batch that is not
the naive loop's, a cache that is torn, shared with others or trusted when it is damaged, memory or
time that grows with what a file claims, and a bad source without its sentence.
"""

import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lpkit.cli import _of_system, main
from lpkit.config import DataConfig
from lpkit.datasets import (
    RandomWindows,
    byte_unigram_entropy,
    open_tokens,
    prepare,
    prepare_into,
)
from lpkit.datasets import sources as sources_module
from lpkit.datasets import tokenizers as tokenizers_module
from lpkit.datasets.policies import SpreadWindows
from lpkit.datasets.sources import BLOCK_CHARS, is_validation
from lpkit.datasets.sources import find as find_source
from lpkit.datasets.tokenizers import TOKENIZERS, tokenizer_from_dict
from lpkit.errors import ConfigError
from lpkit.techniques.data import POLICIES

WORDS = "the cat sat on a mat and naïve café 漢字 🙂 def return None".split()


def prose(words: int, seed: int = 0) -> str:
    draw = np.random.default_rng(seed).integers(len(WORDS), size=words)
    return "".join(WORDS[i] + ("\n" if n % 9 == 8 else " ") for n, i in enumerate(draw))


@pytest.fixture
def folder(tmp_path) -> Path:
    """60 text files in folders of two levels."""
    root = tmp_path / "texts"
    (root / "deep").mkdir(parents=True)
    for i in range(60):
        (root / ("deep" if i % 2 else ".") / f"{i}.txt").write_text(prose(200, i), encoding="utf-8")
    return root


@pytest.fixture
def corpus(folder, tmp_path):
    return prepare(DataConfig(source=str(folder)), 256, tmp_path / "cache")


def documents(files, split: str) -> list[str]:
    """Return the texts of a split, which the end token separates."""
    ids = np.asarray(getattr(files, split))
    ends = np.flatnonzero(ids == files.tokenizer.end)
    starts = np.concatenate([[0], ends[:-1] + 1])
    assert ends[-1] == len(ids) - 1
    return [files.tokenizer.decode(ids[a:b]) for a, b in zip(starts, ends, strict=True)]


# sources and splits

def test_stdlib_is_the_library_and_not_its_tests():
    files = dict(find_source("python-stdlib").files)
    assert {"ast.py", "json/decoder.py", "asyncio/base_events.py"} <= set(files)
    assert not [key for key in files if {"test", "tests", "site-packages"} & set(key.split("/"))]
    assert list(files) == sorted(files)
    share = sum(is_validation(key, 0.1) for key in files) / len(files)
    # the tolerance is four standard deviations
    assert share == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / len(files)))


def test_split_follows_from_the_path_alone(folder, corpus, tmp_path):
    before = {split: set(documents(corpus, split)) for split in ("train", "val")}
    texts = {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
             for path in folder.rglob("*.txt")}
    for split, validation in (("train", False), ("val", True)):
        assert before[split] == {text for key, text in texts.items()
                                 if is_validation(key, 0.1) == validation}
    for i in range(40):
        (folder / f"a new one {i}.txt").write_text(prose(50, 1000 + i), encoding="utf-8")
    after = prepare(DataConfig(source=str(folder)), 256, tmp_path / "cache")
    assert after.folder != corpus.folder
    assert all(before[split] <= set(documents(after, split)) for split in before)
    more = {key for key in texts if is_validation(key, 0.3)}
    assert more > {key for key in texts if is_validation(key, 0.1)}


def test_is_validation_is_pinned():
    """The split is decided by SHA-256, so that a corpus has the same split on every machine and in
    every version."""
    assert [key for key in ("ast.py", "abc.py", "json/decoder.py", "os.py", "io.py",
                            "re/_parser.py")
           if is_validation(key, 0.5)] == ["json/decoder.py", "io.py", "re/_parser.py"]


def test_one_text_file_is_split_by_blocks(tmp_path):
    path = tmp_path / "one.txt"
    text = prose(150_000)
    path.write_text(text, encoding="utf-8")
    pieces = list(find_source(str(path)).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text.endswith("\n") and BLOCK_CHARS <= len(piece.text) < BLOCK_CHARS + 200
               for piece in pieces[:-1])
    files = prepare(DataConfig(source=str(path)), 256, tmp_path / "cache")
    stretches, last = {"train": [], "val": []}, None
    # computed independently: which blocks follow each other in a split
    for piece in pieces:
        split = "val" if is_validation(piece.text, 0.1) else "train"
        if split == last:
            stretches[split][-1] += piece.text
        else:
            stretches[split].append(piece.text)
        last = split
    assert {split: documents(files, split) for split in stretches} == stretches
    assert all(files.header["splits"][split]["documents"] == len(stretches[split])
               for split in stretches)


def test_a_line_without_end_is_read_in_pieces(tmp_path):
    path = tmp_path / "long.txt"
    text = "é" * (5 * BLOCK_CHARS)
    path.write_text(text, encoding="utf-8")
    pieces = list(find_source(str(path)).pieces())
    assert ("".join(piece.text for piece in pieces) == text
            and max(len(piece.text) for piece in pieces) <= 2 * BLOCK_CHARS)


@pytest.mark.parametrize("suffix", [".parquet", ".txt", ".jsonl"])
def test_every_format_gives_its_texts(tmp_path, suffix):
    texts = [prose(30, i) + "\r\nend" for i in range(50)]
    root = tmp_path / "source"
    root.mkdir()
    if suffix == ".jsonl":
        (root / f"a{suffix}").write_bytes("\n".join(json.dumps({"id": 1, "text": text})
            for text in texts).encode())
    elif suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table({"id": list(range(50)), "text": texts}), sink)
        (root / f"a{suffix}").write_bytes(sink.getvalue().to_pybytes())
    else:
        for i, text in enumerate(texts):
            (root / f"{i}{suffix}").write_bytes(text.encode())
    for source in (str(root), str(root / "*")):
        files = prepare(DataConfig(source=source, val_fraction=0.2), 256, tmp_path / "cache")
        assert Counter(documents(files, "train") + documents(files, "val")) == Counter(texts)


def test_equal_documents_never_straddle_the_split(tmp_path):
    path = tmp_path / "twice.jsonl"
    rows = [{"text": prose(20, i % 40)} for i in range(120)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = prepare(DataConfig(source=str(path), val_fraction=0.3), 256, tmp_path / "cache")
    assert not set(documents(files, "train")) & set(documents(files, "val"))


def test_hub_datasets_stream(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": prose(20, i)} for i in range(40)]
    asked = []
    monkeypatch.setattr(datasets, "load_dataset",
                        lambda *args, **kwargs: asked.append((args, kwargs)) or rows)
    files = prepare(DataConfig(source="hf:someone/texts:small", val_fraction=0.3), 256, tmp_path)
    assert asked[0] == (("someone/texts", "small"), {"split": "train", "streaming": True})
    assert (Counter(documents(files, "train") + documents(files, "val"))
            == Counter(row["text"] for row in rows))

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError,
                     match=r"cannot stream 'hf:someone/else'.*no route.*go online, or give a file"):
        prepare(DataConfig(source="hf:someone/else"), 256, tmp_path)


# tokenizers

@given(st.text())
@settings(deadline=None, max_examples=60)
def test_bytes_round_trip(text):
    tokenizer = TOKENIZERS["bytes"]()
    assert tokenizer.encode(text) == list(text.encode()) == tokenizer.part(text, False,
        False)[0].tolist()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes_show_what_is_no_character():
    assert TOKENIZERS["bytes"]().decode([0x61, 0xE6, 300, -1, 0x62]) == "a\ufffd\ufffd\ufffdb"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return TOKENIZERS["bpe"].build(300, lambda: iter([prose(3000)]), tmp_path_factory.mktemp("bpe"))


@given(text=st.text() | st.sampled_from(["<|endoftext|>", "a <|endoftext|> b", "\r\n\t  \n",
    "café"]))
@settings(deadline=None, max_examples=60)
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text and bpe.end not in ids       # no text can contain the end token
    assert ids == bpe.part(text, False, False)[0].tolist() and all(0 <= i < bpe.vocab for i in ids)


def test_bpe_is_trained_cached_and_kept(bpe, tmp_path):
    text = prose(3000)
    assert bpe.vocab == 300 and len(bpe.encode(text)) < 0.5 * len(text.encode())
    kept = tokenizer_from_dict(json.loads(json.dumps(bpe.to_dict())))
    assert kept.encode(text) == bpe.encode(text) and kept.end == bpe.end and kept.vocab == 300
    assert bpe.decode([*bpe.encode("cat"), 300, *bpe.encode("sat")]) == "cat\ufffdsat"
    again = TOKENIZERS["bpe"].build(300, lambda: iter([text]), tmp_path)
    (cached,) = tmp_path.iterdir()
    assert again.to_dict() == bpe.to_dict()                     # learning is deterministic
    stamp = cached.stat().st_mtime_ns
    # the whole text decides, not how it is cut into pieces
    TOKENIZERS["bpe"].build(300, lambda: iter([text[:50], text[50:]]), tmp_path)
    assert cached.stat().st_mtime_ns == stamp and len(list(tmp_path.iterdir())) == 1
    TOKENIZERS["bpe"].build(300, lambda: iter([text + "!"]), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_gpt2_or_the_way_out():
    try:
        tokenizer = TOKENIZERS["gpt2"]()
    except ConfigError as error:
        assert "data.tokenizer=gpt2" in str(error) and "data.tokenizer=bpe" in str(error)
    else:
        assert (tokenizer.vocab, tokenizer.end) == (50257, 50256)
        assert (tokenizer.encode("Hello world") == [15496, 995]
                and tokenizer.decode([15496, 995]) == "Hello world")
        assert tokenizer.end not in tokenizer.encode("<|endoftext|>")


# token files

def test_header_counts_and_layout(corpus):
    header = json.loads((corpus.folder / "header.json").read_text())
    for split in ("train", "val"):
        raw = np.frombuffer((corpus.folder / f"{split}.bin").read_bytes(), "<u2")
        facts = header["splits"][split]
        assert (facts["tokens"] == len(raw) and facts["documents"] == (raw == 0).sum()
                and facts["largest"] == raw.max())
    assert (header["dtype"], header["vocab"], header["tokenizer"]) == ("uint16", 256,
        {"name": "bytes"})


def test_wide_vocabularies_take_four_bytes(tmp_path, monkeypatch):
    class Codepoints(TOKENIZERS["bytes"]):
        """One token for each code point: 🙂 is 128578."""

        name, vocab = "codepoints", 0x110000
        part = staticmethod(lambda text, special, continued: (np.array([ord(c) for c in text],
            np.uint32), ""))
        decode = staticmethod(lambda ids: "".join(chr(i) for i in ids))

    monkeypatch.setitem(TOKENIZERS, "codepoints", Codepoints)
    path = tmp_path / "a.txt"
    path.write_text(prose(40_000), encoding="utf-8")
    files = prepare(DataConfig(source=str(path), tokenizer="codepoints", val_fraction=0.5),
                    0x110000, tmp_path / "cache")
    assert files.train.dtype == np.dtype("<u4") and ord("🙂") in files.train
    with pytest.raises(ConfigError, match=r"model.vocab=50000; set model.vocab=1114112 or more"):
        prepare(DataConfig(source=str(path), tokenizer="codepoints", val_fraction=0.5), 50_000,
                tmp_path / "cache")


def test_preparing_twice_reads_once(folder, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module.Files, "pieces", lambda self: pytest.fail("read again"))
    again = prepare(DataConfig(source=str(folder)), 256, tmp_path / "cache")
    assert again.folder == corpus.folder and np.array_equal(again.train, corpus.train)
    direct = prepare(DataConfig(source=str(corpus.folder)), 256, tmp_path / "elsewhere")
    assert direct.folder == corpus.folder and not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("harm", ["truncate", "grow", "flip", "missing", "half a header",
                                  "foreign header", "newer"])
def test_altered_files_are_named(corpus, harm):
    target = corpus.folder / ("header.json" if "header" in harm or harm == "newer" else "train.bin")
    data = bytearray(target.read_bytes())
    if harm == "truncate":
        data = data[:-2]
    elif harm == "grow":
        data += b"ab"
    elif harm == "flip":
        data[len(data) // 2] ^= 1
    elif harm == "half a header":
        data = data[:len(data) // 2]
    elif harm == "foreign header":
        data = b"[1]"
    elif harm == "newer":
        data = json.dumps(json.loads(data) | {"version": 99}).encode()
    target.write_bytes(data)
    if harm == "missing":
        target.unlink()
    with pytest.raises(ConfigError, match=rf"{target.name}.*prepare|{target.name}.*upgrade"):
        open_tokens(corpus.folder)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["train.bin", "header.json"])
def test_what_was_damaged_in_the_cache_is_made_again_with_a_word(folder, corpus, tmp_path, name):
    before = corpus.train.copy(), corpus.val.copy()
    flip(corpus.folder / name)
    with pytest.warns(UserWarning, match=rf"{name}.*It is made again"):
        again = prepare(DataConfig(source=str(folder)), 256, tmp_path / "cache")
    assert (again.folder == corpus.folder
            and all(map(np.array_equal, before, (again.train, again.val))))
    # a folder that the user named is never removed
    with pytest.raises(ConfigError, match=r"train\.bin does not have the checksum"):
        own = prepare_into(tmp_path / "own", DataConfig(source=str(folder)), 256,
                           tmp_path / "cache")
        flip(own.folder / "train.bin")
        prepare(DataConfig(source=str(own.folder)), 256, tmp_path / "cache")


@pytest.mark.parametrize("plant", [flip, lambda path: path.write_text("{"),
                                   lambda path: path.write_text('{"model": {}}')],
                         ids=["flipped", "cut", "unsealed"])
def test_a_cached_tokenizer_that_was_damaged_is_learned_again_with_a_word(plant, bpe, tmp_path):
    """A flipped byte may lead to another valid entry, which decodes to another text."""
    text = prose(3000)
    TOKENIZERS["bpe"].build(300, lambda: iter([text]), tmp_path)
    (cached,) = tmp_path.iterdir()
    whole = cached.read_bytes()
    plant(cached)
    with pytest.warns(UserWarning, match="Its entries are learned again"):
        again = TOKENIZERS["bpe"].build(300, lambda: iter([text]), tmp_path)
    assert again.to_dict() == bpe.to_dict() and cached.read_bytes() == whole


@pytest.mark.parametrize("closed, mode", [(False, 0o644), (True, 0o600)])
def test_a_private_corpus_is_cached_for_nobody_else(folder, tmp_path, closed, mode):
    def modes(corpus) -> set[int]:
        return {stat.S_IMODE(path.stat().st_mode) for path in corpus.folder.iterdir()}

    data, before = DataConfig(source=str(folder), tokenizer="bpe"), os.umask(0o022)
    try:
        if closed:      # one of the sixty files
            (folder / "deep" / "1.txt").chmod(0o600)
        copies = prepare(data, 300, tmp_path / "cache")
        (learned,) = (tmp_path / "cache").glob("bpe-*.json")
        assert modes(copies) == {mode} and stat.S_IMODE(learned.stat().st_mode) == 0o600
        assert modes(prepare_into(tmp_path / "own", data, 300, tmp_path / "cache")) == {mode}
        # access is removed after the text was cached
        (folder / "deep" / "1.txt").chmod(0o600)
        assert (prepare(data, 300, tmp_path / "cache").folder == copies.folder
                and modes(copies) == {0o600})
    finally:
        os.umask(before)


def test_files_whose_names_are_no_utf8_are_read(tmp_path):
    for i in range(40):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{i}\udcff.txt").write_text(prose(50, i))
    files = prepare(DataConfig(source=str(tmp_path / "texts")), 256, tmp_path / "cache")
    assert files.header["source"]["files"] == 40


def test_unigram_entropy_by_hand(tmp_path):
    root = tmp_path / "ab"
    root.mkdir()
    keys = [f"{i}.txt" for i in range(40)]
    for key in keys:
        (root / key).write_text("aab" if is_validation(key, 0.1) else "abb")
    files = prepare(DataConfig(source=str(root)), 256, tmp_path / "cache")
    n = sum(not is_validation(key, 0.1) for key in keys)
    p = {"a": (n + 1) / (4 * n + 256), "b": (2 * n + 1) / (4 * n + 256),
         "end": (n + 1) / (4 * n + 256)}
    by_hand = -(2 * math.log(p["a"]) + math.log(p["b"]) + math.log(p["end"])) / 4
    assert byte_unigram_entropy(files) == pytest.approx(by_hand, rel=1e-12)


KILLED = """
import os, signal, sys
from lpkit.config import DataConfig
from lpkit.datasets import prepare, sources, tokens
source, cache, place, count = sys.argv[1:]
owner, name = {"pieces": (tokens._Writer, "write"), "fsync": (os, "fsync"), "replace": (os, \
"replace"),
               "rename": (os, "rename")}[place]
whole, calls = getattr(owner, name), [0]
def counted(*args):
    calls[0] += 1
    if calls[0] == int(count):
        if place == "pieces":
            args[0].file.flush()        # half of it on the disk
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args)
setattr(owner, name, counted)
prepare(DataConfig(source=source), 256, cache)
"""


@pytest.mark.parametrize("place, count", [("pieces", 60), ("fsync", 2), ("replace", 1),
                                          ("rename", 1)])
def test_killed_while_writing_leaves_nothing_that_looks_complete(folder, tmp_path, place, count):
    cache = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(cache), place,
                           str(count)],
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [path for path in cache.iterdir() if path.name != "locks"]
    assert [path.name[0] + path.suffix for path in left] == ["..tmp"]
    files = prepare(DataConfig(source=str(folder)), 256, cache)
    assert {path.name for path in cache.iterdir()} == {"locks", files.folder.name}
    assert len(documents(files, "train")) + len(documents(files, "val")) == 60


def test_two_processes_prepare_the_same_thing(folder, tmp_path):
    code = ("import sys; from lpkit.config import DataConfig; from lpkit.datasets import prepare;"
            "print(prepare(DataConfig(source=sys.argv[1]), 256, sys.argv[2]).header['date'])")
    started = [subprocess.Popen([sys.executable, "-c", code, str(folder), str(tmp_path / "cache")],
                                text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(3)]
    dates = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started) and len(set(dates)) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.name != "locks"]) == 1


def test_what_another_has_prepared_is_read_without_a_right_to_write(folder, tmp_path, monkeypatch):
    files = prepare(DataConfig(source=str(folder)), 256, tmp_path / "cache")
    (tmp_path / "cache" / "locks").rename(tmp_path / "theirs")
    (tmp_path / "cache" / "locks").symlink_to(tmp_path / "theirs")
    assert prepare(DataConfig(source=str(folder)), 256, tmp_path / "cache").folder == files.folder
    with pytest.raises(ConfigError, match="locks' is a link"):
        prepare(DataConfig(source=str(folder), val_fraction=0.2), 256, tmp_path / "cache")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_one_sentence_and_no_litter(folder, tmp_path, monkeypatch):
    whole = Path.open
    full = Path("/dev/full")    # accepts nothing: ENOSPC
    monkeypatch.setattr(Path, "open",
                        lambda path, *mode, **how: whole(full if path.suffix == ".bin" else path,
                            *mode, **how))
    with pytest.raises(OSError, match="No space left") as full_disk:
        prepare_into(tmp_path / "out", DataConfig(source=str(folder)), 256, tmp_path / "cache")
    assert (_of_system(full_disk.value) == f"{tmp_path / 'out'}: No space left on device; free "
                                           f"some space, or choose another folder")
    assert {path.name for path in tmp_path.iterdir()} == {"texts", "cache"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_stays_bounded(tmp_path):
    path = tmp_path / "large.txt"
    block = prose(100_000)
    repeats = -(-(60 << 20) // len(block.encode()))
    with path.open("w", encoding="utf-8") as file:
        for i in range(repeats):
            file.write(f"{i}\n{block}")
    code = """
import sys
from lpkit.config import DataConfig
from lpkit.datasets import prepare
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if \
line.startswith("VmHWM")) << 10
before = peak()
files = prepare(DataConfig(source=sys.argv[1]), 256, sys.argv[2])
print(peak() - before, len(files.train) + len(files.val))
"""
    done = subprocess.run([sys.executable, "-c", code, str(path), str(tmp_path / "cache")],
                          capture_output=True, text=True,
                          check=True)
    extra, tokens = map(int, done.stdout.split())
    assert tokens > 60 << 20 and extra < 24 << 20


# bounds: what is unpacked, held and merged does not grow with what a file claims

def test_a_bomb_is_refused_and_nothing_is_kept(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(sources_module, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(sources_module, "MOST_RATIO", 100)
    path = tmp_path / "bomb.parquet"
    parquet.write_table(
        pyarrow.table({"text": pyarrow.array(["a" * 999] * 9000).dictionary_encode()}), path)
    with pytest.raises(ConfigError,
                       match=r"bomb.parquet unpacks to more than 1,\d+,\d+ characters, 100 times "
                             r"its own size.*repair"):
        prepare(DataConfig(source=str(path)), 256, tmp_path / "cache")
    assert [left.name for left in (tmp_path / "cache").iterdir()] == ["locks"]


def test_a_long_document_comes_in_pieces_and_keeps_its_split(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "PIECE_CHARS", 1000)
    text, path = prose(1000), tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}))
    pieces = list(find_source(str(path)).pieces())
    assert ("".join(piece.text for piece in pieces) == text
            and {piece.key for piece in pieces} == {text})
    assert (len(pieces) > 3 and [piece.ends for piece in pieces] == [False] * (len(pieces) - 1)
            + [True])
    monkeypatch.setattr(sources_module, "MOST_DOCUMENT_CHARS", 1000)
    with pytest.raises(ConfigError,
                       match=r"line 1 of .*a.jsonl is one document of [\d,]+ characters, and at "
                             r"most 1,000"):
        list(find_source(str(path)).pieces())
    monkeypatch.setattr(sources_module, "MOST_LINE_CHARS", 1000)
    with pytest.raises(ConfigError, match=r"line 1 of .*a.jsonl has more than 1,000 characters"):
        list(find_source(str(path)).pieces())


@pytest.mark.parametrize("text", ["a" * (1 << 20), "".join(map(chr,
    np.random.default_rng(0).integers(97, 123, 1 << 18)))], ids=["one letter", "letters"])
def test_text_without_words_takes_no_quadratic_time(tmp_path, text):
    started = time.process_time()
    tokenizer = TOKENIZERS["bpe"].build(400, lambda: iter([text]), tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - started < 5    # as one word, it would take minutes


def test_a_learner_that_ends_early_is_named(tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(tokenizers_module, "LEARN", tmp_path / "killed.py")
    with pytest.raises(ConfigError,
                       match=r"learning 300 entries .* exit code 137 .*memory ran out"):
        TOKENIZERS["bpe"].build(300, lambda: iter([prose(3000)] * 20), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["killed.py"]


def test_a_learner_ends_with_its_parent(tmp_path):
    """The parent is killed while the learner waits for more text. The learner must not wait for
    ever."""
    code = ("import sys, time; from lpkit.datasets import tokenizers as t\n"
            "def texts():\n    yield 'a b ' * 99\n    print('begun', flush=True)\n    "
            "time.sleep(60)\n"
            "t._train(texts(), 300)")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout.readline() == "begun\n"
        # two processes: the keeper, and the learner that it keeps
        while len(both := psutil.Process(process.pid).children(recursive=True)) < 2:
            time.sleep(0.01)
        process.kill()
    for child in both:
        child.wait(10)


# bad input: one sentence, the offender and the way out

@pytest.mark.parametrize("name, data, sentence", [
    ("empty.txt", b"", "there is no text in .*empty.txt.*give a source with text"),
    ("small.txt", b"one line\n", "too small to split.*data.val_fraction"),
    ("binary.txt", b"abc\0def" * 99, "binary.txt is not text .*NUL byte.*remove it"),
    ("latin.txt", b"caf\xe9 " * 99, "latin.txt is not UTF-8 text .byte 0xe9.*repair or remove"),
    ("a.txt.gz", b"plain text",
     "a.txt.gz is packed, and nothing is unpacked here; unpack it first"),
    ("not.parquet", b"plain text", "cannot read .*not.parquet"),
    ("bad.jsonl", b'{"text": "a"}\n{"text": ', "line 2 of .*bad.jsonl is not JSON"),
    ("other.jsonl", b'{"body": "a"}\n', "line 1 of .*other.jsonl has no field 'text' .its fields "
                                        "are body"),
    ("number.jsonl", b'{"text": 3}\n', "has 3 .int. in the place of its text"),
    ("half.jsonl", b'{"text": "\\ud800"}\n', "not valid text .half of a surrogate pair"),
    ("nul.jsonl", b'{"text": "a\\u0000"}\n', "line 1 of .*nul.jsonl is not text"),
])
def test_bad_sources(tmp_path, name, data, sentence):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=sentence):
        prepare(DataConfig(source=str(path)), 256, tmp_path / "cache")
    left = [path for path in (tmp_path / "cache").iterdir() if path.name != "locks"]
    assert not left


def test_packed_text_in_a_folder_is_not_passed_over(tmp_path):
    """A run must not train on a part of a folder without a message."""
    (tmp_path / "a.txt").write_text("one line\n" * 9999)
    (tmp_path / "b.jsonl.gz").write_bytes(b"packed")
    with pytest.raises(ConfigError,
                       match=r"b\.jsonl\.gz is packed, and nothing is unpacked here; unpack it "
                             r"first"):
        prepare(DataConfig(source=str(tmp_path)), 256, tmp_path / "cache")


@pytest.mark.parametrize("settings, vocab, sentence", [
    ({"source": "no/such/thing"}, 256, "no file, folder or glob 'no/such/thing'.*python-stdlib"),
    ({"source": "/dev/zero"}, 256, "/dev/zero is a device, not a file"),
    ({"source": "hf:../etc"}, 256, "not the name of a dataset"),
    ({"source": "TEXTS", "tokenizer": "byte"}, 256, "no tokenizer 'byte'; did you mean 'bytes'"),
    ({"source": "TEXTS"}, 200,
     "bytes has 256 tokens .*model.vocab=200; set model.vocab=256 or more"),
    ({"source": "TEXTS", "tokenizer": "bpe"}, 256, "model.vocab=256 is too small for "
                                                   "data.tokenizer=bpe"),
    ({"source": "EMPTY"}, 256, "nothing to read in .*[.]jsonl"),
    ({"source": "MADE", "tokenizer": "bpe"}, 256, "prepared with tokenizer bytes, but "
                                                  "data.tokenizer is bpe; set"),
    ({"source": "MADE", "val_fraction": 0.2}, 256, "prepared with val_fraction 0.1.*set "
                                                   "data.val_fraction=0.1"),
])
def test_bad_settings(folder, corpus, tmp_path, settings, vocab, sentence):
    (tmp_path / "empty").mkdir()
    places = {"TEXTS": folder, "EMPTY": tmp_path / "empty", "MADE": corpus.folder}
    for name, place in places.items():
        settings = settings | {"source": settings["source"].replace(name, str(place))}
    with pytest.raises(ConfigError, match=sentence):
        prepare(DataConfig(**settings), vocab, tmp_path / "cache2")


def test_out_must_be_new(folder, corpus, tmp_path):
    with pytest.raises(ConfigError, match="already holds something; choose a new or empty folder"):
        prepare_into(folder, DataConfig(source=str(folder)), 256, tmp_path)
    with pytest.raises(ConfigError, match="prepared already"):
        prepare_into(tmp_path / "out", DataConfig(source=str(corpus.folder)), 256, tmp_path)


def test_command(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    out = tmp_path / "out"
    assert main(["data", "prepare", str(folder), "--out", str(out), "--val-fraction", "0.2",
                 "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["val_fraction"] == 0.2 and "tokens of" in captured.err
    assert main(["data", "show", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (f"{answer['splits']['train']['tokens']:,} tokens" in shown
            and "bytes, 256 entries, uint16" in shown)
    assert main(["data", "prepare", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"].startswith(str(tmp_path / "xdg" / "lpkit"))
    assert main(["data", "prepare", str(folder), "--out", str(out)]) == 2
    assert main(["data", "show", str(folder)]) == 2
    assert "not a prepared corpus" in capsys.readouterr().err


def test_preparing_needs_no_torch():
    code = ("import sys, lpkit.datasets as d; assert d.prepare and 'torch' not in sys.modules;"
            "assert d.RandomWindows and 'torch' in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


# policies

def naive(tokens, starts, T):
    return (torch.tensor([[int(t) for t in tokens[s:s + T]] for s in starts]),
            torch.tensor([[int(t) for t in tokens[s + 1:s + T + 1]] for s in starts]))


CORPUS = [name for name in POLICIES if "-" in name]       # without the tasks of lessons


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("name", CORPUS)
def test_batches_are_those_of_a_naive_loop(tmp_path, name, dtype):
    ids = np.random.default_rng(0).integers(2**16 if dtype == "<u2" else 2**32,
        size=5000).astype(dtype)
    ids.tofile(tmp_path / "a.bin")
    tokens = np.memmap(tmp_path / "a.bin", dtype=dtype, mode="r")
    policy = POLICIES[name].load()(tokens=tokens, batch=5, context=33, seed=3)
    for step in (0, 1, 7, 10**6):
        x, y = policy.batch(step).tensors[:2]
        wanted = naive(ids, policy.starts(step), 33)
        assert torch.equal(x, wanted[0]) and torch.equal(y, wanted[1])
        assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
        kept = y.clone()
        x.fill_(-1)         # a policy whose batches share memory would fail here
        assert torch.equal(y, kept) and torch.equal(policy.batch(step).tokens, wanted[0])


@pytest.mark.parametrize("name", POLICIES)
def test_resuming_needs_no_state(name):
    tokens = np.arange(4000, dtype=np.uint16)
    settings = {key: value for key, value in vars(POLICIES[name].settings).items() if key != "name"}
    settings |= {"mask": 4000} if "mask" in settings else {}        # it is not a token of the text
    make = lambda: POLICIES[name].load()(tokens=tokens, batch=3, context=40, seed=5, **settings)
    whole, later = make(), make()
    for step in range(40):
        whole.batch(step)
    for step in range(40, 60):
        assert all(torch.equal(a, b) for a, b in zip(whole.batch(step).tensors,
            later.batch(step).tensors, strict=True))
    assert not torch.equal(whole.batch(40).tokens, whole.batch(41).tokens)


def test_random_windows_are_uniform_and_independent():
    windows, batch, steps = 50, 64, 2000
    policy = RandomWindows(tokens=np.arange(windows + 8, dtype=np.uint16), batch=batch, context=8,
                           seed=0)
    drawn = np.stack([policy.starts(step) for step in range(steps)])
    expected = drawn.size / windows
    chi2 = ((np.bincount(drawn.ravel(), minlength=windows) - expected) ** 2 / expected).sum()
    # the first and the last window occur, and no window beyond them
    assert len(np.bincount(drawn.ravel())) == windows
    # mean and four standard deviations of chi-square(49)
    assert chi2 < 49 + 4 * math.sqrt(2 * 49)
    # correlation of neighbours in a batch, and of successive steps
    for a, b in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / math.sqrt(a.size)
    other = RandomWindows(tokens=np.arange(windows + 8, dtype=np.uint16), batch=batch, context=8,
                          seed=1)
    again = np.stack([other.starts(step) for step in range(steps)])
    assert (again == drawn).mean() == pytest.approx(1 / windows,
        abs=4 * math.sqrt(1 / windows / drawn.size))


def test_random_windows_against_splitmix64():
    """The published generator, computed with Python's integers."""
    def reference(state):
        while True:
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
            yield z ^ z >> 31

    assert next(reference(1234567)) == 6457827717110365317      # the published test vector
    policy = RandomWindows(tokens=np.zeros(1000, np.uint16), batch=7, context=10, seed=0)
    numbers = reference(0)      # seed 0 maps to key 0
    for step in range(5):
        assert policy.starts(step).tolist() == [next(numbers) % 990 for _ in range(7)]


@pytest.mark.parametrize("length", [9, 17, 1001])
def test_one_pass_meets_every_window_once(length):
    policy = SpreadWindows(tokens=np.arange(length, dtype=np.uint16), batch=4, context=8)
    starts = np.concatenate([policy.starts(step) for step in range(len(policy))])
    count = (length - 1) // 8
    assert sorted(starts[:count]) == list(range(0, 8 * count, 8)) and len(starts) - count < 4
    if count > 50:
        # sixteen windows reach all parts of the text
        assert max(np.diff(sorted(starts[:16]))) < length / 6


def test_context_longer_than_the_corpus():
    with pytest.raises(ConfigError,
                       match=r"model.context=64 needs 65 tokens in a row.*only 64; set "
                             r"model.context=63"):
        RandomWindows(tokens=np.zeros(64, np.uint16), batch=1, context=64)
    x, y = RandomWindows(tokens=np.arange(65, dtype=np.uint16), batch=2,
                         context=64).batch(0).tensors
    assert x.tolist() == [list(range(64))] * 2 and y.tolist() == [list(range(1, 65))] * 2
