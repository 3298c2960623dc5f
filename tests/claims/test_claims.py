"""docs/claims.md: every verdict follows from its numbers, and those from arithmetic that is done
here once more.

Only these tests catch: a formula of the kit that moves away from a published number, a verdict
that its numbers no longer support, and a page or a command that shows other claims than the file.
"""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from lpkit import cli
from lpkit.commands.claims import HEADS, line
from lpkit.predict.params import parameter_count
from tests.pages import claim_numbers
from tests.pages import claims as pages
from tests.pages.claim_numbers import CRAMMED, NUMBERS, Numbers
from tests.pages.claims import (
    CONFIRMED,
    NOT_TESTABLE,
    REFUTED,
    SMALLER,
    UNTESTED,
    Claim,
    claims,
)

ROOT = Path(__file__).parents[2]
CLAIMS = claims()


@pytest.fixture(scope="module")
def numbers():
    return {name: claim.numbers for name, claim in CLAIMS.items()}


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS.keys())
def test_a_verdict_follows_from_its_numbers(claim):
    """Where a number moved across a border, the verdict in data/published/claims.toml is to be
    thought over, and its words."""
    assert claim.verdict == claim.follows, line(claim.to_dict())


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "claims.md").read_text() == pages.page(), "python -m tests.pages claims"
    assert (json.loads((ROOT / "data" / "published" / "claims.json").read_text())
            == pages.rows()), "python -m tests.pages claims"


def verdict_of(claimed, unit, *kit, measured=()):
    row = dict.fromkeys(("name", "says", "source", "conditions", "why", "shown"), "x")
    claim = Claim(**row, unit=unit, claimed=claimed, verdict=UNTESTED)
    claim.__dict__["numbers"] = Numbers(kit=dict(enumerate(kit)),
                                        measured=dict(enumerate(measured)))
    return claim.follows


@pytest.mark.parametrize("result, verdict", [
    (verdict_of(2.0, "times", 1.81), CONFIRMED), (verdict_of(2.0, "times", 1.79), SMALLER),
    (verdict_of(2.0, "times", 1.19, 0.5), REFUTED),
    (verdict_of(2.0, "times", 64), CONFIRMED), (verdict_of(2.0, "times", 2.0, 1.0), SMALLER),
    (verdict_of(2.0, "times", 2.0, measured=[1.0]), SMALLER),
    (verdict_of(0.5, "less", 0.41), CONFIRMED), (verdict_of(0.5, "less", -0.1), REFUTED),
    (verdict_of(0.5, "less", -0.1, 0.2), SMALLER),
    (verdict_of(0.2, "more", 0.24), CONFIRMED), (verdict_of(0.2, "more", 0.33), SMALLER),
    (verdict_of(0.2, "more", 1.1), REFUTED),
    (verdict_of(0.2, "more", -0.1), CONFIRMED),       # it was to cost something, and costs nothing
    (verdict_of(None, "times", 2.0), UNTESTED), (verdict_of(2.0, "times"), UNTESTED),
    (verdict_of(1.0, "cases", 1.0), CONFIRMED), (verdict_of(1.0, "cases", 0.99), REFUTED),
    (verdict_of(1.0, "cases", 1.0, measured=[0.5]), REFUTED),
    (verdict_of(140e9, "bytes", 141e9), CONFIRMED), (verdict_of(2.0, "FLOPs", 6.0), SMALLER),
    (verdict_of(2.0, "FLOPs", 12.0), REFUTED)])
def test_the_rule(result, verdict):
    assert result == verdict


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items()
                                  if claim.verdict == CONFIRMED])
def test_a_number_that_moves_across_a_border_is_seen(name, monkeypatch):
    claim = CLAIMS[name]
    none = 1.0 if claim.unit == "times" else 0.0
    wrong = none + (claim.claimed - none) * (3 if claim.unit == "more" else 0.5)
    monkeypatch.setitem(NUMBERS, name, lambda: Numbers(kit={"moved": wrong}))
    expected = REFUTED if claim.unit == "cases" else SMALLER
    assert claims()[name].follows == expected != claim.verdict


# Numbers, from the sources' own arithmetic.

