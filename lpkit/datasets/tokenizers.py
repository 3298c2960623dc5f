"""Text to token ids and back. To add one: a class that satisfies contracts.Tokenizer with `build`,
and a row below.

Every tokenizer has an `end` token that closes each document. Text given to `encode` can never
produce it: a prompt or a corpus that spells `<|endoftext|>` gets the ordinary tokens of those
characters.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lpkit import records
from lpkit.contracts import Tokenizer
from lpkit.errors import ConfigError, pick
from lpkit.files import PACKAGE, expanded, write_atomically
from lpkit.processes import Children, new_folder

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"
LEARN = PACKAGE / "datasets" / "learn_bpe.py"
BPE_TRAINING_CHARS = 1 << 26    # merges are learned from the first 64 Mi of the training split
Texts = Callable[[], Iterator[str]]


class Named:
    """A tokenizer whose name says everything about it, because it learns nothing."""

    name: ClassVar[str]

    @classmethod
    def build(cls, vocab: int, texts: Texts, cache_dir: Path) -> Tokenizer:
        return cls()

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), np.uint32)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tokenizer:
        return cls()


class Bytes(Named):
    """One token for each byte of UTF-8. Token 0 ends a document: NUL, which no source accepts
    inside a text."""

    name = "bytes"
    default_vocab = 256
    vocab = 256
    end = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        # A model may cut a character in two, or have a larger vocabulary: 0xff is never UTF-8, so
        # both show as U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode(errors="replace")


class BPE(Named):
    """Byte-level BPE with GPT-2's pre-tokenisation, trained with the `tokenizers` library (Sennrich
    et al. 2016).

    Every byte is in the vocabulary, so that every text has tokens and decodes to itself.
    """

    name = "bpe"
    default_vocab = 8192

    def __init__(self, model: str, end: int | None = None):
        """`model`: the library's own JSON. `end`: the id that closes a document, None: <|endoftext|>'s."""
        from tokenizers import Tokenizer as Library

        try:
            self._model = Library.from_str(model)
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"this is not a BPE tokenizer of the `tokenizers` library ({error}); "
                              f"prepare the corpus again") from None
        self._model.encode_special_tokens = True    # in a text, <|endoftext|> is 13 characters
        self.vocab = self._model.get_vocab_size()
        self._asked, spelled = end, self._model.token_to_id(END_OF_TEXT)
        self.end = spelled if end is None else end
        if self.end is None or not 0 <= self.end < self.vocab:
            raise ConfigError(f"this tokenizer has {self.vocab:,} tokens, and {self.end} is none that "
                              f"can end a document; say eos_token_id in config.json")

    @classmethod
    def build(cls, vocab: int, texts: Texts, cache_dir: Path) -> "BPE":
        """Learn `vocab` entries from `texts`, or take them from the cache: they are kept under the
        texts' own hash."""
        if vocab < 257:
            raise ConfigError(f"model.vocab={vocab} is too small for data.tokenizer=bpe, which "
                              f"starts from 256 bytes and {END_OF_TEXT}; use at least 257 (8192 is "
                              f"usual), or data.tokenizer=bytes")
        digest = hashlib.sha256(f"bpe 3 {vocab}\n".encode())
        for text in _first(texts(), BPE_TRAINING_CHARS):
            digest.update(text.encode())
        cached = cache_dir / f"bpe-{vocab}-{digest.hexdigest()[:32]}.json"
        try:
            model = records.read(cached)["model"]
        except ConfigError as error:
            if os.path.lexists(cached):
                warnings.warn(f"{error}. Its entries are learned again", stacklevel=2)
            model = _train(_first(texts(), BPE_TRAINING_CHARS), vocab)
            cache_dir.mkdir(parents=True, exist_ok=True)
            # whose texts were private, has entries that are
            write_atomically(cached, records.sealed({"model": model}), 0o600)
        return cls(model)

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        # The library drops ids that it does not know; here they show, as the cut character of a
        # byte model does.
        runs = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab)
        return "".join(self._model.decode(list(run), skip_special_tokens=False) if known else
                       "\ufffd" * len(list(run)) for known, run in runs)

    def to_dict(self) -> dict[str, Any]:
        own = {} if self._asked is None else {"end": self._asked}
        return {"name": self.name, "model": json.loads(self._model.to_str()), **own}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BPE":
        return cls(json.dumps(values.get("model")), values.get("end"))


