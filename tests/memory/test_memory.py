"""Memory techniques: the same gradient as without, or within the error that they state; and the
bytes that they take away.

Only these tests catch: a gradient, a moment or a resumed run that a technique of memory changes,
bytes that it keeps against its arithmetic, a chunked loss that is not float64's, biased codes of
few bits, and a scratch file that has a name.
"""

import gc
from contextlib import closing
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import lessons.rows.disk  # noqa: F401  adds rows
import lpkit
from lessons.rows.activations_torch import Quantized, within
from lessons.rows.disk_torch import Scratch, Slots
from lessons.saved import live, saved_bytes
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.kernels import cross_entropy as cross_entropy_rows
from lpkit.kernels.jit import INTERPRETED
from lpkit.measure import telemetry
from lpkit.measure.trace import predict_trace
from lpkit.measure.tracking import Tracker
from lpkit.measure.updates import memory
from lpkit.memory import loss as loss_rows
from lpkit.memory.loss import linear_cross_entropy
from lpkit.memory.saved import CpuCopy, SavedTensorOffloader, SavedTensorRef
from lpkit.optim.moments import from_blocks, levels, to_blocks
from lpkit.optim.rounding import generator, to_bf16
from lpkit.predict import memory as predict_memory
from lpkit.techniques.recipes import RECIPES, resolve
from lpkit.training import checkpoint
from lpkit.training.background import train
from lpkit.training.build import decide
from lpkit.training.steps import advance
from lpkit.training.training import RandomTokens, Training
from tests.training.resuming import in_parts

CPU = torch.device("cpu")
SMALL = Config().replace({
    "model.layers": 2, "model.width": 128, "model.heads": 2, "model.mlp_width": 128,
    "model.context": 32, "steps": 5,
    "global_batch": 4, "eval_every": 4, "eval_batches": 1, "checkpoint_every": 3,
    "schedule.warmup_steps": 2,
    "system.device": "cpu", "precision.recipe": "fp32"})
LLAMA = {"model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False,
         "model.kv_heads": 1, "model.init": "llama"}


