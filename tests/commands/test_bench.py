"""The benchmark harness on contenders whose results are known. No test asserts a speed.

Only these tests catch: a race that times a wrong answer, pairs rounds wrongly or hides its worst
case, a peer of a bench that computes something else, and a page that is older than the code.
"""

import itertools
import json
import os
import pkgutil
import re
import statistics
import subprocess
import time

import pytest
import torch

from lpkit import timing
from lpkit.cli import main
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.files import PACKAGE
from lpkit.nn.transformer import cross_entropy
from lpkit.training.training import RandomTokens, Training
from tests.attack import NAMES, _page
from tests.bench import (
    BENCHES,
    decode,
    fsdp2,
    harness,
    imports,
    loader,
    losses,
    nanogpt,
    your_model,
)
from tests.bench.command import keep
from tests.bench.harness import paired, race, summary


class Clock:
    """A fake perf_counter: its time passes only when a contender's call says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def costs(self, *seconds):
        turn = itertools.cycle(seconds)

        def call():
            self.now += next(turn)

        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    return clock


def test_race_reports_the_paired_ratio(clock):
    results = race("known", ours=clock.costs(0.001),
                   peers={"twice": clock.costs(0.002), "half": clock.costs(0.0005)},
                   check=lambda: None, target={"twice": 1.5, "half": 1.0})
    twice, half = results
    assert (twice.ratio == pytest.approx(2) and twice.quartiles == pytest.approx((2, 2))
            and twice.rounds == 9)
    assert twice.ours_median == pytest.approx(0.001) and twice.peer_median == pytest.approx(0.002)
    assert twice.met and twice.verdict() == "met (at least 1.5)"
    assert not half.met and half.verdict() == "short by 50.0% (at least 1)"


def test_ratio_is_the_median_of_ratios_with_quartiles():
    ours, peer = [1, 2, 4, 1, 2], [3, 2, 16, 5, 4]
    result = paired("known", ours=ours, peer=peer, peer_name="p", facts={})
    ratios = [b / a for a, b in zip(ours, peer)]        # 3 1 4 5 2
    assert result.ratio == statistics.median(ratios) == 3 and result.quartiles == (2, 4)
    lower = paired("known", ours=peer, peer=ours, peer_name="p", facts={}, better="lower",
                   target=2.5)
    assert lower.ratio == 3 and not lower.met and lower.verdict() == "short by 16.7% (at most 2.5)"


def test_wrong_answers_are_not_timed(clock):
    def check():
        raise AssertionError("they differ")

    with pytest.raises(AssertionError, match="they differ"):
        race("wrong", ours=lambda: pytest.fail("timed"), peers={}, check=check)


def test_samples_are_long_enough_and_take_turns(clock):
    calls = []
    cost = clock.costs(0.0004)

    def contender(name):
        def call():
            calls.append(name)
            cost()
        return call

    race("turns", ours=contender("ours"), peers={"peer": contender("peer")}, check=lambda: None,
         rounds=20)
    runs = [(name, sum(1 for _ in group)) for name, group in itertools.groupby(calls)]
    timed = runs[2:] if runs[0][0] == "ours" else runs      # calibration comes first
    assert all(length * 0.0004 >= harness.SAMPLE_SECONDS for _, length in timed)
    # shuffled rounds: neither one long block nor a fixed alternation
    assert 10 < len(timed) <= 40


def test_inputs_come_round_and_round(clock):
    cost, seen = clock.costs(0.001), {"ours": "", "peer": ""}

    def contender(name):
        def call(letter):
            seen[name] += letter
            cost()
        return call

    race("round", ours=contender("ours"), peers={"peer": contender("peer")}, check=lambda: None,
         over=["a", "b", "c"])
    for letters in seen.values():
        assert len(letters) > 7 and letters == ("abc" * len(letters))[:len(letters)]


def test_a_limited_processor_has_a_record_of_its_own(tmp_path, monkeypatch):
    for limit in (None, "AVX2"):
        if limit:
            monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        keep(tmp_path, summary([paired("b", ours=[1], peer=[9], peer_name="p")]))
    whole, limited = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert limited.name == f"{whole.stem}-onednn-max-cpu-isa-avx2.json"
    assert json.loads(limited.read_text())["command"].split()[:2] == ["ONEDNN_MAX_CPU_ISA=AVX2",
        "lpkit"]
    assert not json.loads(whole.read_text())["command"].startswith("ONEDNN")


def test_summary_leads_with_the_worst_case():
    facts = harness.provenance(["numpy", "no-such-package"])
    good = paired("b", ours=[1], peer=[9], peer_name="p", facts=facts, target=3)
    tight = paired("b", ours=[1], peer=[1.5], peer_name="q", facts=facts, target=1.4)
    missed = paired("b", ours=[3], peer=[10], peer_name="r", facts=facts, target=0.2,
                    better="lower")
    top = summary([good, tight])
    assert ((top["name"], top["peer"], top["met"]) == ("b", "q", True)
            and top["ratio"] == pytest.approx(1.5))
    assert {"name", "ratio", "quartiles", "peer", "versions", "device", "commit", "date",
            "command"} <= set(top)
    assert (top["versions"]["no-such-package"] == "not installed"
            and "versions" not in top["cases"][0])
    assert [case["peer"] for case in top["cases"]] == ["p", "q"]
    worst = summary([good, missed])
    assert worst["peer"] == "r" and not worst["met"]
    json.dumps(worst, allow_nan=False)


def test_loader_bench(monkeypatch):
    monkeypatch.setattr(loader, "SHAPES", ((4, 32),))
    results = loader.run(rounds=1, tokens=200_000)
    timed = [result for result in results if result.unit == "s"]
    assert [result.peer for result in timed] == [loader.LOOP,
        *(f"DataLoader, num_workers={n}" for n in loader.WORKERS)]
    assert [result.target for result in timed] == [3.5, 1.8, 1.8]
    memory = [result for result in results if result.unit == "bytes"]
    # bytes, not seconds: this must hold anywhere
    assert all(result.met for result in memory)


def test_decode_bench_has_our_weights_and_our_tokens(monkeypatch):
    """The race itself asserts that both generate the same greedy tokens."""
    small = {"model.layers": 2, "model.width": 32, "model.heads": 4}
    monkeypatch.setattr(decode, "CASES",
                        {"gpt2": (small, 2.0), "llama": ({**small, **decode.LLAMA}, None)})
    for name, value in (("EARLY", 6), ("LATE", 24), ("NEW", 12)):
        monkeypatch.setattr(decode, name, value)
    results = decode.run(rounds=1)
    assert [result.peer for result in results] == ["transformers.generate", "position 6"] * 2
    assert [(result.better, result.target) for result in results[:3]] == [("higher", 2.0),
        ("lower", 1.5), ("higher", None)]


@pytest.mark.dist
def test_fsdp2_of_accelerate_has_our_losses(monkeypatch):
    """On two processes on a CPU; the bench itself compares each loss with ours. One GPU has no
    second rank to shard over."""
    monkeypatch.setattr(fsdp2, "LEAST_STEPS", 3)
    monkeypatch.setattr(fsdp2, "gpus", lambda: 0)
    small = {"precision.recipe": "fp32", "model.layers": 2, "model.width": 32, "model.heads": 2,
             "model.context": 16, "global_batch": 4}
    monkeypatch.setattr(fsdp2, "ON_CPUS",
                        {"small": small, "small, bf16": small | {"precision.recipe": "bf16",
                            "parallel.gathered": "compute"}})
    first, second = fsdp2.run(rounds=1)
    assert (first.peer == second.peer == "accelerate's FSDP2" and first.case == "small, 2 ranks"
            and first.ratio > 0)
    assert (first.provenance["losses"]["ours"]
            == pytest.approx(first.provenance["losses"][first.peer], rel=1e-5))
    monkeypatch.setattr(fsdp2, "gpus", lambda: 1)
    with pytest.raises(ConfigError, match="shards over several, and there is 1 GPU; hide it"):
        fsdp2.run()


def test_fsdp2_with_other_losses_is_no_figure():
    config = Config().replace({"precision.recipe": "fp32"})
    with pytest.raises(AssertionError, match="the losses of step 2 differ"):
        fsdp2.check({"ours": [2.0, 1.0], "peer": [2.0, 1.0001]}, config)
    assert fsdp2.check({"ours": [2.0, 1.0], "peer": [2.0, 1.0001]},
                       config.replace({"precision.recipe": "bf16"}))


def test_nanogpt_has_our_weights_and_takes_our_updates():
    """In float32 and with the same GELU, the two models are the same function. The next losses
    show that clipping and AdamW are equal, too."""
    config = Config().replace({"system.device": "cpu", "precision.recipe": "fp32",
                               "model.layers": 2, "model.width": 48, "model.heads": 3,
                               "model.context": 16, "global_batch": 4, "steps": 9,
                               "optimizer.lr": 0.01, "schedule.warmup_steps": 1})
    data = RandomTokens(config)
    ours = Training.build(config, data=data)
    with torch.no_grad():
        # biases, too, so that no parameter is hidden because it is zero
        for p in ours.model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    peer = nanogpt.Peer(ours, compiled=False)
    assert {p.data_ptr() for p in ours.model.parameters()}.isdisjoint(
        {p.data_ptr() for p in peer.model.parameters()})
    for block in peer.model.h:
        block.mlp[1].approximate = "tanh"
    batch = data.batch(0)
    want = cross_entropy(ours.model(batch.tokens), batch.targets).item()
    assert peer.model(batch.tokens, batch.targets).item() == pytest.approx(want, rel=1e-6)
    mine, theirs = ([run.update(step).loss.item() for step in range(4)] for run in (ours, peer))
    assert mine[3] < mine[0] - 0.5     # the rate is high enough to show a difference
    assert theirs == pytest.approx(mine, rel=0.01)      # its products are in bf16


def test_peaks_of_other_models_are_counted_without_the_kit(monkeypatch):
    """The peak of an MLP by hand: weights, two moments, step counts and the batch; at the end of
    backward also gradients and the output of the loss."""
    size = your_model.Size(width=64)
    monkeypatch.setattr(your_model, "SIZE", size)
    monkeypatch.setattr(your_model, "SEQUENCES", 2)
    row = your_model.peak_of("mlp", None)
    parameters, tokens = 64 * 128 + 128 + 128 * 64 + 64, 2 * size.context
    held = 4 * (3 * parameters + 4 + tokens * 64)
    activations = 4 * tokens * (128 + 128 + 64)     # what GELU and the loss save, and the output
    assert (row["parameters"] == parameters and row["error"] < 0.005
            and held + activations < row["measured_bytes"] < held + 2 * activations)
    assert (row["closed_bytes"] is None and row["accelerate"] in (16 * parameters, "not installed")
            and isinstance(row["MemTracker"], int))
    assert (your_model._guarded(lambda: 1 // 0) == "ZeroDivisionError: integer division or modulo "
                                                   "by zero")
    assert your_model._peak_row(row)[4] == "+0.00%"


def test_linear_cross_entropy_bench(monkeypatch):
    # at the size for which the claim is made
    assert losses.counted_bytes("in pieces") * 15 <= losses.counted_bytes("plain")
    for name, value in {"WIDTH": 16, "VOCAB": 500, "TOKENS": 64, "CHUNK": 16, "THREADS": (1,),
                        "TOKENS_HELD": 64}.items():
        monkeypatch.setattr(losses, name, value)
    monkeypatch.setattr(losses, "_resident", losses.counted_bytes)
    results = losses.run(rounds=1)
    assert [result.peer for result in results] == ["plain",
        *[losses.EQUAL_PIECES] * losses.PYTORCH_HAS_IT, "plain", "plain"]
    monkeypatch.setattr(losses, "in_pieces", lambda h, head, y: 1.01 * losses.plain(h, head, y))
    with pytest.raises(AssertionError, match="relative error"):
        losses.run(rounds=1)


def test_command(tmp_path, capsys, monkeypatch):
    assert main(["bench", "import", "--rounds", "1", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    (kept,) = tmp_path.iterdir()
    assert (json.loads(kept.read_text()) == printed and kept.name.startswith("import-")
            and kept.suffix == ".json")
    assert printed["name"] == "import" and len(printed["cases"]) == 1
    assert (printed["peer"], printed["better"]) == ("import torch", "lower")
    assert 0 < printed["ratio"] < 1

    def slower_for_torch(code):
        time.sleep(0.01 if "torch" in code else 0.001)

    monkeypatch.setattr(imports, "_python", slower_for_torch)
    assert main(["bench", "import", "import", "--rounds", "1"]) == 0
    assert capsys.readouterr().out.count("at most 0.15") == 2


@pytest.mark.parametrize("argv, sentence", [
    (["bench", "--seconds", "3"],
     "--seconds is for evidence alone, and 1 or more; got 3 with none"),
    (["bench", "imports"], "no benchmark 'imports'; did you mean 'import'"),
    (["bench", "import", "--rounds", "0"], "--rounds must be 1 or more"),
])
def test_bad_input(argv, sentence, capsys):
    assert main(argv) == 2
    assert sentence in capsys.readouterr().err


def test_every_row_is_a_benchmark():
    assert all(callable(pkgutil.resolve_name(f"tests.bench.{where}"))
               for where, _ in BENCHES.values())


def test_without_a_name_all_are_listed(capsys):
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert (all(re.search(rf"^{name} +\S.{{20}}", out, re.M) for name in BENCHES)
            and max(map(len, out.splitlines())) <= 100)
    assert (main(["bench", "--json"]) == 0 and list(json.loads(capsys.readouterr().out)["known"])
            == list(BENCHES))


def test_the_page_of_reliability_is_made_from_its_files():
    assert (PACKAGE.parent / "docs" / "reliability.md").read_text() == _page.page()


def test_a_page_that_is_older_than_the_code_is_told(tmp_path):
    commits: list[str] = []

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        day = {"GIT_COMMITTER_DATE": f"2026-01-0{len(commits) + 1}T12:00:00Z"}
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, text=True,
                              capture_output=True, env=os.environ | day)
        return done.stdout.strip()

    def page(day: str, commit: str) -> str:
        rows = "\n".join(f"| {name} | 1 | none | 5 | {commit}+ | |" for name in NAMES)
        return (f"# Reliability\n\n## A machine\n\nMeasured {day} at commit {commits[0]} with "
                f"x\n{rows}")

    git("init", "-q")
    (tmp_path / "lpkit").mkdir()
    for name in ("lpkit/a.py", "b.py", "lpkit/c.py"):
        (tmp_path / name).write_text("")
        git("add", "-A")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "--short=12", "HEAD"))
    first, second, last = (page("2026-01-01", commit) for commit in commits)
    assert "in 1 commits" in _page.age(first, tmp_path)
    assert "in 1 commits" in _page.age(second, tmp_path), "another file changed before"
    assert _page.age(last, tmp_path) == _page.age(first, tmp_path / "nowhere") == ""
    gone = page("2026-01-02", "0123456789ab")
    sentence = "1 commits to lpkit/ since 2026-01-02."
    assert sentence in _page.age(gone, tmp_path), "of a branch that was squashed"
    newer = last.partition("\n\n## ")[2]
    assert _page.age(f"{gone}\n\n## {newer}", tmp_path) == "", "renewed on one machine"
    git("clone", "-q", "--depth", "1", f"file://{tmp_path}", "shallow")
    assert _page.age(gone, tmp_path / "shallow") == "", "git cannot tell"
    sentence = f"it has no row for {NAMES[0]}."
    assert sentence in _page.age(last.replace(f"| {NAMES[0]} |", ""), tmp_path)
