"""Sources of text. A source yields documents in pieces, so a corpus need not fit in memory.

    python-stdlib               the standard library of the running interpreter (no download)
    a file, a folder, a glob    .txt .md .py .jsonl .parquet
    hf:owner/name[:subset]      streamed from the Hugging Face hub

A hash decides whether a document is for training or for validation. So if a document is added, no
other document moves to the other split. For a text file in a folder, the hash is of its path
relative to the folder. For a document in a .jsonl or .parquet file, and for a block of a single
text file, the hash is of the text, so that equal texts are in the same split.
"""

import contextlib
import functools
import glob
import hashlib
import io
import json
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from lpkit.errors import ConfigError, named, shown
from lpkit.files import check_regular, expanded

PIECE_CHARS = 1 << 18       # characters of a text file that are read at once
BLOCK_CHARS = 1 << 14       # characters of a block of a single text file; 1 MB has about 60 blocks
# most characters of a document in a .jsonl or .parquet file, because a document is held in memory
MOST_DOCUMENT_CHARS = 1 << 24
# most characters of a line in a .jsonl file: 4 times as many, because characters may be escaped
MOST_LINE_CHARS = 1 << 26
# Most characters that a .parquet file may unpack to: FREE_BYTES, or MOST_RATIO times the file's
# size if that is more. Text compresses by a factor of 3 to 20, but a malicious file can unpack to
# any length.
FREE_BYTES, MOST_RATIO = 1 << 26, 1000
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
PACKINGS = (".gz", ".zst", ".xz", ".bz2", ".zip")
PACKED = tuple(suffix + packing for suffix in SUFFIXES for packing in PACKINGS)
WAY_OUT = "repair or remove it, or choose the files to read with a glob"
_NOT_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


class Piece(NamedTuple):
    """A part of a document's text. A source yields the pieces of a document in order."""

    key: str        # the hash of the key decides the document's split
    text: str
    ends: bool      # True for the last piece of a document


