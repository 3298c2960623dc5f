"""How `lpkit bench kernels` calls other libraries' kernels: those that are pure Triton the
interpreter runs where they are installed, Liger's and torchao's. The rest, which needs a GPU to be
imported, is held to the parameters in its source. What is called where nothing is installed is a
double with the signatures of Liger 0.8.5, QuACK 0.5 and Transformer Engine 2.20."""

import ast
import contextlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit import cli
from lpkit.errors import ConfigError
from lpkit.kernels.fused_cast import definition as cast_by
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.kernels.kernel import gradients_of
from lpkit.kernels.norm import add_rms_norm, layer_norm, rms_norm
from lpkit.kernels.rotary import rotate
from lpkit.kernels.swiglu import swiglu
from lpkit.techniques.kernels import KERNELS
from lpkit.techniques.recipes import MX_BLOCK, Cast
from tests.bench import fused, losses, peers, sizes
from tests.bench.peers import far

CPU = torch.device("cpu")
PAIRS = [(name, peer) for name, peers in fused.PEERS.items() for peer in peers]
LIGER = importlib.util.find_spec("liger_kernel")


def judged(kernel, call, dtype=torch.float32):
    arguments = next(a for a in kernel.examples(torch.Generator().manual_seed(0), CPU)
                     if a[0].numel() > 100 and a[0].dtype == dtype)
    return far(gradients_of(kernel, call, arguments),
               gradients_of(kernel, kernel.definition, arguments))


@pytest.mark.skipif(LIGER is None or tl is None or not INTERPRETED,
                    reason="needs liger-kernel, and Triton's interpreter")
@pytest.mark.parametrize("name", [name for name, peer in PAIRS if peer == "liger"])
def test_liger_computes_what_the_definition_says(name):
    from triton.runtime.errors import InterpreterError

    from lpkit.kernels.interpreter import mend

    mend()
    kernel = fused.kernels()[name]
    try:
        said = judged(kernel, fused.PEERS[name]["liger"],
                      torch.bfloat16 if name == "linear-cross-entropy" else torch.float32)
    except InterpreterError as error:
        if "'float' object has no attribute 'to'" in str(error):
            pytest.skip("the interpreter passes a float as Python's, where a GPU has Triton's")
        raise
    assert not said


@pytest.mark.skipif(LIGER is None, reason="needs liger-kernel")
@pytest.mark.parametrize("module, function", [
    ("cross_entropy", "cross_entropy_forward"),
    ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
    ("rms_norm", "LigerRMSNormFunction"), ("swiglu", "LigerSiLUMulFunction")])
