"""How `lpkit bench kernels` calls other libraries' kernels: Liger's are pure Triton, and the interpreter runs them where they are installed.
The rest, which needs a GPU to be imported, is held to the parameters in its source. What is called where nothing is installed is a double
with the signatures of Liger 0.8.5 and QuACK 0.5."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from lpkit.bench import fused, losses
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.kernels.kernel import far, gradients_of
from lpkit.kernels.norm import add_rms_norm, rms_norm
from lpkit.kernels.rotary import rotate
from lpkit.techniques.kernels import KERNELS

CPU = torch.device("cpu")
PAIRS = [(name, peer) for name, kernel in fused.kernels().items() for peer in kernel.peers]
LIGER = importlib.util.find_spec("liger_kernel")


def judged(kernel, call, dtype=torch.float32):
    arguments = next(a for a in kernel.examples(torch.Generator().manual_seed(0), CPU) if a[0].numel() > 100 and a[0].dtype == dtype)
    return far(gradients_of(kernel, call, arguments), gradients_of(kernel, kernel.definition, arguments))


@pytest.mark.skipif(LIGER is None or tl is None or not INTERPRETED, reason="needs liger-kernel, and Triton's interpreter")
@pytest.mark.parametrize("name", [name for name, peer in PAIRS if peer == "liger"])
def test_liger_computes_what_the_definition_says(name):
    from triton.runtime.errors import InterpreterError

    from lpkit.kernels.interpreter import mend

    mend()
    kernel = fused.kernels()[name]
    try:
        said = judged(kernel, kernel.peers["liger"], torch.bfloat16 if name == "linear-cross-entropy" else torch.float32)
    except InterpreterError as error:
        if "'float' object has no attribute 'to'" in str(error):
            pytest.skip("the interpreter passes a float as Python's, where a GPU has Triton's")
        raise
    assert not said


@pytest.mark.skipif(LIGER is None, reason="needs liger-kernel")
@pytest.mark.parametrize("module, function", [
    ("cross_entropy", "cross_entropy_forward"), ("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"),
    ("rms_norm", "LigerRMSNormFunction"), ("swiglu", "LigerSiLUMulFunction")])
def test_liger_s_other_implementation_takes_the_same(module, function):
    """The places up to those that are given here."""
    folder = Path(LIGER.submodule_search_locations[0]) / "ops"
    there = {}      # what it selects, and the module and name that it has
    for node in ast.walk(ast.parse((folder / "cutedsl/ops/__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            there |= {one.asname or one.name: (node.module.rpartition(".")[2], one.name) for one in node.names}
    other, name = there[function]
    assert parameters(folder / f"{module}.py", function)[:7] == parameters(folder / f"cutedsl/ops/{other}.py", name)[:7]


def parameters(path, name):
    (found,) = (node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name)
    function = next((one for one in found.body if getattr(one, "name", "") == "forward"), found)
    return [one.arg.lower() for one in function.args.args]


class Doubles:
    """Modules of QuACK, which are the definitions under its parameters."""

    @staticmethod
    def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False, weight_offset=0.0):
        assert bias is out_dtype is residual_dtype is None and not weight_offset
        if residual is None:
            return rms_norm(x, weight, eps)
        s, y = add_rms_norm(residual, x, weight, eps)
        return (y, s) if prenorm else y

    @staticmethod
    def cross_entropy_fwd(x, target, target_logit=None, weight=None, ignore_index=-100, return_lse=False, return_dx=False,
                          inplace_backward=False):
        assert return_dx and not return_lse and target_logit is weight is None and not inplace_backward
        return KERNELS["cross-entropy"].load().definition(x, target)

    @staticmethod
    def chunked_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True,
                                     use_scaled_exp=None):
        return F.cross_entropy((x @ weight.T).float(), target)

    @staticmethod
    def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=None, cu_seqlens=None, max_seqlen=None):
        T, E = x.shape[1], x.shape[3]
        assert cos.shape == sin.shape == (T, E // 2) and not (interleaved or inplace)
        return rotate(x.transpose(1, 2), torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)).transpose(1, 2)


@pytest.mark.parametrize("name", [name for name, peer in PAIRS if peer == "quack"])
def test_quack_is_called_as_it_says(name, monkeypatch):
    """https://github.com/Dao-AILab/quack at c8ec317: rmsnorm.py, cross_entropy.py, linear_cross_entropy.py, rotary.py."""
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    for module in ("rmsnorm", "cross_entropy", "linear_cross_entropy", "rotary"):
        monkeypatch.setitem(sys.modules, f"quack.{module}", Doubles)
    kernel = fused.kernels()[name]
    assert not judged(kernel, kernel.peers["quack"], torch.bfloat16)


def test_the_loss_in_pieces_and_pytorch_s_are_the_loss():
    for call in (losses.KERNEL.versions["cpu"], losses.KERNEL.peers["F.linear_cross_entropy"]):
        assert not judged(losses.KERNEL, call, torch.bfloat16)


def test_linear_and_cross_entropy_are_raced_beside_their_products(monkeypatch):
    monkeypatch.setattr(fused, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(fused, "candidates", lambda kernel: {"reference": kernel.definition, **kernel.versions})
    results = fused.of("linear-cross-entropy", rounds=1)
    assert {one.peer for one in results} >= {"reference", "F.linear_cross_entropy", fused.PRODUCTS}
    assert all(one.case.startswith("linear-cross-entropy, 256x64") and one.case.endswith("and backward") for one in results)
    assert {"quack", "liger, cutedsl"} <= results[0].provenance["missing"].keys() and results[0].provenance["kernel"] == "linear-cross-entropy"
    assert {name for name, _ in PAIRS} >= {"rms-norm", "add-rms-norm", "layer-norm", "swiglu", "rotary", "cross-entropy"}
