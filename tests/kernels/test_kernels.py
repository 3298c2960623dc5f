"""Every kernel against its definition and float64, forward and backward, and who may run it.

Only these tests catch a Triton kernel that computes something else than its definition, a kernel
that Triton's compiler turns into slow or spilling machine code for Hopper and Blackwell, a record
of an earlier race that lets a wrong version run, and a run that does not use the kernels that were
requested. On a CPU Triton's interpreter runs the kernels (conftest.py asks for it), with PyTorch's
conversions instead of its own.
"""

import dataclasses
import itertools
import json
import os
import re
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lpkit import records
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.files import own_cache
from lpkit.kernels.choose import PYTORCH, choose, refused_here
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.kernels.kernel import difference, gradients_of
from lpkit.precision.backends import BACKENDS
from lpkit.precision.linear import scaled_linears
from lpkit.techniques.kernels import KERNELS
from lpkit.training.training import RandomTokens, Training
from tests.bench import fused
from tests.bench.peers import far
from tests.kernels.builds import BY_TRITON_3_6, PROOFS

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*"),
              pytest.mark.skipif(tl is None, reason="Triton is not installed")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module", autouse=True)
def right_interpreter():
    if INTERPRETED:
        from lpkit.kernels.interpreter import mend
        mend()


def examples(kernel):
    return kernel.examples(torch.Generator().manual_seed(0), DEVICE)


@pytest.mark.parametrize("name", KERNELS)
def test_versions_compute_what_the_definition_says(name):
    kernel = KERNELS[name].load()
    for version, call in kernel.versions.items():
        if version == PYTORCH:      # below
            continue
        for i, arguments in enumerate(examples(kernel)):
            wrong = difference(kernel, call, arguments)
            assert not wrong, f"{version}, example {i}: {wrong}"


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_timed_shares_no_memory(name, monkeypatch):
    """AdamW's bench gave one tensor as weight and gradient, and was faster than a copy."""
    monkeypatch.setattr(fused.sizes, "rows", lambda device: ((256, 384),))
    for _, arguments in fused._timed(name, KERNELS[name].load(), 0, torch.device("cpu")):
        places = [t.untyped_storage().data_ptr() for t in tree_leaves(arguments)
                  if torch.is_tensor(t)]
        assert len(places) == len(set(places))


@pytest.mark.parametrize("name", [name for name in KERNELS
                                  if PYTORCH in KERNELS[name].load().versions])
def test_pytorch_s_own_is_near_the_definition(name):
    """It rounds between its operations, and sums the gradients of weights in other ways. On a GPU
    LayerNorm takes no weights of another dtype, and RMSNorm's gradient for numbers of 1e15 is off
    by 8%."""
    kernel = KERNELS[name].load()
    for arguments in examples(kernel):
        x = arguments[0]
        unlike = (DEVICE.type == "cuda" and x.numel()
                  and (x.abs().max() > 1e6 or ("layer" in name and x.dtype != torch.float32)))
        if x.numel() > 100 and x.isfinite().all() and not unlike:
            both = (gradients_of(kernel, call, arguments)
                    for call in (kernel.versions[PYTORCH], kernel.definition))
            assert not far(*both)


def scaled(call):
    def wrong(*arguments):
        out = call(*arguments)
        return tuple(map(one_percent, out)) if isinstance(out, tuple) else one_percent(out)
    return wrong


def one_percent(t):
    if t.dtype.is_floating_point and t.dtype.itemsize > 1:
        return t * 1.01
    return t.reshape(-1).view(torch.uint8).roll(1).view(t.dtype).view(t.shape)


def nothing(t):
    return t * 0 if t.requires_grad else torch.zeros_like(t)


def zeros(call):
    def wrong(*arguments):
        out = call(*arguments)
        return tuple(map(nothing, out)) if isinstance(out, tuple) else nothing(out)
    return wrong


