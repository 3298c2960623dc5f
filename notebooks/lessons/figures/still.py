"""A static picture of a plotly figure, for viewers without JavaScript: GitHub, nbconvert, slides.

`picture` turns a plotly spec ({"data", "layout"}, the value of `Figure.spec`) into SVG, or into PNG
if the SVG would have more than MOST bytes. `draw` builds the figure from matplotlib's objects,
without pyplot, at 72 dots per inch: a point of matplotlib is a pixel of plotly. Equal specs give
equal bytes.

Each key of a spec is either drawn (DRAWN) or known to change nothing in a static picture (SILENT).
Any other key raises ConfigError, so a picture never omits anything that the live figure shows.
"""

import base64
import io
import itertools
import logging
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape, unescape
from typing import Any

from lessons.figures import ticks
from lpkit.errors import ConfigError, shown

MOST = 60_000           # the most bytes of a picture
WIDE = 800              # pixels; plotly uses the width of the page
# DejaVu Sans comes with matplotlib. It is wider than plotly's font: sizes are multiplied by SCALE.
FONT, SCALE = "DejaVu Sans", 0.88
# fonts that an SVG names; Verdana has the widths of DejaVu Sans
FONTS = f"'{FONT}', Verdana, system-ui, sans-serif"
EDGE = 8                # pixels of margin around everything
SHARP = (144, 108, 72)  # dots per inch of a PNG; the first that gives at most MOST bytes is used
# matplotlib takes the salt of an SVG's ids from its global settings, so one thread saves at a time
_saving = threading.Lock()

# The keys that a static picture draws, by kind of object.
DRAWN = {
    "layout": "annotations bargap barmode coloraxis font height legend margin shapes showlegend "
              "template title uniformtext",
    "legend": "orientation traceorder x xanchor y yanchor yref",
    "axis": "anchor autorange categoryarray categoryorder constrain constraintoward domain dtick "
            "exponentformat gridcolor linecolor matches nticks range rangemode scaleanchor "
            "showgrid showline showticklabels side tick0 tickangle tickcolor tickfont tickformat "
            "ticklabelstandoff ticklen tickmode tickprefix ticks ticksuffix ticktext tickvals "
            "title type visible zeroline zerolinecolor",
    "scatter": "error_x error_y fill fillcolor line marker mode name opacity showlegend "
               "stackgroup text textfont textposition type x xaxis y yaxis",
    "bar": "base constraintext insidetextanchor marker name opacity orientation showlegend text "
           "textangle textfont textposition type width x xaxis y yaxis offset",
    "heatmap": "colorbar colorscale showscale text textfont texttemplate type x xaxis xgap y "
               "yaxis ygap z zmax zmin",
    "parcoords": "dimensions line type",
    "marker": "color coloraxis line opacity size symbol",
    "line": "color dash shape width",
    "shape": "fillcolor layer line opacity type x0 x1 xref y0 y1 yref",
    "annotation": "align arrowcolor arrowhead arrowwidth ax ay bgcolor font showarrow text x "
                  "xanchor xref xshift y yanchor yref yshift",
    "colorbar": "dtick len thickness tick0 tickfont tickformat ticks ticksuffix ticktext tickvals "
                "title x xanchor y ypad",
}
# Keys that only affect mouse interaction, and keys for space that this module measures itself.
SILENT = set("automargin cliponaxis customdata dragmode hoverinfo hoverlabel hovermode hoverongaps "
             "hovertemplate hovertext legendgroup meta uirevision uid".split())
GLYPH = 50              # pixels of a legend's entry besides its name: the marker and the spaces
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "x": "X", "cross": "P", "star": "*",
           "pentagon": "p", "hexagon": "h", "triangle-up": "^", "triangle-down": "v",
           "triangle-left": "<", "triangle-right": ">", "line-ns": "|", "line-ew": "_"}
# plotly's numbers of the symbols
NUMBERED = dict(enumerate(("circle", "square", "diamond", "cross", "x", "triangle-up",
                           "triangle-down", "triangle-left", "triangle-right")))
DASHES = {"solid": "-", "dash": (0, (4, 2)), "dot": (0, (1, 1.5)), "dashdot": (0, (4, 2, 1, 2)),
          "longdash": (0, (7, 3))}
SHAPES = {"linear": "default", "hv": "steps-post", "vh": "steps-pre", "hvh": "steps-mid"}
ACROSS = {"left": "left", "center": "center", "right": "right"}
DOWN = {"top": "top", "middle": "center", "bottom": "bottom"}


