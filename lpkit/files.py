"""Files that are whole or absent, and where the project's own files lie."""

import os
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """The folder `notebooks` or `data/measured`. An installed wheel has it inside the package,
    where setup.py puts it; a checkout has it beside the package."""
    packed = PACKAGE / name
    return packed if packed.is_dir() else PACKAGE.parent / name


def write_atomically(path: Path, text: str) -> None:
    """`path` holds the old content or all of `text`; other writers and readers never meet half of
    it. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)      # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
