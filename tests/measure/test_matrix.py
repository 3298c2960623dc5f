"""The support matrix: this machine's part is run, the rules agree with what the backends say, the
page with the rules.

Only these tests catch: a pair of recipe and backend that the page has otherwise than this machine
or the library's own table, and a trial that lets wrong numbers or state pass.
"""

from pathlib import Path

import pytest
import torch

from lpkit.commands.doctor import Page
from lpkit.errors import ConfigError
from lpkit.measure import matrix, probes
from lpkit.measure.probes import probe
from lpkit.precision.backends import BACKENDS
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.recipes import RECIPES
from tests.pages import matrix as rules

CPU = torch.device("cpu")


def by_pair(probes):
    return {tuple(cell.name.split(", ")): cell for cell in probes}


def status(cells, recipe, backend):
    (cell,) = [c for c in cells if (c.recipe, c.backend) == (recipe, backend)]
    return cell.status


def test_every_recipe_is_emulated_here_in_every_way(cells):
    """Each recipe runs and is compared with its definition in float64, so that the README may say
    that each recipe trains on a CPU."""
    for name, recipe in RECIPES.items():
        backend, want = ("emulated", "emulated, ") if recipe.products else ("pytorch", "native, ")
        cell = by_pair(cells)[name, backend]
        assert cell.works and cell.detail.startswith(want) and ";" not in cell.detail, cell


def test_every_pair_is_answered_and_a_no_says_why_and_what_instead(cells):
    assert [cell.name for cell in cells] == list(matrix.checks())
    assert len(cells) == sum(len(matrix.backends_of(recipe)) for recipe in RECIPES.values())
    for cell in cells:
        assert (cell.works == bool(cell.detail) != bool(cell.why)
                and bool(cell.nearest) == (not cell.works)), cell


def test_on_a_cpu_rules_and_probes_agree(cells):
    """If a library is not installed, only the rule has an answer. The rules do not cover torch
    2.11, which has no FP8 matmul with scales per row."""
    for ruled in rules.by_rule("cpu"):
        run = by_pair(cells)[ruled.recipe, ruled.backend]
        assert ((run.detail or "no,").partition(",")[0] == ruled.status
                or "not installed" in run.why or (
            torch.__version__.startswith("2.11") and "scale_a.numel() == 1" in run.why)), (ruled,
                run)


@pytest.mark.parametrize("machine, recipe, backend, want", [
    # NVIDIA's own table, https://nvidia.github.io/TransformerEngine/support_matrix.html
    ("a100-80", "fp8-tensorwise", "transformer-engine", "no"),
    ("l4", "fp8-tensorwise", "transformer-engine", "native"),
    ("l4", "fp8-blockwise", "transformer-engine", "no"),
    ("h200", "fp8-blockwise-pow2", "transformer-engine", "native"),
    ("h200", "mxfp8", "transformer-engine", "no"),
    ("b200", "mxfp8", "transformer-engine", "native"),
    ("b200", "nvfp4", "transformer-engine", "no"),
    ("rtx-5090", "mxfp8", "transformer-engine", "no"),
    # PyTorch: "only supported on CUDA devices with compute capability >= 9.0 or 8.9"
    ("t4", "fp8-tensorwise", "scaled_mm", "no"), ("rtx-4090", "fp8-rowwise", "scaled_mm", "native"),
    ("h100", "fp8-blockwise", "scaled_mm", "native"), ("b200", "fp8-blockwise", "scaled_mm", "no"),
    ("b200", "nvfp4", "scaled_mm", "native"), ("t4", "bf16", "pytorch", "emulated"),
    ("mi300x", "fp8-tensorwise", "scaled_mm", "no"),
])
def test_rules_are_the_libraries_own(machine, recipe, backend, want):
    assert status(rules.by_rule(machine), recipe, backend) == want


def test_every_machine_of_the_catalogue_has_a_rule():
    assert set(rules.CAPABILITY) == {*CATALOGUE, "cpu"}
    for machine in rules.CAPABILITY:
        for cell in rules.by_rule(machine):
            assert cell.source and cell.why and bool(cell.nearest) == (cell.status == "no"), cell


