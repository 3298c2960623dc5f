"""Programs that the doctor runs on several ranks. Each compares its result with the same
computation in one process. The parent process that forks the ranks imports this file first, so it
imports little else of lpkit."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo  # first use in DDP and FSDP would import it, in each rank
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lpkit.parallel.meeting import BACKENDS, meet
from lpkit.parallel.processes import Place
from lpkit.timing import interleaved_seconds


def _all_reduce(place: Place, device: torch.device) -> None:
    x = torch.full((4,), float(place.rank + 1), device=device)
    dist.all_reduce(x)
    expected = [place.world * (place.world + 1) / 2] * 4
    assert x.tolist() == expected, f"the sum is wrong: {x.tolist()}"


def _gradients(wrap: Callable[[nn.Module], nn.Module], place: Place, device: torch.device) -> None:
    """Check the gradient of a Linear that `wrap` makes data-parallel. The input of rank r is
    (r + 1) x. The gradient must equal the gradient of one process with the inputs of all ranks."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device)
    alone = copy.deepcopy(model)
    x = torch.arange(16.0, device=device).view(2, 8)
    sum(alone(x * (r + 1)).square().mean() / place.world for r in range(place.world)).backward()
    wrapped = wrap(model)
    wrapped(x * (place.rank + 1)).square().mean().backward()
    got = next(wrapped.parameters()).grad
    torch.testing.assert_close(got.full_tensor() if hasattr(got, "full_tensor") else got,
                               alone.weight.grad)


def _fsdp2(model: nn.Module) -> nn.Module:
    device = next(model.parameters()).device.type
    return fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))


def _all_gather(place: Place, device: torch.device) -> float:
    """Return the bytes per second that a rank receives, the best of several tries."""
    whole = torch.zeros(place.world, 2**26, dtype=torch.uint8, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(whole.view(-1), whole[place.rank].clone())
        whole[0, 0].item()      # waits for the device

    received_bytes = whole.nbytes * (place.world - 1) / place.world
    return received_bytes / min(interleaved_seconds([gather], rounds=9)[0])


PROGRAMS: dict[str, Callable[[Place, torch.device], float | None]] = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "DDP": partial(_gradients, nn.parallel.DistributedDataParallel),
    "FSDP2": partial(_gradients, _fsdp2),
}


def run(place: Place, request: dict[str, Any]) -> float | None:
    """Run `request["program"]`, a key of PROGRAMS, as the rank of `place`, with the collectives of
    `request["backend"]` (gloo or nccl). Return the program's result."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if request["backend"] == "nccl":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    meet(BACKENDS[device.type], **place.among)
    return PROGRAMS[request["program"]](place, device)