class GPT2(Named):
    """GPT-2's own vocabulary through `tiktoken`, from its cache or the network."""

    name = "gpt2"
    default_vocab = 50257

    def __init__(self):
        try:
            import tiktoken

            self._model = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise ConfigError("data.tokenizer=gpt2 needs the package `tiktoken`; pip install "
                              "'lpkit[data]', or use data.tokenizer=bpe, which is trained on the "
                              "source") from None
        except Exception as error:  # requests' errors, a bad checksum, a proxy's page
            raise ConfigError(f"the files of data.tokenizer=gpt2 are not in tiktoken's cache and "
                              f"cannot be fetched ({type(error).__name__}); go online once, or use "
                              f"data.tokenizer=bpe, which is trained on the source") from None
        self.vocab = self._model.n_vocab
        self.end = self._model.eot_token

    def encode(self, text: str) -> list[int]:
        return self._model.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        parts = (self._model.decode_single_token_bytes(i) if 0 <= i < self.vocab else b"\xff"
                 for i in map(int, ids))
        return b"".join(parts).decode(errors="replace")


TOKENIZERS = {"bytes": Bytes, "bpe": BPE, "gpt2": GPT2}


class OfFolder:
    """The tokenizer of a run, or of a folder of transformers, in the place of a row."""

    def __init__(self, folder: Path):
        said, path = records.of_others(folder / FILE), folder / "config.json"
        if records.SUM in said:
            said = records.read(folder / FILE)
        else:               # the library's own
            end = records.of_others(path).get("eos_token_id") if path.is_file() else None
            said = {"name": "bpe", "model": said, "end": end[0] if isinstance(end, list) else end}
        self.tokenizer = tokenizer_from_dict(said)
        self.default_vocab = self.tokenizer.vocab

    def build(self, vocab: int, texts: Texts, cache_dir: Path) -> Tokenizer:
        return self.tokenizer


def builder(name: str) -> Any:
    """Finds what `data.tokenizer` names: a row, or a folder's own. Raises ConfigError."""
    if name not in TOKENIZERS and (expanded(name) / FILE).is_file():
        return OfFolder(expanded(name))
    return pick(TOKENIZERS, name, "tokenizer")


def identity(name: str, kind: Any) -> str:
    """Returns what tells `kind`, the builder of that name, from others."""
    return records.digest(kind.tokenizer.to_dict()) if isinstance(kind, OfFolder) else name


def tokenizer_from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` described; a checkpoint keeps it, so that sampling needs no
    corpus."""
    return pick(TOKENIZERS, str(values.get("name")), "tokenizer").from_dict(values)


def _first(texts: Iterator[str], chars: int) -> Iterator[str]:
    for text in texts:
        yield text[:chars]
        chars -= len(text)
        if chars <= 0:
            return


def _train(texts: Iterator[str], vocab: int) -> str:
    """Learns a vocabulary in a process that ends with this function, however it ends."""
    source, asks = os.pipe()
    answers, target = os.pipe()
    command = [sys.executable, "-P", LEARN, source, target, vocab, END_OF_TEXT]
    with Children().start(command, new_folder(), fds=[source, target]) as keeper:
        os.close(source)
        os.close(target)
        with open(answers, encoding="utf-8") as learned:
            with contextlib.suppress(BrokenPipeError), open(asks, "w", encoding="utf-8") as told:
                told.writelines(f"{json.dumps(part)}\n" for part in texts)
            model = learned.read()
        code = keeper.wait()
    if code:
        raise ConfigError(f"learning {vocab:,} entries of data.tokenizer=bpe broke off with exit "
                          f"code {code} (137: memory ran out); use a smaller model.vocab, less "
                          f"text, or data.tokenizer=bytes")
    return model
