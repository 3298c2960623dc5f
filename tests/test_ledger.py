"""The error table: its configs, one row of each kind against arithmetic, and the page that is made from the measured files."""

from pathlib import Path

import pytest
from accelerate.commands.estimate import estimate_training_usage

from lpkit import hardware
from lpkit.bench import ledger
from lpkit.predict import parameter_count

CONFIGS = dict(ledger.configs())


def test_sixty_configs_and_every_kind_of_them():
    assert len(CONFIGS) >= 60 and len(set(CONFIGS.values())) == len(CONFIGS)
    assert {c.model.vocab for c in CONFIGS.values()} >= {256, 128_256}
    assert {c.model.mlp for c in CONFIGS.values()} == {"gelu", "swiglu"}


@pytest.mark.parametrize("name", ["gpt2, fp32, as it is", "llama, mxfp8, accumulated", "llama, bf16, recompute selective"])
def test_a_row(name):
    config = CONFIGS[name].replace({"system.device": "cpu"})
    row = ledger._case(name, config, hardware.machine("cpu"))
    count = parameter_count(config.model)
    assert row["formula_bytes"] == pytest.approx(row["measured_bytes"], rel=0.01)
    assert row["traced_bytes"] == pytest.approx(row["measured_bytes"], rel=0.001)
    assert row["deepspeed_bytes"] == 20 * count and row["classic_bytes"] > 16 * count
    wide = estimate_training_usage(4 * count, "float32")["step"]
    assert row["accelerate_bytes"] <= wide == 16 * count


def test_the_page_is_that_of_the_measured_files():
    page = Path(__file__).parents[1] / "docs" / "ledger.md"
    assert page.read_text() == ledger.page()
