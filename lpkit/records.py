"""JSON that shows when it is not what was written: a flipped bit, a lost half, another hand.

An object carries the SHA-256 of the rest of it, a line of many the CRC-32. Both are of the
canonical text (sorted keys, no spaces), so only what changes a value is damage.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError, DamagedError
from lpkit.files import read_text, write_atomically

SUM, LINE_SUM = "sha256", "crc32"
MOST_BYTES = 1 << 28        # a header of tokens holds its tokenizer


def plain(value: Any) -> Any:
    """As it comes back from JSON, which has no tuples, no numbers as keys, and no NaN: null."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def _line_sum(value: Any) -> str:
    return f"{zlib.crc32(canonical(value)):08x}"


def sealed(value: Mapping[str, Any]) -> str:
    value = plain(value)
    return json.dumps({**value, SUM: digest(value)}, indent=1)


def unsealed(text: str, path: Path) -> dict[str, Any]:
    """What `sealed` was given. Raises DamagedError, which names `path`."""
    try:
        value = json.loads(text)
        due = value.pop(SUM)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} is not a whole record ({type(error).__name__}: {error}); it "
                           f"was cut off or altered") from None
    if digest(value) != due:
        raise DamagedError(f"{path} does not match its checksum; it was altered after it was "
                           f"written")
    return value


def write(path: Path, value: Mapping[str, Any]) -> None:
    """Whole or not at all; NaN becomes null. Raises OSError."""
    write_atomically(path, sealed(value))


def read(path: Path) -> dict[str, Any]:
    """Raises DamagedError, also for a file that is not there or cannot be read."""
    return unsealed(text_of(path), path)


def text_of(path: Path) -> str:
    """Raises DamagedError."""
    try:
        return read_text(path, MOST_BYTES)
    except ConfigError as error:
        raise DamagedError(str(error)) from None


def line(value: Mapping[str, Any]) -> str:
    value = plain(value)
    return json.dumps({**value, LINE_SUM: _line_sum(value)}) + "\n"


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines that are as they were written, and a sentence for each that is not. Of a missing
    file, none."""
    good, problems = [], []
    text = path.read_bytes() if path.is_file() else b""
    for number, one in enumerate(text.splitlines(keepends=True), 1):
        try:
            value = json.loads(one)
            if value.pop(LINE_SUM) != _line_sum(value) or not one.endswith(b"\n"):
                raise ValueError("it does not match its checksum")
            good.append(value)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = "cut off, as a kill leaves it"
            if one.endswith(b"\n"):
                why = f"damaged ({type(error).__name__}: {error})"
            problems.append(f"{path}, line {number}, is {why}; it is passed over")
    return good, problems
