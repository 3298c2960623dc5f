"""What really happened: bytes by what they are for, seconds, and what this machine can do.

Bytes, seconds, FLOPs and bytes/s; nothing here is rounded. Ceilings are the best of several tries (what the machine
can do), step times are medians (what it did).
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit.contracts import Choice

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def bf16_choice(device: torch.device | str, *, size: int = 1024, rounds: int = 5) -> Choice:
    """Which dtype the matrix products of `precision.recipe=auto` take here, "bf16" or "fp32", and why.

    A GPU decides by its compute capability: tensor cores take bf16 from 8.0 (Ampere). A CPU decides by a race of
    (size, size) products, because some run bf16 in hardware and others emulate it at a tenth of the speed. Under 0.3 s.
    """
    device = torch.device(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        used, why = (("bf16", "has bf16 tensor cores") if (major, minor) >= (8, 0)
                     else ("fp32", "has no bf16 tensor cores, they came with 8.0"))
        return Choice(asked="auto", used=used, why=f"compute capability {major}.{minor} {why}")
    operands = [torch.ones(size, size, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16)]
    fp32, bf16 = race([lambda x=x: x @ x for x in operands], rounds=rounds, within_seconds=0.25)
    ratio = statistics.median(a / b for a, b in zip(fp32, bf16))
    return Choice(asked="auto", used="bf16" if ratio > 1.1 else "fp32",
                  why=f"a {size} x {size} matrix product in bf16 ran at {ratio:.2f}x the speed of fp32 on this "
                      f"{device.type}, median of {len(fp32)} rounds; bf16 is taken above 1.1x")


def race(runners: list[Callable[[], object]], *, rounds: int, within_seconds: float = math.inf) -> list[list[float]]:
    """Seconds of each runner in each round, after one round that is thrown away.

    Rounds alternate between the runners, so that a slow moment of the machine meets all of them. No new round begins
    after `within_seconds`, but one is always measured.
    """
    seconds: list[list[float]] = [[] for _ in runners]
    begun = time.perf_counter()
    for i in range(rounds + 1):
        for runner, times in zip(runners, seconds):
            start = time.perf_counter()
            runner()
            times.append(time.perf_counter() - start)
        if i and time.perf_counter() - begun > within_seconds:
            break
    return [times[1:] for times in seconds]


def peak_bytes(device: torch.device | str) -> int:
    """The most memory held so far. Cheap enough for every step.

    On a GPU: the most that PyTorch's allocator had handed out to tensors since the process began or `reset_peak`.
    Elsewhere: the most that the whole process had in RAM (VmHWM on Linux), libraries and Python included, so it
    starts at some 300 MB and compares between runs, not with a sum of tensors.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if STATUS.exists():   # getrusage's maximum would include the process that started this one
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak(device: torch.device | str) -> None:
    """Start `peak_bytes` again from what is held now. Elsewhere than on a GPU or Linux the peak cannot fall."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")   # "reset the peak resident set size", proc(5)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes that autograd kept for the backward pass, each storage once, under the operation that kept it first."""

    operations: dict[str, int]    # by module, block numbers left out: norm1, attention.qkv, ..., loss
    weight_copy_bytes: int        # copies of the weights in another dtype, made by autocast

    @property
    def total_bytes(self) -> int:
        """Without the weight copies."""
        return sum(self.operations.values())


def saved_bytes(model: nn.Module, step: Callable[[], Tensor], *, ignore: Iterable[Tensor] = ()) -> Saved:
    """Run `step`, which returns a loss, and count what autograd keeps of it. Nothing is changed or slowed afterwards.

    What is kept outside any module is the loss's. The model's parameters, and the tensors in `ignore`, exist anyway.
    """
    exists = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *ignore)}
    copies, inside, operations, copy_bytes, held = _WeightCopies(model), ["loss"], {}, 0, []

    def pack(t: Tensor) -> Tensor:
        nonlocal copy_bytes
        storage = t.untyped_storage()
        if storage.data_ptr() not in exists:
            exists.add(storage.data_ptr())
            held.append(storage)   # so that no address is used twice
            if storage.data_ptr() in copies.made:
                copy_bytes += storage.nbytes()
            else:
                operations[inside[-1]] = operations.get(inside[-1], 0) + storage.nbytes()
        return t

    hooks = []
    for name, module in model.named_modules():
        name = ".".join(part for part in name.split(".") if part != "blocks" and not part.isdigit())
        hooks += [module.register_forward_pre_hook(lambda *_, name=name: inside.append(name)),
                  module.register_forward_hook(lambda *_: (inside.pop(), None)[1])]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), copies:
            loss = step()
    finally:
        for hook in hooks:
            hook.remove()
    if not loss.requires_grad:
        raise ValueError("step() returned something that backward cannot start from")
    return Saved(operations=operations, weight_copy_bytes=copy_bytes)


class _WeightCopies(TorchDispatchMode):
    """Remembers the storages of parameters cast to another dtype."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.made, self.held = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.parameters:
            self.made.add(out.untyped_storage().data_ptr())
            self.held.append(out)
        return out