def is_validation(key: str, val_fraction: float) -> bool:
    """Return whether a document is for validation: the hash of its key, as a number in [0, 1), is
    below the fraction. A larger fraction keeps the documents of a smaller one and adds others."""
    # "surrogateescape", because the name of a file need not be UTF-8
    digest = hashlib.sha256(key.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64


def find(source: str) -> "Source":
    """Return the source that `data.source` names: a file, a folder, a glob, hf:owner/name or
    python-stdlib. Raises ConfigError if there is nothing to read."""
    path = expanded(source)
    if source == "python-stdlib":
        return python_stdlib()
    if source.startswith("hf:"):
        return HubSource(name=source)
    with _sentences(path):
        if path.is_dir():
            return Files(name=source, files=_walk(path, SUFFIXES + PACKED))
        if path.exists():
            check_regular(path)
            return Files(name=source, files=[(path.name, path)], alone=True)
        if glob.has_magic(source):
            return Files(name=source, files=_matches(path))
    raise ConfigError(f"there is no file, folder or glob {shown(source)}; give one that exists, "
                      f"hf:owner/name, or python-stdlib, which needs no download")


@functools.cache    # because it lists about 700 files, and each run calls it twice
def python_stdlib() -> "Files":
    """Return the interpreter's standard library, without its tests and without installed
    packages."""
    root = Path(sysconfig.get_path("stdlib"))
    # _sysconfigdata is left out: the build of Python writes it, with the paths of one machine
    files = [(key, path) for key, path in _walk(root, (".py",), without=_NOT_THE_LIBRARY)
             if not path.name.startswith("_sysconfigdata")]
    return Files(name="python-stdlib", files=files, facts={"python": platform.python_version()})


@dataclass(frozen=True, kw_only=True)
class Files:
    """A source of local files."""

    name: str
    files: list[tuple[str, Path]]   # (key, path), in the order in which they are read
    # True: a single file, whose blocks are split between training and validation
    alone: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)  # more fields for the header

    def __post_init__(self):
        if not self.files:
            raise ConfigError(f"there is nothing to read in {shown(self.name)}; a source "
                              f"holds {', '.join(SUFFIXES)} files")

    def header(self) -> dict[str, Any]:
        """Return the source's fields in the header of token files. Except for the given name, they
        contain no path of this machine."""
        return {"name": self.name, "files": len(self.files), **self.facts}

    def fingerprint(self) -> list[Any]:
        """Return a JSON-ready list that changes if a file changes: keys, paths, sizes and times of
        the last change."""
        facts = []
        for key, path in self.files:
            with _sentences(path):
                stat = path.stat()
                facts.append([key, str(path.resolve()), stat.st_size, stat.st_mtime_ns])
        return facts

    def mode(self) -> int:
        """Return the widest file mode that a copy of the text may have. Other users may read the
        copy only if they may read all files of the source."""
        open_to_all = all(path.stat().st_mode & stat.S_IROTH for _, path in self.files)
        return 0o666 if open_to_all else 0o600

    def total_bytes(self) -> int | None:
        """Return the bytes of text, for the progress bar. Return None if they are unknown, as for
        compressed .parquet files."""
        if any(path.suffix.lower() == ".parquet" for _, path in self.files):
            return None
        return sum(path.stat().st_size for _, path in self.files)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of all documents. Raises ConfigError for a file that cannot be read."""
        for key, path in self.files:
            suffix = path.suffix.lower()
            with _sentences(path), _opened(path) as stream:
                if suffix in DOCUMENTS:
                    for text in DOCUMENTS[suffix](stream, path):
                        yield from _document(text)
                else:
                    size = BLOCK_CHARS if self.alone else PIECE_CHARS
                    for text, ends in _blocks(stream, path, size):
                        yield Piece(text if self.alone else key, text, ends)


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A source that streams the training split of a dataset on the Hugging Face hub. The text is
    not stored."""

    name: str                   # "hf:owner/name" or "hf:owner/name:subset"

    def __post_init__(self):
        if not re.fullmatch(r"hf:\w[\w.-]*(/\w[\w.-]*)?(:\w[\w.-]*)?", self.name):
            raise ConfigError(f"{shown(self.name)} is not the name of a dataset; write "
                              f"hf:owner/name or hf:owner/name:subset")

    def header(self) -> dict[str, Any]:
        return {"name": self.name}

    def fingerprint(self) -> list[Any]:
        # The hub is not asked whether the dataset changed. To read it again, prepare with --out.
        return [self.name]

    def mode(self) -> int:
        return 0o666

    def total_bytes(self) -> None:
        return None

    def pieces(self) -> Iterator[Piece]:
        try:
            import datasets
        except ImportError:
            raise ConfigError(f"{shown(self.name)} needs the package `datasets`: run "
                              f"`pip install datasets`, or give a file or folder as "
                              f"data.source") from None
        _, name, *subset = self.name.split(":")
        try:
            rows = datasets.load_dataset(name, *subset, split="train", streaming=True)
            for number, row in enumerate(rows, 1):
                text = _field(row, f"document {number} of {self.name}")
                yield from _document(text)
        except ConfigError:
            raise
        # the network, the hub and the dataset's files may raise any exception
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            raise ConfigError(f"cannot stream {shown(self.name)} ({type(error).__name__}: {why}); "
                              f"go online, or give a file or folder as data.source") from error


Source = Files | HubSource


def _walk(root: Path, suffixes: tuple[str, ...],
          without: frozenset[str] = frozenset()) -> list[tuple[str, Path]]:
    """Return (relative path, path) of the files under `root` with one of the suffixes, sorted.
    Hidden folders and folders named in `without` are skipped. Raises ConfigError for a link to a
    folder. A Path is slow and each run calls this function, so it makes Paths only for the result.
    """
    files = []
    for folder, below, names in os.walk(root, onerror=lambda error: (_ for _ in ()).throw(error)):
        below[:] = [name for name in below if not name.startswith(".")
                    and name != "__pycache__" and name not in without]
        if linked := [name for name in below if not without and Path(folder, name).is_symlink()]:
            raise ConfigError(f"{named(Path(folder, linked[0]))} is a link to a folder, and such "
                              f"links are not followed; read the text with a glob that contains "
                              f"**, or remove the link")
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                path = Path(folder, name)
                files.append((path.relative_to(root).as_posix(), path))
    return sorted(files)


def _matches(pattern: Path) -> list[tuple[str, Path]]:
    """Return (key, path) of the files that match a glob, sorted. The key is the path relative to
    the last folder before the first wildcard."""
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    keys = glob.glob("/".join(parts[fixed:]), root_dir=root, recursive=True)
    return sorted((key, root / key) for key in keys if not (root / key).is_dir())