def test_zero_is_that_of_its_figure_1(numbers):
    """Rajbhandari et al. 2020: 7.5B parameters, 64 devices: 120, 31.4, 16.6 and 1.88 GB."""
    for stage, left in ((1, 31.4), (2, 16.6), (3, 1.88)):
        assert numbers[f"zero-{stage}"].kit["64 devices"] == pytest.approx(120 / left, rel=0.005)
    # embedding and head, 3% of it, are in the replicas' messages alone
    volume = numbers["zero-3-communication"]
    assert (volume.kit["1 micro-batch"] == pytest.approx(3 / 2 - 1, abs=0.05)
            and volume.elsewhere["8 micro-batches"] == pytest.approx(8 * 3 / 2 - 1, abs=0.5))


def test_the_simplified_block_is_that_of_table_1(numbers):
    """He and Hofmann 2023: 120M parameters become 101M."""
    whole, less = parameter_count(CRAMMED), numbers["simplified-blocks-parameters"].kit["that BERT"]
    assert round(whole / 1e6) == 120 and round(whole * (1 - less) / 1e6) == 101
    # Llama 3 8B, by hand: k and v have 1,024 numbers, q and the projection 4,096
    assert (numbers["simplified-blocks-parameters"].kit["llama-8b"]
            == pytest.approx(32 * 4096 * (1024 + 4096) / 8.03e9, rel=1e-3))


def test_masked_tokens_by_hand(numbers):
    """24 D^2 + 4 T D FLOPs a token and block. He et al. 2021 have 3.3 times fewer, table 2a's ViT-L
    with 8 blocks."""
    blocks = lambda layers, width, tokens: layers * tokens * (24 * width**2 + 4 * tokens * width)
    decoder = blocks(8, 512, 196)
    want = (blocks(24, 1024, 196) + decoder) / (blocks(24, 1024, 49) + decoder)
    assert numbers["masked-tokens-3x"].kit["75% masked"] == pytest.approx(want, rel=1e-6)


def test_attention_by_hand(numbers):
    """q, k, v and the output, 2 bytes each, and a float32 log-sum; in backward the gradients of q,
    k and v."""
    flash = lambda T: T * 768 * (4 + 3) * 2 + T * 12 * 4
    assert claim_numbers._attention("sdpa", 2048) == flash(2048)
    # instead of log-sums: probabilities in 16 and in 32 bits and a mask; two matrices of scores,
    # and the output's gradient
    plain = lambda T: T * 768 * 4 * 2 + T * T * (12 * (2 + 4)
        + 1) + T * 768 * 2 + 2 * 12 * T * T * 2
    assert claim_numbers._attention("plain", 2048) == pytest.approx(plain(2048), rel=0.1)
    assert set(numbers["flash-attention-linear"].kit.values()) == {1.0}


def test_bytes_of_optimizers_by_hand(numbers):
    assert numbers["lion-lighter"].kit["a parameter"] == 0.5
    assert numbers["adam-8bit"].kit["a parameter"] == pytest.approx(1 - 2 * (1 + 4 / 256) / 8)
    faster = numbers["lion-faster"]         # a large update feels least of it
    assert (faster.kit["h100, 1 sequence an update"] > faster.kit["h100, 8 sequences an update"]
            > faster.kit["h100, 512 sequences an update"])
    # the optimizer is all that differs: at most 28 over 20 bytes, where nothing else takes time
    assert all(1 < value < 28 / 20 for value in (*faster.kit.values(), *faster.elsewhere.values()))


def test_activations_in_two_bits_by_hand(numbers):
    """32 bits become 2 and a scale and a zero of 4 bytes each for 256 numbers; statistics stay, so
    it is a little less."""
    bits = 2 + 2 * 32 / 256
    kit = numbers["activations-12x"].kit
    assert (0.8 * 32 / bits < kit["fp32"] < 32 / bits
            and 16 / bits < kit["bf16"] < kit["fp32"]), "a part of bf16's is float32"


def test_bytes_of_seven_billion_are_those_of_a_table(numbers):
    """Lv et al. 2023, table 1, in GiB: AdamW 102.20, with an update in backward 14.58, of which
    weights 12.55 and activations 1.79."""
    assert numbers["update-in-backward-10-8"].kit["SGD"] == pytest.approx(1 - 14.58 / 102.20,
        abs=0.02)


