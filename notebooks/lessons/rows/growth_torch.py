"""Makes a larger model's tensors, one by one, from a smaller model's (rows of `growth.py`).

In width, place i of the large model is a copy of place i mod n of the small model's n places. The
rows of a tensor that writes places are copied. Each column of a tensor that reads places is divided
among the copies, so that sums stay the same. The statistics of norms stay the same, since each
place has equally many copies. Groups of heads are copied as a whole, and queries within each group,
so that a query meets a copy of its own key. With a tied head, the weight of the last norm is
divided among the copies, since the head's columns are the embedding's columns.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from lessons.rows.growth import AXES, WidthSettings
from lpkit.config import ModelConfig
from lpkit.techniques.blocks import BLOCKS
from lpkit.techniques.changes import GROWTH
from lpkit.techniques.row import Settings

Pairs = Iterator[tuple[str, Tensor]]
ENDS = ("attention.out.", "mlp.down.")      # modules whose results are added to the stream


def deeper(tensors: Mapping[str, Tensor], small: ModelConfig, large: ModelConfig,
           settings: Settings, tensor_of: Callable[[str], Tensor] | None = None) -> Pairs:
    depth = GROWTH[getattr(settings, "depth", settings.name)]
    tensor_of = tensor_of or tensors.__getitem__
    yield from ((name, tensor_of(name)) for name in tensors if not name.startswith("blocks."))
    for layer in range(large.L):
        source = f"blocks.{depth.source_of(layer, small.L, large.L)}."
        for leaf in [name.removeprefix(source) for name in tensors if name.startswith(source)]:
            t, new = tensor_of(source + leaf), depth.silent and layer >= small.L
            t = torch.zeros_like(t) if new and leaf.startswith(ENDS) else t
            yield f"blocks.{layer}.{leaf}", t


def wider(tensors: Mapping[str, Tensor], small: ModelConfig, large: ModelConfig,
          settings: WidthSettings) -> Pairs:
    axes, draw, uneven = _axes(small, large), torch.Generator().manual_seed(0), settings.uneven

    def tensor_of(name: str) -> Tensor:
        t, (writes, reads) = tensors[name], _axes_of(name, small)
        rows = axes.get(writes)
        if rows is not None and reads and settings.aki:
            above = re.sub(r"(?<=^blocks\.)\d+", lambda layer: f"{int(layer[0]) + 1}", name)
            again = rows.cummax(0).values.diff(prepend=torch.tensor([-1])) == 0     # a second copy
            t, rows = torch.cat((t, tensors.get(above, t))), rows + len(t) * again
        if rows is not None:
            t = t[rows]
        if reads and (name.endswith("weight") or not writes):
            copies = t[..., axes[reads]]
            t = copies if "embed." in name else copies * shares(t, axes[reads], uneven, draw)
        return t

    return deeper(tensors, small, large, settings, tensor_of)


def _axes_of(name: str, small: ModelConfig) -> tuple[str, str]:
    """Return the names (keys of `_axes`) of the axes that a tensor writes and reads; "" for
    none."""
    module, kind = name.split(".")[-2:]
    if small.tied and name.startswith("norm."):
        return "", "width"
    of = module.rstrip("12") if kind in ("weight", "bias") else ""      # norm1 -> norm; buffers: ""
    return AXES.get(of, ("", ""))


def _axes(small: ModelConfig, large: ModelConfig) -> dict[str, Tensor]:
    """Return, by axis, the place in the small model that each place in the large model copies, as
    a tensor of indices."""
    queries, E = small.H // small.G, torch.arange(small.E)
    groups, query = torch.arange(large.G) % small.G, torch.arange(large.H // large.G) % queries
    slots = torch.cat((query, torch.tensor([queries, queries + 1])))     # and its key and value
    heads, qkv = groups[:, None] * queries + query, groups[:, None] * (queries + 2) + slots
    width, mlp = torch.arange(large.D) % small.D, torch.arange(large.F) % small.F
    return {"width": width, "mlp": mlp, "gate_up": torch.cat((mlp, small.F + mlp)),
            "heads": (heads[..., None] * small.E + E).flatten(), "groups": groups,
            "qkv": (qkv[..., None] * small.E + E).flatten(),
            "gain": width if getattr(BLOCKS[small.block], "channels", False) else torch.arange(1)}


def shares(t: Tensor, places: Tensor, uneven: float, draw: torch.Generator) -> Tensor:
    """Return the share (..., N) of each copy of an element of t (..., n). `places` (N,) has the
    element that each copy comes from; the shares of an element sum to 1."""
    drawn = 1 + uneven * (2 * torch.rand(*t.shape[:-1], len(places), generator=draw) - 1)
    return drawn / torch.zeros(t.shape).index_add_(-1, places, drawn)[..., places]
