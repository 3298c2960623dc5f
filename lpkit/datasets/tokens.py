"""Token files: a folder with `train.bin` and `val.bin`, flat little-endian ids, and `header.json`.

The folder is written under a temporary name, synced and renamed, so a folder with a header is
complete. Sizes and SHA-256 are checked whenever one is opened: about half a second for each GB, and
it brings the file into the page cache. Where a text stops, and wherever the other split took over,
stands the tokenizer's `end` token.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from lpkit.config import DataConfig
from lpkit.contracts import Tokenizer
from lpkit.datasets import sources
from lpkit.datasets.tokenizers import TOKENIZERS, tokenizer_from_dict
from lpkit.errors import ConfigError, pick
from lpkit.files import locked, sha256, whole_folder, write_atomically

FORMAT = "lpkit-tokens"
VERSION = 1
SPLITS = ("train", "val")
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """An opened folder. `train` and `val` are memory maps of ids, (tokens,) uint16 or uint32."""

    folder: Path
    header: dict[str, Any]
    tokenizer: Tokenizer
    train: np.memmap
    val: np.memmap

    @property
    def vocab(self) -> int:
        return self.header["vocab"]


def prepare(data: DataConfig, vocab: int, cache_dir: Path | str | None = None) -> TokenFiles:
    """The token files of `data.source`, made when they are not there yet.

    They are kept in `cache_dir` (None: `default_cache_dir()`) under a name that changes with the
    files of the source, the tokenizer and the split. `vocab` is the model's: the number of entries
    that `bpe` learns, and the bound that every token id must respect. A source that is itself a
    prepared folder is opened as it is. Raises ConfigError for a source, a tokenizer or a disk that
    does not serve.
    """
    pick(TOKENIZERS, data.tokenizer, "tokenizer")
    if is_prepared(data.source):
        files = open_tokens(data.source)
        for key, has in (("tokenizer", files.tokenizer.name),
                         ("val_fraction", files.header["val_fraction"])):
            if getattr(data, key) != has:
                raise ConfigError(f"{data.source} was prepared with {key} {has}, but data.{key} is "
                                  f"{getattr(data, key)}; set data.{key}={has}, or prepare the "
                                  f"text again")
        return _fits(files, vocab)
    source, cache = sources.find(data.source), _cache(cache_dir)
    with _disk_sentences(cache):
        return _fits(_written_once(source, data, vocab, cache / _name(source, data, vocab), cache),
                     vocab)


def prepare_into(folder: Path | str, data: DataConfig, vocab: int,
                 cache_dir: Path | str | None = None) -> TokenFiles:
    """The same in a folder of your choice, which must be new or empty. It can be moved, and used as
    a data.source."""
    folder = Path(folder).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder} already holds something; choose a new or empty folder, or "
                          f"remove it first")
    if is_prepared(data.source):
        raise ConfigError(f"{data.source} is prepared already; use it as data.source, or copy the "
                          f"folder")
    pick(TOKENIZERS, data.tokenizer, "tokenizer")
    with _disk_sentences(folder):
        return _fits(_written_once(sources.find(data.source), data, vocab, folder,
                                   _cache(cache_dir)), vocab)


def default_cache_dir() -> Path:
    """Where the platform keeps what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lpkit" / "tokens"


def _cache(asked: Path | str | None) -> Path:
    return Path(asked).expanduser() if asked else default_cache_dir()


def is_prepared(folder: Path | str) -> bool:
    return (Path(folder).expanduser() / "header.json").is_file()


def open_tokens(folder: Path | str) -> TokenFiles:
    """Open a prepared folder, after checking its sizes and checksums. Raises ConfigError."""
    folder = Path(folder).expanduser()
    header = read_header(folder)
    maps = {}
    for split in SPLITS:
        path, facts, dtype = (folder / f"{split}.bin", header["splits"][split],
                              _DTYPES[header["dtype"]])
        try:
            size, due = path.stat().st_size, facts["tokens"] * dtype.itemsize
            if size != due:
                raise ConfigError(f"{path} has {size} bytes where its header says {due}: it was "
                                  f"truncated or altered; remove the folder and prepare it again")
            if sha256(path) != facts["sha256"]:
                raise ConfigError(f"{path} does not have the checksum of its header: it was "
                                  f"altered; remove the folder and prepare it again")
            maps[split] = np.memmap(path, dtype=dtype, mode="r")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}; remove the folder and "
                              f"prepare it again") from None
    return TokenFiles(folder=folder, header=header,
                      tokenizer=tokenizer_from_dict(header["tokenizer"]), **maps)


def read_header(folder: Path | str) -> dict[str, Any]:
    """The facts of a prepared folder, without touching its tokens. Raises ConfigError."""
    path = Path(folder).expanduser() / "header.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        if header["format"] != FORMAT:
            raise ValueError(header["format"])
        if header["version"] > VERSION:
            raise ConfigError(f"{path} has version {header['version']}, newer than this lpkit "
                              f"understands ({VERSION}); upgrade lpkit, or prepare the corpus "
                              f"again")
        counts = [header["splits"][split]["tokens"] for split in SPLITS]
        if header["dtype"] not in _DTYPES or not all(isinstance(n, int) and n > 0 for n in counts):
            raise ValueError(header["dtype"], counts)
        if not isinstance(header["tokenizer"], dict) or not isinstance(header["vocab"], int):
            raise ValueError(header["tokenizer"])
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{folder} is not a prepared corpus ({error.strerror}: header.json); "
                          f"make one with `lpkit data prepare`") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not the header of a prepared corpus; make one with "
                          f"`lpkit data prepare`") from None
    return header


