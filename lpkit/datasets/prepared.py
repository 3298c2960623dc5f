"""Token files: a folder with `train.bin`, `val.bin` and `header.json`. The .bin files are flat
arrays of little-endian token ids.

A folder is written under a temporary name, synced and renamed, so a folder with a header is
complete. Opening a folder checks the sizes and the SHA-256 of its files. This takes about half a
second per GB, and brings the files into the page cache. The tokenizer's `end` token follows each
text, and also each part of a text that continues in the other split.

Nothing in the folder is executed. The checksums detect damage, but not an attack (docs/data.md).
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
    """An opened folder of token files."""

    folder: Path
    header: dict[str, Any]
    tokenizer: Tokenizer
    train: np.memmap        # (tokens,) uint16 or uint32: ids of the training split
    val: np.memmap          # the same for the validation split

    @property
    def vocab(self) -> int:
        return self.header["vocab"]


@checked
def prepare(data: DataConfig, vocab: Count, cache_dir: Folder | None = None) -> TokenFiles:
    """Return the token files of `data.source`, and write them first if they do not exist.

    Token files are stored in `cache_dir` (None: the user's cache), in a folder whose name depends
    on the files of the source, the tokenizer and the split. `vocab` is the vocabulary size of the
    model: the tokenizer `bpe` learns this many entries, and the ids of every tokenizer must be
    below it. If the source is a folder of token files, it is opened and not changed. Raises
    ConfigError for a source or a tokenizer that cannot be used, and OSError.
    """
    if is_prepared(data.source):
        return fits(_open_as(data), vocab)
    make = resolve_name("lpkit.datasets.tokens:make")       # late: `tokens` imports this module
    return fits(make(data, vocab, cache_dir), vocab)


def _open_as(data: DataConfig) -> TokenFiles:
    """Open the folder of token files `data.source`. Raises ConfigError if it was prepared with
    other settings than `data` has."""
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
    """Check the sizes and checksums of a folder of token files, and open it. Raises ConfigError if
    the folder has no token files, and DamagedError if they are damaged."""
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
    """Return the memory map of a .bin file whose size and checksum are those in the header
    (`facts`). Raises DamagedError."""
    try:
        size, expected = path.stat().st_size, facts["tokens"] * dtype.itemsize
        if size != expected:
            raise DamagedError(f"{named(path)} has {size} bytes where its header says {expected}: "
                               f"it was truncated or altered; remove the folder and prepare it "
                               f"again")
        files.check_regular(path)
        if files.sha256(path) != facts["sha256"]:
            raise DamagedError(f"{named(path)} does not have the checksum of its header: it was "
                               f"altered; remove the folder and prepare it again")
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DamagedError(f"cannot read {named(path)}: {error.strerror}; remove the folder and "
                           f"prepare it again") from None


def fits(opened: TokenFiles, vocab: int) -> TokenFiles:
    """Return `opened` if all of its ids are below the model's `vocab`. Raises ConfigError."""
    largest = max(opened.header["splits"][split]["largest"] for split in SPLITS)
    if max(opened.vocab - 1, largest) >= vocab:
        raise ConfigError(f"tokenizer {opened.tokenizer.name} has {opened.vocab} tokens (the "
                          f"largest in {opened.folder} is {largest}), but model.vocab={vocab}; set "
                          f"model.vocab={opened.vocab} or more")
    return opened


def byte_unigram_entropy(opened: TokenFiles) -> float:
    """Return the cross-entropy, in nats per token, of the validation split under the token
    frequencies of the training split: the loss of a model that ignores the context. 1 is added to
    each count, so that the result is finite for tokens that the training split lacks."""
    train, val = (_counts(tokens, opened.vocab) for tokens in (opened.train, opened.val))
    return float(-(val / val.sum()) @ np.log((train + 1) / (train.sum() + opened.vocab)))


def _counts(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Return how often each id occurs: (vocab,) integers. Chunks bound the memory."""
    chunk = 1 << 20
    return sum(np.bincount(tokens[i:i + chunk], minlength=vocab)
               for i in range(0, len(tokens), chunk))
