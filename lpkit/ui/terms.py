"""Formulas from the code that computes them (`lpkit.predict.terms`): as a table in letters, and row
by row with numbers put in."""

from collections.abc import Mapping

from lpkit.config import ModelConfig
from lpkit.predict.casts import on_hardware
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.terms import Term, kept_terms
from lpkit.predict.units import quantity
from lpkit.tables import html_table, opened_rows
from lpkit.techniques.recipes import RECIPES

KEPT = {    # a row of PRECISIONS, and the kind of machine
    "fp32": ("fp32", "cpu"), "bf16": ("bf16", "cpu"), "fp8, on a GPU": ("fp8-tensorwise", "gpu")}


def kept_table(model: ModelConfig, style: str) -> str:
    """HTML: bytes that autograd keeps, by operation and precision, with fused attention: those of
    one block, and those outside the blocks."""
    columns = {}
    for name, (precision, kind) in KEPT.items():
        p = PRECISIONS[precision]
        columns[name] = kept_terms(
            model, 8, attention="sdpa", kind=kind, compute_bytes=p.compute_bytes,
            residual_bytes=p.residual_bytes, operand_bytes=p.low and p.low.bits / 8)
    both = [{name: terms[i] for name, terms in columns.items()} for i in (0, 1)]
    return (terms_table(both[0], rows="operation", caption=f"{style}: bytes that one block keeps")
            + terms_table(both[1], rows="operation", caption=f"{style}: outside the blocks"))


def terms_table(columns: Mapping[str, Mapping[str, Term]], *, rows: str = "",
                caption: str = "") -> str:
    """HTML, in letters: a column for each, by row. `rows`: what the rows are."""
    longest = max(columns.values(), key=len)
    names = dict.fromkeys((*longest, *(name for terms in columns.values() for name in terms)))
    return html_table((rows, *columns), [
        (name, *(str(terms.get(name, "")) for terms in columns.values())) for name in names],
        caption=caption)


def terms_opened(terms: Mapping[str, Term], sizes: Mapping[str, int], unit: str, *,
                 title: str) -> str:
    """HTML: each term's value; a click opens it in letters and in numbers."""
    whole = sum(float(term) for term in terms.values())
    rows = [(name, float(term), quantity(float(term), unit), "",
             (f"{term}  =  {term.put_in(sizes)}  =  {float(term):,.0f} {unit}",))
            for name, term in terms.items() if term]
    return opened_rows(f"{title}: {quantity(whole, unit)}", rows, whole)


def casts_table(model: ModelConfig) -> str:
    """HTML: how each recipe casts the operands of a Linear, as hardware runs it."""
    rows = []
    for name, recipe in RECIPES.items():
        if not recipe.products:
            continue
        made, dy = on_hardware(name, recipe, model), recipe.dx[0]
        x, w = made.casts["y"]
        both = [tensor for tensor, operand in (("x", x), ("w", w)) if operand.transposes]
        rows.append((name, recipe.y[0].format, dy.format, _block(x.block), _block(w.block),
                     f"{x.scale_bytes:g}", " and ".join(both).replace("x", "x, dy") or "none",
                     f"{made.product_share:g}"))
    return html_table(("recipe", "x and w", "dy", "a scale for: of x, dy", "of w",
                       "bytes of a scale", "one cast for both layouts", "products at"), rows)


def _block(sides: tuple[int, int]) -> str:
    return "all" if sides == (0, 0) else " x ".join(str(side or "all") for side in sides)
