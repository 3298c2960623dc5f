"""Rows from outside, as somebody has them in a module beside a notebook: a Config names it under `imports`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lpkit.nn.transformer import Attention
from lpkit.techniques import blocks, changes
from lpkit.techniques.operation import Kind
from lpkit.techniques.row import Row, Settings


class Bare(nn.Module):
    """Attention and MLP without norm and skip: gain * mlp(attention(x)), queries start at 0, the gain at 0.5."""

    def __init__(self, config, attend):
        super().__init__()
        self.attention, self.mlp = Attention(config, attend), blocks.MLPS[config.mlp].load()(config)
        self.gain = nn.Parameter(torch.empty(1))

    def reset(self, init: Settings) -> None:
        self.gain.fill_(0.5)
        nn.init.orthogonal_(self.attention.out.weight)

    def forward(self, x, rotation=None, cache=None, layer=0, documents=None):
        return self.gain * self.mlp(self.attention(x, rotation, cache, layer, documents))


def bare(s):
    yield from (op for op in blocks.pre_norm(s) if op.name not in ("norm1", "add1", "norm2", "add2"))
    stream, narrow = s.stream_bytes, s.tokens * s.model.D * s.compute_bytes
    yield blocks.Op(name="gain", part="norms", params=1, saved_bytes=narrow, saved_itemsize=s.compute_bytes,
                    moved_bytes=stream + narrow, backward=(blocks.Hold(nbytes=2 * stream, frees=1.0),))


@dataclass(frozen=True, kw_only=True)
class Share(Settings):
    where = "governors."
    share: float = 0.5


class Prune:
    """From the second update on, the smallest half of each block's matrices is zero: also after an update of it."""

    def __init__(self, settings: Share):
        self.share, self.masks = settings.share, {}

    def end(self, training, step: int) -> None:
        matrices = {name: p for name, p in training.model.named_parameters() if p.ndim == 2 and "blocks." in name}
        with torch.no_grad():
            if step == 1:
                self.masks = {name: p.abs() > p.abs().flatten().kthvalue(int(self.share * p.numel()))[0]
                              for name, p in matrices.items()}
            for name, mask in self.masks.items():
                matrices[name].mul_(mask)

    def state_dict(self) -> dict[str, Tensor]:
        return self.masks

    def load_state_dict(self, state) -> None:
        self.masks = dict(state)


class LayerDrop:
    """One block, another in each step, is left out of the update; evaluated, saved and sampled are all (arXiv:1909.11556)."""

    def __init__(self, settings: Settings):
        pass

    def begin(self, training, step: int) -> None:
        block = training.model.blocks[step % len(training.model.blocks)]
        block.forward = lambda x, *rest, **named: x

    def end(self, training, step: int) -> None:
        del training.model.blocks[step % len(training.model.blocks)].forward

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state) -> None:
        pass


blocks.BLOCKS["bare"] = Kind(operations=bare, implementation=f"{__name__}:Bare")
changes.GOVERNORS["prune-half"] = Row(implementation=f"{__name__}:Prune", settings=Share())
changes.GOVERNORS["layer-drop"] = Row(implementation=f"{__name__}:LayerDrop")