def test_the_nearest_thing_works_on_that_machine():
    for machine in rules.CAPABILITY:
        for cell in rules.by_rule(machine):
            if " with " in cell.nearest:
                recipe, backend = cell.nearest.split(" with ")
                assert status(rules.by_rule(machine), recipe, backend) == "native"


def test_the_page_is_up_to_date():
    """`python -m tests.pages matrix`"""
    assert (Path(__file__).parents[2] / "docs" / "matrix.md").read_text() == rules.page()


def test_wrong_numbers_are_a_no(monkeypatch):
    """A backend that returns a result does not yet work: the result must be right."""
    class Wrong(type(BACKENDS["emulated"])):
        def product(self, a, b, dtype, bias=None, **how):
            return super().product(a, b, dtype, bias) * 1.1

    monkeypatch.setitem(BACKENDS, "emulated", Wrong())
    outcome = probe(matrix.checks()["fp8-tensorwise, emulated"], CPU)
    assert not outcome.works and "not the recipe's" in outcome.why and outcome.nearest


def test_state_that_moves_twice_is_seen(monkeypatch):
    from lpkit.precision.linear import ScaledLinear

    once = ScaledLinear.forward

    def forward(self, x):
        self.amax_history += 1      # as recomputation would
        return once(self, x)

    monkeypatch.setattr(ScaledLinear, "forward", forward)
    with pytest.raises(ArithmeticError, match="its amax history advanced twice"):
        matrix.Trial("fp8-delayed", "emulated", CPU).recompute()


@pytest.mark.parametrize("does, works, why",
                         [("crash", False, "its process ended with exit code 134"),
                          ("hang", None, "not measured within 3 s")])
def test_a_crash_or_a_hang_is_one_row(does, works, why):
    """A check that takes too long is unknown, and does not count as a failure. The next process
    runs the remaining checks."""
    begun, *parts = probes.answers(only=["fine", does, "fine too"], seconds=3,
                                   module="tests.measure.probe_process")
    assert (begun["device"] == f"fine,{does},fine too"
            and all(list(part) == ["probes"] for part in parts))
    rows = [row for part in parts for row in part["probes"]]
    assert [(row["name"], row["works"]) for row in rows] == [("fine", True), (does, works),
        ("fine too", True)]
    assert why in rows[1]["why"] and rows[1]["nearest"] == "fp32"


def test_a_process_that_does_not_begin_is_a_sentence(monkeypatch):
    with pytest.raises(ConfigError,
                      match=r"did not start: its process ended with exit code 1 .*No module named"):
        list(probes.answers(module="tests.no_such_module"))


def test_a_line_of_a_recipe_says_what_fails_and_is_printed_when_its_last_backend_is_known():
    rows = [{"name": "fp8-tensorwise, scaled_mm", "works": True,
             "detail": "native, relative error 1e-2"},
            {"name": "fp8-tensorwise, torchao", "works": True,
             "detail": "native, relative error 1e-2; no compile: y"},
            {"name": "fp8-tensorwise, emulated", "works": False, "detail": ""},
            {"name": "fp8-tensorwise, transformer-engine", "works": None, "detail": ""},
            {"name": "fp32, pytorch", "works": True, "detail": "native, relative error 0"}]
    page = Page()
    assert list(page.lines({"checks": [[row["name"], "recipe", ""] for row in rows]})) == []
    lines = [[*page.lines({"probes": [row | {"kind": "recipe"}]})] for row in rows]
    assert len(lines[0]) == 1 and lines[0][0].startswith("\nRecipe") and lines[1:3] == [[], []]
    assert " ".join("".join(lines[3]).split()) == (
        "fp8-tensorwise scaled_mm: native; torchao: native, no compile; emulated: no; "
        "transformer-engine: not measured")
    assert " ".join("".join(lines[4]).split()) == "fp32 pytorch: native"


@pytest.mark.parametrize("feature", matrix.FEATURES)
def test_what_does_not_work_with_a_pair_is_named(feature, monkeypatch):
    def fails(self):
        raise ArithmeticError("for a reason")

    monkeypatch.setattr(matrix.Trial, feature, fails)
    outcome = probe(matrix.checks()["fp32, pytorch"], CPU)
    assert outcome.works and outcome.detail.endswith(f"; no {feature}: for a reason")