def byte_unigram_entropy(files: TokenFiles) -> float:
    """Nats per token of the validation split under the token frequencies of the training split.

    What a model reaches that knows only how often each token (with `bytes`: each byte) occurs, and
    so the first mark that a training run must pass. One is added to every count, so that a token
    never seen in training costs finitely.
    """
    train, val = (_counts(tokens, files.vocab) for tokens in (files.train, files.val))
    return float(-(val / val.sum()) @ np.log((train + 1) / (train.sum() + files.vocab)))


def _counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    chunk = 1 << 20
    return sum(np.bincount(tokens[i:i + chunk], minlength=vocab)
               for i in range(0, len(tokens), chunk))


def _fits(files: TokenFiles, vocab: int) -> TokenFiles:
    largest = max(files.header["splits"][split]["largest"] for split in SPLITS)
    if max(files.vocab - 1, largest) >= vocab:
        raise ConfigError(f"tokenizer {files.tokenizer.name} has {files.vocab} tokens (the largest "
                          f"in {files.folder} is {largest}), but model.vocab={vocab}; set "
                          f"model.vocab={files.vocab} or more")
    return files


def _name(source: sources.Source, data: DataConfig, vocab: int) -> str:
    """What decides the content, in a folder's name."""
    learned = vocab if data.tokenizer == "bpe" else None
    facts = [FORMAT, VERSION, source.name, source.fingerprint(), data.tokenizer, learned,
             data.val_fraction]
    stem = (re.sub(r"[^a-z0-9]+", "-", source.name.lower().rpartition("/")[2])[:40].strip("-")
            or "text")
    return f"{stem}-{data.tokenizer}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def _written_once(source: sources.Source, data: DataConfig, vocab: int, folder: Path,
                  cache: Path) -> TokenFiles:
    """The files in `folder`, written by whichever process comes first; the others wait for it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    with locked(cache / "locks" / name):
        if is_prepared(folder):
            return open_tokens(folder)
        with whole_folder(folder) as temporary:
            _write(source, data, vocab, temporary, cache)
    return open_tokens(folder)


def _write(source: sources.Source, data: DataConfig, vocab: int, folder: Path, cache: Path) -> None:
    texts = lambda: sources.texts(source.pieces(), data.val_fraction)
    tokenizer = TOKENIZERS[data.tokenizer].build(vocab, texts, cache)
    kind = "uint16" if tokenizer.vocab <= 2**16 else "uint32"
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(_Writer(folder / f"{split}.bin", _DTYPES[kind],
                                                      tokenizer.end))
                   for split in SPLITS}
        unfinished = None
        for piece in _with_progress(source):
            split = SPLITS[sources.is_validation(piece.key, data.val_fraction)]
            if unfinished and unfinished is not writers[split]:
                unfinished.end()            # its text goes on in the other split
            unfinished = writers[split]
            unfinished.write(tokenizer.encode_array(piece.text))
            if piece.ends:
                unfinished.end()
                unfinished = None
        facts = {split: writer.close() for split, writer in writers.items()}
    _neither_empty(source, data, facts)
    header = {"format": FORMAT, "version": VERSION, "source": sources.describe(source),
              "vocab": tokenizer.vocab, "end": tokenizer.end, "dtype": kind,
              "val_fraction": data.val_fraction, "splits": facts,
              "date": datetime.now(UTC).isoformat(timespec="seconds"),
              "tokenizer": tokenizer.to_dict()}
    write_atomically(folder / "header.json", json.dumps(header))


def _neither_empty(source: sources.Source, data: DataConfig, facts: dict[str, dict]) -> None:
    texts = sum(split["documents"] for split in facts.values())
    if not texts:
        raise ConfigError(f"there is no text in {source.name!r}: it is empty; give a source with "
                          f"text in it")
    for split, name in zip(SPLITS, ("training", "validation")):
        if not facts[split]["tokens"]:
            raise ConfigError(f"{source.name!r} is too small to split: none of its documents or "
                              f"blocks fell to {name} with data.val_fraction={data.val_fraction}; "
                              f"give more text, or change data.val_fraction (0.5 halves it)")


def _with_progress(source: sources.Source) -> Iterator[sources.Piece]:
    from tqdm import tqdm

    with tqdm(desc=f"tokens of {source.name.rpartition('/')[2]}", total=source.total_bytes(),
              unit="B", unit_scale=True) as bar:
        for piece in source.pieces():
            yield piece
            bar.update(len(piece.text) if piece.text.isascii() else len(piece.text.encode()))


class _Writer:
    """Ids to one file, counted and hashed on the way: memory holds one piece."""

    def __init__(self, path: Path, dtype: np.dtype, end: int):
        self.path, self.dtype, self.last = path, dtype, np.array([end], dtype)
        self.digest, self.tokens, self.documents, self.largest = hashlib.sha256(), 0, 0, -1

    def __enter__(self):
        self.file = self.path.open("wb")
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):  # a full disk has been reported by then
            self.file.close()

    def write(self, ids: np.ndarray) -> None:
        if ids.size:
            data = ids.astype(self.dtype).data.cast("B")
            self.file.write(data)
            self.digest.update(data)
            self.tokens += ids.size
            self.largest = max(self.largest, int(ids.max()))

    def end(self) -> None:
        self.write(self.last)
        self.documents += 1

    def close(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"tokens": self.tokens, "documents": self.documents, "largest": self.largest,
                "sha256": self.digest.hexdigest()}


@contextlib.contextmanager
def _disk_sentences(folder: Path):
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(f"the disk of {folder} is full, and nothing was kept; free some "
                              f"space (2 bytes per token are needed), or choose another folder "
                              f"with --out") from None
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}; choose another "
                          f"folder with --out, or set XDG_CACHE_HOME for the cache") from None