@contextlib.contextmanager
def _sentences(path: Path) -> Iterator[None]:
    """Turn an error of reading `path` in this block into a ConfigError: one sentence with the name
    of the file."""
    try:
        yield
    except ConfigError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named(path)} is not UTF-8 text (byte "
                          f"{error.object[error.start]:#04x}); {WAY_OUT}") from None
    except Exception as error:
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "pyarrow":
            raise
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        where = getattr(error, "filename", None) or path
        raise ConfigError(f"cannot read {named(where)}: {why}; {WAY_OUT}") from None


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading. Raises ConfigError for a compressed file, and for a file that is not
    a regular file, such as a pipe."""
    check_regular(path)
    if path.suffix.lower() in PACKINGS:
        raise ConfigError(f"{named(path)} is packed, and nothing is unpacked here; unpack it "
                          f"first, or read it from the hub as hf:owner/name")
    return path.open("rb")


def _document(text: str) -> Iterator[Piece]:
    """Yield the pieces of a document. The key of each piece is the text of the whole document."""
    for start in range(0, len(text) or 1, PIECE_CHARS):
        yield Piece(text, text[start:start + PIECE_CHARS], start + PIECE_CHARS >= len(text))


def _blocks(stream: BinaryIO, path: Path, chars: int) -> Iterator[tuple[str, bool]]:
    """Yield (block, last): blocks of about `chars` characters, each of which ends at the end of a
    line, and whether the block is the last one."""
    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as lines:
        block = lines.read(chars) + lines.readline(chars)   # a very long line is cut
        while block:
            following = lines.read(chars) + lines.readline(chars)
            yield _checked(block, named(path)), not following
            block = following


def _checked(text: str, where: object) -> str:
    """Return `text`. Raises ConfigError if it contains a NUL byte, which is the end token of the
    tokenizer `bytes`."""
    if "\0" in text:
        raise ConfigError(f"{where} is not text (it holds a NUL byte); a source is UTF-8 text: "
                          f"remove it, or choose the files to read with a glob")
    return text


def _field(row: Any, where: str) -> str:
    """Return the text of a row of a dataset: its field "text", or the row itself if it is a string.
    Raises ConfigError if this is not a valid text. `where` names the row in the error."""
    text = row.get("text") if isinstance(row, dict) else row
    if not isinstance(text, str):
        has = f"{shown(text)} ({type(text).__name__}) in the place of its text"
        if isinstance(row, dict) and "text" not in row:
            has = f"no field 'text' (its fields are {shown(', '.join(map(str, row)))[1:-1]})"
        raise ConfigError(f"{where} has {has}; write text there, or rename the field that holds it")
    if len(text) > MOST_DOCUMENT_CHARS:
        raise ConfigError(f"{where} is one document of {len(text):,} characters, and at most "
                          f"{MOST_DOCUMENT_CHARS:,} are held in memory; divide it")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} is not valid text (half of a surrogate pair); repair or remove "
                          f"it") from None
    return _checked(text, where)


def _jsonl(stream: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the texts of a .jsonl file. Raises ConfigError with the number of a bad line."""
    name = named(path)
    with io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_LINE_CHARS), ""), 1):
            if line.isspace():
                continue
            where = f"line {number} of {name}"
            if len(line) == MOST_LINE_CHARS:
                raise ConfigError(f"{where} has more than {MOST_LINE_CHARS:,} characters, and a "
                                  f"line is held in memory; divide its document")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is not JSON ({error}); a .jsonl file has one object "
                                  f"with a field 'text' on each line") from None
            yield _field(row, where)


def _parquet(stream: BinaryIO, path: Path) -> Iterator[str]:
    """Yield the texts in the column "text" of a .parquet file. Raises ConfigError with the number
    of a bad row, and if the file unpacks to too many characters."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{named(path)} needs the package `pyarrow`: run `pip "
                          f"install pyarrow`, or convert it to .jsonl") from None
    table = parquet.ParquetFile(stream)
    if (count := table.schema_arrow.names.count("text")) != 1:
        raise ConfigError(f"{named(path)} has {count or 'no'} columns 'text' (its columns are "
                          f"{shown(', '.join(table.schema_arrow.names))}); rename the column "
                          f"that holds the text")
    rows = (text for batch in table.iter_batches(batch_size=256, columns=["text"])
            for text in batch.column(0).to_pylist())
    read, most = 0, max(FREE_BYTES, MOST_RATIO * path.stat().st_size)
    for number, text in enumerate(rows, 1):
        text = _field({"text": text}, f"row {number} of {named(path)}")
        read += len(text)
        if read > most:
            raise ConfigError(f"{named(path)} unpacks to more than {most:,} characters, "
                              f"{MOST_RATIO:,} times its own size, and text does not compress so "
                              f"well; {WAY_OUT}")
        yield text


DOCUMENTS = {".jsonl": _jsonl, ".parquet": _parquet}     # a file of any other suffix is one text