@pytest.fixture
def small(corpus, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    return SMALL.replace({"data.source": str(corpus / "*.py")})


def batch(config: Config):
    draw = torch.Generator().manual_seed(1)
    shape = (config.global_batch, config.model.context)
    return Batch(*(torch.randint(config.model.vocab, shape, generator=draw) for _ in range(2)))


def built_from(config: Config) -> Training:
    return Training.build(config, data=RandomTokens(config))


def gradients(config: Config):
    """The loss, every gradient of one update before it is used, and the model with the state that
    the step left."""
    built = built_from(config)
    loss = built.forward_backward(batch(config))
    return loss, {name: p.grad for name, p in built.model.named_parameters()}, built.model


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kept(config: Config):
    built = built_from(config)
    x, y = batch(config).tensors
    return saved_bytes(built.model, lambda: built.loss(built.model, Batch(x.clone(), y.clone())))


def loses_nothing(config: Config, changes: dict) -> None:
    """The same loss and the same gradients, bit for bit."""
    (loss, want, before), (again, got,
                           after) = gradients(config), gradients(config.replace(changes))
    assert torch.equal(loss, again) and same(want, got)
    buffers = [{name: b for name, b in model.named_buffers() if "nonfinite" not in name}
               for model in (before, after)]
    assert same(*buffers)


def resumes(config: Config, out, *, stop: int = 4):
    """Stopped after `stop` steps and gone on with, a run is bit for bit the uninterrupted one,
    which is returned."""
    whole = train(config, out=out / "whole")
    parts = in_parts(config, out / "parts", stop)
    want, got = (checkpoint.load_latest(run.checkpoints)[0].tensors for run in (whole, parts))
    assert (same(want, got) and [a["loss"] for a in whole.metrics]
            == [b["loss"] for b in parts.metrics])
    return whole


# ---- recomputation

KINDS = ("block", "selective", "core-attention")


@pytest.mark.parametrize("recipe, recompute", [
    *((recipe, "block") for recipe in RECIPES),
    *((recipe, kind) for recipe in ("bf16", "fp8-delayed", "nvfp4") for kind in KINDS[1:])])
def test_recomputed_gradients_are_the_same_bit_for_bit_under_every_recipe(recompute, recipe):
    loses_nothing(SMALL.replace({"precision.recipe": recipe, "global_batch": 8,
                                 "grad_accum_steps": 2}), {"memory.recompute": recompute})


@pytest.mark.parametrize("attention, recompute", [
    *((name, "core-attention") for name in ("plain", "tiled", "sdpa", "blocked")),
    ("sdpa", "block"), ("tiled", "selective"), ("sdpa", "selective")])
def test_recomputed_gradients_are_the_same_with_every_attention(recompute, attention):
    loses_nothing(SMALL.replace({**LLAMA, "system.attention": attention,
                                 "precision.recipe": "bf16"}),
                  {"memory.recompute": recompute})


def test_recomputed_blocks_keep_their_input_alone():
    """Bytes by arithmetic: N D numbers a recomputed block."""
    config = SMALL.replace({"model.layers": 4})
    tokens, everything = 4 * 32, kept(config)
    outside = ("embed", "norm", "head", "loss")
    block_bytes = everything.total_bytes - sum(everything.operations[name] for name in outside)
    for every, blocks in ((1, 4), (3, 2), (9, 1)):      # all; 0 and 3; 0
        recomputed = kept(config.replace({"memory.recompute": "block",
                                          "memory.recompute.every": every}))
        saved = blocks * (block_bytes // 4 - tokens * 128 * 4)
        assert recomputed.total_bytes == everything.total_bytes - saved


def test_selective_recomputation_keeps_the_products_and_attention():
    """By arithmetic, beyond a block's input: 3 D of qkv, D each of attention, its projection and
    down, F of up, and attention's log-sums, H."""
    config = SMALL.replace({"system.attention": "sdpa", "model.mlp_width": 256})
    block, selective = (held(config.replace({"memory.recompute": name}))
                        for name in ("block", "selective"))
    assert selective - block == 2 * 4 * 32 * (6 * 128 + 256 + 2) * 4


def test_telemetry_sees_a_recomputed_chunked_step_once_and_changes_nothing(small, tmp_path):
    config = small.replace({"memory.recompute": "selective", "memory.cross_entropy": "chunked",
                            "memory.cross_entropy.chunk_tokens": 32,
                            "memory.activation_offload": "cpu", "precision.recipe": "fp8-delayed"})
    plain, seen = train(config, out=tmp_path / "plain"), train(
        config.replace({"precision.telemetry_every": 2}), out=tmp_path / "seen")
    assert [line["loss"] for line in plain.metrics] == [line["loss"] for line in seen.metrics]
    samples = telemetry.read(tmp_path / "seen")
    # steps, roles, Linears
    places = {(sample.step, sample.layer, sample.role) for sample in samples}
    assert len(samples) == 3 * 3 * 9 == len(places)


def test_a_budget_keeps_its_share_and_is_forgotten():
    """Against what the same backend keeps without; the same loss and gradients up to the order of
    sums."""
    x, y = batch(SMALL).tensors
    kept, gradients = {}, {}
    for share in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        built = built_from(SMALL)
        built.model.compile(backend=partial(within, share, compiler="aot_eager_decomp_partition"))
        weights = {p.untyped_storage().data_ptr() for p in built.model.parameters()}
        saved = {}

        def pack(t, weights=weights, saved=saved):
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = built.loss(built.model, Batch(x, y))
        loss.backward()
        kept[share], gradients[share] = sum(saved.values()), [p.grad
            for p in built.model.parameters()]
        assert torch._functorch.config.activation_memory_budget == 1.0
    block_inputs = kept[0.0]
    assert block_inputs < kept[0.5] <= 0.5 * (kept[1.0] - block_inputs) + 2 * block_inputs
    for share in (0.5, 0.0):
        for g, want in zip(gradients[share], gradients[1.0]):
            assert (g - want).norm() <= 1e-5 * want.norm()


def compiled_step(recipe: str, recompute: str) -> dict:
    """Loss, state and gradients of two steps, the second by the history of the first; from one
    graph."""
    config = SMALL.replace({"precision.recipe": recipe, "model.layers": 1,
                            "memory.recompute": recompute})
    if RECIPES[recipe].products:
        config = config.replace({"precision.recipe.high_precision_layers": ("head",)})
    torch._dynamo.reset()
    built = built_from(config)
    built.model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    for _ in range(2):
        built.model.zero_grad()
        loss = built.loss(built.model, batch(config))
        loss.backward()
        advance(built.model)
    counts = "nonfinite"    # what is counted is seen twice
    state = {name: t for name, t in built.model.named_buffers() if counts not in name}
    return {"loss": loss.detach(), **state,
            **{name: p.grad for name, p in built.model.named_parameters()}}


# A history and noise; other pairs are held above, not compiled.
@pytest.mark.parametrize("recompute, recipe", [("block", "fp8-delayed"), ("selective", "nvfp4")])
def test_recomputation_is_compiled_with_the_rest(recompute, recipe):
    """The same loss, gradients and state as the compiled model without, bit for bit."""
    assert same(compiled_step(recipe, "none"), compiled_step(recipe, recompute))


def test_a_compiled_run_within_a_budget_and_with_chunked_loss_resumes(small, tmp_path, monkeypatch):
    """By a compiler that cuts graphs as inductor does, and generates no code."""
    monkeypatch.setitem(within.__kwdefaults__, "compiler", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    run = resumes(small.replace({"memory.recompute": "budget", "memory.recompute.budget": 0.3,
                                 "memory.cross_entropy": "chunked",
                                 "model.layers": 1, "system.compile": True}), tmp_path)
    plain = train(small.replace({"model.layers": 1}), out=tmp_path / "plain")
    assert ([line["loss"] for line in run.metrics]
            == pytest.approx([line["loss"] for line in plain.metrics], rel=1e-3))
    assert run.summary["chosen"]["recompute"]["used"] == "budget"


# ---- chunked loss

@pytest.mark.parametrize("changes", [
    {}, {"precision.recipe": "bf16"}, {"precision.recipe": "fp16"},
    LLAMA | {"grad_accum_steps": 2},
    {"precision.recipe": "fp8-tensorwise", "precision.recipe.high_precision_layers": "none"}],
    ids=str)
def test_one_piece_gives_the_whole_gradient_up_to_rounding(changes):
    """Of the exponential in float32; an ulp of that may turn a 16-bit rounding."""
    config = SMALL.replace(changes)
    if resolve(config.precision.recipe).compute == "bfloat16":
        # else the whole head's product may be wide, and that of a piece too small
        config = config.replace({"system.products": "bf16"})
    (loss, want, _), (again, got, _) = gradients(config), gradients(
        config.replace({"memory.cross_entropy": "chunked"}))
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    for name, grad in want.items():
        assert (got[name] - grad).norm() <= (1e-6 if config.precision.recipe == "fp32"
            else 2**-8) * grad.norm()


@pytest.mark.parametrize("chunk", [1, 100, 4096])
def test_pieces_against_float64(chunk):
    """The gradient of every chunking is as close to float64's as the whole one's: float32 sums in
    another order."""
    torch.manual_seed(0)
    head, y = torch.nn.Linear(64, 500, bias=False), torch.randint(500, (128,))
    h = torch.randn(128, 64, requires_grad=True)
    exact_head, exact_h = head.double(), h.detach().double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(exact_head(exact_h), y)
    exact_grads = torch.autograd.grad(exact, (exact_h, exact_head.weight))
    head = head.float()
    loss = linear_cross_entropy(h, head, y, chunk)
    got_grads = torch.autograd.grad(loss, (h, head.weight))
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    for got, want in zip(got_grads, exact_grads):
        assert (got - want).norm() <= 5e-7 * want.norm()
    with torch.no_grad():
        assert linear_cross_entropy(h, head, y, chunk).item() == pytest.approx(exact.item(),
            rel=1e-6)


@pytest.mark.parametrize("kernel", ["_by_definition", "_by_c", "_by_triton"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pieces_by_each_kernel_that_a_device_may_have(kernel, weighted, monkeypatch):
    """What a GPU runs, in Triton's interpreter; and a target that is none shows in the loss,
    whoever computes it."""
    if kernel == "_by_triton" and not INTERPRETED:
        pytest.skip("Triton's kernels need a GPU, or its interpreter")
    monkeypatch.setattr(cross_entropy_rows, "_kernel_for",
                        lambda logits: getattr(cross_entropy_rows, kernel))
    draw = torch.Generator().manual_seed(0)
    h, w, weights = (torch.randn(shape, generator=draw) for shape in ((21, 16), (50, 16), 21))
    weights, y = weights.abs() if weighted else None, torch.randint(50, (21,), generator=draw)
    head = torch.nn.Linear(16, 50, bias=False)
    head.weight.data = w
    h.requires_grad_()
    for ignored in (slice(0), 3):
        y[ignored] = -100
        counts = (y != -100).double() * (1 if weights is None else weights.double())
        exact = [t.detach().double().requires_grad_() for t in (h, w)]
        nats = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, y, reduction="none")
        mean = (nats * counts).sum() / counts.sum()
        loss = linear_cross_entropy(h, head, y, 8, weights)
        assert loss.item() == pytest.approx(mean.item(), rel=1e-6)
        for got, want in zip(torch.autograd.grad(loss, (h, head.weight)),
                             torch.autograd.grad(mean, exact)):
            assert (got - want).norm() <= 5e-7 * want.norm()
    none = linear_cross_entropy(h, head, torch.full_like(y, -100), 8, weights)
    assert none.item() == 0 and not any(g.any() for g in torch.autograd.grad(none,
        (h, head.weight)))
    for bad in (50, -1):
        y[3] = bad
        assert linear_cross_entropy(h, head, y, 8, weights).isnan()


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_a_gpu_adds_pieces_of_the_head_s_gradient_in_float32(held, monkeypatch):
    """By a stand-in with the checks of CUDA's addmm (_addmm_dtype_out_cuda,
    aten/src/ATen/native/cuda/Blas.cpp), summed in float64. The hidden states are in 16 bits or,
    under autocast, not; what is left of the error is that of the logits' gradient in bf16."""
    calls, addmm = [], torch.addmm

    def strict(total, a, b, *, out_dtype=None, out=None):
        if out_dtype is None:
            return addmm(total, a, b, out=out)
        assert a.dtype == b.dtype == torch.bfloat16, "mat1 and mat2 must have the same dtype"
        assert (out is total and total.dtype == out_dtype == torch.float32
                and total.shape == (a.shape[0], b.shape[1]))
        calls.append(a.shape)
        return out.copy_(total.double() + a.double() @ b.double())

    draw = torch.Generator().manual_seed(0)
    h, y = torch.randn(70, 24, generator=draw).to(held), torch.randint(50, (70,), generator=draw)
    head = torch.nn.Linear(24, 50, bias=False).to(held)
    gradients = []

    def kept(g, *others):
        nats = cross_entropy_rows.cross_entropy_(g, *others)
        gradients.append(g.double())
        return nats

    def dw():
        gradients.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(h, head, y, 16, nats_=kept)
        (got,) = torch.autograd.grad(loss, head.weight)
        return got, torch.cat(gradients).T @ h.bfloat16().double() / 70

    monkeypatch.setattr(torch, "addmm", strict)
    apart, exact = dw()
    assert not calls, "a CPU has no such product"
    monkeypatch.setattr(loss_rows, "_adds_wide", lambda g: True)
    got, exact = dw()
    assert calls == [(50, 16)] * 4 + [(50, 6)]
    if held == torch.float32:
        assert ((got - exact).norm() <= 1e-6 * exact.norm()
                < (apart - exact).norm()), "no piece was rounded to 16 bits"
    else:
        assert torch.equal(got, exact.float().bfloat16())


def test_a_gpu_s_head_gradient_has_shapes_and_flops_and_no_temporary(monkeypatch):
    """Fake tensors of torch 2.11 cannot take addmm's out_dtype, and a trace has nothing else. The
    prediction for a GPU lacks it too."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counted:
        total, a, b = torch.zeros(50, 24), torch.zeros(50, 16,
            dtype=torch.bfloat16), torch.zeros(16, 24, dtype=torch.bfloat16)
        assert torch.ops.lpkit.add_product_(total, a, b) is None
    assert counted.get_total_flops() == 2 * 50 * 16 * 24
    config = SMALL.replace({"model.vocab": 8192, "model.tied": False, "precision.recipe": "bf16",
                            "system.products": "bf16", "memory.cross_entropy": "chunked",
                            "memory.cross_entropy.chunk_tokens": 16})
    beside = predict_trace(config).most["logits and loss"]
    monkeypatch.setattr(loss_rows, "_adds_wide", lambda g: True)
    product = 2 * config.model.vocab * config.model.width
    assert beside - predict_trace(config).most["logits and loss"] == pytest.approx(product,
        rel=0.02)
    assert predict_memory(config, "h100").at("backward begins")["logits' gradients"] < product / 4


def test_chunked_loss_keeps_no_logits():
    """Kept: the gradients of the hidden states and of the head."""
    config = SMALL.replace({"model.vocab": 4096, "memory.cross_entropy": "chunked",
                            "memory.cross_entropy.chunk_tokens": 16})
    assert kept(config).operations["loss"] == 4 * 32 * 128 * 4 + 4096 * 128 * 4
    whole = kept(config.replace({"memory.cross_entropy": "full"})).operations["loss"]
    # log-probabilities, targets, their number
    assert whole == 4 * 32 * 4096 * 4 + 4 * 32 * 8 + 4


def test_the_peak_falls_by_the_logits():
    """Log-probabilities, their gradient and the logits' are there together without; a chunk of 1/64
    of them with."""
    config = SMALL.replace({"model.vocab": 8192, "model.context": 256, "model.tied": False})
    chunked = {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 16}
    whole, chunks = memory(config), memory(config.replace(chunked))
    logits = 4 * 256 * 8192 * 4
    assert whole.peak_bytes - chunks.peak_bytes > 2.5 * logits
    assert chunks.most["logits and loss"] + chunks.most["logits' gradients"] < 0.1 * logits


def test_a_chunked_run_goes_on_where_it_was_and_evaluates_the_same(small, tmp_path):
    config = small.replace({"memory.cross_entropy": "chunked",
                            "memory.cross_entropy.chunk_tokens": 48, "memory.recompute": "block",
                            "precision.recipe": "fp8-delayed"})
    run = resumes(config, tmp_path)
    assert {"recompute", "cross_entropy"} <= run.summary["chosen"].keys()
    whole = train(small.replace({"precision.recipe": "fp8-delayed"}), out=tmp_path / "plain")
    for a, b in zip(run.metrics, whole.metrics):
        assert a.keys() == b.keys()
        assert ([a[key] for key in a if "loss" in key]
                == pytest.approx([b[key] for key in a if "loss" in key], rel=1e-3))


# ---- saved tensors

@pytest.mark.parametrize("saved, changes", [
    *(("cpu", changes) for changes in (
        {}, LLAMA, {"precision.recipe": "fp8-delayed"},
        {"memory.recompute": "selective", "precision.recipe": "bf16"},
        {"memory.recompute": "core-attention", "system.attention": "plain"},
        {"memory.param_dtype": "bf16", "precision.recipe": "mxfp8",
         "precision.cache_weight_casts": True})),
    ("disk", {"precision.recipe": "nvfp4"}),
    ("disk", {"memory.recompute": "block", "precision.recipe": "bf16"})], ids=str)
def test_what_is_moved_comes_back_bit_for_bit(saved, changes):
    loses_nothing(SMALL.replace({"global_batch": 8, "grad_accum_steps": 2, **changes}),
                  {"memory.activation_offload": saved})


def parcels(config: Config):
    """Of one forward pass: what the blocks sent away, once each, and the bytes of other tensors
    that they kept."""
    sent, stayed = {}, []
    built = built_from(config)
    x, y = batch(config).tensors
    pack = SavedTensorOffloader.pack

    def watched(self, least, t):
        kept = pack(self, least, t)
        if isinstance(kept, SavedTensorRef):
            sent[id(kept.parcel)] = (kept.parcel, t.dtype, t.numel())
        else:
            stayed.append(t)
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SavedTensorOffloader, "pack", watched)
        loss = built.loss(built.model, Batch(x, y))
    return list(sent.values()), stayed, built.model, loss


@pytest.mark.parametrize("recipe, each", [("bf16", 10), ("mxfp8", 11)])
def test_activations_go_and_weights_and_statistics_stay(recipe, each):
    """GPT-2 style with fused attention: two norms' inputs, qkv's input, q, k, v and the output,
    what goes into up, gelu and down; and, where it is cast, the output's cast."""
    config = SMALL.replace({"precision.recipe": recipe, "memory.activation_offload": "cpu",
                            "system.attention": "sdpa"})
    sent, stayed, model, _loss = parcels(config)
    N, D = 4 * 32, 128
    assert sorted(n for _, _, n in sent) == [N * D] * 2 * each
    weights = {p.numel() for p in model.parameters() if p.ndim == 2}
    assert all(t.numel() in weights or t.numel() <= N * 2 for t in stayed)


def test_a_tensor_goes_once_however_often_it_is_saved():
    counter = SavedTensorOffloader(CpuCopy)
    t = torch.randn(8, 16)
    a, b, c = counter.pack(1, t), counter.pack(1, t.view(4, 32)), counter.pack(1, t.T)
    assert a.parcel is b.parcel is c.parcel and counter.pack(1, t[:, :8]).parcel is not a.parcel
    assert torch.equal(counter.unpack(c), t.T) and counter.unpack(c).stride() == t.T.stride()
    t.add_(1)       # another version is another tensor
    assert counter.pack(1, t).parcel is not a.parcel
    del t
    assert not counter.parcels and not counter.storages


@pytest.mark.parametrize("bits, error", [(8, 0.012), (4, 0.2), (2, 0.9)])
def test_few_bits_are_right_on_average_and_as_small_as_they_say(bits, error):
    """Each number's mean over n draws is within 5 standard errors, at most half a step each; the
    error is that of a step."""
    torch.manual_seed(0)
    x, n = torch.randn(3, 300), 2000
    put = Quantized(x, bits)
    assert (put.codes.nbytes == -(-900 // 256) * 256 * bits // 8
            and put.scale.nbytes + put.least.nbytes == 8 * 4)
    drawn = torch.stack([Quantized(x, bits).get() for _ in range(n)]).double()
    step = put.scale.repeat_interleave(256)[:900].view(3, 300)
    assert ((drawn.mean(0) - x).abs() <= 5 * step / 2 / n**0.5 + 1e-6).all()
    assert ((drawn - x).abs() <= step * 1.001).all()
    assert (drawn[0] - x).norm() / x.norm() < error


@pytest.mark.parametrize("shape", [(1,), (256,), (5, 257)])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_few_bits_of_any_shape_and_of_a_constant(bits, shape):
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full(shape, 3.0, dtype=dtype)
        restored = Quantized(x, bits).get()
        assert torch.equal(restored, x) and restored.dtype == dtype


def held(config: Config) -> int:
    """Bytes of tensors between forward and backward."""
    built = built_from(config)
    x, y = batch(config).tensors
    with Tracker(built.model, built.optimizer) as tracker:
        _loss = built.loss(built.model, Batch(x, y))
        return sum(live(tracker).values())


@pytest.mark.parametrize("saved, each",
                         [("disk", 0), ("int8", 1 + 8 / 256), ("int4", 1 / 2 + 8 / 256),
                          ("int2", 1 / 4 + 8 / 256)])
def test_saved_bytes_go_down_by_what_arithmetic_says(saved, each):
    """10 tensors a block of N D numbers, 4 bytes before; to the byte."""
    config = SMALL.replace({"system.attention": "sdpa"})
    numbers = 2 * 10 * 4 * 32 * 128
    assert (held(config) - held(config.replace({"memory.activation_offload": saved})) == (4 - each)
            * numbers)


@pytest.mark.parametrize("saved, error", [("int8", 0.01), ("int4", 0.15), ("int2", 0.75)])
def test_the_gradient_from_few_bits(saved, error):
    """Of a whole model: its relative error, as docs/memory.md states it; and the mean over 16 draws
    is off by a quarter of that, as it is when nothing but noise is there."""
    config = SMALL.replace({"global_batch": 8})
    _, want, _ = gradients(config)
    built = built_from(config.replace({"memory.activation_offload": saved}))
    exact, samples = torch.cat([g.flatten() for g in want.values()]).double(), []
    for _ in range(16):
        built.forward_backward(batch(config))
        samples.append(torch.cat([p.grad.flatten() for p in built.model.parameters()]).double())
        built.optimizer.zero_grad()
    errors = [((g - exact).norm() / exact.norm()).item() for g in samples]
    mean = ((sum(samples) / 16 - exact).norm() / exact.norm()).item()
    assert error / 2 < max(errors) < error and mean == pytest.approx(sum(errors) / 16 / 4, rel=0.1)


@pytest.mark.parametrize("changes",
                         [{"memory.activation_offload": "int4", "precision.recipe": "bf16"},
                          {"memory.activation_offload": "int8", "memory.recompute": "block",
                           "grad_accum_steps": 2}], ids=str)
def test_a_run_with_saved_tensors_elsewhere_goes_on_bit_for_bit(small, tmp_path, changes):
    run = resumes(small.replace({"steps": 8, **changes}), tmp_path)
    plain = train(small.replace({"steps": 8}), out=tmp_path / "plain")
    assert ([line["loss"] for line in run.metrics]
            == pytest.approx([line["loss"] for line in plain.metrics], rel=0.01))
    assert (run.summary["chosen"]["activation_offload"]["used"]
            == changes["memory.activation_offload"])


def test_slots_are_used_again_and_have_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with closing(Slots()) as slots:
        data = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 4096, 5000, 5000)]
        held = [slots.write(t) for t in data]
        assert not list(tmp_path.iterdir())
        for slot, t in reversed(list(zip(held, data))):
            slot.written.result()
            slots.expect(slot)
            assert torch.equal(slots.read(slot), t)
        end, offsets = slots.end, {slot.offset for slot in held}
        assert end == (1 + 1 + 2 + 2) * 4096 and len(offsets) == 4
        del held, slot
        again = [slots.write(t) for t in data]
        assert slots.end == end and {slot.offset for slot in again} == offsets


# ---- the update

@pytest.mark.parametrize("changes", [
    {}, LLAMA | {"precision.recipe": "fp8-delayed"},
    {"memory.recompute": "block", "memory.cross_entropy": "chunked",
     "memory.moment_format": "int8"}], ids=str)
def test_updates_in_backward_are_the_same_bit_for_bit(small, tmp_path, changes):
    config = small.replace({"optimizer.clip": 0, **changes})
    after = train(config, out=tmp_path / "after")
    inside = resumes(config.replace({"memory.optimizer_step": "in-backward"}), tmp_path)
    want, got = (checkpoint.load_latest(run.checkpoints)[0].tensors for run in (after, inside))
    assert same(want, got)
    assert [a["grad_norm"] for a in after.metrics] == [b["grad_norm"] for b in inside.metrics]
    assert inside.summary["chosen"]["optimizer_step"]["used"] == "in-backward"


def test_updates_in_backward_never_hold_every_gradient():
    """Bytes of gradients, whenever: all of them after, the largest two or so in backward; and the
    peak falls."""
    config = SMALL.replace({"model.layers": 6, "model.context": 8, "optimizer.clip": 0})
    whole, inside = memory(config), memory(config.replace({"memory.optimizer_step": "in-backward"}))
    parameters = whole.rows["weights"]
    assert whole.most["gradients"] == parameters
    assert inside.peak_bytes < whole.peak_bytes - 0.6 * parameters


@pytest.mark.parametrize("signed", [True, False])
def test_the_8_bit_values_are_the_published_ones(signed):
    quant = pytest.importorskip("torchao.optim.quant_utils")
    assert levels(signed).tolist() == quant.create_dynamic_map(signed)


@pytest.mark.parametrize("size", [1, 255, 256, 1000])
def test_8_bit_blocks_take_the_nearest_value(size):
    """Against every value tried, in float64; a block's largest magnitude comes back as it is, and
    so do zeros."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, size)
    codes, scale = to_blocks(x, signed=True)
    decoded = from_blocks(codes, scale, signed=True).double()
    for at in range(0, size, 256):
        part, top = x[at:at + 256].double(), x[at:at + 256].abs().max().double()
        nearest = (part[:, None] / top - levels(True).double()).abs().amin(1) * top
        assert torch.allclose((decoded[at:at + 256] - part).abs(), nearest, rtol=1e-4,
                              atol=1e-6 * top.item())
    assert not from_blocks(*to_blocks(torch.zeros(300), signed=False), signed=False).any()


def test_8_bit_moments_train_as_float32_ones_do(small, tmp_path):
    """Losses within 0.3% (measured: 0.06%), at a quarter of the state's bytes, and a resumed run is
    the uninterrupted one."""
    config = small.replace({"steps": 30})
    whole = train(config, out=tmp_path / "float32")
    lean = resumes(config.replace({"memory.moment_format": "int8"}), tmp_path, stop=20)
    for a, b in zip(whole.metrics, lean.metrics):
        assert b["loss"] == pytest.approx(a["loss"], rel=3e-3)
    sizes = [sum(t.nbytes for name, t in checkpoint.load_latest(run.checkpoints)[0].tensors.items()
                 if "exp_avg" in name)
             for run in (whole, lean)]
    # a few last blocks are short
    assert sizes[1] == pytest.approx(sizes[0] * (1 + 4 / 256) / 4, rel=2e-3)


def test_stochastic_rounding_is_right_on_average():
    """Between two neighbours in bf16, 2^-7 apart: the mean of n draws has a standard error of at
    most 2^-8 / sqrt(n)."""
    n = 2**18
    for part in (0.0, 1 / 256, 0.3, 0.5, 0.99):
        w = torch.full((n,), 1 + part / 128)
        rounded = to_bf16(w, generator(CPU, 0, 1)).double()
        assert set(rounded.tolist()) <= {1.0, 1 + 1 / 128}
        assert abs(rounded.mean().item() - w[0].item()) <= 5 * 2**-8 / n**0.5
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, -3.0])
    assert (torch.equal(to_bf16(odd, generator(CPU, 0)).float(), odd)
            and to_bf16(odd / 0, generator(CPU, 0)).isnan().sum() == 2)


@pytest.mark.parametrize("changes",
                         [{"precision.recipe": "mxfp8", "memory.cross_entropy": "chunked",
                           "memory.recompute": "block"},
                          {"memory.moment_format": "int8", "memory.optimizer_step": "in-backward",
                           "optimizer.clip": 0},
                          {"grad_accum_steps": 2, "memory.optimizer_state": "disk"}], ids=str)
def test_bf16_parameters_train_and_resume(small, tmp_path, changes):
    """Losses within 1% of float32 parameters' (measured over 30 steps: 0.4%)."""
    config = small.replace({"precision.recipe": "bf16", "steps": 10, **changes})
    plain = train(config, out=tmp_path / "float32")
    run = resumes(config.replace({"memory.param_dtype": "bf16"}), tmp_path)
    assert ([line["loss"] for line in run.metrics]
            == pytest.approx([line["loss"] for line in plain.metrics], rel=0.01))
    assert len(lpkit.sample(run, prompt="def ", tokens=4, temperature=0)) > 4
    saved = checkpoint.load_latest(run.checkpoints)[0].tensors
    assert {t.dtype for name, t in saved.items() if name.startswith("model/")
            and name.endswith("weight")} == {torch.bfloat16}


def test_bf16_parameters_halve_weights_and_gradients():
    config = SMALL.replace({"precision.recipe": "bf16"})
    whole, half = memory(config), memory(config.replace({"memory.param_dtype": "bf16"}))
    assert half.rows["weights"] * 2 == whole.rows["weights"]
    assert half.most["gradients"] * 2 == whole.most["gradients"]
    # float32 moments
    assert half.rows["optimizer state"] == pytest.approx(whole.rows["optimizer state"], rel=1e-3)


@pytest.mark.parametrize("place, changes", [
    ("cpu", {}), ("disk", {"memory.moment_format": "int8"}),
    ("disk", {"memory.optimizer_step": "in-backward", "optimizer.clip": 0})], ids=str)
def test_state_elsewhere_changes_no_bit(small, tmp_path, place, changes):
    config = small.replace(changes)
    here = train(config, out=tmp_path / "here")
    there = resumes(config.replace({"memory.optimizer_state": place}), tmp_path)
    parts = [{name: t for name, t in checkpoint.load_latest(run.checkpoints)[0].tensors.items()
              if not name.endswith("step")}
             for run in (here, there)]
    assert same(*parts)
    assert there.summary["chosen"]["optimizer_state"]["used"] == {"cpu": "device",
        "disk": "disk"}[place]


def test_state_on_a_disk_is_not_in_memory():
    """The second update allocates one parameter's moments at a time; what rests is in the file."""
    config = SMALL.replace({"model.layers": 6, "memory.optimizer_state": "disk"})
    built = built_from(config)
    built.forward_backward(batch(config))
    built.optimizer_step()
    scratch = built.state_placement
    rests = [t for state in built.optimizer.state.values() for t in state.values()
             if torch.is_tensor(t)]
    assert all(t.data_ptr() in scratch.where_is for t in rests)
    assert sum(t.nbytes for t in rests) == 8 * sum(p.numel() for p in built.model.parameters())
    largest = max(p.numel() for p in built.model.parameters())
    # this one's and the next one's
    assert memory(config).most["optimizer temporaries"] <= 2 * 8 * largest + 4096


def test_scratch_files_have_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch = Scratch()
    a, b = scratch.mapped(torch.Size([3, 5]), torch.float32), scratch.mapped(torch.Size([7]),
        torch.uint8)
    a.fill_(2.5)
    b.fill_(9)
    scratch.let_go(a)
    assert (a == 2.5).all() and (b == 9).all() and not list(tmp_path.iterdir())
    assert str(tmp_path) in Scratch.where()


# ---- on a GPU

def updated(config: Config, steps: int = 4) -> tuple[dict, int]:
    """Parameters after some updates on one batch, and the most that the GPU held in the last
    one."""
    gc.collect()        # what another run held
    before = torch.cuda.memory_allocated()
    built = built_from(config)
    tokens = batch(config).to(built.device)
    for _ in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        built.forward_backward(tokens)
        built.optimizer_step()
    torch.cuda.synchronize()
    return {name: p.detach().cpu()
            for name, p
            in built.model.named_parameters()}, torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("changes", [
    {"memory.activation_offload": "cpu"}, {"memory.activation_offload": "disk"},
    {"memory.activation_offload": "cpu", "memory.recompute": "block"},
    {"memory.optimizer_state": "cpu"}, {"memory.optimizer_state": "disk"},
    {"memory.optimizer_state": "cpu", "memory.optimizer_step": "in-backward"}], ids=str)
def test_what_leaves_a_gpu_comes_back_bit_for_bit(changes):
    """With streams beside the computation, and with the attention whose gradients do not depend on
    the order of atomics."""
    config = SMALL.replace({"system.device": "cuda", "system.compile": False,
                            "system.attention": "plain", "model.width": 512,
                            # a race may end otherwise where there is no graph
                            "system.kernels": "reference",
                            "model.heads": 8, "model.layers": 6, "model.context": 256,
                            "global_batch": 16, "precision.recipe": "bf16",
                            "optimizer.clip": 0})
    (want, whole), (got, less) = updated(config), updated(config.replace(changes))
    assert same(want, got) and less < whole


# ---- what cannot be

@pytest.mark.parametrize("changes, message", [
    ({"memory.optimizer_step": "in-backward"}, r"optimizer\.clip=1\.0; set optimizer\.clip=0"),
    ({"memory.optimizer_step": "in-backward", "optimizer.clip": 0, "grad_accum_steps": 2},
     "set grad_accum_steps=1"),
    ({"memory.optimizer_step": "in-backward", "optimizer.clip": 0, "precision.recipe": "fp16"},
     r"set precision\.recipe=bf16"),
    ({"memory.optimizer_step": "in-backward", "optimizer.clip": 0, "system.compile": True},
     r"set system\.compile=false"),
    ({"memory.recompute": "budget"}, r"needs torch\.compile.*set system\.compile=true"),
    ({"memory.activation_offload": "int8", "system.compile": True}, r"set system\.compile=false"),
    ({"memory.param_dtype": "bf16", "precision.recipe": "fp16"}, r"set precision\.recipe to bf16"),
], ids=str)
def test_what_cannot_be_together_says_the_way_out(changes, message):
    with pytest.raises(ConfigError, match=message):
        decide(SMALL.replace(changes))


def test_nothing_is_hooked_when_nothing_is_asked():
    config = SMALL
    built = built_from(config)
    assert not {"recompute", "saved", "loss", "parameters", "optimizer_state",
                "update"} & built.decisions.choices.keys()
    assert all("forward" not in vars(module) for module in built.model.modules())
    assert type(built.optimizer) is torch.optim.AdamW
