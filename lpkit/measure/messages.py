"""Counts what this process and the others of its group tell one another: each collective, by kind,
bytes and ranks, as notebooks/lessons/ranks/messages.py says them before.

It sees what passes PyTorch's dispatcher: FSDP2's messages as well as those of `lpkit.parallel`, in
a process group that is real or "fake". torch.distributed.tensor.debug.CommDebugMode looks at the
same place, and has counts alone.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpkit.predict.messages import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Message

# by c10d's operation; which of its arguments has all the bytes
DATA = {"allreduce_": (ALL_REDUCE, 0), "_allgather_base_": (ALL_GATHER, 0),
        "_reduce_scatter_base_": (REDUCE_SCATTER, 1), "alltoall_base_": (ALL_TO_ALL, 1),
        "send": (SEND, 0)}


class MessageCount(TorchDispatchMode):
    """`with MessageCount() as count: training.update(0)`, then `count.sent`. What else travels
    (`Ranks.told`, `agreed`: from host to host) is in `control`, by c10d's name."""

    def __init__(self):
        super().__init__()
        self.sent: Counter[Message] = Counter()
        self.control: Counter[Message] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func._opname
            kind, whole = DATA.get(name, (name, 0))
            nbytes = sum(t.nbytes for t in tree_leaves(args[whole]) if isinstance(t, Tensor))
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = 2 if kind == SEND else dist.ProcessGroup.unbox(group).size()
            (self.sent if name in DATA else self.control)[Message(kind, nbytes, ranks)] += 1
        return func(*args, **(kwargs or {}))
