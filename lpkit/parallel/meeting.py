"""Rendezvous of ranks: ranks connect, and each rank verifies that its peers are the ranks that were
started with it.

gloo connects ranks by TCP, and takes the first connection for the expected rank. Any user of the
machine can read in /proc/net/tcp on which port a rank listens, and can connect before the expected
rank does. Four measures prevent this:

    loopback    ranks on one machine listen only on its loopback interface, which other machines
                cannot reach
    secret      rank 0 writes 32 random bytes into a file in a private folder, where only the other
                ranks can read them
    handshake   in each process group, before any other message, each rank sends each other rank an
                HMAC of the group, the sender and the receiver, with the secret as the key
    filter      then the listening sockets drop all packets, so that no program can connect to a
                running training or use up its file descriptors

The store of torchrun listens on all interfaces and answers every program. So if torchrun started
all ranks on one machine, the ranks use it only to agree on a private file. Ranks on several
machines have only this store, so there the secret is not private.

    with here(config) as ranks:         the rank and its number come from environment variables
    with joined(config, rank=...)       the rank and its number are arguments

Both yield a `Ranks`, and destroy the process groups at the end of the block.

Source: RFC 2104, HMAC; socket(7), SO_ATTACH_FILTER.
"""

import atexit
import ctypes
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import stat
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import lpkit
from lpkit.config import Config, flat
from lpkit.errors import ConfigError, named
from lpkit.parallel.processes import STRANGER, ranks_from_environment
from lpkit.parallel.ranks import MESSAGE_TIMEOUT, Ranks, distributed, groups_of
from lpkit.techniques.layouts import refuse_untrainable, wrong_world
from lpkit.turns import turn

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# longest wait until all ranks have connected to the store; then longest wait for a proof
MEETING_TIMEOUT, PROOF_TIMEOUT = timedelta(minutes=5), timedelta(seconds=30)
INTERFACE = "GLOO_SOCKET_IFNAME"    # the interface on which gloo listens
LOOPBACKS = ("lo", "lo0")           # Linux; macOS
PROOF_BYTES = 32
SO_ATTACH_FILTER = 26               # Python's socket module has no name for it
# tcp(7) and linux/tcp.h: require a key (TCP MD5 signature) of peers at any address (prefix 0)
TCP_MD5SIG_EXT, MD5_KEY_BYTES, MD5_OF_ALL = 32, 16, "=H126xBBHi80s"
DROP = struct.pack("HBBI", 0x06, 0, 0, 0)       # BPF program "return 0": keep no byte of a packet

Prove = Callable[[str, dist.ProcessGroup], None]        # see `meeting`


@contextmanager
def joined(config: Config, *, rank: int, world: int, local_rank: int, local_world: int,
           init_method: str = "env://") -> Iterator[Ranks]:
    """Create the process groups of the config's layout, yield the `Ranks`, and destroy the groups
    at the end of the block.

    Raises ConfigError if the layout does not have `world` devices, if the machine has too few GPUs,
    if rank 0 cannot be reached, or if a rank has other settings, code or versions than rank 0.
    """
    layout, device = config.parallel, device_type(config)
    refuse_untrainable(config)
    if layout.devices != world:
        raise ConfigError(f"{world} processes were started; {wrong_world(config, layout, world)}")
    if device == "cuda":
        if local_world > (count := torch.cuda.device_count()):
            raise ConfigError(f"{local_world} processes on {socket.gethostname()} take a GPU each, "
                              f"and PyTorch sees {count}; use system.device=cpu, or start fewer "
                              f"processes")
        if not dist.is_nccl_available():
            raise ConfigError("GPUs talk by NCCL, and this PyTorch is built without it; use "
                              "system.device=cpu, or install a PyTorch that is built with NCCL")
        torch.cuda.set_device(local_rank)
    try:
        with meeting(BACKENDS[device], rank=rank, world=world, local_world=local_world,
                     init_method=init_method) as prove:
            groups = dict(groups_of(layout, rank))
            for name, group in groups.items():
                prove(name, group)
        ranks = Ranks(rank=rank, world=world, local_rank=local_rank, local_world=local_world,
                      layout=layout, groups=groups, device=device)
        ranks.refuse_differences({**flat(config), "lpkit code": _code(), "Python": sys.version,
                                  "PyTorch": torch.__version__})
        yield ranks
    finally:
        if distributed():
            dist.destroy_process_group()


