"""Safe access to files and folders: atomic writes, locks against concurrent writers, and checks
that a path is not a link to another place. Also the paths of the project's own files."""

import errno
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from lpkit.errors import ConfigError, named

with suppress(ImportError):
    import fcntl  # only Unix has it

PACKAGE = Path(__file__).resolve().parent
LONGEST_NAME = 200      # bytes; most filesystems allow 255, and a temporary name is longer


def resource(name: str) -> Path:
    """Returns the folder `notebooks`, `data/measured` or `data/published`. In an installed wheel it
    is inside the package, where setup.py puts it. In a checkout it is next to the package."""
    packed = PACKAGE / name
    return packed if packed.is_dir() else PACKAGE.parent / name


def cache_dir(name: str) -> Path:
    """Returns the user's cache folder `name`, such as `tokens` or `kernels`. Its files can be made
    again."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lpkit" / name


def data_dir(name: str) -> Path:
    """Returns the folder for a person's own work; `name` is for example `course`. If several people
    share one account, the environment variable LPKIT_LEARNER names the person. Raises ConfigError
    if its value cannot be the name of a folder."""
    base = expanded(os.environ.get("XDG_DATA_HOME") or "~/.local/share") / "lpkit"
    learner = os.environ.get("LPKIT_LEARNER")
    if learner and not re.fullmatch(r"\w[\w.-]{0,63}", learner):
        raise ConfigError(f"LPKIT_LEARNER={named(learner)!r} names no learner; use at most 64 "
                          f"letters, digits, dots and dashes, and begin with a letter or digit")
    return base / "learners" / learner / name if learner else base / name


def own_cache(room: str = "") -> Path:
    """Returns the kernel cache of this user. Its name contains the user's id, because files in the
    cache are executed, and several users may share one cache folder."""
    return cache_dir(f"kernels-{os.geteuid()}{room and f'-{room}'}")


def expanded(path: Path | str) -> Path:
    """Return `path` with ~ replaced by the home folder. Every path that a person gives passes
    through this function. Raises ConfigError for ~NAME if there is no such user, and for a path
    that is not UTF-8."""
    try:
        str(path).encode()
        return Path(path).expanduser()
    except UnicodeEncodeError:
        raise ConfigError(f"{named(path)} is not UTF-8, and no config or record can hold it; give "
                          f"another path") from None
    except RuntimeError:
        raise ConfigError(f"{named(path)} begins with the home of a user whom this machine does "
                          f"not know; write the whole path, or ./ before a name with ~") from None


# file type in st_mode -> its name in messages
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def check_regular(path: Path) -> None:
    """Raises ConfigError if `path` is not a regular file: reading a pipe can wait for ever, and a
    device has no end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {named(path)}: "
                          f"{getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(mode):
        kind = KINDS.get(stat.S_IFMT(mode), "something else")
        raise ConfigError(f"{named(path)} is {kind}, not a file; give the path of a file")


