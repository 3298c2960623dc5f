"""The low-precision Linear: casts and products against float64, PyTorch, torchao, and autograd's
own machinery.

Only these tests catch: a cast that is not the format's nearest value at its scale, a product that
is not the float64 one or torchao's, scales in another layout than PyTorch reads, a history or a
draw that moves twice under recomputation, compiled numbers that are others, and a NaN that nobody
names.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lessons.number_formats import round_to, values
from lpkit.errors import ConfigError
from lpkit.kernels.cast import Noise
from lpkit.kernels.scales import MAKE_SCALES, swizzled
from lpkit.precision.backends import BACKENDS
from lpkit.precision.linear import nonfinite_report
from lpkit.precision.scaled import product, quantise, reference, spread
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import ALL, RECIPES, Cast, resolve
from lpkit.training.steps import advance
from tests.gpu.strict_cuda import strict

CAST = [name for name, recipe in RECIPES.items() if recipe.products]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    """20 log10(|x| / |x - y|)."""
    return (20 * torch.log10(x.double().norm() / (x.double() - y.double()).norm())).item()


def linear(recipe: str, inputs: int = 128, outputs: int = 256, *, backend: str = "emulated",
           **settings) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs)
    row = resolve(recipe, **settings)
    return BACKENDS[backend].wrap(plain, row, name="blocks.0.up", seed=0)


def needs(backend: str, recipe: str) -> None:
    """A backend that this machine refuses for a recipe has nothing to compare."""
    if why := BACKENDS[backend].why_not(recipe, RECIPES[recipe], torch.device("cpu")):
        pytest.skip(why)


def three(module: nn.Module, *, autocast: bool = False, tokens: int = 128, scale: float = 1.0,
          call: Callable | None = None) -> list[torch.Tensor]:
    """y, dx, dw and db of one call with leading dimensions (2, tokens)."""
    x = (noise(2, tokens, module.in_features) * scale).requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = (call or module)(x)
    y.backward(noise(2, tokens, module.out_features, seed=1).to(y.dtype))
    return [y.detach(), x.grad, module.weight.grad, module.bias.grad]


def plain_of(module: nn.Module) -> nn.Linear:
    """PyTorch's Linear with the same numbers."""
    plain = nn.Linear(module.in_features, module.out_features)
    plain.load_state_dict({"weight": module.weight.detach(), "bias": module.bias.detach()})
    return plain


# ---- casts

@pytest.mark.parametrize("recipe", CAST)
def test_casts_are_the_format_s_own_rounding_at_the_stated_scale(recipe):
    x = noise(128, 128) * torch.logspace(-3, 3, 128)
    for casts in RECIPES[recipe].products.values():
        for cast in casts:
            plain = Cast(format=cast.format, block=cast.block, scale=cast.scale)
            got, to = quantise(x, plain), format_of(cast.format)
            wide = spread(got.scale, x.shape) * (1 if got.tensor is None else got.tensor)
            assert torch.equal(got.data, round_to(x / wide, to).where(wide > 0, 0))
            assert torch.isin(got.data.abs(), values(to).abs()).all()


@pytest.mark.parametrize("recipe", CAST)
def test_folded_operands_are_the_same_numbers_and_exact_in_bf16(recipe):
    x = noise(128, 128) * torch.logspace(-6, 6, 128)
    for casts in RECIPES[recipe].products.values():
        for cast in casts:
            random = Noise(seed=1) if cast.rounding == "stochastic" else None
            want = quantise(x, cast, noise=random)
            got = quantise(x, cast, noise=random, dtype=torch.bfloat16, fold=True)
            assert torch.equal(got.dequantise(torch.float64), want.dequantise(torch.float64))


@pytest.mark.parametrize("block", [(ALL, ALL), (16, 16), (1, 16), (1, ALL)])
def test_the_cast_of_a_transposed_view_is_that_of_its_copy(block):
    x, cast = noise(64, 128), Cast(format="e4m3fn", block=block, scale="power-of-two")
    of_view, of_copy = quantise(x.T, cast), quantise(x.T.contiguous(), cast)
    assert torch.equal(of_view.data, of_copy.data) and torch.equal(of_view.scale, of_copy.scale)
    if cast.transposes:
        assert torch.equal(of_view.data, quantise(x, cast).T.data)


