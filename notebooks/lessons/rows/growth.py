"""Growth: a run starts from a smaller model's weights (`start.grow`).

    lpkit train cpu-3m model.layers=8 start.run=runs/small start.grow=stack --import lessons.rows.growth

With a preserving row, the large model starts as the same function as the small model: new layers
end in zeros, and the copies of a neuron divide its outgoing weights among them. If the shares were
equal, the copies would have equal gradients and stay equal, and the large model could learn no more
than the small one. So shares are uneven (LEMON, https://arxiv.org/abs/2310.07999).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lpkit.techniques.changes import GROWTH, Growth
from lpkit.techniques.row import Settings
from lpkit.values import Rate

READ = {"kv_heads": "G", "head_dim": "E", "mlp_width": "F", "qkv_bias": "biased_qkv"}


def refusal(settings: Settings, small: Any, large: Any) -> str:
    """Return why `small` cannot become `large` (both are ModelConfigs) and the nearest value that
    works; empty if it can."""
    row, depth = GROWTH[settings.name], GROWTH[getattr(settings, "depth", settings.name)]
    if small.changes:
        return (f"that run has model.changes={', '.join(map(str, small.changes))}; grow a run "
                f"without changes (`lpkit export` merges adapters, and `lpkit import` makes a run "
                f"of the result)")
    for key in (f.name for f in fields(small) if f.name not in ("init", "changes")):
        was, now = (getattr(model, READ.get(key, key)) for model in (small, large))
        if key in row.knows and was not in row.knows[key]:
            return f"model.{key}={was} is not supported; use {', '.join(row.knows[key])}"
        if was != now and not (key in row.grows and now > was):
            return f"model.{key}={now}, not {was}; set model.{key}={was}"
        if key in row.multiples + depth.multiples and now % was:
            low = now - now % was
            return f"model.{key}={now} is not a multiple of {was}; nearest: {low} or {low + was}"
    queries = small.H // small.G
    if large.H // large.G < queries:
        return (f"model.heads={large.H} are fewer than {queries} for each of model.kv_heads="
                f"{large.G}, as in that run; set model.heads={queries * large.G}")
    if small.tied and small.norm == "none" and large.D != small.D:
        return (f"model.width={large.D} with a tied head and no norm has other logits; set "
                f"model.width={small.D}, or grow a run with model.tied=false")
    return settings.problem((small, large))


@dataclass(frozen=True, kw_only=True)
class Copies(Growth):
    """A row whose large model consists of copies. `grows`: settings that may be larger; settings in
    `multiples` only by a whole factor. `knows`: by setting, the supported rows. `source_of(layer,
    l, L)`: the layer (of l) that a layer of L copies. `silent`: new layers add 0."""

    grows: tuple[str, ...] = ("layers",)
    multiples: tuple[str, ...] = ()
    knows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source_of: Callable[[int, int, int], int] = lambda layer, l, L: layer % l
    silent: bool = False
    problem: Callable[[Settings, Any, Any], str] = refusal
    implementation: str = "lessons.rows.growth_torch:deeper"


@dataclass(frozen=True, kw_only=True)
class WidthSettings(Settings):
    """Shares of copies are drawn from 1 - uneven to 1 + uneven and normalised; with `aki`, copied
    rows come from the layer above; `depth` is the row that adds layers."""

    uneven: Rate = 0.5
    aki: bool = False
    depth: Literal["identity-depth", "stack", "interpolate"] = "identity-depth"


# By module: the axis that it writes (its rows), and the axis that it reads (its columns).
AXES = {"qkv": ("qkv", "width"), "beta": ("groups", "width"), "out": ("width", "heads"),
        "up": ("mlp", "width"), "gate_up": ("gate_up", "width"), "down": ("width", "mlp"),
        "norm": ("width", ""), "gain": ("gain", ""), "embed": ("", "width"), "head": ("", "width")}


KNOWN = {"block": ("pre-norm", "parallel", "rezero", "skipinit", "layerscale"),
         "norm": ("layernorm", "rmsnorm", "none"), "mlp": ("gelu", "swiglu")}
GROWTH["stack"] = Copies(
    why="layer i begins as layer i mod l of the small model's l; not preserving",
    multiples=("layers",), source="Gong et al. 2019, https://proceedings.mlr.press/v97/gong19a.html")
GROWTH["interpolate"] = Copies(
    why="layers are repeated in place; not preserving", multiples=("layers",),
    source_of=lambda layer, l, L: layer * l // L,
    source="Chang et al. 2018, https://arxiv.org/abs/1710.10348")
GROWTH["identity-depth"] = Copies(
    why="as stack, with 0 as output projections of new layers; preserving", silent=True,
    knows=KNOWN, source="Chen et al. 2016, https://arxiv.org/abs/1511.05641")
GROWTH["bert2bert"] = Copies(
    why="copies of neurons and heads share outgoing weights; preserving, but for aki and other "
        "depths", settings=WidthSettings(), knows=KNOWN,
    grows=("layers", "width", "heads", "kv_heads", "mlp_width"), multiples=("width",),
    implementation="lessons.rows.growth_torch:wider",
    source="Chen et al. 2021, https://arxiv.org/abs/2110.07143, section 3")
