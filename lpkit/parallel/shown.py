"""What each rank has of a tensor, shown in one process: for teaching.

PyTorch computes for all ranks at once, a tensor of each (`torch.distributed._local_tensor`). That
is private and may change; without it there is one sentence, and nothing else here needs it.
"""

from __future__ import annotations

from importlib import import_module

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor

from lpkit.errors import ConfigError
from lpkit.values import Count, checked


@checked
def parts(whole: Tensor, ranks: Count, placement: Placement | None = None) -> list[Tensor]:
    """What each of `ranks` has of `whole` under a placement of `torch.distributed.tensor`; None:
    its rows, as ZeRO and FSDP2 cut them (ceil(rows / ranks) to each, the last ones fewer or none).

    Raises ConfigError where PyTorch cannot show it, or this process has a process group.
    """
    try:
        local = import_module("torch.distributed._local_tensor")
        FakeStore = import_module("torch.testing._internal.distributed.fake_pg").FakeStore
        mode = local.LocalTensorMode(ranks)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"this PyTorch does not show all ranks in one process ({error}); cut "
                          f"the rows with torch.chunk(whole, {ranks}), as FSDP2 does") from None
    if dist.is_initialized():
        raise ConfigError("this process has a process group already, and to show ranks needs one "
                          "of its own; show them in another process")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with mode:
            mesh = init_device_mesh(whole.device.type, (ranks,))
            mine = distribute_tensor(whole.detach(), mesh, [placement or Shard(0)]).to_local()
            of_rank = getattr(mine, "_local_tensors", dict.fromkeys(range(ranks), mine))
            return [of_rank[rank].clone() for rank in range(ranks)]     # as one, where all are
    finally:
        dist.destroy_process_group()