@pytest.mark.parametrize("recipe", CAST)
def test_zero_is_exactly_zero_and_finds_no_fault(recipe):
    module = linear(recipe)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    y, dx, dw, _ = three(module, scale=0.0)
    assert y.eq(0).all() and dx.eq(0).all() and dw.eq(0).all() and nonfinite_report(module) == ""


def test_a_zero_block_beside_a_full_one_stays_zero():
    x = noise(4, 64)
    x[:, :32] = 0
    for scale in ("power-of-two", "power-of-two-floor", "float32"):
        back = quantise(x, Cast(format="e4m3fn", block=(1, 32), scale=scale)).dequantise()
        assert back[:, :32].eq(0).all() and sqnr_db(x, back) > 25


def test_hadamard_cancels_in_the_product_and_shares_out_an_outlier():
    x, g = noise(128, 64), noise(128, 96, seed=1)
    x[5, 7] = 300.0
    plain = Cast(format="e2m1", block=(1, 16), scale="e4m3")
    mixed = Cast(format="e2m1", block=(1, 16), scale="e4m3", transform="hadamard")
    want = g.T.double() @ x.double()
    error = {c.transform: sqnr_db(want, reference(quantise(g.T, c), quantise(x.T, c)))
             for c in (plain, mixed)}
    # mixed operands differ, their product does not
    assert error["hadamard"] > 12 and error["none"] > 8
    spiky = torch.zeros(16, 16)
    spiky[:, 3] = 100.0
    assert quantise(spiky, mixed).amax.max() == pytest.approx(25.0, rel=1e-3)


# ---- products

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", CAST)
def test_emulated_products_are_the_float64_definition_but_for_accumulation(recipe, dtype):
    """float32 sums of K terms: K 2^-24 of the sum of magnitudes; plus half an ulp of the output,
    and a second half for row scales, which come after the rounding."""
    sides = {"M": 128, "K": 256, "N": 384}
    for name, (cast_a, cast_b) in RECIPES[recipe].products.items():
        from lpkit.techniques.recipes import SIDES

        (m, k), (n, _) = SIDES[name]
        operands = []
        for i, (cast, rows) in enumerate(((cast_a, m), (cast_b, n))):
            random = Noise(seed=i) if cast.rounding == "stochastic" else None
            x = noise(sides[rows], sides[k], seed=i)
            operands.append((quantise(x, cast, noise=random),
                             quantise(x, cast, noise=random, dtype=dtype, fold=True)))
        (a, fast_a), (b, fast_b) = operands
        want, got = reference(a, b), product(fast_a, fast_b, dtype)
        sums = a.dequantise(torch.float64).abs() @ b.dequantise(torch.float64).abs().T
        bound = (sums * sides[k] * 2**-24 + want.abs()
                 * (2 * 2**-8 if dtype == torch.bfloat16 else 4 * 2**-24))
        assert ((got.double() - want).abs() <= bound).all(), (name,
            ((got.double() - want).abs() / bound).max())


def test_bf16_holds_every_value_of_the_narrow_formats():
    for name in ("e4m3fn", "e5m2", "e3m2", "e2m3", "e2m1", "int8", "int4"):
        all_of_them = values(format_of(name))
        assert torch.equal(all_of_them.bfloat16().float().nan_to_num(-1),
                           all_of_them.nan_to_num(-1))
    codes = values(format_of("e4m3fn"))
    scales, four = codes[codes.isfinite()], values(format_of("e2m1"))
    both = torch.outer(scales, four)
    assert torch.equal(both.bfloat16().float(), both)       # NVFP4's block scales fold


# dB against float32: y, dx, dw of Gaussian operands; the tensorwise gradients are E5M2, one bit
# less
FLOORS = {
    "fp8-tensorwise": (27, 23.5, 23.5), "fp8-delayed": (27, 23.5, 23.5),
    "fp8-rowwise": (27, 27, 27),
    "fp8-blockwise": (27, 27, 27), "fp8-blockwise-pow2": (27, 27, 27), "mxfp8": (27, 27, 27),
    "nvfp4": (15, 13.5, 13.5),
    "nvfp4-published": (15, 13.5, 13.5), "int8": (38, 38, 37)}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", CAST)