def picture(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return {mime type: content} of the picture: an SVG as text, or a PNG in base64. The file has
    at most MOST bytes (before base64). Raises ConfigError for a spec with anything that cannot be
    drawn, and for a picture that is larger even as the coarsest PNG."""
    drawing = draw(spec)
    title = _words(_text(spec["layout"].get("title"))).replace("\n", " ")
    if len(svg := _svg(drawing, title).encode()) <= MOST:
        return {"image/svg+xml": svg.decode()}
    for dots in SHARP:
        png = _png(drawing, dots, title)
        if len(png) <= MOST:
            return {"image/png": base64.b64encode(png).decode()}
    raise ConfigError(f"the picture of {shown(title)} takes {len(png):,} bytes, more than {MOST:,}")


def _svg(drawing: Any, title: str) -> str:
    """Return the SVG of a matplotlib figure, with `title` as its <title> for screen readers. The
    salt of the ids and the metadata are fixed, so that equal drawings give equal text."""
    import matplotlib

    stream = io.StringIO()
    with _saving, matplotlib.rc_context({"svg.hashsalt": "lpkit", "svg.fonttype": "none"}):
        drawing.savefig(stream, format="svg", dpi=72, metadata={
            "Date": None, "Creator": None, "Format": None, "Type": None})
    text = stream.getvalue()
    # drop the XML header, and the unit of width and height: without it they are pixels
    text = text[text.index("<svg"):].replace("pt\"", "\"", 2)
    text = text.replace(f"'{FONT}'", FONTS)
    return text.replace(">", f' role="img">\n <title>{escape(title)}</title>', 1)


def _png(drawing: Any, dots: int, title: str) -> bytes:
    """Return the PNG of a matplotlib figure, reduced to 64 colours. They are enough for a line
    drawing and take a third of the bytes."""
    from PIL import Image, PngImagePlugin

    stream, small = io.BytesIO(), io.BytesIO()
    drawing.savefig(stream, format="png", dpi=dots, metadata={"Software": None})
    image = Image.open(stream).convert("RGB")
    palette = image.quantize(64, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    words = PngImagePlugin.PngInfo()
    words.add_text("Title", title)
    palette.save(small, "png", compress_level=9, pnginfo=words)
    return small.getvalue()


def draw(spec: Mapping[str, Any]) -> Any:
    """Return the spec as a `matplotlib.figure.Figure` with 72 dots per inch, so a point is a pixel.
    Raises ConfigError that names the key or the value that cannot be drawn."""
    # The first import of matplotlib may build a font cache and log a message, which a notebook
    # would show below the cell.
    log = logging.getLogger("matplotlib")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return _Drawing(spec).figure
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"a static picture of this figure cannot be drawn: "
                          f"{type(error).__name__}: {error}") from error
    finally:
        log.setLevel(level)


# --- words and colours

def _text(title: Any) -> str:
    """Return the text of a plotly title, which is {"text": ...}, a string or None."""
    return (title.get("text") or "" if isinstance(title, Mapping) else title) or ""


def _words(text: Any) -> str:
    """Return plotly's HTML text as plain text: <br> as a line break, <sup> and <sub> as raised and
    lowered characters, other tags dropped, characters that FONT lacks as a white square."""
    text = re.sub(r"<sup>(.*?)</sup>", lambda match: match[1].translate(ticks.RAISED), str(text))
    text = re.sub(r"<sub>(.*?)</sub>", lambda match: match[1].translate(ticks.LOWERED), text)
    text = re.sub(r"<br\s*/?>", "\n", text)
    text = unescape(re.sub(r"</?(b|i|span|em|strong|a)\b[^>]*>", "", text))
    glyphs = _glyphs()
    return "".join(sign if sign == "\n" or ord(sign) in glyphs else "\N{WHITE SQUARE}"
                   for sign in text)


def _glyphs() -> Mapping[int, int]:
    """Return the characters that FONT has, as keys."""
    from matplotlib import font_manager

    return font_manager.get_font(font_manager.findfont(FONT)).get_charmap()


def _bold(text: Any) -> str:
    """Return matplotlib's font weight: "bold" if the whole text is inside <b>."""
    return "bold" if str(text).startswith("<b>") and str(text).endswith("</b>") else "normal"


def _colour(name: Any, opacity: float = 1) -> tuple[float, ...]:
    """Return a CSS colour (a name, #rrggbb, rgb() or rgba()) as red, green, blue and alpha, each
    from 0 to 1; alpha is multiplied by `opacity`. None: transparent."""
    from matplotlib.colors import to_rgba

    if name is None:
        return (0, 0, 0, 0)
    match = re.fullmatch(r"rgba?\(([^)]*)\)", name)
    if match:
        parts = [float(part) for part in match[1].split(",")]
        rgba = (*(part / 255 for part in parts[:3]), parts[3] if len(parts) > 3 else 1.0)
    else:
        rgba = to_rgba(name)
    return (*rgba[:3], rgba[3] * opacity)


def _scale(name: Any) -> Any:
    """Return a colour scale from its name or from a list of [position, colour]."""
    import matplotlib
    from matplotlib.colors import LinearSegmentedColormap

    if isinstance(name, str):
        return matplotlib.colormaps[name.lower()]
    return LinearSegmentedColormap.from_list("", [(at, _colour(colour)) for at, colour in name])


def _readable(colour: Sequence[float]) -> str:
    """Return the colour of a text that is readable on the background `colour`: white, or dark if
    the background's luma is above 0.55."""
    red, green, blue = colour[:3]
    return "#24292f" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "#ffffff"


def _known(kind: str, spec: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key of `spec` is neither in DRAWN[kind] nor in SILENT."""
    known = DRAWN[kind].split()
    for key in spec:
        if key not in known and key not in SILENT and spec[key] is not None:
            raise ConfigError(f"a static picture cannot draw {key!r} of a {kind}; it can draw "
                              f"{', '.join(known)}")


def _pick(table: Mapping[str, Any], name: Any, what: str) -> Any:
    """Return table[name]. Raises ConfigError, which calls the table's names `what`."""
    if name not in table:
        raise ConfigError(f"a static picture cannot draw the {what} {name!r}; it can draw "
                          f"{', '.join(table)}")
    return table[name]


def _merged(*layers: Mapping[str, Any] | None) -> dict:
    """Return the nested dicts merged into one. Where several layers have a key, the last layer's
    value is used; None counts as absent."""
    result: dict = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            if value is None:
                continue
            old = result.get(key)
            both = isinstance(old, Mapping) and isinstance(value, Mapping)
            result[key] = _merged(old, value) if both else value
    return result


def _each(value: Any, count: int) -> list:
    """Return `value` as a list; a single value is repeated `count` times."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * count


# --- axes

class _Axis:
    """One of plotly's axes. Its methods are called in this order: `learn` with all values of all
    traces, `reach` for everything that is drawn, `settle` to fix the range, `tick_positions`."""

    def __init__(self, name: str, spec: dict):
        _known("axis", spec)
        self.name, self.letter, self.spec = name, name[0], spec
        self.kind = spec.get("type")        # "linear", "log", "category" or None, which is linear
        self.names: list = list(spec.get("categoryarray") or []) or []
        # (low, high, whether to add padding) of everything drawn, in axis coordinates
        self.ends: list[tuple[float, float, bool]] = []
        self.from_zero = spec.get("rangemode") == "tozero"
        self.range = (0.0, 1.0)
        self.shared = [self]        # the axes that have the same range, by plotly's `matches`

    @property
    def is_log(self) -> bool:
        return self.kind == "log"

    @property
    def domain(self) -> Sequence[float]:
        """Start and end of the axis, as shares of the plot."""
        return self.spec.get("domain") or (0, 1)

    @property
    def is_reversed(self) -> bool:
        return self.spec.get("autorange") == "reversed"

    def learn(self, values: Iterable[Any]) -> None:
        """Make an axis without a type a category axis if a value is a string, and add the values of
        a category axis to its categories, in order of appearance."""
        values = [value for value in values if value is not None]
        if self.kind is None and any(isinstance(value, str) for value in values):
            self.kind = "category"
        if self.kind == "category":
            self.names += dict.fromkeys(value for value in values if value not in self.names)

    def at(self, value: Any) -> float:
        """Return the axis coordinate of a value: the index of a category, or the number itself. NaN
        for a gap, and for a number that a log axis cannot show."""
        if value is None:
            return math.nan
        if self.kind == "category" and value in self.names:
            return float(self.names.index(value))
        value = float(value)
        return math.nan if self.is_log and value <= 0 else value

    def note(self, value: Any) -> float:
        """Return the axis coordinate of an annotation. On a log axis, plotly expects log10 of the
        value."""
        return 10.0**value if self.is_log else self.at(value)

    def reach(self, values: Iterable[float], room: bool) -> None:
        """Extend the automatic range to these coordinates, with padding if `room` is true."""
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            self.ends.append((min(finite), max(finite), room))

    def settle(self) -> None:
        """Set the range: the spec's, or else the range of the drawn values, with plotly's padding
        of 5% of the range on each side that needs room."""
        given = self.spec.get("range")
        if given is not None and self.spec.get("autorange") is not True:
            low, high = (10.0**end if self.is_log else self.at(end) for end in given)
            self.range = (low, high)
            return
        scale = math.log10 if self.is_log else float
        ends = [(scale(low), scale(high), room) for axis in self.shared
                for low, high, room in axis.ends if low > 0 or not self.is_log]
        low = min((low for low, _, _ in ends), default=-1.0)
        high = max((high for _, high, _ in ends), default=5.0)
        if self.kind == "category" and self.names:
            low, high = min(low, -0.5), max(high, len(self.names) - 0.5)
            ends = []
        if self.from_zero and not self.is_log:
            low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            low, high = low - 1, high + 1
        span = (high - low) / 0.9 * 0.05
        roomy = [(end, value) for first, last, room in ends if room
                 for end, value in (("low", first), ("high", last))]
        at_zero = {0.0} if self.from_zero and not self.is_log else set()
        below = span * (("low", low) in roomy and low not in at_zero)
        above = span * (("high", high) in roomy and high not in at_zero)
        low, high = low - below, high + above
        if self.is_log:
            low, high = 10.0**low, 10.0**high
        self.range = (high, low) if self.is_reversed else (low, high)

    def tick_positions(self, pixels: float) -> tuple[list[float], list[str]]:
        """Return the coordinates of the ticks and their texts, for an axis `pixels` long. Of
        categories, every n-th is named, so that the names have room."""
        low, high = sorted(self.range)
        spec = self.spec
        if self.kind == "category" and "tickvals" not in spec:
            indices = [i for i in range(len(self.names)) if low <= i <= high]
            room = {"x": 24, "y": 13}[self.letter] * len(indices) / max(pixels, 1)
            indices = indices[::max(1, math.ceil(room))]
            return [float(i) for i in indices], [_words(self.names[i]) for i in indices]
        if "tickvals" in spec:
            texts = spec.get("ticktext") or [None] * len(spec["tickvals"])
            pairs = [(self.at(value), value, text) for value, text in zip(spec["tickvals"], texts)]
            pairs = [pair for pair in pairs if low <= pair[0] <= high]
            places = [place for place, _, _ in pairs]
            if spec.get("ticktext"):
                return places, [_words(text) for _, _, text in pairs]
            return places, ticks.words(spec, places)
        places = ticks.positions(spec, self.letter, low, high, pixels)
        words = ticks.words(spec, places)
        if self.letter == "x" and not spec.get("tickangle"):
            words = self.without_overlaps(places, words, pixels)
        return places, words

    def without_overlaps(self, places: list[float], words: list[str], pixels: float) -> list[str]:
        """Return the words, with an empty string for a word that would touch its left neighbour."""
        scale = math.log10 if self.is_log else float
        low, high = map(scale, sorted(self.range))
        end, visible = -math.inf, []
        for place, word in zip(places, words):
            middle, half = (scale(place) - low) / (high - low) * pixels, 3.7 * len(word)
            visible.append(word if middle - half > end else "")
            end = max(end, middle + half + 3 if visible[-1] else end)
        return visible


# keys whose values are names of axes
AXIS_NAMES = {"xaxis", "yaxis", "anchor", "overlaying", "matches", "xref", "yref"}


def _long(name: str) -> str:
    """Return plotly's name of an axis in the layout: x2 -> xaxis2; x and x1 -> xaxis."""
    return f"{name[0]}axis{'' if name[1:] == '1' else name[1:]}"


def _first(value: Any) -> Any:
    """Return a spec in which the first axes have the names that plotly's own layouts use: xaxis for
    xaxis1, x for x1. Both names are allowed in a spec."""
    if isinstance(value, Mapping):
        return {re.sub(r"^([xy]axis)1$", r"\1", key): re.sub(r"^([xy])1(?= |$)", r"\1", item)
                if key in AXIS_NAMES and isinstance(item, str) else _first(item)
                for key, item in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return [*map(_first, value)]
    return value


class _Drawing:
    """Draws one plotly spec; `figure` is the resulting matplotlib figure.

    `prepare` creates the panels and axes, `compose` draws everything at a provisional size, and
    `fit` then moves the edges of the plot until all texts have room. What depends on the final size
    (`placed`) runs after each move.
    """

    def __init__(self, spec: Mapping[str, Any]):
        from matplotlib.figure import Figure

        spec = _first({"data": spec["data"], "layout": spec["layout"]})
        given = spec["layout"]
        template = given.get("template") or {}
        house = template.get("layout", {})
        self.layout = _merged({key: value for key, value in house.items()
                               if key not in ("xaxis", "yaxis", "colorscale")}, given)
        _known("layout", {key: value for key, value in self.layout.items() if not re.fullmatch(
            r"[xy]axis\d*|coloraxis\d*|(paper|plot)_bgcolor|colorway", key)})
        self.high, self.wide = float(self.layout.get("height", 360)), float(WIDE)
        self.font = self.layout.get("font", {})
        self.figure = Figure(figsize=(self.wide / 72, self.high / 72), dpi=72, facecolor="#ffffff")
        defaults = {kind: traces[0] for kind, traces in template.get("data", {}).items()}
        colours = self.layout.get("colorway") or ["#1f77b4"]
        self.traces = []
        for i, trace in enumerate(spec["data"]):
            trace = _merged(defaults.get(trace.get("type", "scatter")), trace)
            trace.setdefault("type", "scatter")
            trace["_colour"] = colours[i % len(colours)]
            _pick(TRACES, trace["type"], "trace type")
            _known(trace["type"], {key: trace[key] for key in trace if key != "_colour"})
            self.traces.append(trace)
        self.axes: dict[str, _Axis] = {}
        self.house = {"x": house.get("xaxis", {}), "y": house.get("yaxis", {})}
        self.panels: dict[tuple[str, str], Any] = {}
        self.handles: list[tuple[Any, str]] = []
        self.bars: list[tuple] = []         # texts that may not fit
        self.placed: list[Callable[[], None]] = []      # callbacks that depend on the plot's size
        self.margin = _merged({"l": 60, "r": 24, "t": 64, "b": 48}, self.layout.get("margin"))
        # These margins are a start: `fit` makes each margin as large as the texts in it need.
        self.prepare()
        self.compose()

    # --- axes and panels by name

    def axis(self, name: str) -> _Axis:
        """Return the axis "x", "y2", ...; create it on first use."""
        long = _long(name)
        if long not in self.axes:
            self.axes[long] = _Axis(name, _merged(self.house[name[0]], self.layout.get(long)))
        return self.axes[long]

    def prepare(self) -> None:
        """Create a panel for each pair of axes that a trace or the layout uses, and `paper`: a
        panel over the whole plot for texts and shapes in plotly's "paper" coordinates (0 to 1)."""
        pairs = [(trace.get("xaxis", "x"), trace.get("yaxis", "y")) for trace in self.traces
                 if trace["type"] != "parcoords"]
        pairs += [(key.replace("axis", ""), value.get("anchor", "y")) for key, value
                  in self.layout.items() if re.fullmatch(r"xaxis\d+", key)]
        plain = any(trace["type"] == "parcoords" for trace in self.traces)
        if not pairs and not plain:
            pairs = [("x", "y")]
        for across, up in pairs:
            key = _long(across), _long(up)
            if key not in self.panels:
                self.axis(across), self.axis(up)
                label = f"{across}{up}"
                self.panels[key] = self.figure.add_axes((0.1, 0.1, 0.8, 0.8), label=label)
        self.paper = self.figure.add_axes((0.1, 0.1, 0.8, 0.8), label="paper", zorder=5)
        self.paper.set_axis_off()
        self.paper.set(xlim=(0, 1), ylim=(0, 1))
        for trace in self.traces:
            if trace["type"] != "parcoords":
                self.axis(trace.get("xaxis", "x")).learn(_listed(trace, "x"))
                self.axis(trace.get("yaxis", "y")).learn(_listed(trace, "y"))
        for axis in self.axes.values():
            if other := axis.spec.get("matches"):
                other = self.axis(other)
                other.shared.append(axis)
                axis.shared = other.shared
            for name in ("linear", "log", "category", None):
                if axis.kind == name:
                    break
            else:
                raise ConfigError(f"a static picture cannot draw an axis of type {axis.kind!r}")

    def panel(self, trace: Mapping[str, Any]) -> tuple[Any, _Axis, _Axis]:
        """Return the matplotlib axes that a trace is drawn in, and its x axis and y axis."""
        across, up = trace.get("xaxis", "x"), trace.get("yaxis", "y")
        return self.panels[_long(across), _long(up)], self.axis(across), self.axis(up)

    # --- composing the figure

    def compose(self) -> None:
        """Draw the traces, settle the ranges, then draw axes, shapes, annotations, title and
        legend, and fit everything into the picture."""
        self.stack_bars()
        for axis in self.axes.values():
            if axis.is_log:
                for (across, up), panel in self.panels.items():
                    if axis is self.axes[across]:
                        panel.set_xscale("log", nonpositive="clip")
                    if axis is self.axes[up]:
                        panel.set_yscale("log", nonpositive="clip")
        stacks: dict[str, dict[float, float]] = defaultdict(dict)
        for number, trace in enumerate(self.traces):
            TRACES[trace["type"]](self, trace, number, stacks)
        for shape in self.layout.get("shapes") or []:
            self.reach_shape(shape)
        for axis in self.axes.values():
            axis.settle()
        for axis in self.axes.values():
            if other := axis.spec.get("matches"):
                given = next((a for a in axis.shared if a.spec.get("range") is not None),
                             self.axis(other))
                axis.range = given.range
        for (across, up), panel in self.panels.items():
            self.furnish(panel, self.axes[across], self.axes[up])
        for shape in self.layout.get("shapes") or []:
            self.shape(shape)
        for annotation in self.layout.get("annotations") or []:
            self.annotation(annotation)
        self.colour_axes()
        title, under = self.title()
        legend = self.legend()
        self.fit(title + under, legend)
        for place in self.placed:
            place()

    def place_panels(self) -> None:
        """Move the panels and `paper` to where the current margins put them, and set the ticks."""
        margin = self.margin
        wide = self.wide - margin["l"] - margin["r"]
        high = self.high - margin["t"] - margin["b"]
        left, low = margin["l"] / self.wide, margin["b"] / self.high
        share = wide / self.wide, high / self.high
        self.paper.set_position((left, low, *share))
        for (across, up), panel in self.panels.items():
            x, y = self.axes[across].domain, self.axes[up].domain
            panel.set_position((left + x[0] * share[0], low + y[0] * share[1],
                                (x[1] - x[0]) * share[0], (y[1] - y[0]) * share[1]))
            for axis, mpl_axis, pixels in ((self.axes[across], panel.xaxis, (x[1] - x[0]) * wide),
                                           (self.axes[up], panel.yaxis, (y[1] - y[0]) * high)):
                places, words = axis.tick_positions(pixels)
                mpl_axis.set_ticks(places, words if mpl_axis.get_visible() else None)
                mpl_axis.set_ticks([], minor=True)
        for panel in self.panels.values():
            panel.apply_aspect()

    def fit(self, above: list, legend: Any) -> None:
        """Enlarge the margins until all texts are inside the picture and none overlaps the title.
        `above`: the texts of title and subtitle. A larger margin changes ticks and wrapped texts,
        so up to three rounds are needed."""
        renderer = self.figure.canvas.get_renderer() if hasattr(
            self.figure.canvas, "get_renderer") else self._renderer()
        ceiling = min((text.get_window_extent(renderer).y0 for text in above), default=self.high)
        drawn = [*self.panels.values(), self.paper]
        for _ in range(3):
            self.place_panels()
            for place in self.placed:
                place()
            boxes = [axes.get_tightbbox(renderer) for axes in drawn if axes.get_visible()]
            boxes += [text.get_window_extent(renderer) for text in self.paper.texts]
            boxes += [bar.ax.get_tightbbox(renderer) for bar in self.colourbars]
            boxes = [box for box in boxes if box is not None and box.width > 0]
            left = min((box.x0 for box in boxes), default=0)
            right = max((box.x1 for box in boxes), default=0)
            low = min((box.y0 for box in boxes), default=0)
            top = max((box.y1 for box in boxes), default=0)
            floor = EDGE
            if legend is not None:
                self.place_legend(legend, renderer)
                box = legend.get_window_extent(renderer)
                if self.legend_below:
                    floor = box.y1 + EDGE
                elif box.y1 > self.high - self.margin["t"]:
                    top = max(top, box.y1)
            moves = {"l": EDGE - left, "r": right - self.wide + EDGE, "b": floor - low,
                     "t": top + EDGE - ceiling}
            moves = {side: move for side, move in moves.items() if move > 0.5}
            if not moves:
                break
            for side, move in moves.items():
                self.margin[side] += move
        self.place_panels()
        if legend is not None:
            self.place_legend(legend, renderer)

    def _renderer(self) -> Any:
        """Return a renderer, which measures texts."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        return FigureCanvasAgg(self.figure).get_renderer()

    def write(self, text: Any, font: Mapping[str, Any] | None = None, **more: Any) -> dict:
        """Return matplotlib's properties of a text ("s" is the text itself) from plotly's `font`,
        with the size multiplied by SCALE. `parse_math` is off: a dollar sign starts no formula."""
        font = font or {}
        size = font.get("size", self.font.get("size", 13)) * SCALE
        return {"s": _words(text), "fontsize": size, "family": FONT, "parse_math": False,
                "color": _colour(font.get("color", self.font.get("color", "#24292f"))),
                "fontweight": _bold(text), **more}

    def title(self) -> tuple[list, list]:
        """Draw the title and, below it, the subtitle; return both lists of texts (0 or 1 each)."""
        title = self.layout.get("title") or {}
        title = title if isinstance(title, Mapping) else {"text": title}
        artists: list[list] = [[], []]
        top, renderer = self.high - 12, self._renderer()
        parts = (title.get("text"), title.get("font")), \
            (_text(title.get("subtitle")), (title.get("subtitle") or {}).get("font"))
        for i, (text, font) in enumerate(parts):
            if not text:
                continue
            artist = self.figure.text(12 / self.wide, top / self.high, va="top", ha="left",
                                      linespacing=1.25, **self.write(text, font))
            self.wrap(artist, self.wide - 24, renderer)
            top = artist.get_window_extent(renderer).y0 - 6
            artists[i].append(artist)
        return artists[0], artists[1]

    def wrap(self, text: Any, pixels: float, renderer: Any) -> None:
        """Break the lines of a matplotlib text between words, so that none is wider than
        `pixels`."""
        lines: list[str] = []
        for line in text.get_text().split("\n"):
            lines.append("")
            for word in line.split(" "):
                longer = f"{lines[-1]} {word}" if lines[-1] else word
                text.set_text(longer)
                if lines[-1] and text.get_window_extent(renderer).width > pixels:
                    lines.append(word)
                else:
                    lines[-1] = longer
        text.set_text("\n".join(lines))

    def legend(self) -> Any:
        """Draw the legend with the most columns (up to 9) that fit, and return it. Return None if
        `showlegend` is off, or if there are fewer than two names and no trace asks for a legend."""
        wanted = self.layout.get("showlegend")
        spec = _merged({"x": 0, "y": 1.02}, self.layout.get("legend"))
        _known("legend", spec)
        self.legend_below = spec.get("yref") == "container" and spec["y"] == 0
        requested = any(trace.get("showlegend") for trace in self.traces)
        if wanted is False or (wanted is None and len(self.handles) < 2 and not requested):
            return None
        if not self.handles:
            return None
        renderer = self._renderer()
        room = self.wide - self.margin["r"] - 12 - (spec["x"] or 0) * (self.wide - 84)
        names = [name for _, name in self.handles]
        single = self.columns(1)
        widths = [text.get_window_extent(renderer).width + GLYPH for text in single.get_texts()]
        single.remove()
        columns = next((many for many in range(min(len(names), 9), 1, -1)
                        if sum(max(widths[i::many]) for i in range(many)) <= room), 1)
        legend = self.columns(columns)
        legend.set_zorder(7)
        self.legend_spec = spec
        return legend

    def columns(self, many: int) -> Any:
        """Draw the legend in `many` columns and return it."""
        count = len(self.handles)
        rows = math.ceil(count / many)
        # matplotlib fills a legend column by column, plotly row by row; empty entries fill the rest
        order = [row * many + column for column in range(many) for row in range(rows)]
        shown_ = [self.handles[i] if i < count else (_nothing(), "") for i in order]
        legend = self.figure.legend(
            [handle for handle, _ in shown_], [name for _, name in shown_], ncols=many,
            loc="lower left", bbox_to_anchor=(0, 0), frameon=False, borderpad=0,
            borderaxespad=0, handlelength=2.2, columnspacing=1.4, labelspacing=0.45,
            handletextpad=0.6, labelcolor=self.font.get("color", "#24292f"),
            prop={"family": FONT, "size": 13 * SCALE})
        for text in legend.get_texts():
            text.set_parse_math(False)
        return legend

    def place_legend(self, legend: Any, renderer: Any) -> None:
        """Move the legend to its place in plotly's coordinates of the plot; keep it inside the
        picture."""
        spec, margin = self.legend_spec, self.margin
        high = self.high - margin["t"] - margin["b"]
        wide = self.wide - margin["l"] - margin["r"]
        x, y = margin["l"] + spec["x"] * wide, margin["b"] + spec["y"] * high
        if self.legend_below:
            y = EDGE
        size = legend.get_window_extent(renderer)
        x = max(EDGE, min(x, self.wide - 2 * EDGE - size.width))   # browsers draw wider text
        legend.set_bbox_to_anchor((x / self.wide, y / self.high), self.figure.transFigure)

    # --- axes

    def furnish(self, panel: Any, across: _Axis, up: _Axis) -> None:
        """Draw the axes of a panel: range, ticks, tick labels, grid, zero line and titles."""
        panel.set_xlim(across.range)
        panel.set_ylim(up.range)
        panel.patch.set_visible(False)
        panel.set_axisbelow(True)
        for side in ("top", "right", "left", "bottom"):
            panel.spines[side].set_visible(False)
        size = self.font.get("size", 13)
        for axis, mpl_axis, sides in ((across, panel.xaxis, ("bottom", "top")),
                                      (up, panel.yaxis, ("left", "right"))):
            spec = axis.spec
            side = spec.get("side", sides[0])
            mpl_axis.set_ticks_position(side)
            mpl_axis.set_label_position(side)
            other = up if axis is across else across
            mine = _long(spec.get("anchor") or other.name) == _long(other.name)
            seen = spec.get("visible", True) and mine
            tickfont = spec.get("tickfont") or {}
            labels = seen and spec.get("showticklabels", True)
            length = spec.get("ticklen", 4) if spec.get("ticks") == "outside" and seen else 0
            mpl_axis.set_tick_params(
                length=length, width=1, color=spec.get("tickcolor", "#444444"), pad=3,
                labelsize=tickfont.get("size", size - 1) * SCALE, labelfontfamily=FONT,
                labelcolor=tickfont.get("color", self.font.get("color", "#24292f")),
                labelrotation=-(spec.get("tickangle") or 0),
                **{f"label{name}": bool(labels and name == side) for name in sides})
            if spec.get("tickangle") and axis is across:
                for label in mpl_axis.get_ticklabels():
                    label.set_ha("right" if spec["tickangle"] < 0 else "left")
                    label.set_rotation_mode("anchor")
            if not labels:
                mpl_axis.set_tick_params(labelbottom=False, labelleft=False, labeltop=False,
                                         labelright=False)
            if spec.get("visible", True) and spec.get("showgrid", True):
                mpl_axis.grid(True, color=spec.get("gridcolor", "#e5e7eb"), linewidth=1, zorder=0.5)
            if seen and spec.get("showline"):
                panel.spines[side].set(visible=True, color=spec.get("linecolor", "#444444"),
                                       linewidth=1)
            if spec.get("visible", True) and spec.get("zeroline", True) and not axis.is_log \
                    and axis.kind != "category" and min(axis.range) < 0 < max(axis.range):
                line = panel.axvline if axis is across else panel.axhline
                line(0, color=spec.get("zerolinecolor", "#e5e7eb"), linewidth=1.4, zorder=0.6)
            if seen and (title := _text(spec.get("title"))):
                font = spec["title"].get("font", {}) if isinstance(spec["title"], Mapping) else {}
                text = self.write(title, font)
                mpl_axis.set_label_text(text.pop("s"), **text)
                mpl_axis.labelpad = 6
        for axis, other in ((across, up), (up, across)):
            if axis.spec.get("scaleanchor"):
                left = "left" in (axis.spec.get("constraintoward"),
                                  other.spec.get("constraintoward"))
                panel.set_aspect("equal", adjustable="box", anchor="W" if left else "C")

    # --- over the traces

    def reference(self, spec: Mapping[str, Any], letter: str) -> tuple[Any, _Axis | None, Any]:
        """Return how the coordinate `letter` ("x" or "y") of a shape or annotation is meant: the
        matplotlib transform, the axis (None if the coordinate is a share of the plot or of a
        panel), and the panel (None for a share of the plot). Raises ConfigError for an axis that
        has no panel."""
        name = spec.get(f"{letter}ref") or letter
        if name == "paper":
            return self.paper.transAxes, None, None
        long, within = _long(name.split()[0]), name.endswith(" domain")
        panel = next((panel for key, panel in self.panels.items() if long in key), None)
        if panel is None:
            raise ConfigError(f"a shape or annotation refers to the axis {name!r}, which no trace "
                              f"uses")
        if within:
            return panel.transAxes, None, panel
        return panel.transData, self.axes[long], panel

    def reach_shape(self, shape: Mapping[str, Any]) -> None:
        """Extend the range of the axes to a shape, as plotly does."""
        for letter in "xy":
            _, axis, _ = self.reference(shape, letter)
            if axis:
                axis.reach([axis.at(shape[f"{letter}{end}"]) for end in "01"], False)

    def shape(self, shape: Mapping[str, Any]) -> None:
        """Draw a line or a rectangle, clipped to the range of its axes."""
        from matplotlib.lines import Line2D
        from matplotlib.patches import Rectangle
        from matplotlib.transforms import blended_transform_factory

        _known("shape", shape)
        line = shape.get("line") or {}
        _known("line", line)
        refs, ends = [], []
        for letter in "xy":
            transform, axis, panel = self.reference(shape, letter)
            values = [shape[f"{letter}{end}"] for end in "01"]
            if axis:
                low, high = sorted(axis.range)
                values = [axis.at(value) for value in values]
                if max(values) < low or min(values) > high:
                    return
                values = [min(max(value, low), high) for value in values]
            refs.append((transform, panel))
            ends.append(values)
        panel = refs[0][1] or refs[1][1] or self.paper
        opacity = shape.get("opacity", 1)
        below = shape.get("layer") == "below"
        style = {"transform": blended_transform_factory(refs[0][0], refs[1][0]), "clip_on": False,
                 "zorder": 0.9 if below else 4.5, "linewidth": line.get("width", 2),
                 "linestyle": _pick(DASHES, line.get("dash") or "solid", "dash")}
        edge = _colour(line.get("color") or "#444444", opacity) if style["linewidth"] else None
        kind = _pick({"line": Line2D, "rect": Rectangle}, shape.get("type"), "shape")
        if kind is Line2D:
            panel.add_line(Line2D(ends[0], ends[1], color=edge, solid_capstyle="butt", **style))
            return
        (x0, x1), (y0, y1) = ends
        panel.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, edgecolor=edge or "none",
                                  facecolor=_colour(shape.get("fillcolor"), opacity), **style))

    def annotation(self, note: Mapping[str, Any]) -> None:
        """Draw a text, with an arrow or a line to its point if `showarrow` is on."""
        from matplotlib.transforms import blended_transform_factory

        _known("annotation", note)
        places, transforms = [], []
        for letter in "xy":
            transform, axis, _ = self.reference(note, letter)
            places.append(axis.note(note[letter]) if axis else note[letter])
            transforms.append(transform)
        arrow = note.get("showarrow", True)
        shift = [note.get("xshift", 0), note.get("yshift", 0)]
        if arrow:
            shift = [shift[0] + note.get("ax", -10), shift[1] - note.get("ay", -30)]
        anchors = []
        for i, (letter, ends) in enumerate((("x", ("left", "center", "right")),
                                            ("y", ("bottom", "middle", "top")))):
            name = note.get(f"{letter}anchor", "auto")
            if name == "auto":      # plotly's rule: by thirds of the plot; else centred
                at = places[i] if not arrow and note.get(f"{letter}ref") == "paper" else 0.5
                name = ends[0 if at < 1 / 3 else 2 if at > 2 / 3 else 1]
            anchors.append(name)
        label = self.write(note["text"], note.get("font"))
        text = label.pop("s")
        more: dict = {}
        if note.get("bgcolor"):
            more["bbox"] = {"facecolor": _colour(note["bgcolor"]), "edgecolor": "none",
                            "pad": 1}
        if arrow:
            if note.get("arrowhead", 1) != 0:
                more["arrowprops"] = {"arrowstyle": "->"}
            else:
                more["arrowprops"] = {"arrowstyle": "-"}
            more["arrowprops"] |= {"color": note.get("arrowcolor", "#24292f"), "shrinkA": 0,
                                   "shrinkB": 0, "linewidth": note.get("arrowwidth", 1.5)}
        self.paper.annotate(
            text, xy=places, xycoords=blended_transform_factory(*transforms), xytext=shift,
            textcoords="offset points", ha=ACROSS[anchors[0]], va=DOWN[anchors[1]],
            multialignment=note.get("align", "center"), annotation_clip=False, zorder=6,
            **label, **more)

    # --- colours with a scale

    colourbars: list

    def colour_axes(self) -> None:
        """Draw a colour bar for each `coloraxis` of the layout."""
        self.colourbars = getattr(self, "colourbars", [])
        for key, spec in self.layout.items():
            if re.fullmatch(r"coloraxis\d*", key):
                self.colour_bar(_scale(spec["colorscale"]), spec["cmin"], spec["cmax"],
                                spec.get("colorbar") or {})

    def colour_bar(self, scale: Any, low: float, high: float, bar: Mapping[str, Any],
                   panel: Any = None) -> None:
        """Draw the colour bar of the colour map `scale` from `low` to `high`; `bar` has plotly's
        settings. It moves with the plot, so its position is set in `placed`."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        _known("colorbar", bar)
        place = self.figure.add_axes((0.9, 0.1, 0.02, 0.8), label="colours")
        drawn_bar = self.figure.colorbar(ScalarMappable(Normalize(low, high), scale), cax=place)
        drawn_bar.outline.set_visible(False)
        values = bar.get("tickvals")
        if values is None:
            values = ticks.positions(bar, "y", low, high, 220)
        words = [_words(word) for word in bar.get("ticktext") or ticks.words(bar, values)]
        drawn_bar.set_ticks(values, labels=words)
        drawn_bar.ax.minorticks_off()
        size = (bar.get("tickfont") or {}).get("size", 12)
        place.tick_params(length=0, labelsize=size * SCALE, labelfontfamily=FONT,
                          labelcolor=self.font.get("color", "#24292f"))
        if title := _text(bar.get("title")):
            text = self.write(title, (bar["title"].get("font") if isinstance(
                bar["title"], Mapping) else None) or {"size": size})
            text["label"] = text.pop("s")
            place.set_title(**text, loc="left", pad=5)
        self.colourbars = [*getattr(self, "colourbars", []), drawn_bar]

        def put() -> None:
            box = self.paper.get_position()
            share, middle = bar.get("len", 1), bar.get("y", 0.5)
            where = box.x0 + bar.get("x", 1.02) * box.width
            place.set_position((where, box.y0 + (middle - share / 2) * box.height,
                                bar.get("thickness", 30) / self.wide, share * box.height))

        self.placed.append(put)

    # --- bars of several traces share their places

    def stack_bars(self) -> None:
        """Set trace["_bars"] of each bar trace: (centre on the axis of names, width, base, size) of
        each bar. Bars at the same place stand side by side ("group"), on top of each other
        ("stack", "relative"; negative bars below zero) or in front of each other ("overlay")."""
        mode = self.layout.get("barmode", "group")
        _pick(dict.fromkeys(("group", "stack", "overlay", "relative")), mode, "bar mode")
        groups: dict[tuple, list[dict]] = defaultdict(list)
        for trace in self.traces:
            if trace["type"] == "bar":
                groups[trace.get("xaxis", "x"), trace.get("yaxis", "y")].append(trace)
        for traces in groups.values():
            _, across, up = self.panel(traces[0])
            tops: dict[tuple[float, bool], float] = defaultdict(float)
            for i, trace in enumerate(traces):
                flat = trace.get("orientation") == "h"
                along = up if flat else across
                names, sizes = _listed(trace, "y" if flat else "x"), _listed(
                    trace, "x" if flat else "y")
                places = [along.at(name) for name in names]
                full = 1.0 if along.kind == "category" else self.step(traces, along, flat)
                width = full * (1 - self.layout.get("bargap", 0.2))
                offset = 0.0
                if trace.get("offset") is not None and trace.get("width") is not None:
                    offset = trace["offset"] + trace["width"] / 2
                elif mode == "group" and len(traces) > 1:
                    width /= len(traces)
                    offset = (i - (len(traces) - 1) / 2) * width
                widths = [width if given is None else given
                          for given in _each(trace.get("width"), len(places))]
                bases = [0.0 if base is None else float(base)
                         for base in _each(trace.get("base"), len(places))]
                sizes = [math.nan if size is None else float(size) for size in sizes]
                if mode in ("stack", "relative"):
                    for k, (place, size) in enumerate(zip(places, sizes)):
                        if math.isfinite(size):
                            bases[k] += tops[place, size < 0]
                            tops[place, size < 0] += size
                trace["_bars"] = list(zip([place + offset for place in places], widths, bases,
                                          sizes))

    def step(self, traces: list[dict], along: _Axis, flat: bool) -> float:
        """Return the smallest distance between two bars on a numeric axis; 1 for a single bar.
        `flat`: the bars are horizontal."""
        places = sorted({along.at(name) for trace in traces
                         for name in _listed(trace, "y" if flat else "x")})
        return min((b - a for a, b in itertools.pairwise(places)), default=1.0)

    def named(self, trace: Mapping[str, Any], handle: Any) -> None:
        """Add a trace to the legend, with `handle` as its sign, unless it has no name."""
        if trace.get("showlegend", True) and trace.get("name"):
            self.handles.append((handle, _words(trace["name"])))

    # --- traces

    # Each method in TRACES draws a trace. `number` is its index, which orders the traces from back
    # to front; `stacks` has the sums so far of stacked areas, by stack and x.

    def scatter(self, trace: dict, number: int, stacks: dict) -> None:
        """Draw lines, markers, texts, error bars and filled areas."""
        panel, across, up = self.panel(trace)
        line, marker = trace.get("line") or {}, trace.get("marker") or {}
        _known("line", line)
        _known("marker", marker)
        count = max(len(_listed(trace, "x")), len(_listed(trace, "y")))
        mode = trace.get("mode") or ("lines+markers" if count < 20 else "lines")
        x = [across.at(value) for value in _listed(trace, "x") or range(count)]
        y = [up.at(value) for value in _listed(trace, "y") or range(count)]
        opacity = trace.get("opacity", 1)
        base = line.get("color") or marker.get("color")
        base = base if isinstance(base, str) else trace["_colour"]
        colour = _colour(line.get("color") or base, opacity)
        steps = _pick(SHAPES, line.get("shape") or "linear", "line shape")
        width = line.get("width", 2)
        zorder = 2 + number / 1000
        handle = None
        if trace.get("stackgroup") or trace.get("fill"):
            handle, y = self.filled(panel, trace, x, y, steps, opacity, base, stacks, zorder)
            up.from_zero = up.from_zero or trace.get("fill") != "toself"
        across.reach(x, "markers" in mode or "text" in mode)
        up.reach(y, True)
        if "lines" in mode and width:
            [drawn] = panel.plot(
                x, y, color=colour, linewidth=width, drawstyle=steps, zorder=zorder + 0.0003,
                linestyle=_pick(DASHES, line.get("dash") or "solid", "dash"), label=_label(number))
            handle = handle or self.line_handle(drawn)
        for letter in "xy":
            self.whiskers(panel, trace.get(f"error_{letter}"), x, y, letter, base, zorder)
        if "markers" in mode:
            self.markers(panel, marker, x, y, base, opacity, zorder + 0.0005, _label(number),
                         trace.get("cliponaxis", True))
            handle = self.marker_handle(marker, base, opacity, handle)
        if "text" in mode:
            self.point_texts(panel, trace, x, y, base if "markers" not in mode else None)
        if handle is not None:
            self.named(trace, handle)

    def filled(self, panel: Any, trace: dict, x: list, y: list, steps: str, opacity: float,
               base: str, stacks: dict, zorder: float) -> tuple[Any, list]:
        """Draw the filled area of a scatter trace. Return the legend's sign (None: no area) and the
        y values, which a stack group raises by the traces below."""
        from matplotlib.patches import Patch

        group = trace.get("stackgroup")
        kind = "tonexty" if group else _pick(dict.fromkeys(
            ("tozeroy", "tonexty", "toself", "none")), trace["fill"], "fill")
        if kind == "none":
            return None, y
        default = _colour(base)
        fill = _colour(trace["fillcolor"], opacity) if trace.get("fillcolor") \
            else (*default[:3], 0.5 * opacity)
        if kind == "toself":
            panel.fill(x, y, facecolor=fill, edgecolor="none", zorder=zorder)
            return Patch(facecolor=fill), y
        lower = [0.0] * len(x)
        if group:
            heap = stacks[f"{group} of {trace.get('yaxis', 'y')}"]
            lower = [heap.get(place, 0.0) for place in x]
            y = [low + (0.0 if math.isnan(value) else value) for low, value in zip(lower, y)]
            heap.update(zip(x, y))
        elif kind == "tonexty" and "before" in stacks:
            before = stacks["before"]
            lower = [before.get(place, math.nan) for place in x]
            if any(map(math.isnan, lower)):
                raise ConfigError("a static picture can fill between two lines only where both "
                                  "have the same x")
        panel.fill_between(x, lower, y, facecolor=fill, edgecolor="none", zorder=zorder,
                           step={"steps-post": "post", "steps-pre": "pre",
                                 "steps-mid": "mid"}.get(steps))
        return Patch(facecolor=fill), y

    def whiskers(self, panel: Any, error: Mapping[str, Any] | None, x: list, y: list, letter: str,
                 base: str, zorder: float) -> None:
        """Draw the error bars of a scatter trace along the axis `letter`, and extend the axis to
        their ends."""
        if not error:
            return
        if error.get("type", "data") != "data":
            raise ConfigError(f"a static picture draws error bars of type 'data', not "
                              f"{error['type']!r}")
        high = error["array"]
        low = error.get("arrayminus", high) if not error.get("symmetric", True) else high
        panel.errorbar(x, y, **{f"{letter}err": [low, high]}, fmt="none", zorder=zorder,
                       ecolor=_colour(error.get("color") or base),
                       elinewidth=error.get("thickness", 2), capsize=error.get("width", 4),
                       capthick=error.get("thickness", 2))
        axis = self.axes[_long(next(key for key, value in self.panels.items()
                                    if value is panel)["xy".index(letter)].replace("axis", ""))]
        middle = x if letter == "x" else y
        axis.reach([value - below for value, below in zip(middle, low)], True)
        axis.reach([value + above for value, above in zip(middle, high)], True)

    def paints(self, marker: Mapping[str, Any], base: str, count: int) -> list:
        """Return the colour of each marker: one colour, a list, or values on a colour scale."""
        colours = marker.get("color", base)
        if marker.get("coloraxis"):
            spec = self.layout[marker["coloraxis"]]
            scale, low, high = _scale(spec["colorscale"]), spec["cmin"], spec["cmax"]
            return [scale(min(max((value - low) / (high - low), 0), 1))
                    for value in _each(colours, count)]
        return [_colour(colour if colour is not None else base)
                for colour in _each(colours, count)]

    def markers(self, panel: Any, marker: Mapping[str, Any], x: list, y: list, base: str,
                opacity: float, zorder: float, label: str, clip: bool) -> None:
        """Draw the markers of a scatter trace. A matplotlib call takes one symbol, so there is one
        call for each symbol, with and without an outline."""
        count = len(x)
        edge = marker.get("line") or {}
        if isinstance(edge.get("width"), list) and not any(edge["width"]):
            edge = {}
        opacities = [opacity * (1 if share is None else share)
                     for share in _each(marker.get("opacity", 1), count)]
        colours = self.paints(marker, base, count)
        sizes = [size if size is not None else 7 for size in _each(marker.get("size", 7), count)]
        symbols = _each(marker.get("symbol") or "circle", count)
        edges, widths = _each(edge.get("color"), count), _each(edge.get("width"), count)
        kinds = dict.fromkeys(zip(symbols, (bool(width) for width in widths)))
        for symbol, framed in kinds:
            mine = [i for i in range(count) if (symbols[i], bool(widths[i])) == (symbol, framed)
                    and not math.isnan(x[i]) and not math.isnan(y[i])]
            sign, hollow = _symbol(symbol)
            thin = sign in "|_"
            paint = [(*colours[i][:3], colours[i][3] * opacities[i]) for i in mine]
            rim = [_colour(edges[i], opacities[i]) if edges[i] and framed else
                   (*colours[i][:3], colours[i][3] * opacities[i]) for i in mine]
            drawn = panel.scatter(
                [x[i] for i in mine], [y[i] for i in mine], marker=sign, zorder=zorder,
                label=label, s=[(sizes[i] * (0.8 if sign == "D" else 1)) ** 2 for i in mine],
                **({"color": rim} if thin else {
                    "facecolors": "none" if hollow else paint,
                    "edgecolors": rim if hollow or framed else "none"}),
                linewidths=[widths[i] or (1.5 if hollow or thin else 0) for i in mine])
            drawn.set_clip_on(bool(clip))

    def point_texts(self, panel: Any, trace: dict, x: list, y: list, colour: str | None) -> None:
        """Draw the text of each point of a scatter trace, next to the point's marker."""
        texts = _each(trace.get("text"), len(x))
        places = _each(trace.get("textposition") or "middle center", len(x))
        font = trace.get("textfont") or ({"color": colour} if colour else {})
        sizes = _each((trace.get("marker") or {}).get("size", 7), len(x))
        for x_at, y_at, text, place, size in zip(x, y, texts, places, sizes):
            if not text or math.isnan(x_at) or math.isnan(y_at):
                continue
            down, across = place.split()
            away = (size or 0) / 2 + 2
            shift = ({"left": -away, "center": 0, "right": away}[across],
                     {"top": away, "middle": 0, "bottom": -away}[down])
            label = self.write(text, font)
            panel.annotate(label.pop("s"), (x_at, y_at), shift, textcoords="offset points",
                           ha={"left": "right", "center": "center", "right": "left"}[across],
                           va={"top": "bottom", "middle": "center", "bottom": "top"}[down],
                           zorder=4, annotation_clip=True, **label)

    def line_handle(self, drawn: Any) -> Any:
        """Return the legend's sign of a line."""
        from matplotlib.lines import Line2D

        return Line2D([], [], color=drawn.get_color(), linewidth=drawn.get_linewidth(),
                      linestyle=drawn.get_linestyle())

    def marker_handle(self, marker: Mapping[str, Any], base: str, opacity: float,
                      line: Any) -> Any:
        """Return the legend's sign of markers; on the sign `line` if the trace has a line, too."""
        from matplotlib.lines import Line2D

        symbol = marker.get("symbol") or "circle"
        sign, hollow = _symbol(symbol[0] if isinstance(symbol, list) else symbol)
        colour = marker.get("color", base)
        colour = _colour(colour if isinstance(colour, str) else base)
        share = marker.get("opacity", 1)
        colour = (*colour[:3], colour[3] * opacity * (share if isinstance(share, (int, float))
                                                      else 1))
        edge = marker.get("line") or {}
        rim = edge.get("color") if edge.get("width") else None
        rim = _colour(rim, opacity) if isinstance(rim, str) else colour
        size = marker.get("size", 7)
        entry = line if isinstance(line, Line2D) else Line2D([], [], linestyle="none")
        wide = edge.get("width")
        wide = wide if isinstance(wide, (int, float)) and wide else 1.5
        entry.set(marker=sign, markersize=min(size if isinstance(size, (int, float)) else 8, 11),
                  markerfacecolor="none" if hollow else colour, markeredgecolor=rim,
                  markeredgewidth=wide if hollow or sign in "|_" or edge.get("width") else 0)
        return entry

    def bar(self, trace: dict, number: int, stacks: dict) -> None:
        """Draw the bars that `stack_bars` placed, with their texts."""
        from matplotlib.patches import Patch, Rectangle

        panel, across, up = self.panel(trace)
        marker = trace.get("marker") or {}
        _known("marker", marker)
        flat = trace.get("orientation") == "h"
        along, over = (up, across) if flat else (across, up)
        boxes = trace["_bars"]
        opacities = [trace.get("opacity", 1) * (1 if share is None else share)
                     for share in _each(marker.get("opacity", 1), len(boxes))]
        colours = self.paints(marker, trace["_colour"], len(boxes))
        edge = marker.get("line") or {}
        texts = _each(trace.get("text") or "", len(boxes))
        for box, opacity, colour, text in zip(boxes, opacities, colours, texts):
            place, width, base, size = box
            if not math.isfinite(size) or not math.isfinite(place):
                continue
            paint = (*colour[:3], colour[3] * opacity)
            corner = (base, place - width / 2) if flat else (place - width / 2, base)
            if over.is_log and base <= 0:
                corner, size = self.above_zero(corner, size, flat)
            sides = (size, width) if flat else (width, size)
            patch = Rectangle(corner, *sides, facecolor=paint, zorder=2 + number / 1000,
                              label=_label(number),
                              linewidth=edge.get("width", 0) or 0,
                              edgecolor=_colour(edge.get("color"), opacity))
            panel.add_patch(patch)
            if text not in ("", None) and trace.get("textposition", "auto") != "none":
                self.bar_text(panel, patch, trace, text, flat, size, colour)
            along.reach([place - width / 2, place + width / 2], False)
            over.reach([base if base > 0 or not over.is_log else math.nan, base + size], True)
        over.from_zero = True
        colour = colours[0] if colours else _colour(trace["_colour"])
        share = opacities[0] if opacities else 1
        self.named(trace, Patch(facecolor=(*colour[:3], colour[3] * share)))

    def above_zero(self, corner: tuple, size: float, flat: bool) -> tuple[tuple, float]:
        """Move the start of a bar from zero to just above zero, for a log axis."""
        low = size * 1e-12
        return ((low, corner[1]) if flat else (corner[0], low)), size - low

    def bar_text(self, panel: Any, patch: Any, trace: dict, text: Any, flat: bool, size: float,
                 colour: Sequence[float]) -> None:
        """Draw the text of a bar: in its middle (`textposition` "inside" or "auto") or at its
        end."""
        inside = trace.get("textposition", "auto") in ("inside", "auto")
        font = trace.get("textfont") or {}
        sign = -1 if size < 0 else 1
        x, y = patch.get_x(), patch.get_y()
        wide, high = patch.get_width(), patch.get_height()
        middle = x + wide / 2, y + high / 2
        log = panel.get_xscale() == "log" and flat
        label = self.write(text, _merged({"size": 12} if not inside else {}, font))
        if inside:
            label["color"] = _colour(font["color"]) if "color" in font else _readable(colour)
            drawn = panel.annotate(label.pop("s"), middle, (0, 0), textcoords="offset points",
                                   ha="center", va="center", zorder=4, annotation_clip=True,
                                   **label)
            if trace.get("constraintext") != "none":
                self.placed.append(lambda: self.hide_where_narrow(panel, patch, drawn, trace, flat,
                                                                  sign, log))
            return
        self.write_beyond(panel, patch, label, flat, sign)

    def write_beyond(self, panel: Any, patch: Any, label: dict, flat: bool, sign: int) -> None:
        """Draw the text `label` beyond the end of a bar. `sign`: -1 for a negative bar."""
        x, y = patch.get_x(), patch.get_y()
        wide, high = patch.get_width(), patch.get_height()
        at = (x + wide, y + high / 2) if flat else (x + wide / 2, y + high)
        panel.annotate(label.pop("s"), at, (4 * sign, 0) if flat else (0, 3 * sign),
                       textcoords="offset points", zorder=4, annotation_clip=True,
                       ha=("left" if sign > 0 else "right") if flat else "center",
                       va="center" if flat else ("bottom" if sign > 0 else "top"), **label)

    def hide_where_narrow(self, panel: Any, patch: Any, drawn: Any, trace: dict, flat: bool,
                          sign: int, log: bool) -> None:
        """Hide the text `drawn` of the bar `patch` if the text is larger than the bar."""
        renderer = self._renderer()
        drawn.set_visible(True)
        box, room = drawn.get_window_extent(renderer), patch.get_window_extent(renderer)
        fits = box.width <= room.width - 2 and box.height <= room.height + 4
        drawn.set_visible(fits)

    def heatmap(self, trace: dict, number: int, stacks: dict) -> None:
        """Draw the cells, their texts and the colour bar."""
        import numpy as np

        panel, across, up = self.panel(trace)
        z = np.array([[math.nan if value is None else value for value in row]
                      for row in trace["z"]], dtype=float)
        x = [across.at(v) for v in _listed(trace, "x") or range(z.shape[1])]
        y = [up.at(v) for v in _listed(trace, "y") or range(z.shape[0])]
        low = trace.get("zmin", np.nanmin(z) if np.isfinite(z).any() else 0)
        high = trace.get("zmax", np.nanmax(z) if np.isfinite(z).any() else 1)
        scale = _scale(trace.get("colorscale", "cividis"))
        edges = [_edges(x), _edges(y)]
        panel.pcolormesh(*edges, np.ma.masked_invalid(z), cmap=scale, vmin=low, vmax=high,
                         zorder=2 + number / 1000, edgecolors="#ffffff", label=_label(number),
                         rasterized=z.size > 400,       # many cells: an image has fewer bytes
                         linewidth=min(trace.get("xgap", 0), trace.get("ygap", 0)))
        across.reach(edges[0], False)
        up.reach(edges[1], False)
        if trace.get("texttemplate"):
            if trace["texttemplate"] != "%{text}":
                raise ConfigError(f"a static picture cannot write the template "
                                  f"{trace['texttemplate']!r}; use '%{{text}}'")
            for row, (up_at, words) in enumerate(zip(y, trace["text"])):
                for column, (at, word) in enumerate(zip(x, words)):
                    if word and math.isfinite(z[row, column]):
                        share = min(max((z[row, column] - low) / (high - low), 0), 1)
                        label = self.write(word, _merged({"size": 12}, trace.get("textfont")))
                        if "color" not in (trace.get("textfont") or {}):
                            label["color"] = _readable(scale(share))
                        panel.text(at, up_at, ha="center", va="center", zorder=4, **label)
        if trace.get("showscale", True):
            self.colour_bar(scale, low, high, trace.get("colorbar") or {})

    def parcoords(self, trace: dict, number: int, stacks: dict) -> None:
        """Draw parallel coordinates: a vertical axis with its own scale for each dimension, and for
        each row a line through its value on every axis, coloured by `line.color`."""
        paper, line = self.paper, trace.get("line") or {}
        dimensions = trace["dimensions"]
        values = line.get("color")
        numbers = [value for value in values if value is not None]
        scale, low, high = _scale(line["colorscale"]), min(numbers), max(numbers)
        shares, last = [], max(len(dimensions) - 1, 1)
        size = 12
        for i, dimension in enumerate(dimensions):
            known = [value for value in dimension["values"] if value is not None]
            ends = dimension.get("range") or [min(known), max(known)]
            span = (ends[1] - ends[0]) or 1
            shares.append([math.nan if value is None else (value - ends[0]) / span
                           for value in dimension["values"]])
            at = i / last
            paper.plot([at, at], [0, 1], color="#9ca3af", linewidth=1, zorder=3, clip_on=False)
            paper.annotate(**self._at(dimension["label"], at, 1, (0, 10), "center", "bottom", size))
            marks = dimension.get("tickvals")
            marks = ticks.positions({}, "y", *sorted(ends), 160) if marks is None else marks
            words = dimension.get("ticktext") or ticks.words({}, marks)
            for mark, word in zip(marks, words):
                share = (mark - ends[0]) / span
                if -1e-9 <= share <= 1 + 1e-9:
                    paper.annotate(**self._at(word, at, share, (4, 0), "left", "center", 11))
        for row, value in enumerate(values):
            paint = scale((value - low) / ((high - low) or 1)) if value is not None else "#9ca3af"
            paper.plot([i / last for i in range(len(dimensions))], [s[row] for s in shares],
                       color=paint, linewidth=1, zorder=2, clip_on=False)

    def _at(self, text: Any, x: float, y: float, shift: tuple, ha: str, va: str,
            size: float) -> dict:
        """Return the arguments of matplotlib's `annotate` for a text `shift` pixels from (x, y), in
        shares of the plot."""
        label = self.write(text, {"size": size})
        return {"text": label.pop("s"), "xy": (x, y), "xytext": shift, "xycoords": "axes fraction",
                "textcoords": "offset points", "ha": ha, "va": va, "annotation_clip": False,
                "zorder": 6, **label}


def _nothing() -> Any:
    """Return an invisible sign, for an empty entry of the legend."""
    from matplotlib.patches import Patch

    return Patch(alpha=0)


TRACES: dict[str, Callable] = {"scatter": _Drawing.scatter, "scattergl": _Drawing.scatter,
                               "bar": _Drawing.bar, "heatmap": _Drawing.heatmap,
                               "parcoords": _Drawing.parcoords}


def _label(number: int) -> str:
    """Return the matplotlib label of what a trace draws, so that tests can find it."""
    return f"trace {number}"


def _listed(trace: Mapping[str, Any], letter: str) -> list:
    """Return the values of a trace along "x" or "y"; [] if it has none."""
    value = trace.get(letter)
    return [] if value is None else list(value)


def _symbol(name: str | int) -> tuple[str, bool]:
    """Return matplotlib's marker for plotly's symbol, and whether it is hollow. A symbol is a name,
    with "-open" if it is hollow, or plotly's number, which is 100 higher if it is hollow."""
    if isinstance(name, int):
        name = _pick(NUMBERED, name % 100, "marker") + "-open" * (name // 100 % 2)
    hollow = name.endswith("-open")
    return _pick(MARKERS, name.removesuffix("-open"), "marker"), hollow


def _edges(middles: list[float]) -> list[float]:
    """Return the edges of cells with these midpoints: one more number than midpoints."""
    if len(middles) == 1:
        return [middles[0] - 0.5, middles[0] + 0.5]
    between = [(a + b) / 2 for a, b in itertools.pairwise(middles)]
    return [2 * middles[0] - between[0], *between, 2 * middles[-1] - between[-1]]


def pictures_of(book: Mapping[str, Any], mime: str) -> Iterator[dict]:
    """Yield the outputs of the mime type `mime` in an executed notebook, in order; with plotly's
    type, these are the specs of its figures."""
    for cell in book["cells"]:
        for output in cell.get("outputs", []):
            if mime in output.get("data", {}):
                yield output["data"][mime]
