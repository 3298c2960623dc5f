"""Token files: a folder with `train.bin`, `val.bin` and `header.json`. The .bin files are flat
arrays of little-endian ids.

The folder is written under a temporary name, synced and renamed, so a folder with a header is
complete. Opening it checks sizes and SHA-256: this takes about half a second per GB, and brings the
file into the page cache. The tokenizer's `end` token stands after each text, and also where a text
continues in the other split.

Nothing in the folder is executed. The checksums detect damage, not malice (docs/data.md).
"""

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from lpkit import files, records
from lpkit.config import DataConfig
from lpkit.contracts import Tokenizer
from lpkit.datasets.tokenizers import builder, tokenizer_from_dict
from lpkit.errors import ConfigError, DamagedError, named
from lpkit.values import Count, Folder, Place, checked

FORMAT = "lpkit-tokens"
VERSION = 2
SPLITS = ("train", "val")
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True, kw_only=True)
class TokenFiles:
    """An opened folder of token files. `train` and `val` are memory maps of ids, (tokens,) uint16
    or uint32."""

    folder: Path
    header: dict[str, Any]
    tokenizer: Tokenizer
    train: np.memmap
    val: np.memmap

    @property
    def vocab(self) -> int:
        return self.header["vocab"]


@checked
def prepare(data: DataConfig, vocab: Count, cache_dir: Folder | None = None) -> TokenFiles:
    """Returns the token files of `data.source`, and makes them if they do not exist.

    They are stored in `cache_dir` (None: the user's cache), under a name that depends on the files
    of the source, the tokenizer and the split. `vocab` is the vocabulary size of the model: `bpe`
    learns so many entries, and every token id must be below it. A source that is a prepared folder
    is opened without changes. Raises ConfigError for a source or a tokenizer that cannot be used,
    and OSError.
    """
    if is_prepared(data.source):
        return fits(_open_as(data), vocab)
    make = resolve_name("lpkit.datasets.tokens:make")       # late: `tokens` imports this module
    return fits(make(data, vocab, cache_dir), vocab)


def _open_as(data: DataConfig) -> TokenFiles:
    """Opens the prepared folder `data.source`. Raises ConfigError if its settings differ from
    `data`."""
    opened = open_tokens(data.source)
    same = data.tokenizer == opened.tokenizer.name or records.digest(
        opened.tokenizer.to_dict()) == getattr(builder(data.tokenizer), "identity", None)
    for key, has in (("tokenizer", data.tokenizer if same else opened.tokenizer.name),
                     ("val_fraction", opened.header["val_fraction"]),
                     ("special_tokens", opened.header.get("special_tokens", False))):
        if getattr(data, key) != has:
            raise ConfigError(f"{data.source} was prepared with {key} {has}, but data.{key} is "
                              f"{getattr(data, key)}; set data.{key}={has}, or prepare the "
                              f"text again")
    return opened


def is_prepared(folder: Path | str) -> bool:
    return (files.expanded(folder) / "header.json").is_file()


@checked
def open_tokens(folder: Place) -> TokenFiles:
    """Open a prepared folder, after checking its sizes and checksums. Raises ConfigError."""
    path = folder / "header.json"
    if not is_prepared(folder):
        raise ConfigError(f"{named(folder)} is not a prepared corpus (it has no file header.json); "
                          f"make one with `lpkit data prepare`")
    try:
        header = records.read(path)
        if (header["format"], header["version"]) != (FORMAT, VERSION):
            raise ValueError("of another kind")
        dtype = DTYPES[header["dtype"]]
        maps = {split: _mapped(folder / f"{split}.bin", header["splits"][split], dtype)
                for split in SPLITS}
        model = header["tokenizer"].get("model") or {}
        if "altered" not in header and (model.get("truncation") or model.get("padding")):
            raise DamagedError("its tokenizer cut texts, or padded them")
        return TokenFiles(folder=folder, header=header,
                          tokenizer=tokenizer_from_dict(header["tokenizer"]), **maps)
    except DamagedError as error:
        raise DamagedError(f"{named(folder)} is not a prepared corpus, or not whole: {error}; make "
                           f"one with `lpkit data prepare`") from None
    except ConfigError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{named(path)} is not the header of a corpus that this lpkit "
                           f"prepared; make one with `lpkit data prepare`") from None


def _mapped(path: Path, facts: dict[str, Any], dtype: np.dtype) -> np.memmap:
    try:
        size, due = path.stat().st_size, facts["tokens"] * dtype.itemsize
        if size != due:
            raise DamagedError(f"{named(path)} has {size} bytes where its header says {due}: it "
                               f"was truncated or altered; remove the folder and prepare it again")
        files.check_regular(path)
        if files.sha256(path) != facts["sha256"]:
            raise DamagedError(f"{named(path)} does not have the checksum of its header: it was "
                               f"altered; remove the folder and prepare it again")
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DamagedError(f"cannot read {named(path)}: {error.strerror}; remove the folder and "
                           f"prepare it again") from None


def fits(opened: TokenFiles, vocab: int) -> TokenFiles:
    largest = max(opened.header["splits"][split]["largest"] for split in SPLITS)
    if max(opened.vocab - 1, largest) >= vocab:
        raise ConfigError(f"tokenizer {opened.tokenizer.name} has {opened.vocab} tokens (the "
                          f"largest in {opened.folder} is {largest}), but model.vocab={vocab}; set "
                          f"model.vocab={opened.vocab} or more")
    return opened


def byte_unigram_entropy(opened: TokenFiles) -> float:
    """Returns the cross-entropy, in nats per token, of the validation split under the token
    frequencies of the training split. Every count has 1 added, so that it is finite for tokens that
    the training split lacks."""
    train, val = (_counts(tokens, opened.vocab) for tokens in (opened.train, opened.val))
    return float(-(val / val.sum()) @ np.log((train + 1) / (train.sum() + opened.vocab)))


def _counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    chunk = 1 << 20
    return sum(np.bincount(tokens[i:i + chunk], minlength=vocab)
               for i in range(0, len(tokens), chunk))