def nan_row(call):
    def wrong(*arguments):
        out = call(*arguments)
        first = out[0] if isinstance(out, tuple) else out
        bad = first.clone()
        bad.view(-1)[:1] = torch.nan if bad.dtype.is_floating_point else 77
        return (bad, *out[1:]) if isinstance(out, tuple) else bad
    return wrong


@pytest.mark.parametrize("name, plant",
                         [*zip(KERNELS, itertools.cycle((scaled, zeros, nan_row)))])
def test_a_planted_mistake_is_found(name, plant):
    kernel = KERNELS[name].load()
    wrong = plant(kernel.definition)
    assert any(difference(kernel, wrong, arguments) for arguments in examples(kernel))


@pytest.fixture(scope="module")
def built():
    """What the compiler makes of them, in a process without the interpreter; masked attention is on
    the page alone."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = subprocess.run([sys.executable, "-m", "tests.pages.kernels"], capture_output=True,
                         text=True, env=clean, cwd=Path(__file__).parents[2])
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_the_compiler_makes_good_machine_code_of_them(built):
    """For Hopper and Blackwell: nothing spills, numbers come 128 bits at a time, no division takes
    the slow path, and FP8 is converted by the hardware's instruction."""
    assert {code["kernel"] for code in built} == {name for name in KERNELS if PROOFS[name].builds}
    casts = {"_cast", "_rows", "_blocks", "_square"}
    assert not [code["way"] for code in built if code["function"] in casts and code["torn"]]
    if BY_TRITON_3_6:
        pytest.skip("Triton 3.6 spills some numbers: docs/gpu.md")
    for code in built:
        where = f"{code['function']} for {code['target']}"
        assert not code["stack_bytes"], f"{where} spills"
        assert not code["calls"], f"{where} calls a slow path"
        assert code["wide_accesses"], f"{where} moves less than 128 bits at a time"
        assert code["registers"] * code["warps"] * 32 <= 65536, f"{where} has no room"
    assert all(code["fp8_conversions"] >= 16 for code in built if code["function"] in casts)
    assert not any(code["narrow_accesses"] for code in built
                   if code["kernel"] in ("amax", "cast-tensor", "cast-rows", "cast-blocks"))


def test_the_page_shows_what_the_compiler_makes(built):
    from tests.pages.kernels import COLUMNS, ON_PAGE, Compiled, page

    there = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text().splitlines()
    if not any(f"Triton {metadata.version('triton')} compiled" in line for line in there):
        pytest.skip("the page is by another version of Triton")
    assert [line for line in page([Compiled(**code) for code in built]).splitlines()
            if line not in there] == []
    rows = [dict(zip(COLUMNS, line.strip("| ").split(" | "))) for line in there if " | sm_" in line]
    assert len(rows) == len(ON_PAGE) * sum(len(proof.builds + proof.more_builds)
        for proof in PROOFS.values())
    assert [row for row in rows if row["stack"] != "0" or row["calls"] != "0"] == []


def test_casts_move_the_bytes_that_they_must():
    """Of bfloat16, both layouts: 6 an element with the tensor's own amax, 4 with a history;
    compiled casts move 8."""
    each = {(name, case): PROOFS[name].moved_bytes(*arguments) / arguments[0].numel()
            for name in PROOFS if name.startswith("cast-")
            for case, arguments in PROOFS[name].typical().items()}
    assert each["cast-tensor", "current scaling"] == 6 == max(each.values())
    assert each["cast-tensor", "delayed scaling"] == 4


@pytest.mark.parametrize("bad, says", [
    (torch.randn(4, 8).int(), "not torch.int32"), (torch.randn(8, 4).T, "contiguous"),
    (torch.empty(1, 65537, dtype=torch.bfloat16), "65,537")])
def test_what_a_row_kernel_does_not_take_is_refused(bad, says):
    from lpkit.kernels.norm import forward

    with pytest.raises(ConfigError, match=says):
        forward(bad, None, torch.ones(bad.shape[-1]), None, 1e-5, False)


def stale(call):
    """The first answer for ever."""
    kept = {}
    return lambda *arguments: kept.setdefault("answer", call(*arguments))


