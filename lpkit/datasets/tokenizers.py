"""Tokenizers convert text to token ids and back. To add a tokenizer, write a subclass of `Named`,
and add a row to TOKENIZERS.

Each tokenizer has an `end` token that closes a document. Unless `special` is set, a text never
becomes a special token: the text `<|endoftext|>` becomes the ordinary tokens of its characters.
"""

import contextlib
import hashlib
import itertools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lpkit import records
from lpkit.contracts import Tokenizer
from lpkit.errors import ConfigError, named, pick, shown
from lpkit.files import PACKAGE, expanded, write_atomically
from lpkit.processes import Children, new_folder

END_OF_TEXT = "<|endoftext|>"
# The `tokenizers` library writes FILE. The files SETTINGS of the `transformers` library say how a
# model uses the tokenizer.
FILE = "tokenizer.json"
CONFIG, GENERATION, TOKENS, MAP, _ = SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja")
# texts with which a tokenizer from elsewhere is tried
PROBES = ("~a~A~one~two ~\n~\t\n~a\r\nb\r\n~one  two   three \n~Hello, World!~3.14e-10 + 0x1F~"
          "def f(x):\n\treturn [y**2 for y in x if y != 0]  # Never `None`\n~{\"a\": [1, null]}~"
          "caf\u00e9~\u20ac~\u0416\u044b~\u6f22\u304b~\u0928\u092e~\U0001f642\u200d\u2642~"
          + "a b\n" * 999).split("~")
# texts on which a bad regular expression would backtrack for a very long time
STRAINS = [f"{character * 99}\x1b{character * 999}" for character in "aA1 \n._"]
# most bytes of FILE, and most ids of a vocabulary; no tokenizer on the hub is as large
MOST_BYTES, MOST_IDS = 1 << 26, 1 << 20
# A script that tries a tokenizer in a process with 10 s of CPU time and 4 GiB of addresses, because
# a signal cannot interrupt the library.
TRY = """import json, resource as r, sys, tokenizers
for of, most in ((r.RLIMIT_CPU, 10), (r.RLIMIT_AS, 1 << 32))[:1 + (sys.platform == "linux")]:
    r.setrlimit(of, (min(most, (hard := r.getrlimit(of)[1]) % 2**63), hard))
library, *texts = json.load(sys.stdin)
(one := tokenizers.Tokenizer.from_str(library)).no_truncation(), one.no_padding()
for text in texts: one.decode(one.encode(text).ids)"""
LEARN = PACKAGE / "datasets" / "learn_bpe.py"
BPE_TRAINING_CHARS = 1 << 26    # merges are learned from the first 64 Mi of the training split
Texts = Callable[[], Iterator[str]]


