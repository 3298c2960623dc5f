"""A backward in two parts, dx now and dw later, is the undivided one: the same bits, products and
casts.

Only these tests catch: a dw that is dropped, doubled or made of other operands, a product or a cast
more than an undivided backward has, a dx that waits for dw, operands that are held too long, and a
queue that another forward or thread fills.
"""

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.kernels import wide_product
from lpkit.kernels.wide_product import WideLinear
from lpkit.parallel.replicas import Messages
from lpkit.precision.deferred import deferring
from lpkit.precision.linear import scaled_linears
from lpkit.precision.weight_cache import weights_cached
from lpkit.techniques.recipes import RECIPES
from lpkit.training.steps import advance
from lpkit.training.training import Training

PARTS = 3       # micro-batches
LLAMA = {"model.kv_heads": 2, "model.norm": "rmsnorm", "model.mlp": "swiglu",
         "model.position": "rope", "model.bias": False}
GPT = {"model.norm": "layernorm", "model.mlp": "gelu", "model.position": "learned",
       "model.bias": True}
aten = torch.ops.aten
MULTIPLY = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default, aten._int_mm.default,
            wide_product.multiply}


def built(recipe: str, model: dict = LLAMA, **settings) -> Training:
    small = {"model.layers": 2, "model.width": 128, "model.heads": 4, "model.context": 128,
             "model.vocab": 256, "model.tied": False,
             "global_batch": PARTS, "grad_accum_steps": PARTS, "precision.recipe": recipe,
             "system.device": "cpu", "system.threads": 1}
    torch.manual_seed(0)
    return Training.build(Config().replace(small | model | settings), data=Drawn())


class Drawn:
    def __init__(self):
        tokens = torch.randint(256, (PARTS, 129), generator=torch.Generator().manual_seed(1))
        self.drawn = Batch(tokens[:, :-1], tokens[:, 1:])

    def batch(self, step: int) -> Batch:
        return self.drawn