def of_shape(call):
    """The first answer for each shape, from a buffer that nobody fills again."""
    kept = {}
    return lambda x, *more: kept.setdefault((x.shape, x.dtype), call(x, *more))


def at_hand(dtype=torch.bfloat16):
    rng = torch.Generator().manual_seed(5)
    return [(torch.randn(6, 64, generator=rng).to(DEVICE, dtype),
             torch.randn(64, generator=rng).to(DEVICE), 1e-5)]


@pytest.mark.parametrize("plant", [scaled, stale, of_shape])
def test_a_wrong_version_is_refused_every_time(plant, tmp_path):
    """Asked for, it is an error; with auto it is named, and what is right runs."""
    kernel = KERNELS["rms-norm"].load()
    for cache in (tmp_path / "first", tmp_path / "second"):
        bad = dataclasses.replace(kernel, versions={"triton": plant(kernel.definition)})
        chosen = choose("rms-norm", bad, "auto", at_hand(), cache=cache)
        assert chosen.choice.used != "triton" and "triton" in chosen.choice.why
        assert chosen.refused["triton"].startswith(("differs", "fails"))
        with pytest.raises(ConfigError, match=r"differs from its definition|fails"):
            choose("rms-norm", bad, "triton", at_hand(), cache=cache)


def test_what_was_raced_is_kept_and_what_changed_is_raced_again(tmp_path):
    kernel, calls = KERNELS["rms-norm"].load(), []

    def counted(*arguments):
        calls.append(arguments[0].shape)
        return kernel.definition(*arguments)

    ours = dataclasses.replace(kernel, versions={"mine": counted})
    first = choose("rms-norm", ours, "auto", at_hand(), cache=tmp_path)
    raced = len(calls)
    again = choose("rms-norm", ours, "auto", at_hand(), cache=tmp_path)
    assert raced and again.choice == first.choice
    # a winner that is no definition is held to an example and to what is at hand, without a race
    assert len(calls) <= raced + 2
    before = len(calls)
    choose("rms-norm", ours, "auto", at_hand(torch.float32), cache=tmp_path)
    assert len(calls) > before + 2


def planted(path: Path, seconds, refused) -> None:
    """On a GPU the compiler takes part, and a record without it would be none of this race."""
    if DEVICE.type == "cuda" and isinstance(seconds, dict) and seconds:
        seconds, refused = {"compile": 9.0, **seconds}, {name: why for name, why in refused.items()
            if name != "compile"}
    path.write_text(records.sealed({"seconds": seconds, "refused": refused}))


RIGHT = {"reference": 2.0, "mine": 1.0}
NO_COMPILE = {"compile": "a CPU fuses little, and compiling takes seconds"}
PLANTS = {      # seconds and reasons of a record, or what is done to its file; words of the refusal
    "a refused version won": (RIGHT | {"triton": 0.5}, NO_COMPILE,
                              "its winner, triton, (differs|fails)"),
    "unknown": (RIGHT | {"stranger": 0.5, "triton": 3.0}, NO_COMPILE, "it is of .*stranger"),
    "left out": ({"mine": 1.0}, {}, "the candidates are reference, triton, mine, compile"),
    **({"cannot run here": (RIGHT | {"compile": 0.1, "triton": 3.0}, {},
                            "raced compile, which a CPU fuses little")}
       if DEVICE.type == "cpu" else {}),
    "nothing raced": ({}, dict.fromkeys([*RIGHT, "triton", "compile"], "no"), "it is of"),
    "text for seconds": (RIGHT | {"triton": "0"}, NO_COMPILE, "its part 'seconds' is"),
    "negative": (RIGHT | {"triton": -1.0}, NO_COMPILE, "its part 'seconds' is"),
    "null": (RIGHT | {"triton": float("nan")}, NO_COMPILE, "its part 'seconds' is"),
    "an escape": (RIGHT, NO_COMPILE | {"triton": "\x1b[2J"}, "its part 'refused' is"),
    "cut off": (lambda path: path.write_text(path.read_text()[:-40]), "is not a whole record"),
    "deep": (lambda path: path.write_text("[" * 100_000), "is not a whole record"),
    "large": (lambda path: path.write_bytes(b" " * (1 << 21)), "has more than 1,048,576 bytes"),
    "for all to write": (lambda path: path.chmod(0o666), "may be written by others"),
    "a folder for all": (lambda path: path.parent.chmod(0o777), "may be written by others"),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS)
