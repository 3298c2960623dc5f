"""What a GPU would be given, under CUDA's own checks (tests/gpu/strict_cuda.py).

Only these tests catch a product of a recipe whose shape, stride, scale or padding cuBLASLt refuses
or reads in another place, at the shapes of every preset; fused kernels that break a compiled graph;
and compiled casts that move more bytes than they must.
"""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels.interpreter import mend
from lpkit.kernels.jit import INTERPRETED
from lpkit.measure.matrix import Definition
from lpkit.measure.updates import REST, _rows_of
from lpkit.memory.recompute import ATTENTION, PRODUCTS
from lpkit.precision.backends import BACKENDS
from lpkit.precision.linear import ScaledLinear
from lpkit.presets import PRESETS
from lpkit.techniques.blocks import operations
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.recipes import RECIPES, Recipe, resolve
from lpkit.training.steps import advance
from tests.execution.compiled_bytes import forward_per_element, of_recipe
from tests.gpu.strict_cuda import RefusedError, strict

GPUS = {9: "Hopper", 10: "Blackwell"}
CAST = [name for name, recipe in RECIPES.items() if recipe.products]


def runs(recipe: str, major: int, backend: str = "scaled_mm") -> bool:
    """Whether `auto` or a person may choose it there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
        return not BACKENDS[backend].why_not(recipe, RECIPES[recipe], torch.device("cuda"))


PAIRS = [pytest.param(major, recipe, id=f"{GPUS[major]}-{recipe}") for major in GPUS
         for recipe in CAST if runs(recipe, major)]


def of_presets() -> set[tuple[int, int, int]]:
    """(M, K, N) of every Linear, the head too; of those that no check can tell apart, one. A check
    knows a size by its rest: the coarsest unit is four blocks of 128."""
    shapes = {}
    for config in PRESETS.values():
        ops = operations(MicroBatch(model=config.model))
        for op in (*ops.linears, ops.head):
            sizes = (config.micro_batch * config.model.context, *op.matmul)
            shapes[tuple(size if size <= 1024 else 1024 + size % 512 for size in sizes)] = sizes
    return set(shapes.values())


def blocks_of(recipe: str) -> list[tuple[int, tuple[int, int]]]:
    return [(cast.bits, cast.block) for cast in RECIPES[recipe].all_casts]


ODD = {(128, 512, 1536), (128, 1536, 512), (256, 16, 16), (384, 48, 80), (128, 128, 128),
       (256, 128, 16), (640, 384, 640), (1040, 528, 144), (16, 256, 256), (17, 256, 256),
       (5, 72, 40), (1, 128, 128), (130, 640, 384)}


def gradients(layer: nn.Module, M: int, N: int, *,
              call: Callable | None = None) -> list[torch.Tensor]:
    """y, dx and dw in bf16, as autocast has them. call: the layer, compiled."""
    def draw(rows: int, columns: int, seed: int) -> torch.Tensor:
        return torch.randn(rows, columns,
                           generator=torch.Generator().manual_seed(seed)).bfloat16()

    x = draw(M, layer.in_features, 1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x) if call is None else call(x)
    return [y.detach(), *torch.autograd.grad(y, (x, layer.weight), draw(M, N, 2))]


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(("major", "recipe"), PAIRS)
def test_cuda_takes_every_product_of_every_preset(major, recipe, pad):
    """Shapes and strides alone. What does not tile is refused by the kit, in words, and never by
    CUDA."""
    row, refusals = resolve(recipe, pad=pad), 0

    def trained():
        y = layer(x)
        torch.autograd.grad(y, (x, layer.weight), torch.empty_like(y))

    def sampled():      # tokens may be any number where nothing is trained
        with torch.no_grad():
            layer(x)

    with FakeTensorMode(allow_non_fake_inputs=True), strict(major) as gpu:
        # what runs on both has the same operands there, as recipes with the same blocks have
        first = next(name for name in CAST if blocks_of(name) == blocks_of(recipe)) == recipe
        presets = (of_presets() if first and not pad and (major == 9 or not runs(recipe, 9))
                   else set())
        for M, K, N in ODD | presets:
            layer = BACKENDS["scaled_mm"].wrap(nn.Linear(K, N), row, name="layer", seed=0)
            x = torch.empty(M, K, dtype=torch.bfloat16).requires_grad_()
            for call in (trained, sampled) if (M, K, N) in ODD else (trained,):
                try:
                    call()
                except ConfigError as error:
                    assert not pad and "do not tile" in str(error)
                    refusals += 1
    assert len(gpu.seen) > 15 and (refusals == 0) == pad


@pytest.mark.parametrize(("major", "recipe"), PAIRS)
def test_what_cuda_reads_is_the_recipe(major, recipe, M=384, K=256, N=640):
    """Both multiply in float64: what differs is one rounding of the result to bf16, or two for
    int8."""
    multiplied_as_defined(RECIPES[recipe], major, M, K, N)


def multiplied_as_defined(row: Recipe, major: int, M: int, K: int, N: int):
    linear = nn.Linear(K, N)
    with torch.no_grad():       # no two blocks of the weight have one scale
        linear.weight *= torch.logspace(-1, 1, N)[:, None] * torch.logspace(-1, 1, K)
    native = BACKENDS["scaled_mm"].wrap(copy.deepcopy(linear), row, name="layer", seed=0)
    defined = ScaledLinear.wrap(copy.deepcopy(linear), row, Definition(), name="layer")
    for _ in range(2 if row.delayed else 1):        # the second with the history of the first
        with strict(major) as gpu:
            got = gradients(native, M, N)
        for name, ours, theirs in zip(("y", "dx", "dw"), got, gradients(defined, M, N),
                                      strict=True):
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < 2.0**-8, (name, error)
        advance(native)
        advance(defined)
    assert [product[1:4] for product in gpu.seen] == [(M, K, N), (M, N, K), (N, M, K)]


VARIED = {name: resolve(name, gradient_rounding="stochastic", transform="hadamard")
          for name in ("fp8-tensorwise", "fp8-delayed", "fp8-rowwise", "fp8-blockwise", "mxfp8",
                       "nvfp4", "int8")}


@pytest.mark.parametrize("recipe", VARIED)
def test_noise_and_transforms_reach_cuda_too(recipe):
    """Each product draws as the recipe says, and scales lie as hardware reads them whoever
    rounded."""
    multiplied_as_defined(VARIED[recipe], 9 if runs(recipe, 9) else 10, 256, 128, 384)


# ---- the fused kernels under a Linear: on a CPU by Triton's interpreter

triton = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def by_triton(layer: nn.Module) -> nn.Module:
    """As `system.kernels=triton` leaves it."""
    mend()
    for attribute, name in layer.arithmetic.kernels.items():
        setattr(layer.arithmetic, attribute, KERNELS[name].load().versions["triton"])
    return layer


# Of x, w and the gradient: six where one does not serve two products. Rows that differ from one of
# these in a scale alone have the same operators.
READS = {"fp8-tensorwise": 3, "fp8-delayed": 3, "fp8-rowwise": 6, "fp8-blockwise": 3, "mxfp8": 3,
         "int8": 6, "nvfp4": 5}


@triton
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
@pytest.mark.parametrize(("recipe", "varied"), [
    *((name, False) for name in READS),
    *((name, True) for name in ("fp8-tensorwise", "mxfp8", "nvfp4"))])
def test_kernels_are_operators_of_one_graph_and_have_the_definitions_bits(recipe, varied):
    """Eager and compiled, over micro-batches that fill a history and draw new noise."""
    row = VARIED[recipe] if varied else RECIPES[recipe]
    torch.manual_seed(0)
    defined = BACKENDS["scaled_mm"].wrap(nn.Linear(128, 256), row, name="layer", seed=0)
    fused, graphs = by_triton(copy.deepcopy(defined)), []
    traced = by_triton(copy.deepcopy(defined))

    def kept(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append([node.target for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    call = torch.compile(traced, backend=aot_autograd(fw_compiler=kept), fullgraph=True)
    with strict(9 if runs(recipe, 9) else 10):
        for _ in range(2):
            results = [gradients(defined, 128, 256), gradients(fused, 128, 256),
                       gradients(traced, 128, 256, call=call)]
            for others in results[1:]:
                assert all(map(torch.equal, results[0], others))
            for linear in (defined, fused, traced):
                advance(linear)
            assert all(map(torch.equal, defined.buffers(), fused.buffers()))
            assert all(map(torch.equal, defined.buffers(), traced.buffers()))
    casts = [target for graph in graphs for target in graph
             if str(target).startswith("lpkit.cast_")]
    # a transform is of dw's operands alone
    assert len(casts) == (max(READS[recipe], 5) if varied else READS[recipe])


@pytest.mark.parametrize(("major", "recipe"), [(9, "fp8-rowwise"), (10, "fp8-tensorwise")])
def test_torchao_hands_cuda_what_it_takes(major, recipe):
    pytest.importorskip("torchao")
    row = RECIPES[recipe]
    library = BACKENDS["torchao"].wrap(nn.Linear(256, 512, bias=False), row, name="layer", seed=0)
    defined = ScaledLinear.wrap(copy.deepcopy(library), row, Definition(), name="layer")
    with strict(major) as gpu:
        got = gradients(library, 128, 512)
    for ours, theirs in zip(got, gradients(defined, 128, 512), strict=True):
        assert (ours.double() - theirs.double()).norm() / theirs.double().norm() < 2.0**-6
    assert len(gpu.seen) == 3


@pytest.mark.parametrize(("major", "recipe"), [(9, "fp8-rowwise"), (10, "fp8-rowwise"),
                                               (9, "fp8-blockwise"), (10, "mxfp8")])
def test_a_backend_that_the_stack_refuses_says_so(major, recipe):
    """Rows are cuBLASLt's on Hopper, CUTLASS's elsewhere: a build may have neither."""
    with strict(major):
        assert BACKENDS["scaled_mm"].refusal(RECIPES[recipe], torch.device("cpu")) == ""
    with strict(major, rowwise=False):
        why = BACKENDS["scaled_mm"].refusal(RECIPES[recipe], torch.device("cpu"))
    assert bool(why) == (recipe == "fp8-rowwise")
    if why:
        assert "refuses y's product of e4m3fn in blocks of (1, 0) (CUBLAS_STATUS_NOT" in why
        assert "fp8-tensorwise" in why


@pytest.mark.parametrize("recipe", CAST)
def test_fast_sums_are_requested_where_the_recipe_says(recipe):
    """y alone by default; blocks have scales inside the sum, and tensor cores cannot keep it to
    themselves."""
    row, fast = RECIPES[recipe], recipe in ("fp8-tensorwise", "fp8-delayed", "fp8-rowwise")
    assert bool(row.fast_accumulation) == fast
    cases = [(row, [fast, False, False])]
    if fast:
        cases.append((resolve(recipe, fast_accumulation=("dx", "dw")), [False, True, True]))
    for changed, expected in cases:
        layer = BACKENDS["scaled_mm"].wrap(nn.Linear(128, 256), changed, name="layer", seed=0)
        with strict(9 if runs(recipe, 9) else 10) as gpu:
            gradients(layer, 128, 256)
        assert [product.fast for product in gpu.seen] == expected


@pytest.mark.slow
def test_compiled_definitions_move_no_more_than_before():
    """8.0 bytes an element, as torchao's."""
    assert of_recipe("fp8-delayed") <= 8.05