def test_liger_s_other_implementation_takes_the_same(module, function):
    """The places up to those that are given here."""
    folder = Path(LIGER.submodule_search_locations[0]) / "ops"
    there = {}      # what it selects, and the module and name that it has
    for node in ast.walk(ast.parse((folder / "cutedsl/ops/__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            there |= {one.asname or one.name: (node.module.rpartition(".")[2], one.name)
                      for one in node.names}
    other, name = there[function]
    assert (parameters(folder / f"{module}.py", function)[:7]
            == parameters(folder / f"cutedsl/ops/{other}.py", name)[:7])


def parameters(path, name):
    (found,) = (node for node in ast.parse(path.read_text()).body
                if getattr(node, "name", None) == name)
    function = next((one for one in found.body if getattr(one, "name", "") == "forward"), found)
    return [one.arg.lower() for one in function.args.args]


class Doubles:
    """Modules of QuACK, which are the definitions under its parameters."""

    @staticmethod
    def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None,
                eps=1e-6, prenorm=False, weight_offset=0.0):
        assert bias is out_dtype is residual_dtype is None and not weight_offset
        if residual is None:
            return rms_norm(x, weight, eps)
        s, y = add_rms_norm(residual, x, weight, eps)
        return (y, s) if prenorm else y

    @staticmethod
    def cross_entropy_fwd(x, target, target_logit=None, weight=None, ignore_index=-100,
                          return_lse=False, return_dx=False,
                          inplace_backward=False):
        assert (return_dx and not return_lse and target_logit is weight is None
                and not inplace_backward)
        return KERNELS["cross-entropy"].load().definition(x, target)

    @staticmethod
    def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100,
                                     reduction="mean", tuned=True,
                                     use_scaled_exp=None):
        return F.cross_entropy((x @ weight.T).float(), target)

    @staticmethod
    def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=None,
                         cu_seqlens=None, max_seqlen=None):
        T, E = x.shape[1], x.shape[3]
        assert cos.shape == sin.shape == (T, E // 2) and not (interleaved or inplace)
        return rotate(x.transpose(1, 2), torch.cat((cos, cos), -1),
                      torch.cat((sin, sin), -1)).transpose(1, 2)


@pytest.mark.parametrize("name", [name for name, peer in PAIRS if peer == "quack"])
def test_quack_is_called_as_it_says(name, monkeypatch):
    """https://github.com/Dao-AILab/quack at c8ec317: rmsnorm.py, cross_entropy.py,
    linear_cross_entropy.py, rotary.py."""
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    for module in ("rmsnorm", "cross_entropy", "linear_cross_entropy", "rotary"):
        monkeypatch.setitem(sys.modules, f"quack.{module}", Doubles)
    kernel = fused.kernels()[name]
    assert not judged(kernel, fused.PEERS[name]["quack"], torch.bfloat16)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.parametrize("name, peer",
                         [(name, peer) for name, peer in PAIRS if peer.startswith("torchao")])
def test_torchao_computes_what_the_definition_says(name, peer, monkeypatch):
    """It multiplies with a rounded reciprocal where the definition divides: a value at a tie, which
    of four bits many numbers of bf16 are, may fall to either side, and a scale in float32 differs
    in its last bit. Where scales are powers of two everything is the same bits."""
    if name == "cast-blocks" or peer == "torchao, triton":
        if tl is None or not INTERPRETED:
            pytest.skip("needs Triton's interpreter")
        interpreted(monkeypatch)
    # adamw: its noise is its own
    share = {"cast-rows": 0, "cast-mx": 0, "cast-nvfp4": 0.01, "adamw": 1}.get(name, 1e-3)
    # adamw: rounded at other places
    rtol, atol = (1e-5, 1e-7) if name == "adamw" else (2.0**-23, 0)
    kernel, ran = fused.kernels()[name], 0
    monkeypatch.setattr(sizes, "rows", lambda device: ((256, 384),))
    for _, arguments in fused._timed(name, kernel, 0, CPU):
        try:
            got = fused.PEERS[name][peer](*arguments)
        except ConfigError as error:
            assert str(error).startswith("it has no ")
            continue
        except NotImplementedError as error:
            pytest.skip(str(error))
        want, ran = kernel.definition(*arguments), ran + 1
        assert not far(got, want)
        for theirs, ours in zip(got, want):
            if ours.dtype == torch.float32:
                torch.testing.assert_close(theirs, ours, rtol=rtol, atol=atol)
            else:
                differ = (theirs.contiguous().view(torch.uint8)
                          != ours.contiguous().view(torch.uint8))
                assert differ.double().mean() <= share
    assert ran


def interpreted(monkeypatch):
    """One shape of a program each: there is no GPU on which to race them."""
    from torchao.prototype.blockwise_fp8_training import kernels
    from torchao.prototype.float8nocompile.kernels import fp8_dynamic_tensorwise
    from triton.runtime.autotuner import Autotuner

    from lpkit.kernels.interpreter import mend

    mend()
    for one in (*vars(kernels).values(), *vars(fp8_dynamic_tensorwise).values()):
        if isinstance(one, Autotuner):
            monkeypatch.setattr(one, "configs", one.configs[-1:])


def padded(scale, rows, columns):
    """What lies beyond the tensor is nothing that may be read."""
    return F.pad(scale.float(), (0, -scale.shape[1] % columns, 0, -scale.shape[0] % rows),
                 value=torch.nan).to(scale.dtype)


class Quantizer:
    internal = optimize_for_gemm = False


class Float8CurrentScalingQuantizer(Quantizer):
    def __init__(self, fp8_dtype, device, *, rowwise=True, columnwise=True, use_existing_amax=False,
                 with_amax_reduction=False,
                 amax_reduction_group=None, force_pow_2_scales=False, amax_epsilon=0.0, scale=None,
                 amax=None):
        assert fp8_dtype == "e4m3" and not use_existing_amax and scale is amax is None
        self.cast = Cast(format="e4m3fn", scale="power-of-two" if force_pow_2_scales else "float32")
        self.how, self.amax = (rowwise, columnwise, True, None), torch.zeros(1)

    def __call__(self, x):
        data, scale, turned, _, amax, _ = cast_by(x, self.cast, *self.how, None)
        self.amax.copy_(amax)
        return SimpleNamespace(_data=data.view(torch.uint8), _transpose=turned.view(torch.uint8),
                               _scale_inv=scale.view(1))


class Float8Quantizer(Float8CurrentScalingQuantizer):
    def __init__(self, scale, amax, fp8_dtype, *, rowwise=True, columnwise=True):
        assert fp8_dtype == "e4m3" and scale.shape == amax.shape == (1,) and not amax
        self.cast, self.how, self.amax = Cast(format="e4m3fn"), (rowwise, columnwise, True,
            448 / scale[0]), amax


class BlockQuantizer(Quantizer):
    def __call__(self, x):
        rows, row_scale, columns, column_scale = self.definition(x)
        return SimpleNamespace(_rowwise_data=rows.view(torch.uint8),
                               _columnwise_data=columns.view(torch.uint8),
                               _rowwise_scale_inv=row_scale, _columnwise_scale_inv=column_scale)


class Float8BlockQuantizer(BlockQuantizer):
    def __init__(self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True,
                 block_scaling_dim=2):
        assert (fp8_dtype == "e4m3" and rowwise and columnwise and not amax_epsilon
                and not force_pow_2_scales)
        self.square = block_scaling_dim == 2

    def definition(self, x):
        rows, row_scale, columns, column_scale, _ = cast_by(
            x, Cast(format="e4m3fn", block=(128 if self.square else 1, 128)), True, True, False,
            None, None)
        return rows, self.lies(row_scale), columns, self.lies(column_scale)

    def lies(self, scale):
        return padded(scale if self.square else scale.T, 1, 4)


class MXFP8Quantizer(BlockQuantizer):
    def __init__(self, fp8_dtype, *, rowwise=True, columnwise=True, with_2d_quantization=False):
        assert fp8_dtype == "e4m3" and rowwise and columnwise and not with_2d_quantization

    def definition(self, x):
        assert self.optimize_for_gemm       # else scales are in no tiles
        rows, row_scale, columns, column_scale, _ = cast_by(
            x, Cast(format="e4m3fn", block=MX_BLOCK, scale="power-of-two"), True, True, True, None,
            None)
        return rows, row_scale.view(torch.uint8), columns.T.contiguous(), column_scale.view(
            torch.uint8)


class NVFP4Quantizer(BlockQuantizer):
    def __init__(self, fp4_dtype="e2m1", rowwise=True, columnwise=True, with_amax_reduction=False,
                 amax_reduction_group=None, with_rht=False,
                 with_post_rht_amax=False, with_2d_quantization=False, stochastic_rounding=False,
                 row_scaled_nvfp4=False, nvfp4_use_4over6=False,
                 nvfp4_e4m3_max=448, nvfp4_4over6_err_mode="MAE", with_random_sign_mask=True):
        assert with_rht == with_post_rht_amax and not stochastic_rounding and with_random_sign_mask
        self.ways, self.how = (rowwise, columnwise), (with_2d_quantization, rowwise, columnwise,
            with_rht)

    def __call__(self, x):
        assert self.optimize_for_gemm
        square, rows, columns, mix = self.how
        cast = Cast(format="e2m1", block=(16 if square else 1, 16), scale="e4m3",
                    transform="hadamard" if mix else "none")
        *found, tensor, _ = cast_by(x, cast, rows, columns, True, None, None)
        found = [t.view(torch.uint8) for t in found]
        made, amax = SimpleNamespace(_rowwise_data=None, _rowwise_scale_inv=None,
                                     _columnwise_data=None,
                                     _columnwise_scale_inv=None), tensor * 2688
        if columns:
            made._columnwise_scale_inv, made._columnwise_data, made._amax_columnwise = (found.pop(),
                found.pop(), amax.view(1))
        if rows:
            made._rowwise_scale_inv, made._rowwise_data, made._amax_rowwise = (found.pop(),
                found.pop(), amax.view(1))
        return made


def gradients(definition, dy, *inputs):
    inputs = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(definition(*inputs), inputs, dy)


class Tex:
    """`transformer_engine_torch` as pybind.cpp and normalization.cpp have it: 1 / rms is kept, and
    eps with it for the double's backward."""

    @staticmethod
    def quantize(tensor, quantizer, output=None, noop=None):
        assert quantizer.internal
        return quantizer(tensor)

    @staticmethod
    def compute_amax(input, amax):
        amax.copy_(input.abs().max())

    @staticmethod
    def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        assert (ln_out is quantizer is None and otype == "bf16" and weight.dtype == input.dtype
                and not zero_centered_gamma)
        return rms_norm(input, weight, eps), None, torch.tensor(eps)

    @staticmethod
    def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin, zero_centered_gamma):
        return gradients(lambda x, w: rms_norm(x, w, rsigma), dz, x, gamma)

    @staticmethod
    def layernorm_fwd(input, weight, bias, eps, ln_out, quantizer, otype, sm_margin,
                      zero_centered_gamma):
        assert (ln_out is quantizer is None and otype == "bf16"
                and weight.dtype == bias.dtype == input.dtype and not zero_centered_gamma)
        return layer_norm(input, weight, bias, eps), torch.zeros(1), torch.tensor(eps)

    @staticmethod
    def layernorm_bwd(dz, x, mu, rsigma, gamma, sm_margin, zero_centered_gamma):
        return gradients(lambda x, w, b: layer_norm(x, w, b, rsigma.item()), dz, x, gamma,
                         torch.zeros_like(gamma))

    @staticmethod
    def swiglu(input, quantizer):
        return swiglu(input)

    @staticmethod
    def dswiglu(grad, fwd_input, quantizer):
        return gradients(swiglu, grad, fwd_input)[0]