def test_sharding_and_batches_obey_their_bounds(numbers):
    """N devices never hold more than N times the model, and 16 bits never more than twice the
    sequences."""
    for where, times in numbers["fsdp-doubles"].elsewhere.items():
        assert 0.4 * int(where.split()[0]) < times <= int(where.split()[0])
    assert all(1 <= times <= 2 for times in numbers["mixed-precision-batch"].kit.values())
    assert all(value < 1 / 3 for value in numbers["recompute-time"].kit.values()), (
        "the head does not run again")


def test_attention_keeps_every_pair_of_tokens(numbers):
    """4 T^2 D FLOPs a block: 8 times the tokens, 64 times the operations."""
    assert set(numbers["flash-attention-complexity"].kit.values()) == {8**2 - 1}


def test_quantities_by_hand(numbers):
    # Llama 3 70B: 80 blocks of q and projection, k and v, three matrices of the MLP, two norms;
    # embedding, head, a norm
    parameters = (80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 2 * 128256
                  * 8192 + 8192)
    weights = numbers["70b-140-gb"]
    assert (weights.kit["weights in 16 bits"] == 2 * parameters
            and weights.elsewhere["trained by AdamW, 16-bit weights with float32 masters"] == 16
            * parameters)
    # 2 a weight in a product, and 4 L D for each of (T + 1) / 2 pairs; the embedding and norms
    # multiply nothing
    products = parameters - 128256 * 8192 - 161 * 8192
    flops = numbers["2-flops-a-parameter"].kit["llama-70b"]
    assert flops == pytest.approx((2 * products + 80 * 4 * 8192 * 8193 / 2) / parameters, rel=1e-6)
    # one key and value for all of 12 heads: of each block 2 x 11/12 of a square of the width
    assert (numbers["shared-heads-15"].kit["gpt2-124m"]
            == pytest.approx(12 * 2 * 11 / 12 * 768 * (768 + 1) / 124.48e6, rel=1e-3))


def test_caches_and_windows_by_hand(numbers):
    cache, window = numbers["kv-cache-40"].kit, numbers["windows-75"].kit
    assert (cache["in 8 bits"] == 1 - (128 + 2) / 256 and cache["8 heads of 32"] == 0.75
            and cache["window of half the context"] == 0.5)
    T, W = 8192, 2048
    pairs = W * (W + 1) / 2 + (T - W) * W
    assert window["cache, the last token of 8,192"] == 0.75
    assert (window["pairs of queries and keys, training"]
            == pytest.approx(1 - pairs / (T * (T + 1) / 2)))


def test_an_addition_and_a_norm_by_hand(numbers):
    """Two read, one written; one read, one written. Under autocast the addend has 16 bits, and a
    cast reads and writes the norm's result."""
    saved = numbers["fused-add-norm-50"]
    assert saved.kit == pytest.approx({"float32": 1 / 5, "16 bits": 1 / 5,
        "bf16 autocast": 4 / (10 + 8 + 6)})
    assert (saved.elsewhere["bf16 autocast, its cast fused too"]
            == pytest.approx(1 - (4 + 2 + 4 + 2) / 24))


def test_selective_recomputation_is_near_its_table_2(numbers):
    """Korthikanti et al. 2022, in s b h bytes: 10 + 24 / t + 5 a s / (h t) over 34 / t, which
    counts masks of dropout, and of scores 5 bytes where this attention keeps 6."""
    for name, heads, width in (("GPT 22B", 64, 6144), ("GPT 175B", 96, 12288),
                               ("GPT 530B", 128, 20480), ("GPT 1T", 160, 25600)):
        scores = heads * 2048 / width
        assert (numbers["selective-5x"].kit[name]
                == pytest.approx((10 + 24 / 8 + 5 * scores / 8) / (34 / 8), rel=0.12))
        assert (numbers["selective-5x"].kit[name]
                == pytest.approx((8 + 24 / 8 + (6 * scores + 2 + 1 / 3) / 8) / (32 / 8), rel=0.02))


