"""What ranks do in test_parallel.py; each is `f(place, told)`."""

import torch
import torch.distributed as dist
from torch import nn

from lpkit import measure
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.measure.messages import MessageCount
from lpkit.parallel.processes import Place
from lpkit.parallel.rank import train
from lpkit.parallel.ranks import Share, joined
from lpkit.training.training import Training


def _meet(place: Place, config: Config):
    torch.set_num_threads(1)
    return joined(config, rank=place.rank, world=place.world, local_rank=place.local_rank,
                  local_world=place.local_world, init_method=place.store)


def chain(place: Place, told: dict) -> None:
    """A run that goes on."""
    torch.set_num_threads(1)
    train(place, told)


def beside_ddp(place: Place, told: dict) -> float:
    """The largest distance between our averaged gradients and DistributedDataParallel's, of their largest."""
    config = Config.from_dict(told["config"])
    with _meet(place, config) as ranks:
        training = Training.build(config, ranks=ranks)
        batch = training.batch(0)
        model = nn.parallel.DistributedDataParallel(training.copy().model)
        training.forward_backward(batch)
        for i, piece in enumerate(batch.chunk(config.micro_batches)):
            model.require_backward_grad_sync = i == config.micro_batches - 1
            loss = nn.functional.cross_entropy(model(piece.tokens).flatten(0, 1), piece.targets.flatten())
            (loss / config.micro_batches).backward()
        ours = dict(training.model.named_parameters())
        theirs = dict(model.module.named_parameters())
        return max(((ours[name].grad - p.grad).abs().max() / p.grad.abs().max()).item() for name, p in theirs.items())


def messages(place: Place, told: dict) -> list[int]:
    """How many all-reduces an update of gradients takes, by reduction; and whether all ranks have the same weights."""
    found = []
    for reduction in told["reductions"]:
        config = Config.from_dict(told["config"]).replace({"parallel.reduction": reduction})
        with _meet(place, config) as ranks:
            training = Training.build(config, ranks=ranks)
            training.update(0)
            found.append(len(training.sharding.messages.buckets))
            for p in training.model.parameters():
                everybody = [torch.empty_like(p) for _ in range(ranks.world)]
                dist.all_gather(everybody, p.detach())
                assert all(torch.equal(one, p) for one in everybody)
        place.store += "-next"
    return found


def differs(place: Place, told: dict) -> None:
    with _meet(place, Config.from_dict(told["config"]).replace({"seed": place.rank})):
        pass


def weights_and_zeros(place: Place, told: dict) -> list[float]:
    """Loss and gradient norm of a weighted batch, where one rank has less to say."""
    config = Config.from_dict(told["config"])
    with _meet(place, config) as ranks:
        whole = weighted(config)

        class Drawn:
            def batch(self, step):
                return whole

        training = Training.build(config, ranks=ranks, data=Share(Drawn(), ranks))
        done = training.update(0)
        return [done.loss.item(), done.grad_norm.item(), training.evaluate()]


def weighted(config: Config) -> Batch:
    rng = torch.Generator().manual_seed(1)
    shape = config.global_batch, config.model.context
    tokens, targets = (torch.randint(config.model.vocab, shape, generator=rng) for _ in range(2))
    return Batch(tokens, targets, weights=(torch.rand(shape, generator=rng) > torch.linspace(0.1, 0.9, shape[0])[:, None]).float())



def counted(place: Place, told: dict) -> list:
    """What the second update sent, as data and as control, and what this rank held, in all and by row."""
    config = Config.from_dict(told["config"])
    with _meet(place, config) as ranks:
        found = measure.memory(config, ranks=ranks)
        bench = measure.Bench(config, ranks=ranks)
        with MessageCount() as count:
            bench.train()
        assert count.sent == found.messages
        as_lists = [[[*message, times] for message, times in sent.items()] for sent in (count.sent, count.control)]
        return [*as_lists, found.peak_bytes, found.rows]
