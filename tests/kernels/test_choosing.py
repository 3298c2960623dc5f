"""Choosing a version of a kernel: what it must be held to before a run may have it, and what must
not be held against it.

Only these tests catch a compiled version that runs eagerly for some shape, a wrong version or
backend that is right on small inputs, a lack of memory or of a compiler that is taken for a fault
of the version, and a race within a compiled block that times something else than the block runs.
"""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from lpkit.config import Config
from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.execution import attention
from lpkit.kernels import choose as choosing
from lpkit.kernels import jit
from lpkit.kernels.choose import candidates, choose, refused_here, wrong
from lpkit.techniques.attention_backends import Attending
from lpkit.techniques.kernels import KERNELS
from lpkit.training import build
from lpkit.training.training import RandomTokens, Training

CPU = torch.device("cpu")
NORM = KERNELS["rms-norm"].load()


def rows(n=6, width=64):
    draw = torch.Generator().manual_seed(n)
    return torch.randn(n, width, generator=draw), torch.randn(width, generator=draw), 1e-5


def with_version(call, name="cpu"):
    return dataclasses.replace(NORM, versions={name: call})


@pytest.fixture
def graphs(monkeypatch):
    """What PyTorch compiles from now on, and how often each graph ran."""
    runs = []

    def backend(graph, _):
        runs.append(0)
        place = len(runs) - 1

        def ran(*arguments):
            runs[place] += 1
            return graph(*arguments)

        return ran

    monkeypatch.setattr(jit, "compiled", lambda function, **how: torch.compile(function,
        backend=backend, **how))
    choosing._compiled.cache_clear()
    yield runs
    choosing._compiled.cache_clear()


def test_every_shape_is_compiled_however_many_there_were(graphs):
    """PyTorch gives a function up after eight shapes, and runs the ninth eagerly without a word."""
    version = candidates(NORM)["compile"]
    for n in range(2, 14):
        version(*rows(n))
        assert graphs == [1] * (n - 1), f"{n} rows ran eagerly"


def test_what_was_chosen_compiled_is_compiled_for_the_shapes_at_hand_alone(graphs):
    x, weight, eps = rows()
    chosen = partial(candidates(NORM)["compile"],
                     only=frozenset([choosing.shapes((x, weight, eps))]))
    assert torch.equal(chosen(x, weight, eps), NORM.definition(x, weight, eps)) and graphs == [1]
    more = rows(7)
    assert torch.equal(chosen(*more), NORM.definition(*more)) and graphs == [1]


def now_and_then(definition, every):
    calls = []

    def version(*arguments):
        calls.append(1)
        return definition(*arguments) * (1.5 if len(calls) % every == 0 else 1)

    return version


@pytest.mark.parametrize("every", [2, 20])
def test_one_wrong_answer_in_twenty_is_found(every):
    alone = dataclasses.replace(NORM, examples=lambda draw, device: [])
    assert wrong(alone, now_and_then(NORM.definition, every),
                 [rows()]).startswith("differs from its definition")


def test_sums_in_another_order_each_time_are_right():
    def version(x, weight, eps):
        return NORM.definition(x, weight, eps) * (1 + 2.0**-24 * torch.rand(()).item())

    assert wrong(NORM, version, [rows()]) == ""


def test_what_it_does_not_take_is_no_mistake(tmp_path):
    """Nor is it kept as one; where it is at hand, it is no candidate."""
    def narrow(x, weight, eps):
        if x.shape[-1] > 100:
            raise ConfigError(f"takes rows of 100, not {x.shape[-1]}")
        return NORM.definition(x, weight, eps)

    assert wrong(NORM, narrow, [rows()]) == ""
    chosen = choose("rms-norm", with_version(narrow), "auto", [rows(6, 200)], cache=tmp_path)
    assert chosen.refused["cpu"] == "cannot: takes rows of 100, not 200"