def test_three_products_against_fp32(recipe, autocast):
    module = linear(recipe)
    plain = plain_of(module)
    *want, want_db = three(plain)
    *got, got_db = three(module, autocast=autocast)
    for floor, a, b in zip(FLOORS[recipe], want, got, strict=True):
        assert floor < sqnr_db(a, b) < floor + 6
    assert got[0].dtype == (torch.bfloat16 if autocast else torch.float32)
    assert got[1].dtype == got[2].dtype == torch.float32 and sqnr_db(want_db, got_db) > 50


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "fp8-rowwise", "int8"])
def test_emulation_is_pytorch_s_own_scaled_product(recipe):
    """torch._scaled_mm and torch._int_mm on the same operands: the order of the sum, and one bf16
    rounding or two."""
    needs("scaled_mm", recipe)
    for ours, theirs in zip(three(linear(recipe), autocast=True),
                            three(linear(recipe, backend="scaled_mm"), autocast=True)):
        assert sqnr_db(theirs, ours) > 45
        assert (theirs - ours).abs().max() <= theirs.abs().max() * 2**-7


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "fp8-rowwise", "int8"])
def test_emulation_is_torchao(recipe):
    """torchao divides by a scale where we multiply by its inverse, or the other way round: a value
    beside a tie may move."""
    needs("torchao", recipe)
    for ours, theirs in zip(three(linear(recipe), autocast=True),
                            three(linear(recipe, backend="torchao"), autocast=True)):
        assert sqnr_db(theirs, ours) > 40


def test_blackwell_s_scale_layout_is_torchao_s():
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    for rows, columns in ((128, 4), (256, 12), (130, 5), (7, 3)):
        scale = torch.arange(rows * columns).remainder(250).to(torch.uint8).view(rows, columns)
        want = utils.to_blocked(scale.view(torch.float8_e8m0fnu),
                                use_triton_kernel=False).view(torch.uint8).flatten()
        assert torch.equal(swizzled(scale), want)


