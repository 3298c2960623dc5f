"""Growth: a run begins from a smaller model's weights (`start.grow`). No torch.

A preserving row begins as the same function: new layers end in zeros, and copies of a neuron share
its outgoing weights. Copies with equal shares have the same gradients and stay alike: a large model
learns what the small one could. So shares are uneven (LEMON, https://arxiv.org/abs/2310.07999).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from lpkit.techniques.blocks import MLPS, NORMS
from lpkit.techniques.row import Row, Settings
from lpkit.values import Rate


@dataclass(frozen=True, kw_only=True)
class Growth(Row):
    """The implementation is f(tensors, small, large, settings), of the small model's tensors and
    both ModelConfigs: pairs of a name and a tensor of the large one, made one by one. `grows`:
    settings that may be larger; those in `multiples` by a whole factor. `knows`: of a setting, the
    rows that it grows. `source_of(layer, l, L)`: which of l layers one of L begins as. `silent`:
    new ones add 0."""

    grows: tuple[str, ...] = ("layers",)
    multiples: tuple[str, ...] = ()
    knows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source_of: Callable[[int, int, int], int] = lambda layer, l, L: layer % l
    silent: bool = False


@dataclass(frozen=True, kw_only=True)
class WidthSettings(Settings):
    """Shares are drawn from 1 - uneven to 1 + uneven, over their sum; with `aki`, copied rows come
    from the layer above; `depth` is the row by which layers grow."""

    uneven: Rate = 0.5
    aki: bool = False
    depth: Literal["identity-depth", "stack", "interpolate"] = "identity-depth"


# By module: the axis that it writes (its rows), and the one that it reads (its columns).
AXES = {"qkv": ("qkv", "width"), "beta": ("groups", "width"), "out": ("width", "heads"),
        "up": ("mlp", "width"), "gate_up": ("gate_up", "width"), "down": ("width", "mlp"),
        "norm": ("width", ""), "gain": ("gain", ""), "embed": ("", "width"), "head": ("", "width")}


DEEPER = "lpkit.training.growth:deeper"
KNOWN = {"block": ("pre-norm", "parallel", "rezero", "skipinit", "layerscale"),
         "norm": tuple(NORMS), "mlp": tuple(MLPS)}      # the kit's own
GROWTH: dict[str, Row] = {
    "none": Row(why="by the same names and shapes, or start.map"),
    "stack": Growth(why="layer i begins as layer i mod l of the small model's l; not preserving",
                    multiples=("layers",), implementation=DEEPER,
                    source="Gong et al. 2019, https://proceedings.mlr.press/v97/gong19a.html"),
    "interpolate": Growth(why="layers are repeated in place; not preserving", implementation=DEEPER,
                          source_of=lambda layer, l, L: layer * l // L, multiples=("layers",),
                          source="Chang et al. 2018, https://arxiv.org/abs/1710.10348"),
    "identity-depth": Growth(why="as stack, with 0 as output projections of new layers; preserving",
                             silent=True, knows=KNOWN, implementation=DEEPER,
                             source="Chen et al. 2016, https://arxiv.org/abs/1511.05641"),
    "bert2bert": Growth(why="copies of neurons and heads share outgoing weights; preserving, but "
                        "for aki and other depths", settings=WidthSettings(), knows=KNOWN,
                        grows=("layers", "width", "heads", "kv_heads", "mlp_width"),
                        multiples=("width",), implementation="lpkit.training.growth:wider",
                        source="Chen et al. 2021, https://arxiv.org/abs/2110.07143, section 3"),
}