def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False,
                         fused=False, cu_seqlens=None, cp_size=1, cp_rank=0):
    assert (tensor_format == "bshd" and fused and freqs.dtype == torch.float32
            and freqs.shape == (t.shape[1], 1, 1, t.shape[3]))
    return rotate(t.transpose(1, 2), freqs[:, 0, 0].cos(), freqs[:, 0, 0].sin()).transpose(1, 2)


def cross_entropy_forward(_input, target, label_smoothing, reduce_loss, dist_process_group,
                          ignore_idx):
    assert (_input.ndim == 3 and target.shape == _input.shape[:2] and not reduce_loss
            and not label_smoothing and dist_process_group is None)
    nats, gradient = KERNELS["cross-entropy"].load().definition(_input[0], target[0])
    return nats[None], gradient[None].float()


@pytest.mark.parametrize("name", [name for name, peer in PAIRS if peer == "transformer-engine"])
def test_transformer_engine_is_called_as_it_says(name, monkeypatch):
    """https://github.com/NVIDIA/TransformerEngine at d0067d0: pytorch/tensor,
    csrc/extensions/pybind.cpp, attention/rope.py, triton/cross_entropy.py."""
    package = "transformer_engine.pytorch"
    quantizers = {one.__name__: one for one in (Float8CurrentScalingQuantizer, Float8Quantizer,
        Float8BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer)}
    doubles = {"transformer_engine": {}, "transformer_engine_torch": vars(Tex), package: quantizers,
               f"{package}.constants": {"TE_DType": {torch.float8_e4m3fn: "e4m3",
                   torch.bfloat16: "bf16"}},
               f"{package}.attention.rope": {"apply_rotary_pos_emb": apply_rotary_pos_emb},
               f"{package}.triton.cross_entropy": {"cross_entropy_forward": cross_entropy_forward}}
    for module, names in doubles.items():
        monkeypatch.setitem(sys.modules, module, double := ModuleType(module))
        for key, value in names.items():
            if not key.startswith("__"):
                setattr(double, key, getattr(Tex, key, value))
    monkeypatch.setattr(sizes, "rows", lambda device: ((256, 384),))
    kernel = fused.kernels()[name]
    for _, arguments in fused._timed(name, kernel, 0, CPU):
        assert not far(gradients_of(kernel, fused.PEERS[name]["transformer-engine"], arguments),
                       gradients_of(kernel, kernel.definition, arguments))