def test_partitioning_optimizer_states_has_a_limit(numbers):
    """8 of 16 bytes a parameter; with gradients 12 of 16, but 16-bit copies of weights stay: less
    than three times."""
    grown = [*numbers["fsdp-doubles"].kit.values()]
    assert (grown == sorted(grown) and grown[0] < 2 and grown[-1] < 3
            and numbers["fsdp-doubles"].elsewhere["64 devices, weights and gradients too"] > 20)


def test_counter_examples_are_there(numbers):
    """One move and one pair, with nothing in them that only training could tell."""
    few, many = (point.values for point in claim_numbers.triangle(
        claim_numbers.Candidate(name=name, config=claim_numbers._of("gpt2-350m", 16), tokens=1e10,
                                machine=name)
        for name in ("a100-80", "h100")))
    assert (many["days"] < few["days"] and many["dollars"] < few["dollars"]
            and many["loss"] == few["loss"])
    assert numbers["more-gpus-expense"].elsewhere == {"8 for 4 of them": 0, "64 for 8 of them": 1}


def test_measured_peaks_are_those_that_were_recorded(numbers):
    tables = [json.loads(path.read_text())["table"]
              for path in (ROOT / "data" / "measured").glob("ledger-*.json")]
    ratios = []
    for table in tables:
        peaks = {row["name"]: row["measured_bytes"] for row in table}
        pairs = [(f"{style}, bf16, as it is", f"{style}, fp32, as it is")
                 for style in ("gpt2", "llama")]
        # a GPU's table has one pair
        ratios += [peaks[low] / peaks[high] for low, high in pairs if {low, high} <= peaks.keys()]
    saved = numbers["mixed-precision-memory"].measured["as it is"]
    assert 1 - max(ratios) <= saved <= 1 - min(ratios) and 0 < saved < 0.5


def test_bert_and_its_children_are_as_large_as_published(numbers):
    """110, 66 and 25.3 million parameters; segments, pooler, biases and norms are a few percent.
    MobileBERT's weights by hand: three neighbours of 128 in; a layer has two bottlenecks and one
    back, queries and keys of 128, values of 512, a result, and four MLPs of 128 to 512."""
    layer = 3 * 512 * 128 + 2 * 128**2 + 512 * 128 + 128**2 + 4 * 2 * 128 * 512
    weights = 30_522 * 128 + 512 * 512 + 3 * 128 * 512 + 24 * layer
    assert claim_numbers.mobilebert()[0] == weights == pytest.approx(25.3e6, rel=0.05)
    assert claim_numbers._small_bert() == pytest.approx(66e6, rel=0.01)
    assert numbers["distilbert-40"].kit["6 of 12 layers"] == pytest.approx(0.4, abs=0.01)
    # FLIP's section 4.1: the text encoder is 4.4% of the image encoder
    image, text = (claim_numbers._blocks_flops(*shape)
                   for shape in ((24, 1024, 196), (12, 768, 32)))
    assert text / image == pytest.approx(0.044, abs=0.001)


def test_flops_of_large_runs_by_hand(numbers):
    """3.14e23 of 175 billion weights and 300 billion tokens; attention over pairs adds a little."""
    flops = numbers["gpt-3-flops"]
    assert (flops.elsewhere["6 a parameter and token"] == pytest.approx(3.14e23, rel=2e-3)
            and 1.02 < flops.kit["with all pairs"] / 3.14e23 < 1.04)
    assert (numbers["gpt-4-flops"].kit["25,000 A100s, 100 days at 32%"]
            == pytest.approx(25_000 * 312e12 * 0.32 * 100 * 86_400))
    tokens = 1e6 * 256 * (0.9 * 128 + 0.1 * 512)
    least = 6 * 85e6 * tokens / (16 * 123e12) / 86_400      # days at the peak, blocks alone
    assert 1.5 * least < numbers["bert-base-4-days"].kit["16 TPU v3"] < 5 * least


def test_skipped_zeros_by_another_route():
    """Lanes of binomial length: a draw of many has the same slowest lane as the formula."""
    import numpy as np
    slowest = np.random.default_rng(0).binomial(4096, 0.1, (400, 256)).max(axis=1).mean()
    assert claim_numbers.lanes_times(256) == pytest.approx(4096 / slowest, rel=0.005)