def read_scales(data: torch.Tensor, scale: torch.Tensor, kind, *, right: bool) -> torch.Tensor:
    """What `F.scaled_mm` reads for (R, K) data, by its documentation: float32 (R, K)."""
    from torch.nn.functional import ScalingType

    rows, columns = data.shape
    i, k = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    if kind == ScalingType.BlockWise1x128:
        return scale[i, k // 128]
    assert (right and kind == ScalingType.BlockWise128x128
            and scale.shape == (-(-columns // 512) * 4, rows // 128))
    return scale[k // 128, i // 128]


@pytest.mark.parametrize("recipe, inputs, outputs, tokens",
                         [("fp8-blockwise", 128, 128, 128), ("fp8-blockwise", 256, 128, 128),
                          ("fp8-blockwise-pow2", 640, 384, 256)])
def test_blocks_of_128_say_what_they_are_also_where_one_block_is_the_whole_axis(monkeypatch, inputs,
        outputs, tokens, recipe):
    """The shapes and strides pass PyTorch's own checks (on the meta device), and what they mean is
    the recipe's product."""
    real, seen = torch.nn.functional.scaled_mm, []

    def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, *, output_dtype):
        meta = [t.to("meta") for t in (a, scale_a, scale_b)]
        meta_b = torch.empty(b.T.shape, dtype=b.dtype, device="meta").T
        assert [t.stride() for t in meta] == [t.stride() for t in (a, scale_a, scale_b)]
        assert real(meta[0], meta_b, meta[1], kind_a, meta[2], kind_b,
                    output_dtype=output_dtype).shape == (len(a), b.shape[1])
        seen.append((kind_a.name, kind_b.name))
        left, right = (x.double() * read_scales(x, s, kind, right=i)
                       for i, (x, s, kind) in enumerate(
            ((a, scale_a, kind_a), (b.T, scale_b, kind_b))))
        return (left @ right.T).to(output_dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    emulated, native = (linear(recipe, inputs, outputs, backend=backend)
                        for backend in ("emulated", "scaled_mm"))
    with torch.no_grad():       # every block of the weight has another scale
        native.weight *= torch.logspace(-2, 2, outputs)[:, None] * torch.logspace(-1, 1, inputs)
        emulated.weight.copy_(native.weight)
    for ours, theirs in zip(three(emulated, tokens=tokens // 2, autocast=True),
                            three(native, tokens=tokens // 2, autocast=True)):
        assert sqnr_db(ours, theirs) > 40       # a rounding to bf16 or two
    # y and dx; and dw, unless its sum over tokens is one block long: then these are scales of rows
    assert (seen == [("BlockWise1x128", "BlockWise128x128")] * 2
            + [("BlockWise1x128", "BlockWise1x128")] * (tokens > 128))


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "fp8-rowwise", "int8"])
def test_one_token_has_a_row_s_scale(recipe):
    """And not a tensor's: its one scale looks like both."""
    needs("scaled_mm", recipe)
    x = noise(1, 128)
    with torch.no_grad():
        theirs, ours = (linear(recipe, backend=backend)(x) for backend in ("scaled_mm", "emulated"))
    assert sqnr_db(ours, theirs) > 40


def test_blocks_of_128_are_e4m3_alone_on_hardware(monkeypatch):
    row = resolve("fp8-blockwise", gradient_format="e5m2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert BACKENDS["scaled_mm"].why_not("fp8-blockwise", RECIPES["fp8-blockwise"],
        torch.device("cuda")) == ""
    assert "in E4M3 alone, and dx has e5m2" in BACKENDS["scaled_mm"].why_not("fp8-blockwise", row,
        torch.device("cuda"))


@pytest.mark.parametrize("backend", ["scaled_mm", "torchao"])
def test_int8_is_refused_where_its_products_saturate(backend, monkeypatch):
    """oneDNN on a CPU without VNNI, as ONEDNN_MAX_CPU_ISA=AVX2 shows: a wrong sum is not used
    silently."""
    pytest.importorskip("torchao")
    refused = lambda: BACKENDS[backend].why_not("int8", RECIPES["int8"], torch.device("cpu"))
    a = torch.randint(-127, 128, (64, 128), dtype=torch.int8,
                      generator=torch.Generator().manual_seed(0))
    exact = bool((torch._int_mm(a, a.T.contiguous()) == a.int() @ a.int().T).all())
    assert bool(refused()) is not exact
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (a.int() @ b.int()).clamp(max=2**15))
    assert "saturates on this CPU" in refused()


# ---- state

def test_delayed_scaling_uses_the_history_and_the_margin():
    module = linear("fp8-delayed", history=3, margin=1, gradient_rounding="nearest-even")
    for scale in (1.0, 4.0, 2.0):
        three(module, scale=scale)
        advance(module)
    top = noise(2, 128, 128).abs().max().item()
    assert module.amax_history[0].tolist() == pytest.approx([0, 2 * top, 4 * top, 1 * top])
    operand = module.cast("y", "x", noise(4, 128), torch.float32)
    # the largest of them, and a factor of 2 of room
    assert operand.scale.item() == pytest.approx(4 * top * 2 / 448)
    recent = linear("fp8-delayed", history=3, history_rule="most-recent")
    recent.amax_history.copy_(module.amax_history)
    assert (recent.cast("y", "x", noise(4, 128), torch.float32).scale.item()
            == pytest.approx(2 * top / 448))


def test_what_outgrows_its_history_saturates():
    module = linear("fp8-delayed", history=1)
    three(module)
    advance(module)
    x = noise(2, 128, 128) * 100
    operand = module.cast("y", "x", x.flatten(0, 1), torch.float32)
    assert operand.data.abs().max() == 448
    assert operand.dequantise().abs().max() < 0.1 * x.abs().max()


@pytest.mark.parametrize("recipe, reentrant", [("fp8-delayed", False), ("nvfp4", False),
                                               ("nvfp4", True)])
def test_recomputation_gives_the_same_numbers_and_one_entry(recipe, reentrant):
    plain = linear(recipe)
    again = copy.deepcopy(plain)

    for _ in range(3):
        want, got = three(plain), three(again, call=lambda x: checkpoint(again, x,
            use_reentrant=reentrant))
        assert all(torch.equal(a, b) for a, b in zip(want, got))
        advance(plain)
        advance(again)
    for a, b in zip(plain.buffers(), again.buffers()):
        assert torch.equal(a, b) or a.dtype == torch.int64    # what is counted is seen twice


def as_a_gpu(recipe: str, backend: str) -> AbstractContextManager:
    """CUDA's products, where the CPU lacks them."""
    return strict(9 if "blockwise" in recipe else 10) if backend == "scaled_mm" else nullcontext()


def compiled_is_eager(recipe: str, backend: str, compiler: str) -> None:
    """Three micro-batches of other magnitudes, bit for bit: y, the gradients and all state. One
    graph: `fullgraph` raises at a break."""
    module = linear(recipe, backend=backend)
    traced, tokens = copy.deepcopy(module), noise(128, 128)
    torch._dynamo.reset()
    with as_a_gpu(recipe, backend):
        call = torch.compile(traced, backend=compiler, fullgraph=True)
        for step in range(3):
            results = []
            for function in (module, call):
                x = (tokens * 4.0**step).requires_grad_()
                with torch.autocast("cpu", torch.bfloat16):
                    y = function(x)
                results.append([y, *torch.autograd.grad(y,
                    (x, *(module if function is module else traced).parameters()),
                                                        noise(128, 256, seed=step).to(y.dtype))])
            *equal, (db, again) = zip(*results)
            assert all(torch.equal(*pair) for pair in equal), step
            # the compiler adds up in another order: an ulp of bf16
            assert torch.equal(db, again) or (compiler == "inductor"
                and ((db - again).abs() <= db.abs() * 2**-7).all())
            assert all(map(torch.equal, module.buffers(), traced.buffers()))
            advance(module)
            advance(traced)
        assert all(map(torch.equal, module.buffers(), traced.buffers()))
        tokens[3, 5] = torch.nan
        call(tokens)
    assert "1 in the activations of blocks.0.up" in nonfinite_report(traced)


# Casts with noise, and scales of a block, a tensor and a history. `lpkit.measure.matrix` compiles
# every pair without making code (test_matrix.py).
@pytest.mark.slow
@pytest.mark.parametrize("recipe, backend, compiler", [
    ("fp8-blockwise", "emulated", "aot_eager"), ("fp8-delayed", "scaled_mm", "aot_eager"),
    ("fp8-delayed", "emulated", "inductor"), ("nvfp4", "emulated", "inductor")])
def test_compiled_numbers_are_the_eager_ones(recipe, backend, compiler):
    compiled_is_eager(recipe, backend, compiler)


def test_a_shape_that_does_not_tile_is_refused_in_a_graph_too():
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="96 tokens do not tile by 128"):
        torch.compile(linear("fp8-blockwise"), backend="aot_eager")(noise(96, 128))


# ---- bad input

@pytest.mark.parametrize("recipe, bad", [*((recipe, torch.nan) for recipe in CAST),
                                         ("fp8-delayed", torch.inf), ("nvfp4", torch.inf)])
def test_nan_and_inf_are_loud_counted_and_named(recipe, bad):
    module = linear(recipe)
    three(module)
    advance(module)
    x = noise(128, 128)
    x[3, 5] = bad
    y = module(x)
    assert not y[3].isfinite().any()
    assert (nonfinite_report(module) == "NaN or Inf met in casts: 1 in the activations of "
                                        "blocks.0.up")


def test_shapes_that_do_not_tile_say_which_and_what_would():
    with pytest.raises(ConfigError,
                       match=r"blocks\.0\.up: 96 input features do not tile by 128 \(nearest: "
                             r"128\).*mxfp8"):
        linear("fp8-blockwise", 96, 128)(noise(128, 96))
    with pytest.raises(ConfigError,
                       match=r"100 tokens do not tile by 32.*precision\.recipe\.pad=true"):
        linear("mxfp8")(noise(100, 128))
    # the tensor cores', not the recipe's
    with pytest.raises(ConfigError, match=r"72 input features do not tile by 16"):
        linear("fp8-tensorwise", 72, 48, backend="scaled_mm")(noise(32, 72))
    assert (linear("fp8-tensorwise", 72, 40, backend="scaled_mm", pad=True)(noise(5, 72)).shape
            == (5, 40))


@pytest.mark.parametrize("recipe", ["fp8-delayed", "fp8-blockwise", "nvfp4", "int8"])
def test_padding_with_zeros_when_asked(recipe):
    module = linear(recipe, 72, 40, pad=True)
    plain = plain_of(module)
    for floor, a, b in zip(FLOORS[recipe], three(plain, tokens=25), three(module, tokens=25)):
        assert a.shape == b.shape and sqnr_db(a, b) > floor - 1


def test_every_scale_rule_keeps_a_nan_in_its_block():
    amax = torch.tensor([[1.0, torch.nan]])
    for name in ("float32", "power-of-two", "power-of-two-floor"):
        scale, _ = MAKE_SCALES[name](amax, format_of("e4m3fn"))
        assert scale[0, 0].isfinite() and scale[0, 1].isnan()