class Products(TorchDispatchMode):
    """Counts products by operator and shapes."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in MULTIPLY:
            self.seen[function, *(tuple(t.shape) for t in args if torch.is_tensor(t)
                                  and t.ndim == 2)] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted(model: nn.Module):
    """Counts products, and casts of the Linears by shapes and cast."""
    casts = Counter()
    layers = list(scaled_linears(model))

    def count(layer):
        plain = layer.arithmetic.cast

        def cast(x, cast, dtype, **how):
            casts[tuple(x.shape), str(cast), how["both"]] += 1
            return plain(x, cast, dtype, **how)
        return cast

    arithmetic = {layer.arithmetic for layer in layers}
    for backend in arithmetic:
        layer = next(layer for layer in layers if layer.arithmetic is backend)
        backend.cast = count(layer)
    try:
        with Products() as products:
            yield products.seen, casts
    finally:
        for backend in arithmetic:
            del backend.cast


def undivided(training: Training) -> None:
    for piece in training.data.drawn.chunk(PARTS):
        training.objective(training.model, piece).backward()
        advance(training.model)


def divided(training: Training, order: Callable[[list], list] = list) -> None:
    """All the Ws come after the last B. `order`: what is done with them."""
    waiting = []
    for piece in training.data.drawn.chunk(PARTS):
        queue = []
        with deferring(queue):
            loss = training.objective(training.model, piece)
        assert not queue
        loss.backward()
        advance(training.model)
        waiting.append(queue)
    for queue in order(waiting):
        while queue:
            queue.pop(0)()


def result(training: Training, run: Callable, **how):
    with counted(training.model) as counts:
        run(training, **how)
    return {name: p.grad for name, p in training.model.named_parameters()} | {
        name: b.clone() for name, b in training.model.named_buffers()}, *counts


def same(got: dict, want: dict) -> bool:
    return all(torch.equal(got[name], t) if t is not None else got[name] is None
               for name, t in want.items())


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def the_same(recipe: str, model: dict = LLAMA, kept: bool = False, **settings):
    """Both ways give the same bits, by the same products and casts, which are returned."""
    results = []
    for run in (undivided, divided):
        training = built(recipe, model, **settings)
        with weights_cached(training.model) if kept else nullcontext():
            results.append(result(training, run))
    (want, products, casts), (got, *ours) = results
    assert same(got, want) and ours == [products, casts]
    return want, products, casts


@pytest.mark.parametrize("recipe, model", [*((recipe, LLAMA) for recipe in RECIPES),
                                           ("bf16", GPT), ("fp8-delayed", GPT)])
def test_the_same_bits_products_and_casts(recipe, model):
    want, products, casts = the_same(recipe, model)
    assert all(t is not None for t in want.values())
    # y, dx and dw of each Linear
    assert products.total() == PARTS * 3 * len(linears(built(recipe, model).model))
    assert bool(casts) == bool(RECIPES[recipe].products)


@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
def test_mutants_are_seen(recipe):
    want, products, _ = result(built(recipe), undivided)

    def dropped(waiting):
        waiting[1].pop()
        return waiting

    def twice(waiting):
        waiting[1].append(waiting[1][0])
        return waiting

    for mutant, more in ((dropped, -1), (twice, 1)):
        got, ours, _ = result(built(recipe), divided, order=mutant)
        wrong = [name for name, t in want.items() if not torch.equal(got[name], t)]
        assert (len(wrong) == 1 and wrong[0].endswith("weight")
                and ours.total() == products.total() + more), mutant


def test_dx_waits_for_no_w():
    """Before a W runs, no weight of a Linear has a gradient, everything else has its own."""
    for recipe in ("fp32", "bf16", "fp8-blockwise"):
        training, whole, queue = built(recipe, GPT), built(recipe, GPT), []
        piece = training.data.drawn.chunk(PARTS)[0]
        with deferring(queue):
            loss = training.objective(training.model, piece)
        loss.backward()
        whole.objective(whole.model, piece).backward()
        theirs = dict(whole.model.named_parameters())
        waits = {f"{name}.{part}" for name, module in training.model.named_modules()
                 if isinstance(module, nn.Linear)
                 for part, _ in module.named_parameters()}
        for name, p in training.model.named_parameters():
            assert p.grad is None if name in waits else torch.equal(p.grad, theirs[name].grad), name
        assert len(queue) == len(linears(training.model))


HEAD = {"precision.recipe.high_precision_layers": ""}


@pytest.mark.parametrize("recipe, settings", [
    *((recipe, setting) for recipe in ("bf16", "fp8-delayed") for setting in (
        {"memory.recompute": "block"}, {"memory.recompute": "selective"},
        {"memory.recompute": "core-attention"}, {"memory.activation_offload": "cpu"},
        {"memory.cross_entropy": "chunked"})),
    ("fp8-delayed", {"memory.cross_entropy": "chunked"} | HEAD),
    ("mxfp8", {"memory.recompute": "block"})], ids=str)
def test_beside_what_saves_memory(recipe, settings):
    the_same(recipe, GPT, **settings)


@pytest.mark.parametrize("settings", [
    {"precision.recipe": {"name": "nvfp4", "gradient_rounding": "stochastic"}},
    {"precision.recipe": {"name": "fp8-blockwise", "pad": True}, "model.width": 96},
    {"precision.recipe": {"name": "mxfp8", "pad": True}, "model.width": 80}], ids=str)
def test_drawn_noise_and_padding(settings):
    """Rounding is drawn in B, before the next micro-batch draws; a padded weight's gradient loses
    its padding."""
    the_same("bf16", GPT, **settings)


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "mxfp8"])
def test_casts_of_weights_that_are_kept(recipe):
    the_same(recipe, kept=True)


@pytest.mark.parametrize("bias", [True, False])
def test_wide_products(bias, monkeypatch):
    monkeypatch.setattr(wide_product, "large", lambda *sizes: True)
    grads = []
    for later in (False, True):
        torch.manual_seed(0)
        layer, queue = WideLinear(64, 48, bias=bias), []
        for seed in range(PARTS):
            x = torch.randn(2, 8, 64,
                            generator=torch.Generator().manual_seed(seed)).requires_grad_()
            with Products() as products:
                with deferring(queue) if later else nullcontext(), torch.autocast("cpu",
                        torch.bfloat16):
                    y = layer(x)
                y.backward(torch.ones_like(y) * x.detach()[..., :48].bfloat16())
                assert len(queue) == later and (not later or layer.weight.grad is None or seed)
                while queue:
                    queue.pop()()
            assert products.seen.keys() <= {key for key in products.seen
                if key[0] == wide_product.multiply} and products.seen.total() == 3
            grads.append((x.grad, *(p.grad.clone() for p in layer.parameters())))
    for ours, theirs in zip(grads[PARTS:], grads[:PARTS], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 2, 3, 5)])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("trained", ["x weight bias", "weight bias", "x weight", "x bias"])
def test_calls_of_linear(shape, dtype, trained):
    """Any leading dimensions, an input that lies otherwise, arguments by name, and what is
    frozen."""
    def gradients(later: bool):
        draw = torch.Generator().manual_seed(0)
        t = {"x": torch.randn(shape, generator=draw), "weight": torch.randn(4, 5, generator=draw),
             "bias": torch.randn(4, generator=draw)}
        for name in trained.split():
            t[name].requires_grad_()
        queue = []
        with deferring(queue) if later else nullcontext(), torch.autocast("cpu", dtype,
                enabled=dtype is not None):
            ys = [F.linear(t["x"], bias=t["bias"], weight=t["weight"])]
            if len(shape) > 2:
                ys.append(F.linear(t["x"].transpose(0, 1), t["weight"], t["bias"]))
        for y in ys:
            y.float().square().sum().backward()
        # nothing waits for what lies otherwise, in three axes: its product by a constant weight is
        # another one
        assert len(queue) == (later and {"x", "weight"} <= set(trained.split()))
        for w in queue:
            w()
        return [tensor.grad for tensor in t.values()]

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert (ours is None) == (theirs is None)
        assert theirs is None or torch.equal(ours, theirs)


def test_a_tied_weight_adds_in_another_order():
    """Autograd adds what it finds for one parameter, and then that to what there is: float32
    differs in last bits."""
    want, products, _ = result(built("fp32", **{"model.tied": True}), undivided)
    got, ours, _ = result(built("fp32", **{"model.tied": True}), divided)
    assert ours == products
    for name, t in want.items():
        assert (got[name] - t).norm() <= (1e-6 if name == "embed.weight" else 0) * t.norm()


def test_a_w_holds_its_operands_and_nothing_holds_them_after_it():
    for recipe in ("bf16", "fp8-tensorwise"):
        training, queue = built(recipe), []
        block, rotation = training.model.blocks[0], training.model.positions.rotation(128, 0,
            torch.zeros(1))
        gc.collect()
        gc.disable()
        try:
            before = live()
            with deferring(queue), torch.autocast("cpu", torch.bfloat16):
                y = block(torch.randn(1, 128, 128, requires_grad=True), rotation)
            y.sum().backward()
            del y
            between = live()
            while queue:
                queue.pop(0)()
            training.model.zero_grad()
            after = live()
        finally:
            gc.enable()
        assert after <= before < between, (recipe, before, between, after)


def live() -> int:
    """Bytes of tensors that anybody has, but parameters and buffers, which stay."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects()
                if torch.is_tensor(t)}
    return sum(storages.values())


