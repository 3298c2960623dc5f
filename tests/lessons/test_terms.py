"""Formulas in letters, held against the plain numbers: what is printed is read again, and put into
Python.

Only these tests catch: a printed formula whose value is not the code's, also at other sizes.
"""

import html
import re
from dataclasses import replace

import pytest

from lessons.activations import kept
from lessons.terms import Lettered, Term, letter, sizes, terms_opened, terms_table
from lpkit.predict.flops import products, training_flops
from lpkit.predict.params import parameter_count, parameters
from lpkit.presets import preset
from lpkit.techniques.blocks import operations
from lpkit.techniques.operation import MicroBatch
from tests.course.by_hand import evaluated
from tests.course.test_notebooks import numbered
from tests.predict.test_predict import ODD

MODELS = {**ODD, **{name: preset(name).model for name in ("gpt2-124m", "llama-1b", "llama-70b")}}
PRECISIONS = {"fp32": {"compute_bytes": 4, "residual_bytes": 4},
              "bf16": {"compute_bytes": 2, "residual_bytes": 4},
              "bf16-pure": {"compute_bytes": 2, "residual_bytes": 2},
              "fp8": {"compute_bytes": 2, "residual_bytes": 4, "operand_bytes": 1.0},
              "fp4": {"compute_bytes": 2, "residual_bytes": 4, "operand_bytes": 0.5}}


@pytest.mark.parametrize("attention, precision", [
    *((attention, "bf16") for attention in ("plain", "tiled", "sdpa", "blocked")),
    *(("sdpa", precision) for precision in PRECISIONS if precision != "bf16")])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_is_kept_in_letters_is_what_is_kept(kind, attention, precision):
    for name, model in MODELS.items():
        for batch in (1, 3):
            how = dict(kind=kind, attention=attention, **PRECISIONS[precision])
            lettered, numbers = kept(Lettered(model), batch=letter("B", batch), **how), sizes(model,
                B=batch)
            plain = kept(model, batch=batch, **how)
            assert lettered.operations.keys() == plain.operations.keys()
            for operation, nbytes in plain.operations.items():
                term = lettered.operations[operation]
                assert evaluated(str(term), numbers) == nbytes == term, (name, operation, str(term))
                assert evaluated(term.put_in(numbers), {}) == nbytes, (name, operation,
                    term.put_in(numbers))
            assert evaluated(str(lettered.total_bytes), numbers) == plain.total_bytes


def test_letters_hold_for_other_sizes_too():
    """A formula that is a number in disguise would not."""
    for style in ("gpt2", "llama"):
        small, how = MODELS[style], dict(kind="cpu", attention="sdpa", compute_bytes=2,
            residual_bytes=4)
        other = replace(small, layers=5, width=96, heads=8, kv_heads=small.kv_heads and 4,
                        mlp_width=200, vocab=77, context=300)
        lettered, plain = kept(Lettered(small), batch=letter("B", 3), **how), kept(other, batch=2,
            **how)
        for operation, nbytes in plain.operations.items():
            assert (evaluated(str(lettered.operations[operation]), sizes(other, B=2))
                    == nbytes), operation
        count = sum(parameters(Lettered(small)).values())
        assert evaluated(str(count), sizes(other)) == parameter_count(other)
        flops = training_flops(Lettered(small), batch=letter("B", 3))
        assert evaluated(str(flops), sizes(other, B=2)) == training_flops(other, batch=2)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_and_flops_in_letters(model):
    for part, count in parameters(model).items():
        assert evaluated(str(parameters(Lettered(model))[part]), sizes(model)) == count, part
    for lettered, plain in zip(products(Lettered(model), batch=letter("B", 3)),
                               products(model, batch=3), strict=True):
        assert evaluated(str(lettered.flops), sizes(model, B=3)) == plain.flops == lettered.flops


def test_a_letter_of_value_1_is_not_1_to_a_cache():
    """FLOPs had B squared after bytes of one sequence were asked for."""
    model = replace(MODELS["gpt2"], layers=3)
    asked = MicroBatch(model=Lettered(model), batch=letter("B", 1))
    operations(asked)
    assert operations(replace(asked, batch=1)) is not operations(asked)
    for lettered, plain in zip(products(Lettered(model), batch=letter("B", 3)),
                               products(model, batch=3), strict=True):
        assert evaluated(str(lettered.flops), sizes(model, B=3)) == plain.flops


def test_the_parameters_of_01_are_the_codes():
    """Of its two formulas that are typeset, and so written by hand."""
    cell = next(cell for cell in numbered("01").cells if cell.id == "memory-formula-0")
    formulas = re.findall(r"^N = (.+)$", cell.source, re.MULTILINE)
    for latex, name in zip(formulas, ("gpt2-124m", "llama-8b"), strict=True):
        text = re.sub(r"\\underbrace{(.+?)}_{\\text{.+?}}", r"\1", latex).replace(r"\,",
            "").replace("^2", "²")
        model = preset(name).model
        assert evaluated(text, sizes(model)) == parameter_count(model)


def test_written_as_one_would():
    B, T, D, H, E = (letter(name, value) for name, value in zip("BTDHE", (2, 8, 12, 3, 4)))
    assert str(4 * B * T * D + 8 * B * T) == "4 B T (D + 2)"
    assert str(B * H * T**2) == "B H T²" and str(D / H * T) == "T E" and str((D / H) * H) == "D"
    assert (str(B - B) == "0" and str(2 - B) == "-B + 2" and str(B * 0.5) == "B / 2"
            and str((T + 1) / (2 * T)) == "(T + 1) / 2 / T")
    assert (4 * B * (T + E)).put_in({"B": 2, "T": 1008, "E": 4}) == "4 x 2 x (1,008 + 4)"
    assert (isinstance(B + 1, Term) and B + 1 == 3 and max(B, 1) is B and T % 3 == 2
            and list(range(B)) == [0, 1])


def test_a_table_and_its_rows_say_the_same():
    model = MODELS["llama-1b"]
    numbers = sizes(model, B=4)
    terms = {name: kept(Lettered(model), batch=letter("B", 4), kind="gpu", attention="sdpa",
                        **PRECISIONS[name]).operations
             for name in ("bf16", "fp8")}
    page = terms_table(terms, rows="operation")
    for operation, term in terms["fp8"].items():
        assert f">{operation}<" in page and f">{term}<" in page
    opened = html.unescape(terms_opened(terms["fp8"], numbers, "bytes", title="kept"))
    assert opened.count("<details") == len(terms["fp8"]) and opened.count("<details open") == 1
    for line in re.findall(r"2em[^>]*>(.+?)<", opened):
        letters, put_in, value = re.fullmatch(r"(.+?)  =  (.+?)  =  ([\d,]+) bytes", line).groups()
        assert evaluated(letters, numbers) == evaluated(put_in, {}) == int(value.replace(",", ""))