def _code() -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of this package's Python files."""
    files = sorted(Path(lpkit.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def device_type(config: Config) -> str:
    asked = config.system.device.partition(":")[0]
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def here(config: Config) -> Iterator[Ranks]:
    """Yield the `Ranks` of this process, which torchrun or `accelerate launch` describe in the
    environment. A process without other ranks waits for its turn at a GPU that other people share
    (`lpkit.turns`), and sends no messages.

    Raises ConfigError if the config needs several processes and this process has no other ranks.
    """
    place = ranks_from_environment(config)
    if place["world"] == 1:
        with turn(config.system.device):
            yield Ranks()
        return
    with joined(config, **place) as ranks:
        yield ranks


@contextmanager
def meeting(backend: str, *, rank: int, world: int, local_world: int,
            init_method: str = "env://") -> Iterator[Prove]:
    """Create the process group of all ranks, verify its members, and yield `prove`.

    In the block, the caller creates further groups, and calls `prove(name, group)` for each, on all
    ranks and in the same order. Raises ConfigError if a program that is not a rank answers. After
    the block, gloo's listening sockets drop all packets.

    local_world: how many of the `world` ranks are on this machine
    """
    one_machine = local_world == world
    proven: list[dist.ProcessGroup] = []
    with _on_loopback(one_machine), _clear_gloo_errors(rank):
        store = _store(init_method, rank, world, one_machine)
        others = set(_listening())      # inodes of sockets that are not gloo's, such as the store's
        dist.init_process_group(backend, store=store, rank=rank, world_size=world,
                                timeout=PROOF_TIMEOUT)
        secret = bytes.fromhex(store.get("secret").decode())

        def prove(name: str, group: dist.ProcessGroup) -> None:
            proven.append(group)
            _prove(secret, name, group)

        prove("world", dist.group.WORLD)
        yield prove
    for group in proven:
        dist.distributed_c10d._set_pg_timeout(MESSAGE_TIMEOUT, group)
    for inode, handle in _listening().items():
        if inode not in others:
            try:
                _shut(handle)
            except OSError as error:
                warnings.warn(f"rank {rank} cannot close its socket to other programs of this "
                              f"machine ({error}); a program that opens a thousand connections "
                              f"can end this run",
                              stacklevel=2)


def meet(backend: str, **place: int | str) -> None:
    """Create and verify only the process group of all ranks. Arguments as for `meeting`."""
    with meeting(backend, **place):
        pass


def _store(init_method: str, rank: int, world: int, one_machine: bool) -> dist.Store:
    """Return the store through which ranks meet, after all ranks have written to it and rank 0 has
    written the secret. Raises ConfigError if that takes longer than MEETING_TIMEOUT."""
    try:
        store, *_ = next(dist.rendezvous(init_method, rank, world, timeout=MEETING_TIMEOUT))
        if one_machine and not isinstance(store, dist.FileStore):
            store = _private(store, rank, world)
        if rank == 0:
            store.set("secret", secrets.token_hex(PROOF_BYTES))
        store.set(f"here {rank}", "")
        store.wait(["secret", *(f"here {each}" for each in range(world))], MEETING_TIMEOUT)
    # DistError: the network. ValueError: an environment variable is missing or wrong.
    except (dist.DistError, ValueError) as error:
        raise ConfigError(f"rank {rank} on {socket.gethostname()} cannot meet the others: "
                          f"{str(error).splitlines()[0]}; start all ranks with torchrun, and set "
                          f"another --master-port if this port is taken") from None
    store.set_timeout(MESSAGE_TIMEOUT)
    return store


def _private(store: dist.Store, rank: int, world: int) -> dist.Store:
    """Return a store in a file that no other user can open. It replaces `store`, which every
    program can write to: rank 0 creates the folder and writes its name to `store`. A wrong name
    from another user cannot make a rank trust it, because the folder must belong to this user."""
    if rank == 0:
        folder = tempfile.mkdtemp(prefix="lpkit-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        store.set("folder", folder)
    folder = os.fsdecode(store.get("folder"))
    status = os.lstat(folder) if os.path.lexists(folder) else None
    if status is None or status.st_uid != os.geteuid() or status.st_mode != stat.S_IFDIR | 0o700:
        raise ConfigError(f"rank {rank} must meet the other ranks in {named(folder)!r}, which is "
                          f"no private folder of this user: {STRANGER}")
    return dist.FileStore(os.path.join(folder, "store"), world)


def _prove(secret: bytes, name: str, group: dist.ProcessGroup) -> None:
    """Exchange proofs in `group`. Raise ConfigError if a member does not know the secret. All
    members must call it with the same `name`."""
    mine, ranks = dist.get_rank(), dist.get_process_group_ranks(group)

    # A proof is an HMAC of the group, the sender and the receiver. So a program that received a
    # proof cannot send it on as its own: it is valid for one sender, receiver and group.
    def proofs(pairs: list[tuple[int, int]]) -> bytearray:
        return bytearray(b"".join(hmac.digest(secret, f"{name} {ranks} {pair}".encode(), "sha256")
                                  for pair in pairs))

    due = proofs([(rank, mine) for rank in ranks])
    received = bytearray(len(due))
    dist.all_to_all_single(torch.frombuffer(received, dtype=torch.uint8),
                           torch.frombuffer(proofs([(mine, rank) for rank in ranks]),
                                            dtype=torch.uint8), group=group)
    for at, rank in enumerate(ranks):
        part = slice(at * PROOF_BYTES, (at + 1) * PROOF_BYTES)
        if not hmac.compare_digest(received[part], due[part]):
            raise ConfigError(f"the process that answers rank {mine} as rank {rank} does not know "
                              f"the secret of this launch: {STRANGER}")


@contextmanager
def _clear_gloo_errors(rank: int) -> Iterator[None]:
    """Turn an error of gloo in this block (a closed connection, a proof that is late) into a
    ConfigError that names the cause."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        raise ConfigError(f"rank {rank} cannot make sure of the others: {STRANGER}") from error


@contextmanager
def _on_loopback(one_machine: bool) -> Iterator[None]:
    """Make gloo listen on the loopback interface in this block, if all ranks are on one machine. By
    default, gloo listens at the address of the host's name, which other machines may reach."""
    names = {name for _, name in socket.if_nameindex()}
    before = os.environ.get(INTERFACE)
    name = next((loopback for loopback in LOOPBACKS if loopback in names), None)
    if not one_machine or name is None:
        yield
        return
    os.environ[INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(INTERFACE)
        if before is not None:
            os.environ[INTERFACE] = before


def _listening() -> dict[int, int]:
    """Return the listening TCP sockets of this process, as {inode: file descriptor}. Empty on
    systems without /proc."""
    handles = {}
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):         # the file was closed since `listdir`
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as listener:
                    inet = listener.family in (socket.AF_INET, socket.AF_INET6)
                    if inet and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        handles[status.st_ino] = int(name)
    return handles


def _shut(handle: int) -> None:
    """Make a listening socket drop all packets. It cannot be closed, because gloo would then end
    the process. Where only root may attach a filter, the socket requires TCP signatures with a
    random key that no program knows. Connections that exist already are not affected."""
    program = ctypes.create_string_buffer(DROP, len(DROP))
    with socket.socket(fileno=os.dup(handle)) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER,
                                struct.pack("HP", 1, ctypes.addressof(program)))
        except PermissionError:
            key = secrets.token_bytes(MD5_KEY_BYTES)
            listener.setsockopt(socket.IPPROTO_TCP, TCP_MD5SIG_EXT,
                                struct.pack(MD5_OF_ALL, listener.family, 1, 0, len(key), 0, key))
