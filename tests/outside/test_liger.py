"""The layers that Liger-Kernel fuses, at its kinds of shapes and dtypes, compared with float64:
values and all gradients.

The tolerance is a share of the largest magnitude: 2e-5 in float32 (sums of up to 1,000 terms in
another order), and 2^-7 in bf16 (two units in the last place).
"""

import pytest
import torch
import torch.nn.functional as F

from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn.layers import LayerNorm, RMSNorm, RotaryPositions
from lpkit.nn.mlps import GeluMLP, SwigluMLP

DTYPES = [torch.float32, torch.bfloat16]
SHARE = {torch.float32: 2e-5, torch.bfloat16: 2.0**-7}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(computed: torch.Tensor, due: torch.Tensor, share: float) -> None:
    assert computed.shape == due.shape and computed.isfinite().all()
    assert (computed.double() - due).abs().max() <= share * max(due.abs().max().item(), 1e-30)


def with_gradients(call, *inputs: torch.Tensor, seed: int = 9) -> list[torch.Tensor]:
    """Return the result of `call`, and the gradients of its inputs for a random gradient of the
    result."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    y = call(*inputs)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, g)]


# ---- norms

SHAPES = [(2, 128, 512), (9, 7, 41), (8, 9, 7, 64), (1, 1, 1023)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm", "layernorm without a bias"])
def test_norms(kind, shape, dtype):
    D, x = shape[-1], drawn(*shape, dtype=dtype)
    norm = (RMSNorm(D, eps=1e-6) if kind == "rmsnorm"
            else LayerNorm(D, eps=1e-6, bias=kind == "layernorm")).to(dtype)
    for i, p in enumerate(norm.parameters()):
        p.data.copy_(drawn(D, seed=3 + i))
    values = [p.detach() for p in norm.parameters()]

    def definition(x, w, *b):
        centred = x if kind == "rmsnorm" else x - x.mean(-1, keepdim=True)
        y = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w
        return y + b[0] if b else y

    def ours(x, *parameters):
        return torch.func.functional_call(norm,
            dict(zip(dict(norm.named_parameters()), parameters, strict=True)), (x,))

    computed, due = with_gradients(ours, x, *values), with_gradients(definition, x.double(),
        *(t.double() for t in values))
    for ours_grad, of_definition in zip(computed, due, strict=True):
        # the gradient of a gain sums over all rows; PyTorch's own layer norm adds them in bf16
        close(ours_grad, of_definition, SHARE[dtype] * (8 if ours_grad.ndim == 1 else 1))


@pytest.mark.parametrize("shape", [(2, 2, 8), (9, 7, 41), (5, 123, 123)], ids=str)
def test_the_norm_of_a_sum_gives_both(shape):
    norm, x, delta = RMSNorm(shape[-1], eps=1e-6), drawn(*shape), drawn(*shape, seed=1)
    total, y = norm(x, delta)
    assert torch.equal(total, x + delta)
    close(y.detach(), F.rms_norm((x + delta).double(), shape[-1:], eps=1e-6), 2e-5)


# ---- rotary positions

def by_complex_numbers(x: torch.Tensor, theta: float, start: int = 0) -> torch.Tensor:
    """Expected: the pair (i, i + E/2) is rotated by the angle position / theta^(2i/E)."""
    T, E = x.shape[-2:]
    angles = torch.arange(start, start + T).double()[:,
        None] * theta ** (-torch.arange(0, E, 2).double() / E)
    left, right = x.double().chunk(2, dim=-1)
    turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B, T, H, E, theta", [(1, 2, 2, 8, 10_000.0), (3, 423, 7, 92, 500_000.0),
                                               (1, 8, 1, 2, 10_000.0)])
def test_rotary_positions_turn_pairs(B, T, H, E, dtype, theta):
    from lpkit.kernels.pytorch import rotate_pytorch
    from lpkit.kernels.rotary import ROTARY

    positions = RotaryPositions(ModelConfig(width=H * E, heads=H, head_dim=E, context=T,
        position="rope", rope_theta=theta))
    x = drawn(B, H, T, E, dtype=dtype)
    cos, sin = positions.rotation(T, 0, x)
    for turn in (rotate_pytorch, ROTARY.definition):
        # an angle of 400 is rounded to 24 bits
        close(turn(x, cos, sin), by_complex_numbers(x, theta), max(SHARE[dtype], 6e-5))


@pytest.mark.parametrize("start", [1, 7, 200])
def test_rotary_positions_from_a_later_place(start):
    positions = RotaryPositions(ModelConfig(width=64, heads=1, context=256, position="rope"))
    x = drawn(2, 1, 16, 64)
    from lpkit.kernels.pytorch import rotate_pytorch

    close(rotate_pytorch(x, *positions.rotation(16, start, x)),
          by_complex_numbers(x, 10_000.0, start), 6e-5)


def test_a_head_of_an_odd_size_has_no_pairs():
    with pytest.raises(ConfigError, match="rotary positions turn pairs"):
        ModelConfig(width=9 * 41, heads=9, head_dim=41, position="rope")


# ---- MLPs

@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B, T, D, W", [(2, 2, 8, 8), (6, 42, 123, 431), (3, 1, 8, 1409)])
@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_mlps(kind, B, T, D, W, dtype, bias):
    config = ModelConfig(width=D, heads=1, head_dim=2, mlp_width=W, mlp=kind, bias=bias)
    mlp = (SwigluMLP if kind == "swiglu" else GeluMLP)(config).to(dtype)
    x, wide = drawn(B, T, D, dtype=dtype), {key: p.detach().double()
        for key, p in mlp.named_parameters()}

    def definition(x):
        first = "gate_up" if kind == "swiglu" else "up"
        h = F.linear(x, wide[f"{first}.weight"], wide.get(f"{first}.bias"))
        if kind == "swiglu":
            gate, up = h.chunk(2, dim=-1)
            h = gate * gate.sigmoid() * up
        else:
            h = 0.5 * h * (1 + torch.tanh((2 / torch.pi)**0.5 * (h + 0.044715 * h**3)))
        return F.linear(h, wide["down.weight"], wide.get("down.bias"))

    computed, due = with_gradients(mlp, x), with_gradients(definition, x.double())
    for ours_grad, of_definition in zip(computed, due, strict=True):
        close(ours_grad, of_definition,
              SHARE[dtype] * 2)     # in bf16, the hidden layer is rounded, too
