"""Files and folders that are whole or absent, and where the project's own files lie."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lpkit.errors import ConfigError, named

PACKAGE = Path(__file__).resolve().parent


def resource(name: str) -> Path:
    """The folder `notebooks` or `data/measured`. An installed wheel has it inside the package,
    where setup.py puts it; a checkout has it beside the package."""
    packed = PACKAGE / name
    return packed if packed.is_dir() else PACKAGE.parent / name


def cache_dir(name: str) -> Path:
    """Where the platform keeps what can be made again: `tokens`, `kernels`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lpkit" / name


KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_regular(path: Path) -> None:
    """Raises ConfigError for what is no file, before it is opened: a named pipe would wait for a
    writer, and a device may have no end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {named(path)}: "
                          f"{getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise ConfigError(f"{named(path)} is {kind}, not a file; give the path of a file")


def read_text(path: Path, most_bytes: int) -> str:
    """The whole of a file in UTF-8. Raises ConfigError for what is no such file, and for one of
    more than `most_bytes`."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {named(path)}: {error.strerror}") from None
    if len(content) > most_bytes:
        raise ConfigError(f"{named(path)} has more than {most_bytes:,} bytes, too many to be "
                          f"what it should; give another file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named(path)} is not UTF-8 text (byte {content[error.start]:#04x} "
                          f"at {error.start:,}); give a text file") from None


def sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write into the path that this yields: `path` then holds the old content or all of the new.

    Other writers and readers never meet half of it. Raises OSError.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)       # mkstemp makes it private
        sync(Path(name))
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: Path, *, aside: Path | None = None) -> Iterator[Path]:
    """Fill the folder that this yields, without folders in it: it becomes `path` whole, or never.

    An older `path` goes into the folder `aside`; without `aside` it must be empty or absent. The
    temporary name is always the same one, and what a killed process left there is removed: the
    caller holds a lock, or is the only writer. Raises OSError.
    """
    temporary = _hidden(path)
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.iterdir()):
            sync(file)
        sync(temporary)
        if aside is not None and path.exists():
            move_into(aside, path)
        os.rename(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """A folder that is half removed is never seen under its name."""
    shutil.rmtree(path.rename(_hidden(path)))


def move_into(folder: Path, path: Path) -> None:
    """Rename `path` into `folder`, under a number too when its name is taken there."""
    folder.mkdir(exist_ok=True)
    number, free = 0, folder / path.name
    while free.exists():
        number += 1
        free = folder / f"{path.name}-{number}"
    os.rename(path, free)


def _hidden(path: Path) -> Path:
    hidden = path.with_name(f".{path.name}.tmp")
    if hidden.exists():
        shutil.rmtree(hidden)
    return hidden


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock file `path` now."""
    if not path.exists():
        return False
    try:
        with locked(path, wait=False):
            return False
    except OSError:
        return True


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path` alone. The kernel lets go of it when its holder dies.

    Raises BlockingIOError when another process holds it and this one does not `wait`.
    """
    import fcntl  # Unix alone has it

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
