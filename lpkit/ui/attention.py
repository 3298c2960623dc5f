"""Kinds of attention: which keys a query sees, what that costs over the context, and what a model
of each kind recalls over a distance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from lpkit.errors import ConfigError
from lpkit.tables import FAINT
from lpkit.techniques.attention import KINDS
from lpkit.ui.draw import SECONDS, axis, figure, rule, scatter
from lpkit.ui.style import lines_of

SEEN, HIDDEN = "#004488", "#eef1f5"
Curve = Mapping[float, float]


def mask_view(context: int) -> Callable[..., dict]:
    """For an Explorer: a function of `kind`, the length of documents, and settings of kinds by
    their names, of which a kind takes those that it has."""
    def show(kind: str, document: int, **settings: int) -> dict:
        row = KINDS[kind]
        has = {field.name for field in fields(row.settings)}
        given = {key: value for key, value in settings.items() if key in has}
        rule_ = replace(row.settings, name=kind, **given).rule(context)
        if rule_ is None:
            raise ConfigError(f"{kind} attention hides no key: all of the past is added up in one "
                              f"state, and what is lost there is lost by adding; choose a kind "
                              f"with softmax")
        seen = [[bool(rule_.sees(i, j)) and not (rule_.documents and i // document != j // document)
                 for j in range(context)] for i in range(context)]
        count, all_ = sum(map(sum, seen)), context * (context + 1) // 2
        used = {"document": document} if rule_.documents else given
        words = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in used.items())
        return figure(
            [{"type": "heatmap", "z": [[int(one) for one in line] for line in seen],
              "zmin": 0, "zmax": 1, "colorscale": [[0, HIDDEN], [1, SEEN]], "showscale": False,
              "xgap": 1, "ygap": 1, "hovertemplate": "query %{y}, key %{x}<extra></extra>"}],
            f"{kind}{f', {words}' if words else ''}: {count:,} pairs, {count / all_:.0%} of full",
            height=460, margin={"t": 48}, xaxis=axis("key", constrain="domain"),
            yaxis=axis("query", autorange="reversed", scaleanchor="x", constrain="domain"))

    return show


def cost_figure(formula: Mapping[str, Curve], measured: Mapping[str, Curve], *, unit: str,
                title: str = "", others: float = 0.0) -> dict:
    """The plotly spec, both axes logarithmic: over the context, by kind, a line by formula and
    marks as measured."""
    data, lines = [], lines_of(measured)
    for name, found in measured.items():
        data.append(scatter(formula[name], formula[name].values(), "", hover=None, showlegend=False,
                            line=lines[name], legendgroup=name))
        data.append(scatter(found, found.values(), name, lines[name]["color"], mode="markers",
                            legendgroup=name, hover=f"%{{x:,}} tokens: %{{y:.3s}}{unit}", **SECONDS))
    contexts = sorted({T for found in measured.values() for T in found})
    return figure(data, title, others=others, height=440,
                  xaxis=axis("tokens in a sequence", type="log", tickvals=contexts,
                             ticktext=[f"{T:,}" for T in contexts]),
                  yaxis=axis("", type="log", dtick=1, exponentformat="SI", ticksuffix=unit))


def recall_figure(found: Mapping[str, Sequence[Curve]], *, chance: float, ends: Mapping[str, float],
                  title: str = "") -> dict:
    """The plotly spec: the share of right answers over the distance, by kind: a line through the
    means of the seeds, a mark for each. `ends`: how far a kind can be told anything."""
    data, lines = [], lines_of(found)
    for name, seeds in found.items():
        means = {far: sum(one[far] for one in seeds) / len(seeds) for far in seeds[0]}
        data.append(scatter(means, means.values(), name, hover="%{x:g} back: %{y:.0%}",
                            line=lines[name], legendgroup=name))
        for one in seeds:
            data.append(scatter(one, one.values(), "", lines[name]["color"], mode="markers",
                                hover=None, showlegend=False, legendgroup=name,
                                marker={"size": 5, "opacity": 0.6}))
    shapes = [rule(y=chance, colour=FAINT)]
    shapes += [rule(x=end, colour=lines[name]["color"]) for name, end in ends.items()]
    return figure(data, title, height=400, shapes=shapes,
                  xaxis=axis("places between a question and its answer", rangemode="tozero"),
                  yaxis=axis("right", tickformat=".0%", range=[-0.03, 1.05]))