def test_a_peer_is_compiled_with_its_arguments(monkeypatch):
    asked = []
    monkeypatch.setattr(peers, "compiled", lambda function, *given: asked.append(given)
                        or function(*given))
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda")
        assert peers._fused(lambda x, power: x * power, x, 2).shape == (4, 8) and asked == [(x, 2)]
    assert (peers._fused(lambda x, power: x * power, torch.ones(2), 2).tolist() == [2, 2]
            and len(asked) == 1)


def test_whether_a_version_runs_is_asked_of_a_call(monkeypatch):
    """Not of its first tensor, which would be read row by row: for minutes, where it is a weight of
    10^8 elements."""
    seen = []
    for module in (peers, fused):
        monkeypatch.setattr(module, "why_not", lambda key, at_hand: seen.append(at_hand)
                            or "runs nowhere")
    x, lr = torch.ones(4), torch.tensor(0.5)
    with pytest.raises(ConfigError, match="runs nowhere"):
        peers._in_triton(x)
    kernel = SimpleNamespace(definition=lambda x, lr: x * lr, versions={"triton": None},
                             gradients=(0,))
    with contextlib.suppress(AssertionError):       # no definition among what runs
        fused._contenders("none", kernel, (x, lr))
    assert seen and all(isinstance(at_hand, list)
                        and all(isinstance(call, tuple) for call in at_hand) for at_hand in seen)