def read_text(path: Path, most_bytes: int) -> str:
    """Return the text of a UTF-8 file. Raises ConfigError for any other file, and for a file of
    more than `most_bytes`."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            return _text(file, path, most_bytes)
    except OSError as error:
        raise ConfigError(f"cannot read {named(path)}: {error.strerror}") from None


def read_private(path: Path, most_bytes: int) -> str:
    """Return the text of a UTF-8 file that only this user can have written. Raises ConfigError as
    `read_text` does, and for a file that others can write; OSError."""
    with open_own(path, "rb") as file:
        refuse_others(os.fstat(file.fileno()), path)
        return _text(file, path, most_bytes)


def _text(file: IO[bytes], path: Path, most_bytes: int) -> str:
    """Return the text of an open file. `path`: for messages. Raises ConfigError."""
    # check the size, then call read() without an argument: read(n) would allocate n bytes at once
    too_large = os.fstat(file.fileno()).st_size > most_bytes
    if too_large or len(content := file.read()) > most_bytes:
        raise ConfigError(f"{named(path)} has more than {most_bytes:,} bytes, too many for this "
                          f"kind of file; give another file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named(path)} is not UTF-8 text (byte {content[error.start]:#04x} "
                          f"at {error.start:,}); give a text file") from None


def of_transformers(path: Path) -> str:
    """Returns the end of an error message if `path` is a folder of transformers that was given in
    place of a run folder; otherwise the empty text."""
    return (f"; it is a folder of transformers: import it first, by lpkit import {named(path)} "
            f"--out runs/{named(path.resolve().name)}") * (path / "config.json").is_file()


def sync(path: Path) -> None:
    """Write a file's content, or the names in a folder, to disk, so that they survive a crash of
    the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def whole_file(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Replace a file atomically. Yields a temporary path; write the new content there. At the end
    of the block, the temporary file replaces `path`; after an error, it is removed.

    At any moment, `path` has either the complete old content or the complete new content, for all
    readers and writers. Its permissions are those that `mode`, the umask and the old file all
    allow. Raises OSError, and ConfigError for a folder.
    """
    if path.is_dir() and not path.is_symlink():
        raise _folder_in_the_way(path)
    with suppress(FileNotFoundError):
        mode &= path.stat().st_mode
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL, mode | stat.S_IWUSR))
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sweep(folder: Path, pattern: str = ".*.????????.tmp") -> None:
    """Remove the temporary files that killed writers left in `folder`. The caller must hold the
    lock of the folder."""
    for leftover in folder.glob(pattern):
        remove(leftover)


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the content of a file by `text`, as `whole_file` does."""
    with whole_file(path, mode) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def whole_folder(path: Path, *, aside: Path | None = None) -> Iterator[Path]:
    """Make a folder atomically. Yields a temporary folder; write files (no folders) into it. At the
    end of the block, the temporary folder is renamed to `path`; after an error, it is removed.

    An existing `path` is moved into the folder `aside`; without `aside`, it must be empty or
    absent. Removes what a killed process left, so the caller must hold a lock, or be the only
    writer. Raises OSError.
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
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # if the disk is full, the errors of safetensors and of write() name no file: add the path
        if type(error).__name__ == "SafetensorError" or getattr(error, "filename", path) is None:
            why = getattr(error, "strerror", None) or str(error)
            raise OSError(getattr(error, "errno", None) or errno.EIO, why, str(path)) from error
        raise
    sync(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder. It is renamed first, so that no process sees a partly removed folder under
    the name `path`."""
    shutil.rmtree(path.rename(_hidden(path)))


def move_into(folder: Path, path: Path) -> None:
    """Move `path` into `folder`. If its name is taken there, a number is added to the name."""
    own_folder(folder)
    os.rename(path, free(folder / path.name))


def free(path: Path) -> Path:
    """Return `path` if it does not exist, else the path with a number: learner-1.json."""
    names = (path.with_stem(f"{path.stem}-{n}") if n else path for n in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _hidden(path: Path) -> Path:
    """Return the temporary path for `path`, and remove what a killed process left there."""
    hidden = path.with_name(f".{path.name}.tmp")
    remove(hidden)
    return hidden


def remove(path: Path) -> None:
    """Remove a file, a folder with its contents, or a link (not its target)."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---- checks that nothing outside a folder is touched

def refuse_links(folder: Path) -> None:
    """Raises ConfigError if `folder` contains anything other than regular files and folders: a
    write through a link changes a file elsewhere, and reading a pipe can wait for ever."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):       # a temporary file, removed by now
                    _refuse(entry.path, entry.stat(follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"cannot read {str(folder)!r} ({error.strerror}); choose another "
                          f"folder") from None


def own_folder(path: Path, mode: int = 0o777) -> Path:
    """Return `path`, which is made if it does not exist, with permissions of at most `mode`. Raises
    ConfigError if it is a link or a file; OSError."""
    if not os.path.lexists(path):
        path.mkdir(mode, parents=True, exist_ok=True)
    has = path.lstat().st_mode
    _refuse(path, has)
    if not stat.S_ISDIR(has):
        raise ConfigError(f"{str(path)!r} is a file where a folder is needed; remove it")
    if stat.S_IMODE(has) & 0o777 & ~mode:
        path.chmod(stat.S_IMODE(has) & (mode | ~0o777))
    return path


def private_folder(path: Path, by: str = "XDG_CACHE_HOME") -> Path:
    """Return the folder `path`, which is made if it does not exist. Files in it may be executed, so
    no other user may be able to write, rename or replace anything there. Raises ConfigError if
    another user can, also in a folder above it; OSError. `by`: the environment variable that
    chooses the folder, for the message."""
    path = Path(os.path.abspath(path))
    for folder in (*reversed(path.parents), path):
        with suppress(FileExistsError):
            # 0755: the check below refuses a folder that others can write
            if not os.path.lexists(folder):
                folder.mkdir(0o700 if folder == path else 0o755)
    refuse_others(own_folder(path).lstat(), path, by)
    for above in _way_to(path.parent):
        status = above.lstat()
        theirs = status.st_uid not in {os.geteuid(), *_administrators()}
        writers = stat.S_IWOTH | (0 if _of_one(status.st_gid) else stat.S_IWGRP)
        if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
            writers = 0
        if theirs or status.st_mode & writers:
            raise ConfigError(f"{named(above)} {'belongs to' if theirs else 'may be written by'} "
                              f"others, who could put another folder in the place of "
                              f"{named(path)}; set {by} to a folder of your own")
    return path


def refuse_others(status: os.stat_result, path: Path, by: str = "XDG_CACHE_HOME") -> None:
    """Raises ConfigError for a file or folder that another user owns or can write."""
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{named(path)} belongs to user {status.st_uid}, who could have planted "
                          f"it; remove it, or set {by} to a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"{named(path)} may be written by others, who could have planted it; "
                          f"remove it, or chmod go-w it if you know what is in it")


def _way_to(path: Path) -> Iterator[Path]:
    """Yields all folders and links that the system passes from the root to the existing `path`. The
    owner of any of them could replace what comes after it."""
    for part in (*reversed(path.parents), path):
        yield part
        if part.is_symlink():
            yield from _way_to(part.parent / os.readlink(part))


def _administrators() -> set[int]:
    """Returns the user ids that mean root. In a user namespace without root, the files of root seem
    to belong to the overflow uid, so the set contains this uid, too."""
    with suppress(OSError, ValueError):
        rows = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if rows and all(int(first) > 0 for first, *_ in rows):
            return {0, int(Path("/proc/sys/kernel/overflowuid").read_text())}
    return {0}


def _of_one(group: int) -> bool:
    """Returns True if `group` is the private group of this user (the user is its only member). Many
    systems make such a group for each user."""
    import grp
    import pwd

    try:
        name, known = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return known.gr_name == name and set(known.gr_mem) <= {name}


def open_own(path: Path | str, mode: str) -> IO:
    """Opens a regular file like `open`. Raises ConfigError for a link, a device, and a file with
    other hard links, through which a write would change another path; OSError."""
    def opener(name: str, flags: int) -> int:
        # truncate only after the checks, and do not block on a pipe
        how = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            handle = os.open(name, how, 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                _refuse(path, os.lstat(name).st_mode)
            if error.errno == errno.EISDIR:
                raise _folder_in_the_way(path) from None
            raise
        try:
            status = os.fstat(handle)
            _refuse(path, status.st_mode)
            if status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{str(path)!r} has other names (hard links), and a write would "
                                  f"change them, too; replace it by a copy, or remove it")
            if flags & os.O_TRUNC:
                os.ftruncate(handle, 0)
        except BaseException:
            os.close(handle)
            raise
        return handle

    return open(path, mode, opener=opener)


def _refuse(path: Path | str, mode: int) -> None:
    """Raise ConfigError unless `mode`, the st_mode of `path`, is that of a regular file or a
    folder."""
    kind = "a link"
    if not stat.S_ISLNK(mode):
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return
        kind = "a pipe, a socket or a device"
    raise ConfigError(f"{str(path)!r} is {kind}; lpkit uses only regular files and folders, so "
                      f"that it changes nothing in other places; remove it, or choose another path")


def _folder_in_the_way(path: Path | str) -> ConfigError:
    return ConfigError(f"{str(path)!r} is a folder where a file is needed; remove it")


def one_name(name: str) -> str:
    """Return `name` if it is valid as the name of a file or folder in any folder. Raises
    ConfigError."""
    if not isinstance(name, str) or name in ("", ".", "..") or not name.isprintable() \
            or "/" in name or "\\" in name or len(os.fsencode(name)) > LONGEST_NAME:
        raise ConfigError(f"{name!r} cannot be the name of a folder; use letters, digits and "
                          f"dashes, at most {LONGEST_NAME} bytes")
    return name


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file. First removes a last line without a line break, which a killed
    process left, since the next line would be joined to it. Raises ConfigError as `open_own` does;
    OSError."""
    with open_own(path, "a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.writelines(line.encode() for line in lines)


# ---- locks

# errors of flock() on filesystems that do not support it: NFS without lockd, Lustre without -o
# flock, FUSE
NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# `locked` without `wait` retries for so long, because `is_locked` may hold the lock for a moment
LOOK_SECONDS = 0.25
POLL_SECONDS = 0.005


def _flock(file: IO, how: int, folder: Path, way_out: str) -> None:
    """Lock an open file without waiting. Raises BlockingIOError if another process holds the lock,
    and ConfigError if the filesystem has no flock; OSError."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        raise ConfigError(f"nothing can be locked in {named(folder)} ({error.strerror}), and two "
                          f"processes could write there at once; {way_out}") from None


def lockable(folder: Path, by: str) -> None:
    """Raises ConfigError if the filesystem of `folder` has no flock; OSError. `by`: the environment
    variable that chose the folder, for the message."""
    with tempfile.TemporaryFile(dir=folder) as file:
        _flock(file, fcntl.LOCK_EX, folder, f"set {by} to a folder on a local disk")


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`. The kernel releases it when its holder dies.

    Raises BlockingIOError, whose `strerror` names the lock, if another process holds it and `wait`
    is false; ConfigError as `open_own` does, and if the filesystem has no flock; OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path, "ab") as file:
        begun = time.monotonic()
        while True:
            try:
                _flock(file, fcntl.LOCK_EX, path.parent, f"choose a folder on a local disk, below "
                                                         f"{tempfile.gettempdir()} for example")
                break
            except BlockingIOError:
                if not wait and time.monotonic() - begun > LOOK_SECONDS:
                    raise BlockingIOError(errno.EAGAIN,
                                          f"it holds the lock {named(path)}") from None
                time.sleep(POLL_SECONDS)
        try:
            yield
        finally:
            # explicitly: a forked process may still have the file open
            fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(path: Path) -> bool:
    """Return True if any process, including this one, holds the lock file `path` now. Needs no
    permission to write. Raises ConfigError as `locked` does, and OSError if the file cannot be
    read."""
    try:
        with open_own(path, "rb") as file:
            _flock(file, fcntl.LOCK_SH, path.parent, "choose a folder on a local disk")
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
