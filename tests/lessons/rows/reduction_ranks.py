"""What ranks do in tests of reductions; each is `f(place, given)`."""

from pathlib import Path

import torch
import torch.distributed as dist

import lessons.rows.reductions  # noqa: F401  adds rows
from lpkit.config import Config
from lpkit.parallel.cut import Cut
from lpkit.parallel.meeting import joined
from lpkit.parallel.processes import Place
from lpkit.techniques.layouts import REDUCTIONS
from lpkit.training import checkpoint
from lpkit.training.training import Training

ROUNDS = 4


def gradients(shape: tuple[int, ...], rank: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=draw).mul_(0.5**i) for i in range(ROUNDS)]


def averages(place: Place, given: dict) -> dict[str, list]:
    """Returns what each reduction makes of the ranks' gradients, round by round."""
    config, results = Config.from_dict(given["config"]), {}
    with joined(config, local_rank=place.local_rank, **place.among):
        for name in given["names"]:
            state, rounds = {}, gradients(tuple(given["shape"]), place.rank)
            for g in rounds:
                REDUCTIONS[name].load().keywords["average"](g, dist.group.WORLD, state)
            results[name] = [g.tolist() for g in rounds]
    return results


def resumed(place: Place, given: dict) -> list[list]:
    """Returns by reduction the losses and weights after six updates, and of a training that a
    checkpoint of four updates begins."""
    results = []
    for i, name in enumerate(given["names"]):
        config = Config.from_dict(given["config"]).replace({"parallel.reduction": name})
        place.store += f"-{i}"
        with joined(config, local_rank=place.local_rank, **place.among) as ranks:
            first = Training.build(config, ranks=ranks)
            for step in range(4):
                first.update(step)
            state = {key: first.sharding.placed(key, t) for key, t in first.state_dict().items()}
            tensors = {key: t for key, t in state.items() if isinstance(t, torch.Tensor | Cut)}
            numbers = {key: t for key, t in state.items() if key not in tensors}
            root = Path(given["folder"]) / name
            checkpoint.save(root, 4, tensors, {"numbers": numbers}, keep=1)
            saved, _ = checkpoint.load_latest(root, blank=first.blank)
            again = Training.build(config, ranks=ranks)
            again.load_state_dict(saved.tensors | saved.state["numbers"])
            of = []
            for training in (first, again):
                losses = [training.update(step).loss.item() for step in (4, 5)]
                weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
                of.append([losses, weights.tolist()])
            results.append(of)
    return results