def test_what_is_not_the_definition_s_is_no_peer():
    want = [torch.ones(4, 3), torch.ones(())]
    assert not far(want, want) and not far(want[:1], want)
    assert (far([torch.ones(3, 4)], want).startswith("result 1 of 2: ") and "has 2" in far([], want)
            and "has 2" in far([*want, want[0]], want))
    assert far([want[0] * 1.03], want) and far([want[0], want[1] * torch.nan], want)


def test_the_loss_in_pieces_and_pytorch_s_are_the_loss():
    pytorchs = [losses.PEERS["F.linear_cross_entropy"]] * losses.PYTORCH_HAS_IT
    for call in (losses.KERNEL.versions["cpu"], *pytorchs):
        assert not judged(losses.KERNEL, call, torch.bfloat16)


def test_linear_and_cross_entropy_are_raced_beside_their_products(monkeypatch):
    monkeypatch.setattr(fused, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(fused, "candidates",
                        lambda kernel: {"reference": kernel.definition, **kernel.versions})
    results = fused.fused(1, kernel="linear-cross-entropy")
    assert {one.peer for one in results} >= {"reference",
        *["F.linear_cross_entropy"] * losses.PYTORCH_HAS_IT, fused.PRODUCTS}
    assert all(one.case.startswith("linear-cross-entropy, 256x64 bfloat16")
               and one.case.endswith("and backward") for one in results)
    assert ({"quack", "liger, cutedsl"} <= results[0].provenance["missing"].keys()
            and results[0].provenance["kernel"] == "linear-cross-entropy")
    assert (("quack left out",
             "ModuleNotFoundError: No module named 'quack' (linear-cross-entropy)")
        in results[0].provenance["breakdown"])
    assert {name for name, _ in PAIRS} == KERNELS.keys() - {"add-layer-norm",
        "lion"} | {"linear-cross-entropy"}


def test_cross_entropy_is_timed_without_a_copy_of_its_logits(monkeypatch):
    """Ours and Liger's write the gradient over the logits: a copy would be half of what moves, and
    is none of what is counted. They are judged on one, so that those who come after them are judged
    on logits."""
    kernel, copied, real, logits = KERNELS["cross-entropy"].load(), {}, fused.race, []

    def forward(x, targets, *others):
        assert x.requires_grad
        nats, gradient = kernel.definition(x.detach(), targets)
        x.detach().copy_(gradient)
        return nats, None, None, None, x

    def contenders(name, kernel, arguments):
        logits.append((arguments[0], arguments[0].clone()))
        return found(name, kernel, arguments)

    def race(*, ours, peers, over, **more):
        assert all(torch.equal(*pair) for pair in logits), "what was judged has spoiled nothing"
        for name, call in {"ours": ours, **peers}.items():
            with Copies(over[0][0].numel()) as mode:
                call(*over[0])
            copied[name] = mode.count
        return real(ours=ours, peers=peers, over=over, **more)

    found = fused._contenders
    monkeypatch.setattr(fused, "_contenders", contenders)
    monkeypatch.setattr(fused, "candidates",
                        lambda kernel: {"reference": kernel.definition,
                                        "cpu": kernel.versions["cpu"]})
    monkeypatch.setattr(fused, "race", race)
    monkeypatch.setattr(fused, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr("tests.bench.peers.liger", lambda *what: forward)
    results = fused.of("cross-entropy", kernel, CPU, 1, {})
    assert results[0].case == "cross-entropy, 512x8192 bfloat16, cpu, forward"
    assert copied["ours"] == 0 and copied["liger"] == 1, "the double's own; Liger's kernel has none"


class Copies(TorchDispatchMode):
    """Counts clones of, and copies into, tensors of so many elements."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.count = numel, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += (function.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_)
                       and args[0].numel() == self.numel)
        return function(*args, **(kwargs or {}))


def test_one_kernel_is_asked_for_by_name(capsys):
    assert cli.main(["bench", "kernels", "--kernel", "rmsnorm"]) == 2
    assert "rms-norm" in capsys.readouterr().err
    assert cli.main(["bench", "kernels", "--kernel", "flash-attention"]) == 2
    assert "lpkit bench attention-cpu" in capsys.readouterr().err
