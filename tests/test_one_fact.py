"""One number, one place: in how many modules each fact of a technique is written. One.

A fact is found by how it must be written in code: its pattern, in lines without comments and docstrings. Formats and recipes
may be *named* anywhere; their numbers stand in their row. Exercises are a learner's own sums and do not count, nor does what
hardware multiplies (`precision/backends.py`), which is a fact of the hardware; nor what a Triton kernel must have as a literal.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "lpkit"
ELSEWHERE = {"precision/backends.py", "measure/matrix.py", "kernels/amax.py", "kernels/cast_blocks.py", "kernels/cast_nvfp4.py",
             "kernels/cast_operand.py", "kernels/rounding.py", "kernels/defects.py", "course/kernel_parts.py"}
FACTS = {
    "bits of a format": (r"\b(exponent_bits|mantissa_bits)=\d", "techniques/formats.py"),
    "largest value of a format": (r"\b(448|57344|65504)\.0\b", "techniques/formats.py"),
    "blocks that share a scale": (r"\(1, (16|32|128)\)|\((16, 16|128, 128)\)", "techniques/recipes.py"),
    "bytes of a recipe's scale": (r"\bScale\(bytes=|\bscale_bytes=[1-9]", "techniques/recipes.py"),
    "amaxes that are remembered": (r"\b1024\b.*histor|histor.*\b1024\b", "techniques/recipes.py"),
    "state bytes of an optimizer": (r"\bbytes=(FLOAT32|1 \+ FLOAT32)", "techniques/optimizers.py"),
    "numbers that share a scale of 8-bit state": (r"^BLOCK = 256\b", "techniques/optimizers.py"),
    "numbers that share a scale of activations": (r"^GROUP = 256\b", "techniques/memory.py"),
    "sizes of q, k and v": (r"H \+ 2 \* [a-z.]*G\b", "techniques/attention_backends.py"),
    "sizes of an MLP": (r"\b2 \* [a-z]+\.F\b", "techniques/blocks.py"),
    "passes over scores": (r"\bscore_passes=\(\d", "techniques/attention_backends.py"),
    "memory of a machine": (r"\bmemory_bytes=\d", "techniques/machines.py"),
}


def code_of(path: Path) -> str:
    """Without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body[0].value = ast.Constant(value=0)
    return ast.unparse(tree)


@pytest.fixture(scope="module")
def code():
    modules = {str(path.relative_to(ROOT)): code_of(path) for path in sorted(ROOT.rglob("*.py"))}
    return {name: text for name, text in modules.items() if name not in ELSEWHERE and "exercises" not in name}


@pytest.mark.parametrize("fact", FACTS)
def test_a_fact_is_written_in_one_module(fact, code):
    pattern, home = FACTS[fact]
    assert [name for name, text in code.items() if re.search(pattern, text, re.MULTILINE)] == [home]