def test_a_planted_record_of_a_race_is_passed_over_and_named(plant, tmp_path):
    """Only the definition and what equals it may run; a kernel that computes zeros would have
    won."""
    norm = KERNELS["rms-norm"].load()
    kernel = dataclasses.replace(norm, versions={"triton": zeros(norm.definition),
                                                 "mine": lambda *a: norm.definition(*a)})
    choose("rms-norm", kernel, "auto", at_hand(), cache=tmp_path / "raced")
    [record] = (tmp_path / "raced").iterdir()
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    *change, words = plant
    if callable(change[0]):
        change[0](record)
    else:
        planted(record, *change)
    chosen = choose("rms-norm", kernel, "auto", at_hand(), cache=tmp_path / "raced")
    assert chosen.choice.used in {*RIGHT, "compile"} and "triton" in chosen.refused
    assert chosen.choice.why.isprintable()
    assert re.search(f"an earlier record was not used: .*{words}", chosen.choice.why)


WRONG_AT = {"at hand": lambda x: x.shape == at_hand()[0][0].shape,
            "at the run's size": lambda x: len(x) > 2048, "nowhere": lambda x: False}


@pytest.mark.parametrize("place", WRONG_AT)
def test_a_planted_order_of_seconds_can_only_choose_what_is_right(place, tmp_path):
    """Well formed, and of the candidates that there are: what it names as the fastest is verified,
    or another race is run."""
    norm, draw = KERNELS["rms-norm"].load(), torch.Generator().manual_seed(0)
    raced = [(torch.randn(4096, 64, generator=draw), torch.randn(64, generator=draw), 1e-5)]

    def off(x, weight, eps):
        y = norm.definition(x, weight, eps)
        return torch.cat((y[:-1], y[-1:] * 0)) if WRONG_AT[place](x) else y

    kernel = dataclasses.replace(norm, versions={"mine": off,
        "right": lambda *a: norm.definition(*a)})
    choose("rms-norm", kernel, "auto", at_hand(), raced=raced, cache=tmp_path / "raced")
    [record] = (tmp_path / "raced").iterdir()
    for order in (("mine", "reference", "right"), ("right", "mine", "reference")):
        planted(record, dict(zip(order, (1.0, 2.0, 3.0))), NO_COMPILE)
        chosen = choose("rms-norm", kernel, "auto", at_hand(), raced=raced,
                        cache=tmp_path / "raced")
        if order[0] == "mine" and place != "nowhere":
            assert "an earlier record was not used: its winner, mine, differs" in chosen.choice.why
            assert chosen.choice.used != "mine" and chosen.refused["mine"].startswith("differs")
        else:
            assert chosen.choice.used == order[0] and "was not used" not in chosen.choice.why


def test_a_record_that_is_passed_over_is_said_by_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = KERNELS["rms-norm"].load()
    choose("rms-norm", dataclasses.replace(kernel, versions={"triton": zeros(kernel.definition)}),
           "auto", at_hand())
    [record] = tmp_path.rglob("*.json")
    assert refused_here()["rms-norm"]["triton"].startswith("differs")
    assert record.parent == own_cache("raced")
    record.write_text("[")
    assert "is not a whole record" in refused_here()["rms-norm"]["the record"]


@pytest.fixture
def tiny():
    return Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 16,
        "model.vocab": 64, "model.norm": "rmsnorm", "model.mlp": "swiglu", "model.bias": False,
        "model.position": "rope", "global_batch": 2, "precision.recipe": "fp32",
        "system.device": DEVICE.type})


