"""A safe subset of YAML for settings: mappings, lists and plain values.

Refused are anchors and aliases (a few hundred bytes of them can expand to more than any memory),
duplicate keys (PyYAML keeps the last), tags, integers in other bases, deep nesting and large texts.
"""

import re
from pathlib import Path
from typing import Any

import yaml

from lpkit.errors import ConfigError, named, shown
from lpkit.files import read_text

MOST_CHARACTERS = 1 << 16
DEEPEST = 16
OTHER_BASE = re.compile(r".*:.*|[-+]?0[0-7_]+")     # YAML 1.1 reads 1:30 as 90, and 010 as 8


def read_yaml(path: Path, rule: str = "") -> Any:
    """Returns the values of a YAML file; {} for an empty file. Raises ConfigError, whose message
    names the file and the line, and ends with `rule`: a sentence that says what such a file
    contains."""
    try:
        return parse_yaml(read_text(path, MOST_CHARACTERS), named(path))
    except ConfigError as error:
        raise ConfigError(f"{error}{rule and f'; {rule}'}") from None


def parse_yaml(text: str, where: str = "the text") -> Any:
    """Return the values of a YAML text; {} for an empty text. `where`: the name of the text in
    messages. Raises ConfigError."""
    if not isinstance(text, str):
        raise ConfigError(f"{where} must be YAML, got {shown(text)}")
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{where} has {len(text):,} characters, and YAML is read up to "
                          f"{MOST_CHARACTERS:,}; shorten it")
    try:
        values = yaml.load(text, _Plain)    # a restricted SafeLoader: tags cannot make objects
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{where} is not valid YAML, line {mark.line + 1}: "
                          f"{_short(error.problem)}; write plain settings, as `key: value`"
                          ) from None
    except (yaml.YAMLError, ValueError) as error:   # invalid characters, numbers and dates
        raise ConfigError(f"{where} is not valid YAML: {_short(error)}") from None
    return {} if values is None else values


def _short(words: object) -> str:
    """Return a message of PyYAML in one line of at most about 120 characters."""
    text = " ".join(str(words).split())
    return text if len(text) < 120 else f"{text[:120]}..."


class _Refused(yaml.MarkedYAMLError):
    """An error for valid YAML that settings do not need."""


class _Plain(yaml.SafeLoader):
    """A SafeLoader that raises _Refused for YAML outside of the subset."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Refuse anchors, aliases, tags, deep nesting, and numbers in base 60 or 8."""
        event = self.peek_event()
        tag = getattr(event, "tag", None)
        for wrong, words in ((event.anchor is not None, "anchors and aliases are not read"),
                             (tag not in (None, "!"), f"the tag {tag} is not read"),
                             (self.depth > DEEPEST, f"it nests more than {DEEPEST} deep")):
            if wrong:
                raise _Refused(problem=words, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node.tag.endswith((":int", ":float")) and OTHER_BASE.fullmatch(node.value):
            raise _Refused(problem=f"YAML reads {_short(node.value)} in base 60 or 8",
                           problem_mark=event.start_mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Refuse keys that are no words, merge keys (<<), and keys that are given twice."""
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                raise _Refused(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in seen:
                raise _Refused(problem=f"the key {key.value} is there twice",
                               problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
