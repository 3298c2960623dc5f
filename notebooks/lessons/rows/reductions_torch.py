"""The methods of the rows in `reductions`. Each is a function average(flat, group, state), which
replaces the numbers `flat` of a message by their average over the ranks of `group`, exactly or
approximately. `state` is a dict in which the method keeps tensors and counts between updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from lessons.rows.reductions import BLOCK, is_matrix, top_count
from lpkit.errors import ConfigError
from lpkit.parallel.cut import Cut, TensorPiece
from lpkit.parallel.ranks import all_gather, wait_for
from lpkit.parallel.replicas import Finish, Replicas

Group = dist.ProcessGroup
State = dict[str, Any]


def mean(flat: Tensor, group: Group) -> Tensor:
    """Averages `flat` over the ranks, in place."""
    dist.all_reduce(flat, group=group)
    return flat.div_(dist.get_world_size(group))


# ---- compression: encode numbers to bytes, and decode them

def top_k(x: Tensor, share: float) -> Tensor:
    """Return as bytes (uint8) the elements of x (numbers,) with the largest magnitudes, followed by
    their int32 indices."""
    indices = x.abs().topk(top_count(share, len(x))).indices
    return torch.cat([x[indices].view(torch.uint8), indices.int().view(torch.uint8)])


def from_top_k(code: Tensor, numbers: int) -> Tensor:
    """Return (numbers,) float32 from the bytes of `top_k`; elements that were not sent are 0."""
    values, indices = code.view(2, -1)
    x = code.new_zeros(numbers, dtype=torch.float32)
    return x.index_put_((indices.view(torch.int32).long(),), values.view(torch.float32))


def quantised(x: Tensor, bits: int) -> Tensor:
    """Return as bytes the float32 scales of all blocks of x (numbers,), followed by signed integers
    of 8 or 4 bits. The largest magnitude of a block becomes the largest integer."""
    blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30) / (2**(bits - 1) - 1)
    codes = (blocks / scale).round().to(torch.int8).view(torch.uint8).flatten()
    if bits == 4:
        codes = (codes[::2] << 4) | (codes[1::2] & 15)
    return torch.cat([scale.flatten().view(torch.uint8), codes])


def from_quantised(code: Tensor, numbers: int, bits: int) -> Tensor:
    """Return (numbers,) float32 from the bytes of `quantised`."""
    blocks = -(-numbers // BLOCK)
    scale, codes = code[:4 * blocks].view(torch.float32), code[4 * blocks:].view(torch.int8)
    if bits == 4:       # int8 shifts keep the sign
        codes = torch.stack([codes >> 4, (codes << 4) >> 4], 1)
    return (codes.view(blocks, BLOCK) * scale[:, None]).flatten()[:numbers]


def signs(x: Tensor) -> Tensor:
    """Return as bytes the mean magnitude of x (numbers,) in float32, followed by one bit per
    element, which is 1 for a negative element."""
    bits = torch.nn.functional.pad((x < 0).byte(), (0, -len(x) % 8)).view(-1, 8)
    packed = (bits << torch.arange(8, device=x.device)).sum(1).byte()
    return torch.cat([x.abs().mean()[None].view(torch.uint8), packed])


def from_signs(code: Tensor, numbers: int) -> Tensor:
    """Return (numbers,) float32 from the bytes of `signs`."""
    bits = (code[4:, None] >> torch.arange(8, device=code.device)) & 1
    return code[:4].clone().view(torch.float32) * (1 - 2 * bits.flatten()[:numbers].float())


def compressed(flat: Tensor, group: Group, state: State, *, encode: Callable[[Tensor], Tensor],
               decode: Callable[[Tensor, int], Tensor]) -> None:
    """Average the ranks' decoded messages. Error feedback: the error of this rank's code is stored
    and added to the next gradient."""
    x = flat.flatten().float() + state.get("error", 0.0)
    code, ranks = encode(x), dist.get_world_size(group)
    codes = code.new_empty(ranks * len(code))
    all_gather(codes, code, group=group)
    decoded = [decode(message, len(x)) for message in codes.view(ranks, -1)]
    state["error"] = x - decoded[dist.get_rank(group)]
    flat.copy_(sum(decoded).view_as(flat) / ranks)


def powersgd(flat: Tensor, group: Group, state: State, *, rank: int) -> None:
    """Approximate a gradient matrix M, averaged over ranks, by P Q^T of rank `rank`: one step of
    power iteration from the last update's Q, with error feedback. A vector is averaged exactly."""
    if not is_matrix(tuple(flat.shape), rank):
        mean(flat, group)
        return
    if not state:
        draw = torch.Generator().manual_seed(0)     # the same on all ranks
        q = torch.randn(flat.shape[1], rank, generator=draw).to(flat.device)
        state |= {"error": torch.zeros_like(flat), "q": q}
    m = flat.float() + state["error"]
    p = torch.linalg.qr(mean(m @ state["q"], group))[0]
    state["q"] = mean(m.T @ p, group)
    flat.copy_(p @ state["q"].T)
    state["error"] = m - flat


