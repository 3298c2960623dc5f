"""Text to token ids and back. To add one: a class that satisfies contracts.Tokenizer with `build`,
and a row below.

Every tokenizer has an `end` token that closes each document. Text produces no special token: where
it spells `<|endoftext|>`, it gets the ordinary tokens of these characters, unless `special` is set.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lpkit import records
from lpkit.contracts import Tokenizer
from lpkit.errors import ConfigError, pick, shown
from lpkit.files import PACKAGE, expanded, write_atomically
from lpkit.processes import Children, new_folder

END_OF_TEXT = "<|endoftext|>"
FILE, TEMPLATE = "tokenizer.json", "chat_template.jinja"
# files of transformers that say how FILE is used; of the first only IDS
CONFIG, GENERATION, TOKENS, MAP = SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What a tokenizer should give back; a first space may be lost.
PROBES = ("def import(folder):\n\treturn [x**2 for x in folder if x != 0]  # Never `None`\n",
          "", " ", "a", "A", "\n", "\t\n", "a\r\nb\r\n", " one", "one  two   three \n", "Hello, World!",
          "3.14159e-10 + 0x1F", "caf\u00e9, \u00dcber \u20ac5", "\u041f\u0440\u0438\u0432\u0435\u0442", "\u6f22\u5b57\u304b\u306a\u3002",
          "\U0001f642\u200d\u2642\ufe0f", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "<|endoftext|></s>[SEP]<eos>", "{\"a\": [1, null]}",
          "one two\n" * 999)
LEARN = PACKAGE / "datasets" / "learn_bpe.py"
BPE_TRAINING_CHARS = 1 << 26    # merges are learned from the first 64 Mi of the training split
Texts = Callable[[], Iterator[str]]


class Named:
    """A tokenizer whose name says everything about it, because it learns nothing. `ends`: the ids
    that end what a model writes."""

    name: str
    ends: frozenset[int] = frozenset()

    @classmethod
    def build(cls, vocab: int, texts: Texts, cache_dir: Path) -> Tokenizer:
        return cls()

    def encode_array(self, text: str) -> np.ndarray:
        return np.array(self.encode(text), np.uint32)

    def part(self, text: str, special: bool, continued: bool) -> tuple[np.ndarray, str]:
        """Returns the ids of a part of a document, `continued` where it is not the first, and where
        they decode to other text (empty: nowhere). Raises ConfigError where that is much."""
        return np.array(self.encode(text, True)) if special else self.encode_array(text), ""

    def prompt(self, text: str, special: bool = False) -> list[int]:
        """Returns the ids of a text that a model is to continue."""
        return self.encode(text, special)

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

    def encode(self, text: str, special: bool = False) -> list[int]:
        if special:
            raise ConfigError("the tokenizer bytes has no special tokens; choose another one, or "
                              "leave special_tokens out")
        return list(text.encode())

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        # A model may cut a character in two, or have a larger vocabulary: 0xff is never UTF-8, so
        # both show as U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode(errors="replace")


class BPE(Named):
    """A tokenizer of the `tokenizers` library: the byte-level BPE that is learned here, with GPT-2's
    pre-tokenisation (Sennrich et al. 2016), in which every text has tokens and decodes to itself; or
    a folder's, of any kind. `values`: "model", the library's own JSON; of a folder "files", its
    SETTINGS and TEMPLATE."""

    name = "bpe"
    default_vocab = 8192

    def __init__(self, values: Mapping[str, Any]):
        from tokenizers import Tokenizer as Library

        try:
            self._model = model = Library.from_str(json.dumps(values.get("model")))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"this is not a tokenizer of the `tokenizers` library ({error}); save "
                              f"it again, or prepare the corpus again") from None
        model.no_truncation()       # it was saved as it was last used: cutting, padding, by chance
        model.no_padding()
        if hasattr(model.model, "dropout"):
            model.model.dropout = None
        self.name, ids = type(model.model).__name__.lower(), {*model.get_vocab().values()}
        self.vocab, self._values = 1 + max(ids, default=-1), {"name": self.name, **values}
        files = values.get("files", {})
        said, config = files.get(TOKENS, {}), files.get(CONFIG, {})
        self._adds = {key: self._token(f"{key}_token") if said[f"add_{key}_token"] else []
                      for key in ("bos", "eos") if f"add_{key}_token" in said}
        ends, last = _ends(config, CONFIG), _ends(files.get(GENERATION, {}), GENERATION)
        known = [values["end"]] if values.get("end") is not None else ends or last
        self.end = [*(known or self._token("eos_token")), model.token_to_id(END_OF_TEXT)][0]
        if self.end not in ids:
            raise ConfigError(f"this tokenizer has {self.vocab:,} tokens, and {self.end} is none that "
                              f"can end a document; say eos_token_id in {CONFIG}")
        self._values |= {"end": self.end} if files else {}
        self.ends = frozenset(last if GENERATION in files else ends if "eos_token_id" in config else
                              [self.end] * ("end" in self._values))     # a folder's
        model.add_special_tokens([model.id_to_token(self.end)])
        inner = values["model"]["model"]
        unknown = inner.get("unk_id", model.token_to_id(inner.get("unk_token") or ""))
        special = {i for i, one in model.get_added_tokens_decoder().items() if one.special}
        self._special = special - {unknown} | {self.end}

    def _token(self, key: str) -> list[int]:
        """Returns the id of the token that `key` spells, if any. Raises ConfigError."""
        files = self._values.get("files", {})
        said = {**files.get(MAP, {}), **files.get(TOKENS, {})}.get(key)
        text = said.get("content") if isinstance(said, Mapping) else said
        found = self._model.token_to_id(text) if isinstance(text, str) else None
        if found is None and said is not None:
            raise ConfigError(f"{TOKENS} has {key}={shown(said)}, which is no token of {FILE}")
        return [found] if said is not None else []

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
        return cls({"model": json.loads(model)})

    def encode(self, text: str, special: bool = False) -> list[int]:
        self._model.encode_special_tokens = not special
        try:
            ids = self._model.encode(text, add_special_tokens=False).ids
        except Exception as error:
            raise ConfigError(f"this tokenizer has no tokens for {shown(text)} ({error})") from None
        if not special and not self._special.isdisjoint(ids):
            found = self._model.id_to_token(next(i for i in ids if i in self._special))
            raise ConfigError(f"a text spells {shown(found)}, which is a special token of this "
                              f"tokenizer in every text; take it out, or set special_tokens=true "
                              f"if it is meant")
        return ids

    def part(self, text: str, special: bool, continued: bool) -> tuple[np.ndarray, str]:
        lead, whole = self.encode("\n") if continued else [], text
        if lead and self.encode("\na") != [*lead, *self.encode("a")]:  # it puts a space before a text
            whole = f"\n{text}"
        ids, lead = self.encode(whole), lead[:len(lead) * (whole != text)]
        if ids[:len(lead)] != lead:     # the break is part of a longer token
            return self.part(text, special, False)[0], f"a space is put before {shown(text[:30])}"
        found, back = "", self._model.decode(ids, skip_special_tokens=False)
        if back != whole:
            at = next((i for i, (a, b) in enumerate(zip(whole, back)) if a != b), len(back))
            found = f"{shown(whole[at:at + 30])} comes back as {shown(back[at:at + 30])}"
            one, two = (unicodedata.normalize("NFC", t).replace("\u2581", " ") for t in (whole, back))
            if one not in (two, f" {two}") and two != f" {one}":
                raise ConfigError(f"this tokenizer decodes to another text ({found}), whose loss it "
                                  f"would be; choose another data.tokenizer, or other text")
        ids = self.encode(whole, True) if special else ids
        return np.array(ids[len(lead):], np.uint32), found

    def prompt(self, text: str, special: bool = False) -> list[int]:
        ids = self.encode(text, special)
        if self._adds:
            return [*self._adds.get("bos", []), *ids, *self._adds.get("eos", [])]
        return self._model.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        # The library drops ids that it does not know; here they show, as the cut character of a
        # byte model does.
        runs = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab)
        return "".join(self._model.decode(list(run), skip_special_tokens=False) if known else
                       "\ufffd" * len(list(run)) for known, run in runs)

    def to_dict(self) -> dict[str, Any]:
        return self._values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "BPE":
        return cls({key: values[key] for key in ("name", "model", "end", "files") if key in values})


def _ends(file: Mapping[str, Any], name: str) -> list[int]:
    """Returns its eos_token_id as a list. Raises ConfigError."""
    said = file.get("eos_token_id")
    ids = said if isinstance(said, list) else [said] * (said is not None)
    if said == [] or not all(type(one) is int and one >= 0 for one in ids):
        raise ConfigError(f"{name} has eos_token_id={shown(said)}, which must be the number of a "
                          f"token, or a list of some; correct it, or leave it out")
    return ids


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

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self._model.encode(text, allowed_special="all" if special else set(),
                                  disallowed_special=())

    def decode(self, ids: Iterable[int]) -> str:
        parts = (self._model.decode_single_token_bytes(i) if 0 <= i < self.vocab else b"\xff"
                 for i in map(int, ids))
        return b"".join(parts).decode(errors="replace")


TOKENIZERS = {"bytes": Bytes, "bpe": BPE, "gpt2": GPT2}


class OfFolder:
    """The tokenizer of a run, or of a folder of transformers, in the place of a row."""

    def __init__(self, folder: Path):
        said = records.of_others(folder / FILE)
        if records.SUM in said:
            said = records.read(folder / FILE)
        else:               # the library's own
            files = {name: records.of_others(folder / name) for name in SETTINGS
                     if (folder / name).is_file()}
            files[CONFIG] = {key: files[CONFIG][key] for key in IDS if key in files.get(CONFIG, {})}
            files.get(TOKENS, {}).pop("auto_map", None)     # code of others
            if (folder / TEMPLATE).is_file():
                files[TEMPLATE] = records.text_of(folder / TEMPLATE)
            said = {"model": said, "files": files}
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
    name = "bpe" if "model" in values else str(values.get("name"))
    return pick(TOKENIZERS, name, "tokenizer").from_dict(values)


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