@triton
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
def test_fused_casts_move_what_they_must():
    """The rest is a history of three times 1024, and scales."""
    mend()
    assert of_recipe("fp8-delayed", version="triton") <= 4.05


class RMSNorm(nn.RMSNorm):
    def forward(self, x):
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), 1e-5)


class SwiGLU(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.slow
@pytest.mark.parametrize("before, width, most", [
    pytest.param(partial(RMSNorm, 512), 512, 7, id="a norm: sums of squares 2, amax 2, cast 2 + 1"),
    pytest.param(SwiGLU, 1024, 11, id="SwiGLU: 4 + 2, then amax 2, cast 2 + 1")])
def test_the_compiler_quantises_a_norm_without_its_16_bits_in_between(before, width, most):
    """An element of a bf16 result that is written would be 2 bytes, and read 2 each by the amax and
    the cast. x.T is cast in backward."""
    assert forward_per_element(before(), width) == pytest.approx(most, abs=0.1)


# ---- what counts and keeps products knows these

def test_recomputation_keeps_and_counts_products_of_8_and_4_bits():
    aten, kinds = torch.ops.aten, torch.nn.functional.ScalingType
    assert ({aten._scaled_mm.default, aten._scaled_mm_v2.default, aten._int_mm.default}
            < set(PRODUCTS))
    assert aten._scaled_mm_v2.default in PRODUCTS
    assert aten._scaled_dot_product_cudnn_attention.default in ATTENTION
    a, b = eight(128, 512).to("meta"), eight(256, 512).to("meta")
    ones = partial(torch.ones, device="meta")
    calls = {
        2 * 128 * 512 * 256: lambda: torch.nn.functional.scaled_mm(
            a, b.T, ones(4, 128).T, kinds.BlockWise1x128, ones(2, 4).T, kinds.BlockWise128x128),
        2 * 32 * 64 * 48: lambda: torch._int_mm(torch.ones(32, 64, dtype=torch.int8),
                                                torch.ones(64, 48, dtype=torch.int8))}
    for flops, call in calls.items():
        with FlopCounterMode(display=False) as counter:
            call()
        assert counter.get_total_flops() == flops


@pytest.mark.parametrize(("operation", "shapes"), [
    ("aten::_scaled_mm", [[256, 128], [128, 512], [256, 1], [1, 512], [], [], []]),
    ("aten::_int_mm", [[256, 128], [128, 512]]),
    ("aten::_scaled_mm_v2", [[256, 64], [64, 512], [], [], []]),
    ("aten::addmm", [[512], [256, 128], [128, 512], [], []])])
def test_the_profiler_s_products_are_rows_of_the_model(operation, shapes):
    """By their sizes, whatever scales come after them; FP4 is packed, two along the sum."""
    config = Config().replace({"model.width": 128, "model.heads": 2, "model.mlp_width": 512,
                               "model.context": 64, "global_batch": 4})
    spent = SimpleNamespace(key=operation, input_shapes=shapes, self_cpu_time_total=2e6)
    attention = SimpleNamespace(key="aten::_cudnn_attention_forward", input_shapes=[],
                                self_cpu_time_total=1e6)
    profiler = SimpleNamespace(key_averages=lambda group_by_input_shape: [spent, attention])
    rows = _rows_of(profiler, config, torch.device("cpu"), 3.0)
    (product,) = rows.keys() - {"attention", REST}
    assert "mlp.up" in product and rows[product] == 2 and rows["attention"] == 1


# ---- the emulator itself: what it must not let pass

def eight(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns).to(torch.float8_e4m3fn)


def blocks128(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor,
              scale_b: torch.Tensor) -> torch.Tensor:
    kinds = torch.nn.functional.ScalingType
    return torch.nn.functional.scaled_mm(a, b.T, scale_a, kinds.BlockWise1x128, scale_b,
                                         kinds.BlockWise128x128)


ONE, ones = torch.ones(()), torch.ones
BAD = {     # words of the refusal: the GPU, and a call
    "row-major and column-major": (9, lambda mm: mm(eight(32, 64), eight(64, 32), ONE, ONE)),
    "divisible by 16": (10, lambda mm: mm(eight(32, 72), eight(32, 72).T, ONE, ONE)),
    # the last rows of a transposed scale have the strides of what was transposed
    "scale_b strides": (9, lambda mm: blocks128(eight(128, 512), eight(256, 512), ones(4, 128).T,
                                                ones(4, 2))),
}


@pytest.mark.parametrize("words", BAD)
def test_the_emulator_refuses_what_cuda_does(words):
    major, call = BAD[words]
    with strict(major), pytest.raises(RefusedError, match=words):
        call(partial(torch._scaled_mm, out_dtype=torch.bfloat16))
