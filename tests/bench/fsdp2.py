"""ZeRO 3 of the kit beside accelerate's FSDP2, on all GPUs or on two CPU processes: the same model,
weights, batches and rates, in one process group, step after step in turns, with losses that must
agree.

The peer is what accelerate's documentation describes: FullyShardedDataParallelPlugin of version 2
around each block, PyTorch's fused AdamW, clipping by the accelerator; on GPUs also with its blocks
compiled, as accelerate's regional compilation has them. On CPUs accelerate 1.15 drops the plugin
and says nothing: AcceleratorState makes FSDP of types of GPUs alone, and the model becomes a DDP.
Its FSDP2 works there once the state says FSDP, which `_accelerator` sees to.
"""

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.machine_facts import gpus
from lpkit.nn.transformer import cross_entropy
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import Place, Processes
from lpkit.precision.compute import compute_dtype
from lpkit.training.build import initial_model, moved
from lpkit.training.training import Training
from tests.bench.harness import ROUNDS, Result, last_losses, paired, steps_in_turns
from tests.bench.nanogpt import ON_A_GPU, adamw

TARGET = 1.0            # times as many tokens/s
LEAST_STEPS, LAST = 20, 5
FLOAT32 = 1e-5          # relative, of each loss: sums in other orders
LOSS_TOLERANCE = 0.01   # in 16 bits, of the mean of the last losses
PROCESSES = 2           # on CPUs
ON_CPUS = {"cpu-3m, float32": {"precision.recipe": "fp32"},
           "6 x 384, 8 x 128 tokens, float32": {
               "precision.recipe": "fp32", "model.layers": 6, "model.width": 384, "model.heads": 6,
               "model.context": 128, "global_batch": 8}}
ON_GPUS = {"GPT-2 124M, float32": {"precision.recipe": "fp32"},
           "GPT-2 124M, bf16": {"precision.recipe": "bf16", "parallel.gathered": "compute"}}


class Peer:
    """Takes updates as a `Training` does: the weights, batches and rates of `training`."""

    def __init__(self, training: Training, *, compiled: bool):
        config, device = training.config, training.device
        self.training, self.accelerator = training, _accelerator(training)
        model = moved(initial_model(config, training.decisions.choices["attention"].used), device)
        if compiled:
            for block in model.blocks:
                block.compile()
        optimizer = adamw(model, config.optimizer)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def update(self, step: int) -> SimpleNamespace:
        config, batch = self.training.config, self.training.batch(step)
        for group in self.optimizer.param_groups:
            group["lr"] = config.optimizer.lr * self.training.schedule(step)
        loss = cross_entropy(self.model(batch.tokens), batch.targets)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return SimpleNamespace(loss=self.accelerator.reduce(loss.detach(), "mean"), grad_norm=norm)


def _accelerator(training: Training) -> Any:
    """Over the process group that is there. Raises ConfigError where it would not shard."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    compute, on_cpu = compute_dtype(training.decisions.recipe), training.device.type == "cpu"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=compute,
                                                    reduce_dtype=torch.float32))
    accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin)
    if on_cpu:
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = DistributedType.FSDP
    if not accelerator.is_fsdp2:
        raise ConfigError(f"this accelerate trains as {accelerator.distributed_type} here, and not "
                          f"by FSDP2; use another version of it")
    return accelerator


def rank(place: Place, given: dict[str, Any]) -> dict[str, Any]:
    """Seconds and losses of each contender, by name, and what the kit chose, of a config."""
    config = Config.from_dict(given["config"])
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.local_rank),
                   "WORLD_SIZE": str(place.world), "LOCAL_WORLD_SIZE": str(place.local_world),
                   # else accelerate sets the number of threads for all
                   "OMP_NUM_THREADS": str(torch.get_num_threads())}
    place.at(0, "building")
    with joined(config, local_rank=place.local_rank, **place.among) as ranks:
        ours = Training.build(config, ranks=ranks)
        threads = torch.get_num_threads()
        peers = {name: Peer(ours, compiled=compiled)
                 for name, compiled in given["peers"].items()}
        torch.set_num_threads(threads)
        seconds, losses = steps_in_turns({"ours": ours, **peers}, config.steps)
        chosen = {name: choice.used for name, choice in ours.decisions.choices.items()}
        return {"seconds": seconds, "losses": losses, "chosen": chosen}


def run(rounds: int = ROUNDS) -> list[Result]:
    """Tokens/s of ZeRO 3 and of accelerate's FSDP2. Raises ConfigError for a single GPU."""
    here, steps = gpus(), max(rounds, LEAST_STEPS)
    if here == 1:
        raise ConfigError("FSDP2 shards over several, and there is 1 GPU; hide it to rehearse on "
                          "two CPU processes (CUDA_VISIBLE_DEVICES= lpkit bench fsdp2)")
    world, peers, results = here or PROCESSES, {"accelerate's FSDP2": False}, []
    base = Config().replace({"system.device": "cuda" if here else "cpu", "steps": steps,
                             "parallel.shard": world, "parallel.gathered": "float32"})
    if here:
        peers["accelerate's FSDP2, compiled"] = True
        (size,) = ON_A_GPU.values()
        base = base.replace({**size, "global_batch": world * size["global_batch"]})
    for case, settings in (ON_GPUS if here else ON_CPUS).items():
        config = base.replace(settings)
        given = {"config": config.to_dict(), "peers": peers}
        with Processes(f"{__name__}:rank", given, world=world) as ranks:
            measured = ranks.wait()[0]
        last = check(measured["losses"], config)
        results += [paired("fsdp2", ours=measured["seconds"]["ours"],
                           peer=measured["seconds"][name],
                           case=f"{case}, {world} ranks", peer_name=name, target=TARGET,
                           packages=("torch", "accelerate"),
                           device=torch.cuda.get_device_name() if here else None,
                           facts={"losses": last, "chosen": measured["chosen"], "steps": steps,
                                  "tokens_per_step": config.tokens_per_step})
                    for name in peers]
    return results


def check(losses: dict[str, list[float]], config: Config) -> dict[str, float]:
    """Means over the last steps. AssertionError where losses are not one another's."""
    if config.precision.recipe.name != "fp32":
        return last_losses(losses, "ours", last=LAST, tolerance=LOSS_TOLERANCE)
    for step, each in enumerate(zip(*losses.values()), 1):
        if max(each) - min(each) > FLOAT32 * max(each):
            raise AssertionError(f"the losses of step {step} differ: {dict(zip(losses, each))}")
    return last_losses(losses, "ours", last=LAST, tolerance=FLOAT32)