class Named:
    """The base class of tokenizers, for a tokenizer that learns nothing."""

    name: str
    ends: frozenset[int] = frozenset()      # ids with which a model ends a text that it generates

    @classmethod
    def build(cls, vocab: int, texts: Texts, cache_dir: Path) -> Tokenizer:
        """Return the tokenizer for a corpus. A tokenizer that learns overrides this."""
        return cls()

    def part(self, text: str, special: bool, continued: bool) -> tuple[np.ndarray, str]:
        """Return the ids of a part of a document, and a description of the first place where the
        ids decode to another text; "" if there is none. `special`: texts may spell special tokens.
        `continued`: the part is not the first part of its document."""
        return np.array(self.encode(text, special), np.uint32), ""

    def prompt(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a prompt, to which a tokenizer may add a token that begins a text."""
        return self.encode(text, special)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, from which `tokenizer_from_dict` returns the tokenizer."""
        return {"name": self.name}


class Bytes(Named):
    """A tokenizer with one token for each byte of UTF-8. Token 0 (the NUL byte) ends a document,
    because no source accepts a NUL byte inside a text."""

    name = "bytes"
    default_vocab = 256
    vocab = 256
    end = 0

    def encode(self, text: str, special: bool = False) -> list[int]:
        if special:
            raise ConfigError("bytes have no special tokens; leave special_tokens out")
        return list(text.encode())

    def part(self, text: str, special: bool, continued: bool) -> tuple[np.ndarray, str]:
        self.encode("", special)
        return np.frombuffer(text.encode(), np.uint8), ""

    def decode(self, ids: Iterable[int]) -> str:
        # An id that is not a byte becomes 0xff, which UTF-8 never contains. Like an incomplete
        # character, it decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode(errors="replace")


class BPE(Named):
    """A tokenizer of the `tokenizers` library: either a byte-level BPE (Sennrich et al. 2016) that
    lpkit learned with GPT-2's pre-tokenisation, or any tokenizer of a transformers folder. Ids of
    the learned BPE always decode to the original text.

    `values`: "model" is the library's JSON; "files" are the SETTINGS files of a folder, by name;
    "end" is the id of the end token, if it is known. Raises ConfigError for a tokenizer that the
    library cannot use, or without a token that ends a document.
    """

    name = "bpe"
    default_vocab = 8192

    def __init__(self, values: Mapping[str, Any]):
        from tokenizers import Tokenizer as Library

        self._model = model = _by_library(Library.from_str, json.dumps(values.get("model")))
        model.no_truncation()       # a saved tokenizer has the settings of its last use
        model.no_padding()
        # raises ConfigError if the tokenizer has no token for unknown characters
        _by_library(model.encode, "\U0010ffff")
        if hasattr(model.model, "dropout"):     # no random dropout of merges
            model.model.dropout = None
        self._values = {"name": type(model.model).__name__.lower(), **values}
        self.name, self._files = self._values["name"], values.get("files", {})
        self.vocab = 1 + max(model.get_vocab().values(), default=-1)
        if self.vocab > MOST_IDS:
            raise ConfigError(f"this tokenizer has an id of {self.vocab - 1:,}, and at most "
                              f"{MOST_IDS:,} are read; number its {model.get_vocab_size():,} "
                              f"entries without gaps")
        first, last = self._ids(CONFIG, "eos_token_id"), self._ids(GENERATION, "eos_token_id")
        self.ends = frozenset(last if GENERATION in self._files else first)
        ends = first or last or self._ids(TOKENS, "eos_token") or self._ids(MAP, "eos_token")
        self.end = values.get("end", [*ends, model.token_to_id(END_OF_TEXT)][0])
        if self.end is None:
            raise ConfigError(f"no token of this tokenizer is known to end a document; say "
                              f"eos_token_id in {CONFIG}")
        model.add_special_tokens([model.id_to_token(self.end)])
        added = model.get_added_tokens_decoder()
        self._special = {self.end, *(i for i, token in added.items() if token.special)}

    def _ids(self, name: str, key: str) -> list[int]:
        """Return the ids of the tokens that `key` in the file `name` lists, as ids or as texts.
        Raises ConfigError if one of them is not a token of the vocabulary."""
        setting = self._files.get(name, {}).get(key)
        each = setting if isinstance(setting, list) else [setting] * (setting is not None)
        if not key.endswith("_id"):
            texts = [token.get("content") if isinstance(token, Mapping) else token
                     for token in each]
            each = [self._model.token_to_id(text) if isinstance(text, str) else None
                    for text in texts]
        if setting == [] or not all(type(number) is int and 0 <= number < self.vocab and
                                 self._model.id_to_token(number) is not None for number in each):
            raise ConfigError(f"{name} has {key}={shown(setting)}, which is no token of {FILE}; "
                              f"correct it, or leave it out")
        return each

    @classmethod
    def build(cls, vocab: int, texts: Texts, cache_dir: Path) -> "BPE":
        """Return a BPE with `vocab` entries that are learned from `texts`. The entries are cached
        in `cache_dir` under the hash of the texts, and read from there if they exist."""
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
            # mode 0600, because entries learned from private texts are private
            write_atomically(cached, records.sealed({"model": model}), 0o600)
        return cls({"model": json.loads(model)})

    def encode(self, text: str, special: bool = False) -> list[int]:
        self._model.encode_special_tokens = not special
        ids = _by_library(self._model.encode, text, add_special_tokens=False).ids
        if not special and (special_ids := self._special.intersection(ids)):
            token = self._model.id_to_token(min(special_ids))
            raise ConfigError(f"a text gives the special token {token}; "
                              f"remove it from the text, or set special_tokens=true")
        return ids

    def part(self, text: str, special: bool, continued: bool) -> tuple[np.ndarray, str]:
        # Some tokenizers put a space before a text. To avoid it inside a document, a later part is
        # encoded after a line break, whose tokens (`lead`) are then removed.
        lead = self.encode("\n", True) if continued else []
        if self.encode("\na", True) == [*lead, *self.encode("a", True)]:
            lead = []       # this tokenizer puts nothing before a text
        whole = "\n" * bool(lead) + text
        ids = self.encode(whole, special)
        back = _by_library(self._model.decode, ids, skip_special_tokens=False)
        # If the line break became part of a longer token, it cannot be removed: the part is encoded
        # without it, and decodes with a space in front.
        if ids[:len(lead)] != lead:
            lead, ids, back = [], self.encode(text, special), f"\n {text}"
        at = next((i for i, (a, b) in enumerate(zip(whole, back)) if a != b), len(back))
        difference = f"{shown(whole[at:at + 30])} comes back as {shown(back[at:at + 30])}"
        return np.array(ids[len(lead):], np.uint32), difference * (back != whole)

    def prompt(self, text: str, special: bool = False) -> list[int]:
        self.encode(text, special)      # raises if the text has special tokens that are not allowed
        return _by_library(self._model.encode, text).ids

    def decode(self, ids: Iterable[int]) -> str:
        # the library drops ids that are not in the vocabulary; here they become U+FFFD
        runs = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab)
        return "".join(
            _by_library(self._model.decode, list(run), skip_special_tokens=False) if known
            else "\ufffd" * len(list(run)) for known, run in runs)

    def to_dict(self) -> dict[str, Any]:
        return self._values