# ---- averages of weights: the first call receives the initial weights

def due(state: State, every: int) -> bool:
    """Count an update, and return whether ranks average weights after it. The first call, which
    gets the initial weights, returns False."""
    state["updates"] = state.get("updates", -1) + 1
    return state["updates"] > 0 and state["updates"] % every == 0


def local(flat: Tensor, group: Group, state: State, *, every: int) -> None:
    """Local SGD: average the weights after every n-th update."""
    if due(state, every):
        mean(flat, group)


def diloco(flat: Tensor, group: Group, state: State, *, every: int, rate: float,
           momentum: float) -> None:
    """DiLoCo: after every n-th update, the mean change of the weights since the last average is the
    gradient of an outer step of SGD with Nesterov momentum."""
    if not state:
        state |= {"weights": flat.clone(), "momentum": torch.zeros_like(flat)}
    if due(state, every):
        change = state["weights"] - mean(flat, group)
        state["momentum"].mul_(momentum).add_(change)
        state["weights"].sub_(rate * (change + momentum * state["momentum"]))
        flat.copy_(state["weights"])


def exchanged(flat: Tensor, group: Group, distances: list[int]) -> list[Tensor]:
    """Send `flat` to rank + d for each distance d, and return the tensors from rank - d."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    received = [torch.empty_like(flat) for _ in distances]
    both = [op for d, t in zip(distances, received) for op in (
        dist.P2POp(dist.isend, flat, group=group, group_peer=(rank + d) % ranks),
        dist.P2POp(dist.irecv, t, group=group, group_peer=(rank - d) % ranks))]
    for work in dist.batch_isend_irecv(both):
        wait_for(work, flat)
    return received


def gossip_on_ring(flat: Tensor, group: Group, state: State) -> None:
    """Average the weights with those of both neighbours on a ring."""
    if due(state, 1):
        before, after = exchanged(flat, group, [1, -1])
        flat.add_(before).add_(after).div_(3)


def gossip_one_peer(flat: Tensor, group: Group, state: State) -> None:
    """Average the weights with those of one rank, whose distance doubles in each update: 1, 2, 4,
    and so on, then 1 again."""
    if due(state, 1):
        distances = (dist.get_world_size(group) - 1).bit_length()
        received, = exchanged(flat, group, [1 << (state["updates"] - 1) % distances])
        flat.add_(received).div_(2)


@dataclass(kw_only=True)
class Averaged(Replicas):
    """Replicas whose gradients are averaged in place by `average(flat, group, state)`. `flat`: the
    elements of a message, in the shape of the parameter if it has only one. `state`: a dict of
    tensors and counts, empty at first, which checkpoints store for each rank."""

    average: Callable[[Tensor, Group, State], None]

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        self.names = {p: name for name, p in model.named_parameters()}
        self.states: dict[str, State] = {}
        self.governors = {"reduction": self}
        return super().own(model)

    def averaged(self, bucket: list[nn.Parameter], flat: Tensor) -> Finish:
        state = self.states.setdefault(self.names[bucket[0]], {})
        with self.ranks.waits:
            self.average(flat.view_as(bucket[0]) if len(bucket) == 1 else flat,
                         self.ranks.groups["replicas"], state)
        return lambda: None

    def state_dict(self) -> dict[str, Cut]:
        return {f"{name}/{key}": self.as_row(torch.as_tensor(t))
                for name, state in self.states.items() for key, t in state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor | Cut]) -> None:
        for key, rows in state.items():
            name, _, key = key.rpartition("/")
            t = self.own_row(rows).to(next(iter(self.names)).device, copy=True)
            self.states.setdefault(name, {})[key] = t if t.ndim else t.item()

    def as_row(self, t: Tensor) -> Cut:
        """Return a tensor of this rank as one row of a tensor over all ranks."""
        at = (self.ranks.rank, *[0] * t.ndim)
        return Cut(torch.Size((self.ranks.world, *t.shape)), t.dtype,
                   (TensorPiece(at, t[None]),), at[:1])

    def own_row(self, rows: Tensor | Cut) -> Tensor:
        return rows.pieces[0].data[0] if isinstance(rows, Cut) else rows[self.ranks.rank]


class OwnWeights(Averaged):
    """Replicas whose weights and optimizer states differ. `average` gets weights: the initial
    weights, then the weights after each update. In a checkpoint, each tensor has a row per rank;
    the checkpoint's model has the first rank's weights."""

    def own(self, model: nn.Module) -> dict[str, nn.Parameter]:
        owned = super().own(model)
        self._average_weights()
        return owned

    def send(self, bucket: list[nn.Parameter]) -> Finish:
        return lambda: None

    @torch.no_grad()
    def _average_weights(self) -> None:
        for bucket in self.messages.buckets:
            flat = _flatten_dense_tensors([p.detach() for p in bucket])
            self.averaged(bucket, flat)
            torch._foreach_copy_(bucket, list(_unflatten_dense_tensors(flat, bucket)))

    def end(self, training: Any, step: int) -> None:
        if not step and (training._evaluated() or not all(
                training._is_cut(p, slot) for p, slots in training.optimizer.state.items()
                for slot in slots)):
            raise ConfigError(
                f"parallel.reduction={self.layout.reduction} needs an optimizer that evaluates the "
                f"trained weights and whose state tensors have the shapes of their parameters, and "
                f"optimizer={training.config.optimizer.name} does not meet this rule; set "
                f"optimizer=adamw")
        self._average_weights()

    def state_dict(self) -> dict[str, Cut]:
        return super().state_dict() | {f"weights/{name}": self.as_row(p.detach().clone())
                                       for name, p in self.owned.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor | Cut]) -> None:
        super().load_state_dict(state)
        for name, t in self.states.pop("weights").items():
            self.owned[name].copy_(torch.as_tensor(t))

    def whole(self, name: str, t: Tensor) -> Tensor | Cut:
        return self.as_row(t) if t.ndim else t

    def part(self, name: str, whole: Tensor | Cut) -> Tensor:
        return whole if isinstance(whole, Tensor) and not whole.ndim else self.own_row(whole)

    def placed(self, name: str, t: Tensor | Cut) -> Tensor | Cut:
        if isinstance(t, Cut) or not name.startswith("model/"):
            return t
        return Cut(t.shape, t.dtype, (TensorPiece((0,) * t.ndim, t.detach()),), (0,))


# ---- functions that the rows name

top_k_1_percent, top_k_01_percent = (partial(Averaged, average=partial(
    compressed, encode=partial(top_k, share=share), decode=from_top_k)) for share in (0.01, 0.001))
bits_8, bits_4 = (partial(Averaged, average=partial(
    compressed, encode=partial(quantised, bits=bits), decode=partial(from_quantised, bits=bits)))
    for bits in (8, 4))
sign = partial(Averaged, average=partial(compressed, encode=signs, decode=from_signs))
powersgd_4 = partial(Averaged, average=partial(powersgd, rank=4))
local_10 = partial(OwnWeights, average=partial(local, every=10))
diloco_10 = partial(OwnWeights, average=partial(diloco, every=10, rate=0.7, momentum=0.5))
gossip_ring = partial(OwnWeights, average=gossip_on_ring)
gossip_exponential = partial(OwnWeights, average=gossip_one_peer)
