"""Turn text into token files (`lpkit.datasets.prepared`), once."""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm.auto import tqdm

from lpkit import files, records
from lpkit.config import DataConfig
from lpkit.datasets import sources
from lpkit.datasets.prepared import (
    DTYPES,
    FORMAT,
    SPLITS,
    VERSION,
    TokenFiles,
    fits,
    is_prepared,
    open_tokens,
)
from lpkit.datasets.tokenizers import builder
from lpkit.errors import ConfigError, DamagedError, named, shown
from lpkit.values import Count, Folder, checked


@checked
def prepare_into(folder: Folder, data: DataConfig, vocab: Count,
                 cache_dir: Folder | None = None) -> TokenFiles:
    """Write the token files of `data.source` to a new or empty folder, and return them. The folder
    can be moved, and used as data.source. Raises ConfigError and OSError."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{named(folder)} already holds something; choose a new or empty folder, "
                          f"or remove it first")
    if is_prepared(data.source):
        raise ConfigError(f"{data.source} is prepared already; use it as data.source, or copy the "
                          f"folder")
    return fits(make(data, vocab, cache_dir, folder), vocab)


def make(data: DataConfig, vocab: int, cache_dir: Path | None,
         target: Path | None = None) -> TokenFiles:
    """Return the token files in the folder `target` (None: a folder in the cache), and write them
    first if they are missing.

    If several processes need the same files, the first process writes them and the others wait.
    Damaged files in the cache are written again. If other users cannot read the source, they cannot
    read its token files in the cache either."""
    kind = builder(data.tokenizer)
    source = sources.find(data.source)
    cache = cache_dir or files.cache_dir("tokens")
    folder = cache / _name(source, data, vocab, getattr(kind, "identity", data.tokenizer))
    folder = target or folder
    lock = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
    opened, _ = _opened(folder)      # without the lock, since the cache may be read-only
    if opened is None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(files.own_folder(cache / "locks") / lock):
            opened, damage = _opened(folder)
            if opened is None:
                if damage:
                    warnings.warn(f"{damage}. It is made again", stacklevel=4)
                if target is None:
                    files.remove(folder)
                with files.whole_folder(folder) as temporary:
                    _write(source, data, kind, vocab, temporary, cache)
                opened = open_tokens(folder)
    if target is None and (mode := source.mode()) != 0o666:
        for path in folder.iterdir():       # the source may have become private in the meantime
            with contextlib.suppress(PermissionError):      # another user owns the file
                path.chmod(path.stat().st_mode & mode)
    return opened


def _opened(folder: Path) -> tuple[TokenFiles | None, str]:
    """Return (token files, "") of a folder, or (None, reason) if its files are damaged, or
    (None, "") if it has none. Raises ConfigError if the files cannot be used for another reason."""
    try:
        return (open_tokens(folder) if is_prepared(folder) else None), ""
    except DamagedError as error:
        return None, str(error)


def _name(source: sources.Source, data: DataConfig, vocab: int, who: str) -> str:
    """Return the name of the folder in the cache. The name depends on all settings that decide the
    content of the folder. `who` identifies the tokenizer."""
    learned = vocab if data.tokenizer == "bpe" else None
    facts = [FORMAT, VERSION, source.name, source.fingerprint(), who, learned,
             data.val_fraction, *["special"] * data.special_tokens]
    last = source.name.lower().rpartition("/")[2]
    stem = re.sub(r"[^a-z0-9]+", "-", last)[:40].strip("-") or "text"
    return f"{stem}-{who[:16]}-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"


def _write(source: sources.Source, data: DataConfig, kind: Any, vocab: int, folder: Path,
           cache: Path) -> None:
    """Build the tokenizer of `kind`, and write the token files of `source` to `folder`. A learned
    tokenizer is stored in `cache`."""
    def texts() -> Iterator[str]:
        """Yield the texts of the training split, from which a tokenizer learns."""
        for piece in source.pieces():
            if not sources.is_validation(piece.key, data.val_fraction):
                yield piece.text

    tokenizer = kind.build(vocab, texts, cache)
    dtype = "uint16" if tokenizer.vocab <= 2**16 else "uint32"
    name = named(source.name.rpartition("/")[2])
    bar = tqdm(desc=f"tokens of {name}", total=source.total_bytes(), unit="B", unit_scale=True)
    with bar, contextlib.ExitStack() as stack:
        writers = {}
        for split in SPLITS:
            path = folder / f"{split}.bin"
            path.touch(source.mode())
            file = stack.enter_context(path.open("wb"))
            writers[split] = _Writer(file, DTYPES[dtype], tokenizer.end, data.special_tokens)
        unfinished, altered = None, []
        for piece in source.pieces():
            split = SPLITS[sources.is_validation(piece.key, data.val_fraction)]
            continued = unfinished is writers[split]
            if unfinished and not continued:
                unfinished.end()            # the text continues in the other split
            unfinished = writers[split]
            ids, differs = tokenizer.part(piece.text, data.special_tokens, continued)
            altered += [differs] * bool(differs)
            unfinished.write(ids)
            if piece.ends:
                unfinished.end()
                unfinished = None
            bar.update(len(piece.text) if piece.text.isascii() else len(piece.text.encode()))
    facts = {split: writer.facts() for split, writer in writers.items()}
    _neither_empty(source, data, facts)
    if altered:
        warnings.warn(f"{len(altered):,} parts of {shown(source.name)} decode to another text "
                      f"({altered[0]}); val_loss is of it, and not per byte of the source",
                      stacklevel=5)
    header = {"format": FORMAT, "version": VERSION, "source": source.header(),
              "vocab": tokenizer.vocab, "end": tokenizer.end, "dtype": dtype,
              "val_fraction": data.val_fraction, "splits": facts, "altered": len(altered),
              "date": datetime.now(UTC).isoformat(timespec="seconds"),
              "special_tokens": data.special_tokens, "tokenizer": tokenizer.to_dict()}
    files.write_atomically(folder / "header.json", records.sealed(header), source.mode())


def _neither_empty(source: sources.Source, data: DataConfig, facts: dict[str, dict]) -> None:
    """Raise ConfigError if the source or one of its splits has no text."""
    if not any(split["documents"] for split in facts.values()):
        raise ConfigError(f"there is no text in {shown(source.name)}: it is empty; give a source "
                          f"with text in it")
    for split, name in zip(SPLITS, ("training", "validation")):
        if not facts[split]["tokens"]:
            raise ConfigError(f"{shown(source.name)} is too small to split: none of its documents "
                              f"or blocks fell to {name} with "
                              f"data.val_fraction={data.val_fraction}; give more text, or change "
                              f"data.val_fraction (0.5 halves it)")


class _Writer:
    """A writer of token ids to a file, which also counts and hashes them. Only one piece of text is
    in memory at a time. `special`: ids may contain the `end` token, because texts may spell special
    tokens."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, end: int, special: bool):
        self.file, self.dtype, self.last = file, dtype, np.array([end], dtype)
        self.special, self.ended = special, False       # ended: the last id is the end token
        self.digest, self.tokens, self.documents, self.largest = hashlib.sha256(), 0, 0, -1

    def write(self, ids: np.ndarray) -> None:
        if ids.size:
            data = ids.astype(self.dtype).data.cast("B")
            self.file.write(data)
            self.digest.update(data)
            self.tokens += ids.size
            self.largest = max(self.largest, int(ids.max()))
            self.documents += int((ids == self.last[0]).sum())
            self.ended = self.special and ids[-1] == self.last[0]

    def end(self) -> None:
        """Write the end token, unless the text already ended with it."""
        if not self.ended:
            self.write(self.last)

    def facts(self) -> dict[str, Any]:
        """Return the split's fields for the header."""
        return {"tokens": self.tokens, "documents": self.documents, "largest": self.largest,
                "sha256": self.digest.hexdigest()}
