"""YAML files of configs as people and their tools write them: by what YAML 1.1 makes of a word, by
kind, by encoding, by size.

Only these cases catch: a value of a file that becomes another setting, or that runs code.
"""

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lpkit.config import Config, flat
from lpkit.errors import ConfigError
from lpkit.presets import resolve

CALLED: list[str] = []      # what a tag has called


def call(*words: str) -> None:
    """A tag must never reach this."""
    CALLED.append(words)


# A name, the file, and its settings as a person reads them; or a piece of the sentence that refuses
# it.
FILES: list[tuple[str, str | bytes, dict[str, Any] | str]] = [
    ("plain nested settings", "model:\n  layers: 3\n  width: 64\nsteps: 7\n",
     {"model.layers": 3, "model.width": 64, "steps": 7}),
    ("flow style", "{model: {layers: 3, width: 64}, steps: 7}",
     {"model.layers": 3, "model.width": 64, "steps": 7}),
    ("JSON", '{"model": {"layers": 3}, "steps": 7}', {"model.layers": 3, "steps": 7}),
    ("an empty file", "", {}),
    ("comments alone", "# to do\n\n# later\n", {}),
    ("a document marker", "---\nsteps: 7\n...\n", {"steps": 7}),
    ("two documents", "steps: 7\n---\nsteps: 8\n", "document"),
    ("a %YAML directive", "%YAML 1.1\n---\nsteps: 7\n", {"steps": 7}),
    ("a directive of YAML 2", "%YAML 2.0\n---\nsteps: 7\n", "version"),
    ("a float written 1e-3, which is text in YAML 1.1", "optimizer: {name: adamw, lr: 1e-3}",
     {"optimizer.lr": 1e-3}),
    ("a float written 1.0e-3", "optimizer: {name: adamw, lr: 1.0e-3}", {"optimizer.lr": 1e-3}),
    ("a whole number written 1e3", "steps: 1e3", {"steps": 1000}),
    ("a whole number written 7.0", "steps: 7.0", {"steps": 7}),
    ("a whole number with underscores", "steps: 1_000", {"steps": 1000}),
    ("a whole number in quotes", "steps: '7'", {"steps": 7}),
    ("a fraction for a whole number", "steps: 7.5", "steps must be a whole number, got 7.5"),
    ("an octal number", "steps: 010", "base 60 or 8"),
    ("a hexadecimal number", "steps: 0x10", {"steps": 16}),
    ("a sexagesimal number", "steps: 1:30", "base 60 or 8"),
    ("yes for a switch", "model: {tied: yes}", {"model.tied": True}),
    ("off for a switch", "model: {tied: off}", {"model.tied": False}),
    ("no for a name", "optimizer: no", "optimizer must name one of"),
    ("a switch where a number is due", "steps: true", "steps must be a whole number, got True"),
    ("a number where a switch is due", "model: {tied: 2}",
     "model.tied must be true or false, got 2"),
    ("text where a number is due", "steps: many", "steps must be a whole number, got 'many'"),
    ("a list where a number is due", "steps: [1, 2]", "steps must be a whole number, got [1, 2]"),
    ("null where a number is due", "steps: null", "steps must be a whole number, got None"),
    ("null where none is allowed", "model: {kv_heads: ~}", {"model.kv_heads": None}),
    ("a key without a value", "model:\n  kv_heads:\n  layers: 3\n",
     {"model.kv_heads": None, "model.layers": 3}),
    ("a group without settings", "model:\n", "model must be a mapping"),
    ("a group that is a list", "model: [layers, 3]", "model must be a mapping"),
    ("the top level a list", "- steps: 7\n", "must be a mapping"),
    ("the top level a word", "steps=7", "must be a mapping"),
    ("infinity", "optimizer: {name: adamw, lr: .inf}", "lr"),
    ("not a number", "optimizer: {name: adamw, lr: .nan}", "lr"),
    ("a huge number", f"steps: {'9' * 400}", "at most"),
    ("a negative count", "steps: -1", "steps must be positive"),
    ("a date", "data: {source: 2026-11-28}", "data.source must be text"),
    ("a duplicate key", "steps: 7\nsteps: 8\n", "the key steps is there twice"),
    ("a duplicate key below", "model: {layers: 3, width: 64, layers: 4}",
     "the key layers is there twice"),
    ("an anchor and an alias", "steps: &n 7\nglobal_batch: *n\n",
     "anchors and aliases are not read"),
    ("a merge key", "<<: {steps: 7}\n", "a key must be a word"),
    ("a tag that calls a function", "steps: !!python/object/apply:tests.inputs.yamls.call ['gone']",
     "the tag"),
    ("a tag of a kind", "steps: !!int '7'", "the tag"),
    ("an unknown key", "stepz: 7\n", "did you mean 'steps'?"),
    ("an unknown key below", "model: {layes: 3}", "did you mean 'layers'?"),
    ("a dotted key", "model.layers: 3\n", "there is no setting 'model.layers'"),
    ("a tab for indentation", "model:\n\tlayers: 3\n", "line 2"),
    ("a tab after a colon, which YAML 1.1 does not take", "steps:\t7\n", "cannot start any token"),
    ("deep nesting", "model: " + "{a: " * 40 + "1" + "}" * 40, "deep"),
    ("another version", "version: 99\nsteps: 7\n", "version 99"),
    ("UTF-8 with a mark", b"\xef\xbb\xbfsteps: 7\n", {"steps": 7}),
    ("UTF-16", "steps: 7\n".encode("utf-16"), "UTF-8"),
    ("Latin-1", "data: {source: é.txt}\n".encode("latin-1"), "UTF-8"),
    ("line ends of Windows", b"model:\r\n  layers: 3\r\nsteps: 7\r\n",
     {"model.layers": 3, "steps": 7}),
    ("a NUL", b"steps: 7\0\n", "YAML"),
]


def cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, file, due in FILES:
        yield name, functools.partial(tried, file, due)


def tried(file: str | bytes, due: dict[str, Any] | str) -> str:
    """Returns "right" or the sentence of the refusal."""
    before = len(CALLED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.yaml"
        path.write_bytes(file if isinstance(file, bytes) else file.encode())
        try:
            settings = flat(resolve(str(path)))
        except ConfigError as error:
            result = str(error)
        else:
            result = "right"
            # every other setting keeps its default
            assert (isinstance(due, dict) and settings == flat(Config())
                    | due), f"taken without a word: {file!r:.80}"
    assert len(CALLED) == before, "a tag has called a function"
    assert result == "right" if isinstance(due, dict) else due in result, (
        f"another reason: {result}")
    assert result == "right" or ("\n" not in result and len(result) < 1000), result
    return result
