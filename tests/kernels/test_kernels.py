"""Every kernel against its definition and float64, forward and backward; planted mistakes are
found; what the compiler makes of the Triton kernels for GPUs.

On a CPU Triton's interpreter runs them (conftest.py asks for it), with PyTorch's conversions
instead of its own.
"""

import dataclasses
import itertools
import json
import os
import re
import stat
import subprocess
import sys
import time
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




@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("plant", [scaled, zeros, nan_row])
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
                         text=True, env=clean,
                         cwd=Path(__file__).parents[2])
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_the_compiler_makes_good_machine_code_of_them(built):
    """For Hopper and Blackwell: nothing spills, numbers come 128 bits at a time, no division takes
    the slow path, and FP8 is converted by the hardware's instruction."""
    assert {one["kernel"] for one in built} == {name for name in KERNELS if PROOFS[name].builds}
    casts = {"_cast", "_rows", "_blocks", "_square"}
    assert not [one["way"] for one in built if one["function"] in casts and one["torn"]]
    if BY_TRITON_3_6:
        pytest.skip("Triton 3.6 spills some numbers: docs/gpu.md")
    for one in built:
        where = f"{one['function']} for {one['target']}"
        assert not one["stack_bytes"], f"{where} spills"
        assert not one["calls"], f"{where} calls a slow path"
        assert one["wide_accesses"], f"{where} moves less than 128 bits at a time"
        assert (one["registers"] * one["warps"] * 32
                <= 65536), f"{where} does not fit a multiprocessor"
    assert all(one["fp8_conversions"] >= 16 for one in built if one["function"] in casts)
    assert not any(one["narrow_accesses"] for one in built
                   if one["kernel"] in ("amax", "cast-tensor", "cast-rows", "cast-blocks"))


def test_the_page_shows_what_the_compiler_makes(built):
    from tests.pages.kernels import COLUMNS, ON_PAGE, Compiled, page

    there = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text().splitlines()
    if not any(f"By Triton {metadata.version('triton')}," in line for line in there):
        pytest.skip("the page is by another version of Triton")
    assert [line for line in page([Compiled(**one) for one in built]).splitlines()
            if line not in there] == []
    rows = [dict(zip(COLUMNS, line.strip("| ").split(" | "))) for line in there if " | sm_" in line]
    assert len(rows) == len(ON_PAGE) * sum(len(proof.builds + proof.more_builds)
        for proof in PROOFS.values())
    assert [row for row in rows if row["stack"] != "0" or row["calls"] != "0"] == []


def test_the_page_has_a_bar_for_each_share_of_a_roofline(tmp_path):
    from tests.pages.kernels import measured

    cases = [{"case": "rms-norm, 16384x4096, triton, forward", "peer": peer, "ratio": 0.87}
             for peer in ("a copy of as many bytes", "liger")]
    record = {"device": "NVIDIA H200", "cpu": "a CPU", "date": "2026-11-22T01:02:03",
              "commit": "abc", "cases": cases}
    (tmp_path / "kernels-nvidia-h200.json").write_text(json.dumps(record))
    (tmp_path / "kernels-a-cpu.json").write_text(json.dumps(record | {"device": "a CPU"}))
    first, *_, row = list(measured(tmp_path))[:-1]
    assert first == "NVIDIA H200, 2026-11-22, at commit abc."
    assert (row == f"| rms-norm, 16384x4096, triton, forward | a copy of as many bytes | 0.87 | "
                   f"{17 * chr(0x2588)} |")


def test_casts_move_the_bytes_that_they_must():
    """Of bfloat16, both layouts: 6 an element with the tensor's own amax, 4 with a history; today's
    compiled casts move 8."""
    each = {}
    for name in ("cast-tensor", "cast-rows", "cast-blocks", "cast-mx", "cast-nvfp4"):
        proof = PROOFS[name]
        each |= {(name, case): proof.moved_bytes(*a) / a[0].numel()
                 for case, a in proof.typical().items()}
    assert (each["cast-tensor", "current scaling"] == 6
            and each["cast-tensor", "delayed scaling"] == 4)
    assert max(each.values()) <= 6


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


@pytest.mark.parametrize("plant", [scaled, zeros, nan_row, stale, of_shape])
def test_a_wrong_version_is_refused_every_time(plant, tmp_path):
    """Asked for, it is an error; with auto it is named, and what is right runs."""
    kernel = KERNELS["rms-norm"].load()
    for cache in (tmp_path / "first", tmp_path / "second"):
        bad = dataclasses.replace(kernel, versions={"triton": plant(kernel.definition)})
        chosen = choose("rms-norm", bad, "auto", at_hand(), cache=cache)
        assert (chosen.choice.used != "triton"
                and chosen.refused["triton"].startswith(("differs", "fails")))
        assert "triton" in chosen.choice.why
        with pytest.raises(ConfigError, match=r"differs from its definition|fails"):
            choose("rms-norm", bad, "triton", at_hand(), cache=cache)