def test_hooks_of_a_parameter_run_when_its_w_does():
    """The messages of ZeRO leave as they do after an undivided backward, later."""
    training, sent, queue = built("fp8-tensorwise"), [], []
    own = [p for p in training.model.parameters() if p.requires_grad]

    def send(bucket):
        assert all(p.grad is not None for p in bucket)
        sent.append(len(bucket))
        return lambda: None

    messages = Messages(own, "overlapped", send)
    with deferring(queue):
        loss = training.objective(training.model, training.data.drawn.chunk(PARTS)[0])
    messages.backward(last=True)
    loss.backward()
    assert not sent
    while queue:
        queue.pop(0)()
    assert sent == [len(own)], "before `finish` asks for it"
    messages.finish()
    assert sum(sent) == len(own)


def test_the_queue_is_the_forwards_own():
    """Two threads and two micro-batches in turn: each has its own, and outside there is none."""
    layer, queues = nn.Linear(4, 4), [[], [], []]
    x = torch.randn(2, 4, requires_grad=True)
    with deferring(queues[0]):
        first = layer(x)
        with deferring(queues[1]):
            second = layer(x)
            with deferring(None):
                none = layer(x)
        outputs = []
        thread = threading.Thread(target=lambda: outputs.append(layer(x)))
        thread.start()
        thread.join()
        with torch.no_grad():
            layer(x)
        third = layer(x)
    outside = layer(x)
    for y in (second, none, *outputs, outside, first):
        y.sum().backward()
    backward = threading.Thread(target=lambda: third.sum().backward())
    backward.start()
    backward.join()
    assert [len(queue) for queue in queues] == [2, 1, 0]
    with pytest.raises(RuntimeError, match="shape"), deferring(queues[2]):
        layer(x[:, :3])
    layer(x).sum().backward()
    assert not queues[2], "also after an error"


def test_dropped_forwards_leave_nothing():
    layer, queue = nn.Linear(4, 4), []
    with deferring(queue):
        y = weakref.ref(layer(torch.randn(2, 4, requires_grad=True)))
    assert y() is None and not queue


def test_what_is_compiled_keeps_its_backward():
    layer, queue = nn.Linear(8, 8), []
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(2, 8, requires_grad=True)
    with deferring(queue):
        y = compiled(x)
    y.square().sum().backward()
    got, layer.weight.grad = layer.weight.grad, None
    layer(x).square().sum().backward()
    assert not queue and torch.allclose(got, layer.weight.grad, atol=1e-6)
