"""Mistyped names of machines, models, recipes, optimizers, notebooks and settings: which name is
suggested, and that no mistyped name is accepted.

Only these tests catch: a usual wrong spelling for which another name than the intended name is
suggested, or that is accepted.
"""

from pathlib import Path

import pytest

import lessons.rows.optimizers  # noqa: F401  ten rules more
from hosting.notebooks import by_name
from lpkit.cli import COMMANDS
from lpkit.config import Config
from lpkit.errors import ConfigError, nearest, pick
from lpkit.names import alike
from lpkit.presets import PRESETS
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.machines import CATALOGUE
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.recipes import RECIPES
from tests import NOTEBOOKS

TABLES = {"machine": CATALOGUE, "model": PRESETS, "recipe": RECIPES, "optimizer": OPTIMIZERS,
          "attention": ATTENTION, "command": COMMANDS}
MEANT = {
    "machine": {"A100": "a100-40 a100-80", "a100 80GB": "a100-80",
                "NVIDIA A100-SXM4-40GB": "a100-40", "H100 80GB": "h100", "NVIDIA H200": "h200",
                "H20 96GB": "h20", "MI350": "mi350x", "RTX 6000 Ada": "rtx-6000-ada",
                "RTX PRO 6000": "rtx-pro-6000", "H100 SXM": "h100",
                "rtx4090": "rtx-4090", "RTX 4090": "rtx-4090", "RTX5090": "rtx-5090",
                "B100": "b200", "MI300": "mi300x", "L40": "l40s", "v10": "v100",
                "Tesla T4": "t4", "H100 PCIe": "h100-pcie"},
    "model": {"llama-7b": "llama-8b", "meta-llama/Llama-3.1-8B": "llama-8b",
              "meta-llama/Llama-3.3-70B-Instruct": "llama-70b", "lama-7b": "llama-8b",
              "llama_65b": "llama-70b", "Llama-2-13b": "llama-8b", "llama-3.2-1.2b": "llama-1b",
              "GPT2-124M": "gpt2-124m", "gpt2-774m": "gpt2-1.5b",
              "gpt-2": "gpt2-1.5b gpt2-124m gpt2-350m", "gpt2_350": "gpt2-350m", "cpu-3n": "cpu-3m",
              "cpu": "cpu-3m"},
    "recipe": {"MXFP8": "mxfp8", "mxpf8": "mxfp8", "bf17": "bf16", "fp8_rowwise": "fp8-rowwise",
               "fp8-tensor": "fp8-tensorwise", "nvfp5": "nvfp4", "int-8": "int8", "int9": "int8"},
    "optimizer": {"AdamW": "adamw", "adam_w": "adamw", "adamv": "adam", "mun": "muon",
                  "shampo": "shampoo", "ScheduleFree": "schedule-free"},
    "attention": {"flash_attn": "flash-attn", "SDPA": "sdpa", "sdqa": "sdpa"},
    "command": {"Doctor": "doctor", "pln": "plan", "notebooks": "notebook"}}


@pytest.mark.parametrize("table, wrong, right",
                         [(table, wrong, right) for table, each in MEANT.items()
                          for wrong, right in each.items()])
def test_the_name_that_was_meant(table, wrong, right):
    assert wrong not in TABLES[table] and alike(wrong, sorted(TABLES[table])) == right.split()
    with pytest.raises(ConfigError, match="did you mean "
                       + " or ".join(f"'{name}'" for name in right.split())):
        pick(TABLES[table], wrong)


def test_a_family_too_large_for_a_question_is_listed_alone():
    assert (nearest("FP8", RECIPES) == "choose one of fp8-blockwise, fp8-blockwise-pow2, "
                                       "fp8-delayed, fp8-rowwise, fp8-tensorwise")
    assert nearest("qwen", PRESETS).startswith("choose one of cpu-3m, dense-1t, ")


@pytest.mark.parametrize("table", TABLES)
def test_exact_names_in_another_case_are_suggested_and_refused(table):
    for name in TABLES[table]:
        for wrong in {name.upper(), name.title()} - {name}:
            assert alike(wrong, sorted(TABLES[table])) == [name]
            with pytest.raises(ConfigError):
                pick(TABLES[table], wrong)


@pytest.mark.parametrize("wrong, right", [
    ("notebook 3", "03"), ("Notebook 03", "03"), ("3", "03"), ("Number Formats", "number_formats"),
    ("03 number formats", "03_number_formats"),
    ("03_number_formats.ipynb", "03_number_formats"), ("fp8_trainig", "fp8_training")])
def test_notebooks_by_number_and_by_title(wrong, right):
    with pytest.raises(ConfigError, match=f"did you mean '{right}'"):
        by_name(sorted(Path(NOTEBOOKS).glob("*.ipynb")), wrong)


@pytest.mark.parametrize("wrong, right", [
    ("layers", "model.layers"), ("Model.Layers", "model.layers"), ("model.layer", "model.layers"),
    ("model_width", "model.width"), ("batch_size", "global_batch"),
    ("Steps", "steps"), ("optimiser", "optimizer"), ("grad_accum", "grad_accum_steps"),
    ("context", "model.context")])
def test_settings(wrong, right):
    with pytest.raises(ConfigError, match=f"did you mean .*'{right}'"):
        Config().replace({wrong: 3})


def test_odd_names_end_in_a_list():
    for odd in ("", " ", "---", "é" * 300, "0", "x" * 10**5, None, 3, "1e309b", "9" * 200 + "b"):
        assert nearest(odd, PRESETS)
    assert (nearest("x", []) == "there are no names to choose from"
            and alike("7b", ["", "-", "llama-8b"]) != [""])