def test_what_was_raced_is_kept_and_what_changed_is_raced_anew(tmp_path):
    kernel, calls = KERNELS["rms-norm"].load(), []

    def counted(*arguments):
        calls.append(arguments[0].shape)
        return kernel.definition(*arguments)

    ours = dataclasses.replace(kernel, versions={"mine": counted})
    first = choose("rms-norm", ours, "auto", at_hand(), cache=tmp_path)
    raced = len(calls)
    assert (raced and choose("rms-norm", ours, "auto", at_hand(), cache=tmp_path).choice
            == first.choice)
    assert len(calls) <= raced + 2, ("a winner that is no definition is held to an example and "
                                       "to what is at hand, and nothing is raced")
    before = len(calls)
    choose("rms-norm", ours, "auto", at_hand(torch.float32), cache=tmp_path)
    assert len(calls) > before + 2


def planted(path: Path, seconds, refused) -> None:
    """On a GPU the compiler takes part, and a record without it would be none of this race."""
    if DEVICE.type == "cuda" and isinstance(seconds, dict) and seconds:
        seconds, refused = {"compile": 9.0, **seconds}, {name: why for name, why in refused.items()
            if name != "compile"}
    path.write_text(records.sealed({"seconds": seconds, "refused": refused}))


def linked(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def given_away(path: Path) -> None:
    try:
        os.chown(path, 12345, -1)
    except PermissionError:
        pytest.skip("only root gives files away")


RIGHT = {"reference": 2.0, "mine": 1.0}
NO_COMPILE = {"compile": "a CPU fuses little, and compiling takes seconds"}
PLANTS = {
    "a refused version won": (lambda path: planted(path, RIGHT | {"triton": 0.5}, NO_COMPILE),
                              "its winner, triton, (differs|fails)"),
    "unknown": (lambda path: planted(path, RIGHT | {"stranger": 0.5, "triton": 3.0}, NO_COMPILE),
                "it is of .*stranger"),
    "left out": (lambda path: planted(path, {"mine": 1.0}, {}),
                 "the candidates are reference, triton, mine, compile"),
    **({"cannot run here": (lambda path: planted(path, RIGHT | {"compile": 0.1, "triton": 3.0}, {}),
                            "raced compile, which a CPU fuses little")} if DEVICE.type == "cpu"
        else {}),
    "nothing raced": (lambda path: planted(path, {},
        dict.fromkeys([*RIGHT, "triton", "compile"], "no")), "it is of"),
    "text for seconds": (lambda path: planted(path, RIGHT | {"triton": "0"}, NO_COMPILE),
                         "its part 'seconds' is"),
    "a list for seconds": (lambda path: planted(path, ["triton"], {}), "its part 'seconds' is"),
    "negative": (lambda path: planted(path, RIGHT | {"triton": -1.0}, NO_COMPILE),
                 "its part 'seconds' is"),
    "null": (lambda path: planted(path, RIGHT | {"triton": float("nan")}, NO_COMPILE),
             "its part 'seconds' is"),
    "a list for a reason": (lambda path: planted(path, RIGHT, NO_COMPILE | {"triton": ["x"]}),
                            "its part 'refused' is"),
    "an escape": (lambda path: planted(path, RIGHT, NO_COMPILE | {"triton": "\x1b[2J"}),
                  "its part 'refused' is"),
    "without parts": (lambda path: path.write_text(records.sealed({})),
                      "its part 'seconds' is None"),
    "cut off": (lambda path: path.write_text(path.read_text()[:-40]), "is not a whole record"),
    "a list": (lambda path: path.write_text("[1, 2]"), "is not a whole record"),
    "deep": (lambda path: path.write_text("[" * 100_000), "is not a whole record"),
    "no UTF-8": (lambda path: path.write_bytes(b"\xff"), "is not UTF-8 text"),
    "large": (lambda path: path.write_bytes(b" " * (1 << 21)), "has more than 1,048,576 bytes"),
    "a link": (linked, "is a link"), "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)),
        "is a pipe"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "another's": (given_away, "belongs to user 12345"),
    "for all to write": (lambda path: path.chmod(0o666), "may be written by others"),
    "a folder for all": (lambda path: path.parent.chmod(0o777), "may be written by others"),
}


@pytest.mark.parametrize("plant, said", PLANTS.values(), ids=PLANTS)
def test_a_planted_record_of_a_race_is_passed_over_and_named(plant, said, tmp_path):
    """Only the definition and what equals it may run; a kernel that computes zeros would have
    won."""
    kernel = dataclasses.replace(KERNELS["rms-norm"].load(), versions={
        "triton": zeros(KERNELS["rms-norm"].load().definition),
        "mine": lambda *a: KERNELS["rms-norm"].load().definition(*a)})
    choose("rms-norm", kernel, "auto", at_hand(), cache=tmp_path / "raced")
    [record] = (tmp_path / "raced").iterdir()
    assert (stat.S_IMODE(record.stat().st_mode) == 0o600
            and stat.S_IMODE(record.parent.stat().st_mode) == 0o700)
    plant(record)
    chosen = choose("rms-norm", kernel, "auto", at_hand(), cache=tmp_path / "raced")
    assert (chosen.choice.used in {*RIGHT, "compile"} and "triton" in chosen.refused
            and chosen.choice.why.isprintable())
    assert re.search(f"an earlier record was not used: .*{said}", chosen.choice.why)


WRONG_AT = {"on an example": lambda x: True, "at hand": lambda x: x.shape == at_hand()[0][0].shape,
            "at the run's size": lambda x: len(x) > 2048,
            "nowhere": lambda x: False}


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
    for order in itertools.permutations(("reference", "mine", "right")):
        planted(record, dict(zip(order, (1.0, 2.0, 3.0))), NO_COMPILE)
        chosen = choose("rms-norm", kernel, "auto", at_hand(), raced=raced,
                        cache=tmp_path / "raced")
        if order[0] == "mine" and place != "nowhere":
            assert re.search("an earlier record was not used: its winner, mine, differs from its "
                             "definition", chosen.choice.why) and chosen.choice.used != "mine"
            assert chosen.refused["mine"].startswith("differs"), "and the record is another now"
        else:
            assert chosen.choice.used == order[0] and "was not used" not in chosen.choice.why


def test_a_record_that_is_passed_over_is_said_by_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel = KERNELS["rms-norm"].load()
    choose("rms-norm", dataclasses.replace(kernel, versions={"triton": zeros(kernel.definition)}),
           "auto", at_hand())
    [record] = tmp_path.rglob("*.json")
    assert (refused_here()["rms-norm"]["triton"].startswith("differs")
            and record.parent == own_cache("raced"))
    record.write_text("[")
    assert "is not a whole record" in refused_here()["rms-norm"]["the record"]


def test_a_version_that_is_slow_loses(tmp_path):
    kernel = KERNELS["rms-norm"].load()

    def slow(*arguments):
        time.sleep(0.01)
        return kernel.definition(*arguments)

    chosen = choose("rms-norm", dataclasses.replace(kernel, versions={"mine": slow}), "auto",
                    at_hand(), cache=tmp_path)
    assert chosen.choice.used != "mine"


def test_an_unknown_version_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match="triton"):
        choose("rms-norm", KERNELS["rms-norm"].load(), "tritn", at_hand(), cache=tmp_path)


