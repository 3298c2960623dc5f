"""Only this test catches a recipe in 8 bits whose losses over several ranks are further from one
process than other roundings get, and a page of docs/parallel.md that cannot be written."""

from contextlib import nullcontext

import pytest

from tests.parallel import parity

LAYOUTS = ["replicas", "ZeRO 1", "ZeRO 3, float32", "tensor", "context", "all-to-all",
           "ZeRO 3, fp8"]


@pytest.mark.dist
def test_a_part_of_the_matrix(parent, monkeypatch):
    """Three updates. Float32 within 1e-5. In 8 bits within 3 sigma of 20 updates, as
    docs/parallel.md has them: in three updates hardly a rounding has gone the other way yet, and
    sigma is that of a few last bits. Casts that travel are those of whole weights, so both ways to
    gather are the same run."""
    monkeypatch.setattr(parity, "WarmParent", lambda: nullcontext(parent))
    measured = parity.measure(["fp32", "fp8-tensorwise"],
                              {name: parity.LAYOUTS[name] for name in LAYOUTS}, updates=3, orders=1)
    rows = {(row.recipe, row.layout): row for row in measured}
    assert list(rows) == [*(("fp32", name) for name in LAYOUTS[:-1]),
                          *(("fp8-tensorwise", name) for name in LAYOUTS)]
    for (recipe, layout), row in rows.items():
        far = row.distance
        # a rank's part of a matrix or of a sequence has a scale of its own
        most = 5e-4 if layout in ("replicas", "ZeRO 1") or "ZeRO 3" in layout else 2e-3
        assert (row.same if recipe == "fp32" else
                far.loss < most and far.grad_norm < 4e-2 and far.weights < 6e-3), row
    fp8, float32 = (rows["fp8-tensorwise", f"ZeRO 3, {gathered}"]
                    for gathered in ("fp8", "float32"))
    assert fp8.distance == float32.distance
    heads, lines = parity.table(measured)
    assert [line[0] for line in lines] == ["fp32", "fp8-tensorwise"]
    assert {len(line) for line in lines} == {len(heads)}
    assert parity.page(measured).count("\n| ") == 3
