"""How `lpkit bench kernels` calls other libraries' kernels.

Only these tests catch a call of torchao or Liger Kernel (where it is installed) that computes
something else than the kit's definition, and a bench that copies, spoils or leaves out what it
times. Libraries that need a GPU to be imported are held to the definition by the bench itself,
before it times them.
"""

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lpkit import cli
from lpkit.errors import ConfigError
from lpkit.kernels.jit import INTERPRETED, tl
from lpkit.kernels.kernel import gradients_of
from lpkit.techniques.kernels import KERNELS
from tests.bench import fused, losses, sizes
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
        problem = judged(kernel, fused.PEERS[name]["liger"],
                      torch.bfloat16 if name == "linear-cross-entropy" else torch.float32)
    except InterpreterError as error:
        if "'float' object has no attribute 'to'" in str(error):
            pytest.skip("the interpreter passes a float as Python's, where a GPU has Triton's")
        raise
    assert not problem


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
    for member in (*vars(kernels).values(), *vars(fp8_dynamic_tensorwise).values()):
        if isinstance(member, Autotuner):
            monkeypatch.setattr(member, "configs", member.configs[-1:])


def test_the_loss_in_pieces_and_pytorch_s_are_the_loss():
    pytorchs = [losses.PEERS["F.linear_cross_entropy"]] * losses.PYTORCH_HAS_IT
    for call in (losses.KERNEL.versions["cpu"], *pytorchs):
        assert not judged(losses.KERNEL, call, torch.bfloat16)


def test_linear_and_cross_entropy_are_raced_beside_their_products(monkeypatch):
    monkeypatch.setattr(fused, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(fused, "candidates",
                        lambda kernel: {"reference": kernel.definition, **kernel.versions})
    results = fused.fused(1, kernel="linear-cross-entropy")
    assert {timing.peer for timing in results} >= {"reference",
        *["F.linear_cross_entropy"] * losses.PYTORCH_HAS_IT, fused.PRODUCTS}
    assert all(timing.case.startswith("linear-cross-entropy, 256x64 bfloat16")
               and timing.case.endswith("and backward") for timing in results)
    facts = results[0].provenance
    assert {"quack", "liger, cutedsl"} <= facts["missing"].keys()
    assert facts["kernel"] == "linear-cross-entropy"
    assert ("quack left out", "ModuleNotFoundError: No module named 'quack' (linear-cross-entropy)"
            ) in facts["breakdown"]
    assert {name for name, _ in PAIRS} == (KERNELS.keys() - {"add-layer-norm", "lion"}
                                           | {"linear-cross-entropy"})


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
        return plain_contenders(name, kernel, arguments)

    def race(*, ours, peers, over, **more):
        assert all(torch.equal(*pair) for pair in logits), "what was judged has spoiled nothing"
        for name, call in {"ours": ours, **peers}.items():
            with Copies(over[0][0].numel()) as mode:
                call(*over[0])
            copied[name] = mode.count
        return real(ours=ours, peers=peers, over=over, **more)

    plain_contenders = fused._contenders
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