def test_attention_alone_cubes_what_is_left(numbers):
    """Dong et al. 2021; a causal mask does not."""
    powers = numbers["skipless-rank-collapse"]
    assert all(2.8 < power < 3.4 for power in powers.kit.values())
    assert powers.elsewhere["causal"] < 2


def test_importance_is_the_record_over_the_cost_of_scores(numbers):
    """The formula is within 10% of what was measured, so that either gives the verdict."""
    gains = numbers["importance-sampling"]
    for case, value in gains.kit.items():
        assert value == pytest.approx(gains.measured[case], rel=0.1)
        assert gains.elsewhere[f"{case}, scores for nothing"] == pytest.approx(
            gains.measured[case] * 4 / 3)


# The file, the page and the command.

def test_rows_are_whole(numbers):
    assert NUMBERS.keys() <= CLAIMS.keys()
    for name, claim in CLAIMS.items():
        assert re.fullmatch(r"[a-z0-9-]+", name), "a heading's anchor"
        assert "https://" in claim.source or claim.source == "none was found", name
        assert bool(claim.missing) == (claim.verdict == NOT_TESTABLE), name
        assert claim.missing.endswith(".") or numbers[name].kit or numbers[name].measured, name
    assert {claim.verdict for claim in CLAIMS.values()} == {
        CONFIRMED, SMALLER, REFUTED, NOT_TESTABLE}, "each sentence has a verdict"


def test_lora_leaves_the_weights(numbers):
    """Of 2 bytes a weight, 2 of its gradient and 8 of its moments 2 stay, where activations are
    few; of 4, 4 and 8 at least 4."""
    ratios = numbers["lora-3x"]
    assert (ratios.elsewhere["GPT-3 175B, weights in 16 bits and blocks recomputed"]
            == pytest.approx((2 + 2 + 8) / 2, rel=0.03))
    assert (max(ratios.kit, key=ratios.kit.get) == "GPT-3 175B"
            and all(1 < times < (4 + 4 + 8) / 4 for times in ratios.kit.values()))


@pytest.mark.parametrize("shown", sorted({claim.shown for claim in CLAIMS.values()}))
def test_what_is_named_shows_it(shown, capsys):
    """A command that runs, or a heading that is in the notebook."""
    if shown.startswith("lpkit "):
        assert cli.main(shlex.split(shown)[1:]) == 0 and capsys.readouterr().out.strip()
        return
    name, heading = shown.split(", ")
    cells = json.loads((ROOT / name).read_text())["cells"]
    lines = [line.strip() for cell in cells if cell["cell_type"] == "markdown"
             for line in "".join(cell["source"]).splitlines()]
    assert f"## {heading}" in lines or f"### {heading}" in lines


def test_the_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CLAIMS) and lines[0].split() == list(HEADS)
    assert cli.main(["claims", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["claims"]
    assert ([row["name"] for row in rows] == list(CLAIMS)
            and all(isinstance(row["kit"], dict) for row in rows))
    assert cli.main(["claims", "lion-lighter"]) == 0
    printed = capsys.readouterr().out
    claim = CLAIMS["lion-lighter"]
    assert all(" ".join(words.split()) in " ".join(printed.split())
               for words in (claim.says, claim.source, claim.why, claim.verdict))
    assert cli.main(["claims", "lion-lighter", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == next(row for row in pages.rows()
        if row["name"] == "lion-lighter")


def test_a_narrow_terminal_has_every_number(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["claims"]) == 0
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    for claim in CLAIMS.values():
        name, *numbers, verdict = line(claim.to_dict())
        assert f"{name}  {verdict}\n" in f"{narrow}\n" and all(words in narrow for words in numbers)
    assert cli.main(["claims", "update-in-backward-10-8"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_an_unknown_name_is_told_the_nearest(capsys):
    assert cli.main(["claims", "lion-lightr"]) == 2
    assert (capsys.readouterr().err == "lpkit: there is no claim 'lion-lightr'; did you mean "
                                       "'lion-lighter'?\n")


def test_a_slip_in_the_file_is_named():
    with pytest.raises(ValueError, match="verdict"):
        replace(CLAIMS["zero-1"], verdict="true")