class GPT2(Named):
    """GPT-2's tokenizer from the library `tiktoken`, which reads the vocabulary from its cache or
    from the network."""

    name = "gpt2"
    default_vocab = 50257

    def __init__(self):
        try:
            import tiktoken

            self._model = tiktoken.get_encoding("gpt2")
        except Exception as error:  # no package, network errors, a bad checksum, a proxy's page
            raise ConfigError(f"data.tokenizer=gpt2 needs `pip install tiktoken`, and its files, "
                              f"fetched once ({type(error).__name__}); or use "
                              f"data.tokenizer=bpe") from None
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


def of_folder(folder: Path) -> Tokenizer:
    """Return the tokenizer in a run folder, or in a folder of the `transformers` library. Warns if
    it decodes to another text. Raises ConfigError for a tokenizer that cannot be used."""
    record = records.of_others(folder / FILE, MOST_BYTES)
    if records.SUM in record:
        return tokenizer_from_dict(records.read(folder / FILE))
    files = {name: (records.of_others if ".json" in name else records.text_of)(folder / name)
             for name in SETTINGS if os.path.lexists(folder / name)}
    files[CONFIG] = {key: token_id for key, token_id in files.get(CONFIG, {}).items()
                     if key.endswith("_token_id")}
    files.get(TOKENS, {}).pop("auto_map", None)     # "auto_map" names code to run; not kept
    _by_library(_try, json.dumps(record))
    tokenizer = BPE({"model": record, "files": files})
    for why in filter(None, (tokenizer.part(text, True, False)[1] for text in PROBES)):
        warnings.warn(f"the tokenizer of {named(folder)} decodes to another text ({why}); a loss "
                      f"is of that text, so do not compare it with losses per byte", stacklevel=3)
        break
    return tokenizer


def _try(library: str) -> None:
    """Encode and decode PROBES and STRAINS in a separate process with time and memory limits.
    `library` is the library's JSON. Raises Exception if the process fails."""
    done = subprocess.run([sys.executable, "-P", "-c", TRY], capture_output=True, text=True,
                          input=json.dumps([library, *PROBES, *STRAINS]))
    if done.returncode:
        raise Exception(done.stderr.strip().rpartition("\n")[2] or "some texts take over 10 s")


def _by_library(call: Callable, *args: Any, **named: Any) -> Any:
    """Return the result of a function of the `tokenizers` library. Raises ConfigError instead of
    the library's errors and of panics of its Rust code."""
    try:
        return call(*args, **named)
    except BaseException as error:
        if type(error).__name__ not in ("Exception", "PanicException"):
            raise
        raise ConfigError(f"this is not a tokenizer of the `tokenizers` library that reads any "
                          f"text ({shown(str(error))[1:-1]}); save it again, or use another "
                          f"tokenizer") from None


def builder(name: str) -> Any:
    """Return an object whose method `build` returns the tokenizer that `data.tokenizer` names: a
    row of TOKENIZERS, or the tokenizer of a folder. Raises ConfigError for an unknown name."""
    if name not in TOKENIZERS and os.path.lexists(expanded(name) / FILE):
        tokenizer = of_folder(expanded(name))
        return SimpleNamespace(build=lambda *_: tokenizer, default_vocab=tokenizer.vocab,
                               identity=records.digest(tokenizer.to_dict()))
    return pick(TOKENIZERS, name, "tokenizer")


def tokenizer_from_dict(values: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer whose `to_dict` returned `values`. Raises ConfigError."""
    if "model" in values:
        return BPE({key: values[key] for key in ("name", "model", "end", "files") if key in values})
    return pick(TOKENIZERS, str(values.get("name")), "tokenizer")()


def _first(texts: Iterator[str], chars: int) -> Iterator[str]:
    """Yield the first `chars` characters of the texts."""
    for text in texts:
        yield text[:chars]
        chars -= len(text)
        if chars <= 0:
            return


def _train(texts: Iterator[str], vocab: int) -> str:
    """Return the library's JSON of a BPE with `vocab` entries, learned from `texts` in a separate
    process (learn_bpe.py). The process ends when this function returns or raises."""
    source, asks = os.pipe()
    answers, target = os.pipe()
    command = [sys.executable, "-P", LEARN, source, target, vocab, END_OF_TEXT]
    with Children().start(command, new_folder(), fds=[source, target]) as keeper:
        os.close(source)
        os.close(target)
        with open(answers, encoding="utf-8") as learned:
            # a broken pipe means that the process ended; its exit code below gives the reason
            with contextlib.suppress(BrokenPipeError), open(asks, "w", encoding="utf-8") as lines:
                lines.writelines(f"{json.dumps(part)}\n" for part in texts)
            model = learned.read()
        code = keeper.wait()
    if code:
        raise ConfigError(f"learning {vocab:,} entries of data.tokenizer=bpe broke off with exit "
                          f"code {code} (137: memory ran out); use a smaller model.vocab, less "
                          f"text, or data.tokenizer=bytes")
    return model