def test_what_no_compiler_built_is_raced_once_there_is_one(tmp_path, monkeypatch):
    """Triton builds its launchers by a C compiler. Without one its kernels are not wrong, and what
    was found then is not believed later."""
    cuda, here = tmp_path / "cache", []
    monkeypatch.setattr(choosing, "_device", lambda calls: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda: SimpleNamespace(name="H100", major=9, minor=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(jit.shutil, "which", lambda name: name if here else None)
    monkeypatch.delenv("CC", raising=False)
    offered = {"reference": NORM.definition, "triton": NORM.definition}
    alone = dataclasses.replace(NORM, examples=lambda draw, device: [])
    chosen = choose("rms-norm", alone, "auto", [rows()], offered=offered, cache=cuda)
    why = "there is no compiler here (gcc, clang); install gcc and g++"
    assert chosen.refused == {"triton": why} and chosen.choice.used == "reference"
    with pytest.raises(ConfigError,
                       match=rf"^system.kernels=triton: rms-norm {re.escape(why)}; set"):
        choose("rms-norm", alone, "triton", [rows()], offered=offered)
    here.append(1)
    monkeypatch.setattr(jit.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert not choose("rms-norm", alone, "auto", [rows()], offered=offered, cache=cuda).refused
    assert len(list(cuda.iterdir())) == 2


@pytest.mark.parametrize("limit", ["ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "ATEN_CPU_CAPABILITY"])
def test_a_limited_processor_is_another_machine(limit, tmp_path, monkeypatch):
    """The fastest version with AVX2 alone may not be the fastest with AVX-512."""
    monkeypatch.setenv(limit, "AVX2")
    choose("rms-norm", NORM, "auto", [rows()], cache=tmp_path)
    monkeypatch.setenv(limit, "AVX512_CORE")
    for _ in range(2):
        choose("rms-norm", NORM, "auto", [rows()], cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("lack", [
    torch.OutOfMemoryError("tried to allocate"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't "
                 "allocate memory: you tried to allocate 9 bytes"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")],
    ids=lambda lack: str(lack)[:12])
def test_a_lack_of_memory_is_not_kept(lack, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    short = [True]

    def version(x, weight, eps):
        if short[0]:
            raise lack
        return NORM.definition(x, weight, eps)

    reason = choose("rms-norm", with_version(version), "auto", [rows()]).refused["cpu"]
    assert reason == f"lacks memory now: {type(lack).__name__}: {lack}" and not refused_here()
    assert not list(tmp_path.rglob("*.json"))
    short[0] = False
    assert "cpu" not in choose("rms-norm", with_version(version), "auto", [rows()]).refused


def wrong_when_large(x, weight, eps):
    """Right where float64 has room, wrong in the last rows of a step."""
    y = NORM.definition(x, weight, eps)
    return y if len(x) <= 2048 else torch.cat((y[:-1], y[-1:] * 0))


def test_a_version_is_held_to_the_step_s_size(tmp_path):
    """To PyTorch's own where the definition has no room there."""
    chosen = choose("rms-norm", with_version(wrong_when_large), "auto", [rows()],
                    raced=[rows(4096)], cache=tmp_path)
    assert "result 1 of 3, at the run's size: a row is off" in chosen.refused["cpu"], chosen
    lacks = dataclasses.replace(with_version(wrong_when_large), definition=no_room)
    record = choosing._find(lacks, {"pytorch": NORM.versions["pytorch"], "cpu": wrong_when_large},
                           [rows()], [rows(4096)], 1.0)
    assert "cpu" in record["refused"]


@pytest.mark.parametrize("definition", [NORM.definition, None])
def test_a_requested_version_is_held_to_the_step_s_size_too(definition):
    """And to PyTorch's, where the definition has no room there. A version that has no room is not
    wrong."""
    kernel = dataclasses.replace(with_version(wrong_when_large), definition=definition or no_room,
                                 examples=lambda draw, device: [])
    offered = {"pytorch": NORM.versions["pytorch"], "cpu": wrong_when_large,
               "right": lambda *a: NORM.definition(*a), "wide": no_room}
    with pytest.raises(ConfigError, match=r"^system.kernels=cpu: rms-norm differs from its "
                                          r"definition: result 1 of 3, at the run's size: a row"):
        choose("rms-norm", kernel, "cpu", [rows()], offered=offered, raced=[rows(4096)])
    for right in ("right", "wide"):
        assert choose("rms-norm", kernel, right, [rows()], offered=offered,
                      raced=[rows(4096)]).choice.used == right


def no_room(x, weight, eps):
    if len(x) > 64:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: all scores")
    return NORM.definition(x, weight, eps)


# ---- within compiled blocks

def breaks(x, weight, eps):
    torch._dynamo.graph_break()
    return NORM.versions["pytorch"](x, weight, eps)


def lingers(x, weight, eps):
    """As fast as PyTorch's own, until it is compiled."""
    for _ in range(400 if torch.compiler.is_compiling() else 0):
        x = x + 0
    return NORM.versions["pytorch"](x, weight, eps)


@pytest.fixture
def as_on_a_gpu(graphs, monkeypatch):
    """There the compiler is a candidate. Eagerly the definition loses."""
    def slow(x, weight, eps):
        for _ in range(0 if torch.compiler.is_compiling() else 60):
            x = x + 0
        return NORM.definition(x, weight, eps)

    monkeypatch.setattr(choosing, "why_not", lambda version, at_hand: "")
    return dataclasses.replace(NORM, definition=slow, versions={}, examples=lambda *_: [])


@pytest.mark.parametrize("planted, refused", [
    (breaks, "cannot be compiled with a block: Unsupported: Call to `torch._dynamo.graph_break()`"),
    (lingers, None)])
def test_the_fastest_outside_of_a_block_loses_within(planted, refused, as_on_a_gpu, tmp_path):
    """Each is raced as a compiled block runs it, and a record of the one is none of the other."""
    kernel, call = dataclasses.replace(as_on_a_gpu, versions={"cpu": planted}), [rows(4096)]
    eager = {"reference": kernel.definition, "cpu": planted}
    assert choose("rms-norm", kernel, "auto", call, offered=eager,
                  cache=tmp_path / "eager").choice.used == "cpu"
    for _ in range(2):
        within = choose("rms-norm", kernel, "auto", call, cache=tmp_path / "within", in_block=True)
        assert within.choice.used == "compile" and within.refused.get("cpu") == refused
        assert within.refused["reference"].startswith("in a compiled block it becomes the same")
    # it is kept, and it is not wrong
    assert len(list((tmp_path / "within").iterdir())) == 1 and "rms-norm" not in refused_here()
    assert len({choosing._key("rms-norm", kernel, eager, call, *how)
                for how in ((False, False), (True, False), (True, True))}) == 3


@pytest.mark.parametrize("seconds, in_block, used", [
    ({"triton": 1.0, "compile": 1.24}, True, "compile"),
    ({"triton": 1.0, "compile": 1.26}, True, "triton"),
    ({"triton": 1.0, "compile": 1.24}, False, "triton"),
    ({"cpu": 2.0, "compile": 1.0}, True, "compile"), ({"cpu": 1.0}, True, "cpu")])
def test_a_kernel_in_a_block_must_win_by_more_than_fusing_gains(seconds, in_block, used):
    """An H200's: norms as kernels of their own, each faster alone, made a whole step 2 to 4%
    slower."""
    assert choosing._winner(seconds, in_block) == used


def test_what_a_graph_starts_is_raced_as_a_graph(tmp_path, monkeypatch):
    """Where a host's time does not count. Here what stands for a graph is the call itself."""
    captured = []
    monkeypatch.setattr(choosing.capture, "captured",
                        lambda step: (captured.append(step) or step, step()))
    chosen = choose("rms-norm", NORM, "auto", [rows()], cache=tmp_path, captured=True)
    assert len(captured) > 1 and "here, in a CUDA graph, and verified" in chosen.choice.why
    choose("rms-norm", NORM, "auto", [rows()], cache=tmp_path, captured=True)
    assert len(list(tmp_path.iterdir())) == 1


def test_calls_of_a_kernel_are_one_graph_within_a_block(as_on_a_gpu, graphs, tmp_path, monkeypatch):
    """Casts have one for each operand."""
    monkeypatch.setattr(choosing, "FUSES", 1.0)
    calls = [rows(), rows(9), (rows(5)[0].bfloat16(), rows()[1].bfloat16(), 1e-3)]
    kernel = dataclasses.replace(as_on_a_gpu, versions={"cpu": NORM.versions["pytorch"]})
    chosen = choose("rms-norm", kernel, "auto", calls, cache=tmp_path, in_block=True)
    assert len(graphs) == 2 and set(chosen.refused) == {"reference"}
    assert "the fastest of cpu, compile in a compiled block" in chosen.choice.why

    def wrong_in_the_last(x, weight, eps):
        wrong = torch.compiler.is_compiling() and x.dtype == torch.bfloat16
        return NORM.definition(x, weight, eps) * (1.2 if wrong else 1)

    kernel = dataclasses.replace(kernel, versions={"cpu": wrong_in_the_last})
    chosen = choose("rms-norm", kernel, "auto", calls, cache=tmp_path, in_block=True)
    assert chosen.choice.used == "compile"
    assert "definition: result 3 of 9, at the run's size" in chosen.refused["cpu"]


def test_the_definition_stays_where_nothing_can_be_raced(as_on_a_gpu, tmp_path):
    def no_block(x, weight, eps):
        if torch.compiler.is_compiling():
            raise ValueError("planted")
        return NORM.definition(x, weight, eps)

    kernel = dataclasses.replace(as_on_a_gpu, definition=no_block, versions={"cpu": no_block})
    chosen = choose("rms-norm", kernel, "auto", [rows()], cache=tmp_path, in_block=True)
    assert chosen.choice.used == "compile" and set(chosen.refused) == {"reference", "cpu"}


# ---- attention

def asked(**model):
    config = Config().replace({f"model.{key}": value for key, value in {
        "layers": 1, "heads": 8, "kv_heads": 4, "head_dim": 16, "width": 128, "context": 2048,
        **model}.items()})
    return Attending(model=config.model, dtype="float32", here=True)


def plain(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def first_group(q, k, v, *_):
    return plain(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v))


def few_heads(q, k, v, *_):
    y = plain(q, k, v)
    n = q.shape[0] * q.shape[1]
    return (y.flatten(0, 1) * (torch.arange(n) < 64).view(-1, 1, 1)).view_as(y)


def short_context(q, k, v, *_):
    y = plain(q, k, v)
    return y if q.shape[2] <= 1024 else torch.cat((y[:, :, :1024], y[:, :, 1024:] * 0.5), 2)


def two_sequences(q, k, v, *_):
    return plain(q, k, torch.cat((v[:2], v[2:].detach())))


@pytest.mark.parametrize("version", [first_group, few_heads, short_context, two_sequences])
def test_a_backend_that_is_right_in_the_small_is_refused(version, tmp_path):
    """Several groups of heads, more than two sequences, and the step's own size."""
    given = asked()
    kernel, hand = attention.of_backends(given), attention.at_hand(given, CPU)
    raced = [attention.drawn(given, CPU, batch=16, groups=4, T=130),
             attention.drawn(given, CPU, batch=1, groups=2, T=1100)]
    offered = {"plain": kernel.definition, "right": lambda q, k, v, *_: plain(q, k, v),
               "planted": version}
    chosen = choose("attention-test", kernel, "auto", hand, offered=offered, raced=raced,
                   within_seconds=0.01, cache=tmp_path)
    assert set(chosen.refused) == {"planted"} and "differs" in chosen.refused["planted"], chosen


def test_a_backend_by_name_is_held_to_the_step_s_size(monkeypatch):
    """On a GPU, where that takes no time."""
    given = dataclasses.replace(asked(context=70), device="gpu")
    monkeypatch.setitem(attention.AT_HAND, "gpu", 33)
    monkeypatch.setattr(attention, "candidates",
                        lambda given: {"plain": attention._with_rule("plain", given.rule)})
    with_rule = attention._with_rule
    monkeypatch.setattr(attention, "_with_rule", lambda name, rule: few_heads
                        if name == "sdpa-cudnn" else with_rule(name, rule))
    with pytest.raises(ConfigError,
                       match=r"^system.attention=sdpa-cudnn: attention-\w+ differs from its "
                             r"definition: "
                             r"result 1 of 4, at the run's size"):
        attention.verified("sdpa-cudnn", given, 9, CPU)


def test_float16_is_verified_and_raced_in_float16(monkeypatch):
    dtypes = []
    monkeypatch.setattr(attention, "race", lambda given, *_: dtypes.append(given.dtype)
                        or Choice(asked="auto", used="sdpa", why=""))
    for recipe in ("fp16", "bf16", "fp32"):
        build.decide(Config().replace({"system.device": "cpu", "precision.recipe": recipe,
                                       "steps": 10**9}))
    assert dtypes == ["float16", "bfloat16", "float32"]


# ---- what is at hand

def test_casts_are_held_to_both_layouts_and_to_gradients():
    """As a training step calls them, of a few tokens and of a micro-batch; and nothing of the
    recipe's state moves."""
    config = Config().replace({
        "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 64,
        "model.vocab": 64, "global_batch": 4, "precision.recipe": "fp8-delayed",
        "precision.backend": "scaled_mm", "system.compile": "false", "system.device": "cpu"})
    training = Training.build(config, data=RandomTokens(config, CPU))
    model = training.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    kernels = build.kernels(config, training.decisions, training.ranks)
    few, many = kernels._at_hand(model)["cast-tensor"]
    x, w, g = sorted(many, key=lambda call: (call[1].format, call[0].dtype == torch.float32))
    assert [call[1].format for call in (x, w, g)] == ["e4m3fn", "e4m3fn", "e5m2"]
    assert all(call[3] for call in many), "in training both layouts are requested"
    assert len(few) == len(many) and max(len(call[0]) for call in many) == 4 * 64
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert all("cast_tensor" not in vars(m.arithmetic) for m in model.modules()
               if isinstance(getattr(m, "arithmetic", None), nn.Module))