def two_losses(config):
    training = Training.build(config, data=RandomTokens(config, DEVICE))
    return training, [training.update(step).loss.item() for step in range(2)]


@pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED,
                    reason="Triton's kernels need a GPU, or its interpreter")
def test_a_model_trains_with_the_kernels_that_were_asked_for(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, want = two_losses(tiny)
    training, got = two_losses(tiny.replace({"system.kernels": "triton"}))
    used = {key: choice.used for key, choice in training.decisions.choices.items()
            if key.startswith("kernel:")}
    assert used == dict.fromkeys(("kernel:rms-norm", "kernel:add-rms-norm", "kernel:swiglu",
                                  "kernel:rotary"), "triton")
    assert training.model.blocks[1].mlp.activate is KERNELS["swiglu"].load().versions["triton"]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)


@pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED,
                    reason="Triton's kernels need a GPU, or its interpreter")
def test_a_recipe_s_casts_are_kernels_that_were_asked_for(tiny, tmp_path, monkeypatch):
    """The same bits, for the casts are: a row of the run, and every Linear has it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fp8 = tiny.replace({"precision.recipe": "fp8-delayed", "precision.backend": "scaled_mm",
                        "model.mlp": "gelu", "model.norm": "layernorm",
                        "model.position": "learned", "system.compile": "false"})
    (_, want), (training, got) = (two_losses(fp8.replace({"system.kernels": version}))
                                  for version in ("reference", "triton"))
    assert training.decisions.choices["kernel:cast-tensor"].used == "triton"
    fused = {layer.arithmetic.cast_tensor for layer in scaled_linears(training.model)}
    assert fused == {KERNELS["cast-tensor"].load().versions["triton"]}
    assert not vars(BACKENDS["scaled_mm"]), "another model has its own"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=0)


def test_each_kernel_may_be_asked_for_by_name(tiny, tmp_path, monkeypatch):
    """A mapping and a text say the same; the others keep PyTorch's own on a CPU. What is not there
    is one sentence."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = Config.from_dict({**tiny.to_dict(),
                              "system": {"device": tiny.system.device,
                                         "kernels": {"rms-norm": "reference",
                                                     "swiglu": "pytorch"}}})
    assert asked == tiny.replace({"system.kernels": "rms-norm:reference, swiglu:pytorch"}).replace(
        {"system.kernels": asked.system.kernels})
    assert Config.from_yaml(asked.to_yaml()) == asked
    training, got = two_losses(asked)
    used = {key: choice.used for key, choice in training.decisions.choices.items()
            if key.startswith("kernel:")}
    assert {"kernel:rms-norm": "reference", "kernel:swiglu": "pytorch"}.items() <= used.items()
    assert len(used) == 2 or DEVICE.type == "cuda"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(two_losses(tiny)[1]), rtol=1e-5,
                               atol=0)
    for text, says in {"rms-nrom:triton": "there is no kernel of system.kernels 'rms-nrom'; did "
                                          "you mean 'rms-norm'", "tritn": "did you mean 'triton'",
                       "triton,compile": "more than one version for the same"}.items():
        with pytest.raises(ConfigError, match=says):
            tiny.replace({"system.kernels": text})
    for text, says in {"layer-norm:reference": "no layer of this model calls layer-norm; its "
                                               "kernels: .*swiglu",
                       "rotary:cpu": "system.kernels: there is no version 'cpu'"}.items():
        with pytest.raises(ConfigError, match=says):
            two_losses(tiny.replace({"system.kernels": text}))


def test_where_a_kernel_has_no_such_version_it_says_so(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    training, got = two_losses(tiny.replace({"system.kernels": "reference"}))
    assert all(c.used == "reference" for k, c in training.decisions.choices.items()
               if k.startswith("kernel:"))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(two_losses(tiny)[1]), rtol=1e-5,
                               atol=0)
    with pytest.raises(ConfigError, match="there is no version 'cuda'; choose one of auto"):
        tiny.replace({"system.kernels": "cuda"})