@pytest.fixture
def tiny():
    return Config().replace({"model.layers": 2, "model.width": 32, "model.heads": 2,
                             "model.context": 16, "model.vocab": 64,
                             "model.norm": "rmsnorm", "model.mlp": "swiglu",
                             "model.position": "rope", "model.bias": False,
                             "global_batch": 2, "precision.recipe": "fp32",
                             "system.device": "cpu" if DEVICE.type == "cpu" else "cuda"})


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
    def losses(version):
        training = Training.build(fp8.replace({"system.kernels": version}),
                                  data=RandomTokens(fp8, DEVICE))
        return training, [training.update(step).loss.item() for step in range(2)]

    (_, want), (training, got) = losses("reference"), losses("triton")
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


def test_cross_entropy_reads_last_first_what_it_read_last(monkeypatch):
    """The pieces of the second pass are those of the first, backwards: a row of 256 KB may still be
    in a cache in part."""
    if not INTERPRETED:
        pytest.skip("the interpreter's loads are counted")
    from triton.runtime.interpreter import InterpreterBuilder

    from lpkit.kernels.cross_entropy import PIECE, in_triton

    seen, load = [], InterpreterBuilder.create_masked_load

    def counted(self, pointers, *others):
        if pointers.data.size == PIECE:
            seen.append(int(pointers.data.min()))
        return load(self, pointers, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
    in_triton(torch.randn(1, 3 * PIECE + 5).bfloat16(), torch.tensor([7]))
    assert len(seen) == 8 and seen[:4] == sorted(seen[:4]) and seen[4:] == seen[3::-1]
