"""Other libraries' kernels under the arguments of the kit's own: PEERS of `lpkit bench kernels`,
which holds each against the definition before it is timed.

A peer gives as many of the definition's results as it has, the first ones: none counts what is not
finite. What torchao writes for torch.compile is compiled on a GPU, as torchao runs it. A case that
a library lacks raises ConfigError, and a library that is missing ImportError. Its optimizers change
a weight where it lies, so copies would be timed with Transformer Engine's; compiled, torchao's
copies vanish.

https://github.com/linkedin/Liger-Kernel at 0.8.5, https://github.com/Dao-AILab/quack at 0.5,
https://github.com/pytorch/ao at 0.18, https://github.com/NVIDIA/TransformerEngine at d0067d0.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lpkit.errors import ConfigError
from lpkit.kernels.choose import compiled, why_not
from lpkit.kernels.kernel import Version
from lpkit.kernels.scales import stored_dtype
from lpkit.nn.attention import sdpa
from lpkit.nn.library_attention import flash_attn
from lpkit.techniques.attention import Rule
from lpkit.techniques.formats import format_of
from lpkit.techniques.recipes import Cast

POWERS = {"float32": False, "power-of-two": True}
NEAR = 0.02             # of the norm: bf16 results that were rounded on the way
Results = tuple[Tensor, ...]


def far(got: list[Tensor], want: list[Tensor]) -> str:
    """Where another library's results are not those of the definition within NEAR, or empty. It may
    round in between, and lack the last ones."""
    if not 0 < len(got) <= len(want):
        return f"{len(got)} results and gradients where the definition has {len(want)}"
    for i, (ours, theirs) in enumerate(zip(got, want), 1):
        which = f"result {i} of {len(want)}"
        if ours.shape != theirs.shape:
            return f"{which}: {tuple(ours.shape)} where the definition has {tuple(theirs.shape)}"
        error = torch.dist(ours.double(), theirs.double()) / theirs.double().norm().clamp(min=1e-30)
        if not error < NEAR:
            return f"{which} differs from the definition by {error:.3g} of it"
    return ""


def _lacks(what: str, *asked: object) -> None:
    """Raises ConfigError where something of `what` is asked for."""
    if any(option is not None and option is not False for option in asked):
        raise ConfigError(f"it has no {what}; a peer in other cases")


def _in_triton(x: Tensor) -> None:
    """Raises ConfigError where Triton does not run."""
    if why := why_not("triton", [(x,)]):
        raise ConfigError(f"its kernel is Triton's, which {why}")


def _dtype(cast: Cast) -> torch.dtype:
    return stored_dtype(format_of(cast.format))


def _both(data: Tensor | bool, turned: Tensor | bool, scale: Tensor) -> Results:
    """Values and scale of each way that was asked for; False: it was not."""
    return tuple(t for values in (data, turned) if values is not False for t in (values, scale))


# ---- torchao

def _fused(function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
    return compiled(function, x, *arguments) if x.is_cuda else function(x, *arguments)


def _torchao_amax(x: Tensor) -> Results:
    from torchao.float8.float8_utils import tensor_to_amax

    return (tensor_to_amax(x).float(),)


torchao_amax = partial(_fused, _torchao_amax)


def _scaled(x: Tensor, dtype: torch.dtype, powers: bool, axis: int | None,
            turned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Values as they lie, transposed where `turned`, and the scale."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    by = ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE
    scale = tensor_to_scale(x, dtype, scaling_granularity=by, axiswise_dim=axis,
                            round_scales_to_power_of_2=powers)
    data = to_fp8_saturated(x.float() * scale, dtype)
    return data, data.T.contiguous() if turned else data, scale.reciprocal()


def torchao_tensor(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                   history: Tensor | None, noise: Tensor | None) -> Results:
    _lacks("history and no stochastic rounding", history, noise)
    data, turned, scale = _fused(_scaled, x, _dtype(cast), POWERS[cast.scale], None, columns)
    return _both(rows and data, columns and turned, scale.view(1, 1))


def torchao_tensor_triton(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                          history: Tensor | None, noise: Tensor | None) -> Results:
    """Both ways by one read, after one for the amax."""
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.float8nocompile.kernels.fp8_dynamic_tensorwise import (
        hp_to_fp8_row_major_t_and_non_t,
    )

    _lacks("history, no stochastic rounding and no scale that is a power of two", history, noise,
           POWERS[cast.scale])
    _in_triton(x)
    plain, turned = hp_to_fp8_row_major_t_and_non_t(x, _dtype(cast), LinearMMConfig())
    scale = plain._scale.reciprocal().view(1, 1)
    return _both(rows and plain._data, columns and turned._data, scale)


def torchao_rows(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                 history: Tensor | None, noise: Tensor | None) -> Results:
    _lacks("stochastic rounding", noise)
    _, turned, scale = _fused(_scaled, x, _dtype(cast), POWERS[cast.scale],
                              0 if columns else 1, columns)
    return turned, scale.T if columns else scale


def torchao_blocks(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                   history: Tensor | None, noise: Tensor | None) -> Results:
    """By a read for each way. Its kernels for weights are named by how they are multiplied."""
    from torchao.prototype.blockwise_fp8_training import kernels

    _lacks("stochastic rounding and no scale that is a power of two", noise, POWERS[cast.scale])
    _in_triton(x)
    results, square, side = [], cast.block[0] > 1, cast.block[1]
    if rows:
        results += ([t.T for t in kernels.triton_fp8_blockwise_weight_quant_transposed_rhs(x, side)]
                    if square else kernels.triton_fp8_blockwise_act_quant_lhs(x, side))
    if columns:
        results += ([t.T for t in kernels.triton_fp8_blockwise_weight_quant_rhs(x, side)]
                    if square else kernels.triton_fp8_blockwise_act_quant_transposed_lhs(x, side))
    return tuple(results)


def _to_mx(x: Tensor, dtype: torch.dtype, side: int, rule: str, swizzled: bool) -> Results:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    mode = {"power-of-two": ScaleCalculationMode.RCEIL,
            "power-of-two-floor": ScaleCalculationMode.FLOOR}[rule]
    scale, data = to_mx(x, dtype, side, mode, swizzled)
    return data, scale.flatten() if swizzled else scale


def torchao_mx(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
               history: Tensor | None, noise: Tensor | None) -> Results:
    _lacks("stochastic rounding", noise)
    given = [x] * rows + [x.T.contiguous()] * columns
    return sum((_fused(_to_mx, operand, _dtype(cast), cast.block[1], cast.scale, swizzled)
                for operand in given), ())


def torchao_mx_cuda(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                    history: Tensor | None, noise: Tensor | None) -> Results:
    """Both ways by one read; on Blackwell."""
    from torchao.prototype.mx_formats.kernels import mxfp8_quantize_cuda

    _lacks("stochastic rounding", noise)
    mode = {"power-of-two": "rceil", "power-of-two-floor": "floor"}[cast.scale]
    data, turned, scale, turned_scale = mxfp8_quantize_cuda(x, rows, columns, mode)
    results = [data, scale.squeeze(-1)] * rows + [turned.T, turned_scale] * columns
    return tuple(_blocked(t) if swizzled and i % 2 else t for i, t in enumerate(results))


def _blocked(scale: Tensor) -> Tensor:
    from torchao.prototype.mx_formats.utils import to_blocked

    return to_blocked(scale)


def _nvfp4(x: Tensor, swizzled: bool) -> Results:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    tensor = per_tensor_amax_to_scale(x.abs().amax())
    scale, data = nvfp4_quantize(x, per_tensor_scale=tensor)
    scale = scale.view(len(x), -1)
    return data, _blocked(scale).flatten() if swizzled else scale, tensor


def torchao_nvfp4(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
                  history: Tensor | None, noise: Tensor | None) -> Results:
    _lacks("stochastic rounding, no square blocks and no transform", noise, cast.block[0] > 1,
           cast.transform != "none")
    given = [x] * rows + [x.T.contiguous()] * columns
    casts = [_fused(_nvfp4, operand, swizzled) for operand in given]
    return *(t for pair in casts for t in pair[:2]), casts[-1][2]


def _adamw(w: Tensor, *arguments: Any) -> Results:
    from torchao.optim.adam import single_param_adam

    g, m, v, *others = arguments
    new = [t.clone() for t in (w, m, v)]
    single_param_adam(new[0], g, others[0], *new[1:], None, *others[1:])
    return tuple(new)


def torchao_adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, bits: Tensor | None, settings: Any,
                  update: int) -> Results:
    """Rounds with bits of its own."""
    step, lr = torch.tensor(float(update)), torch.tensor(settings.lr)
    return _fused(_adamw, w, g, m, v, step, lr, settings.beta1, settings.beta2,
                  settings.weight_decay, settings.eps, True, bits is not None)


# ---- Transformer Engine

def _te(name: str) -> Any:
    """`module:name` of its package, which loads what `_tex` needs."""
    return resolve_name(f"transformer_engine.pytorch{name}")


def _tex() -> Any:
    _te("")
    return resolve_name("transformer_engine_torch")


def te_amax(x: Tensor) -> Results:
    amax = x.new_zeros(1, dtype=torch.float32)
    _tex().compute_amax(x, amax)
    return (amax.view(()),)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, b: Tensor | None, eps: float) -> Tensor:
        tex, to = _tex(), _te(".constants:TE_DType")[x.dtype]
        how = (eps, None, None, to, 0, False)
        y, mean, r = (tex.rmsnorm_fwd(x, w, *how) if b is None
                      else tex.layernorm_fwd(x, w, b, *how))
        ctx.save_for_backward(x, mean, r, w)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        tex, (x, mean, r, w) = _tex(), ctx.saved_tensors
        if mean is None:
            return *tex.rmsnorm_bwd(dy, x, r, w, 0, False), None, None
        return *tex.layernorm_bwd(dy, x, mean, r, w, 0, False), None


def te_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, w.to(x.dtype), None, eps)     # its weight has x's dtype


def te_layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, w.to(x.dtype), b.to(x.dtype), eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _tex().swiglu(x, None)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return _tex().dswiglu(dy, *ctx.saved_tensors, None)


te_swiglu = _SwiGLU.apply


def te_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """It takes angles, tokens before heads."""
    angles = torch.atan2(sin.float(), cos.float())[:, None, None]
    turn = _te(".attention.rope:apply_rotary_pos_emb")
    return turn(x.transpose(1, 2), angles, tensor_format="bshd", fused=True).transpose(1, 2)


def te_cross_entropy(logits: Tensor, targets: Tensor) -> Results:
    """The gradient in float32, in a place of its own."""
    forward = _te(".triton.cross_entropy:cross_entropy_forward")
    nats, gradient = forward(logits[None], targets[None], 0.0, False, None, -100)
    return nats[0], gradient[0]


def _quantised(x: Tensor, quantizer: str, *arguments: Any, **settings: Any) -> Any:
    """Scales as products read them, without the wrapper that autograd would need."""
    built = _te(f":{quantizer}")(*arguments, **settings)
    built.internal = built.optimize_for_gemm = True
    return _tex().quantize(x, built)


def te_tensor(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
              history: Tensor | None, noise: Tensor | None) -> Results:
    _lacks("stochastic rounding", noise)
    to, dtype, amax = format_of(cast.format), _dtype(cast), x.new_zeros(1).float()
    ways, of = {"rowwise": rows, "columnwise": columns}, _te(".constants:TE_DType")[dtype]
    if history is None:
        quantised = _quantised(x, "Float8CurrentScalingQuantizer", of, x.device, **ways,
                               force_pow_2_scales=POWERS[cast.scale])
    else:
        _lacks("history under a scale that is a power of two", POWERS[cast.scale])
        quantised = _quantised(x, "Float8Quantizer", to.largest / history.view(1), amax, of, **ways)
    _lacks("transpose on a GPU that multiplies either way",
           columns and quantised._transpose is None)
    return (*_both(rows and quantised._data.view(dtype),
                   columns and quantised._transpose.view(dtype),
                   quantised._scale_inv.view(1, 1)), *[amax.view(())] * (history is not None))


def _ways(quantised: Any, rows: bool, columns: bool) -> list[tuple[Tensor, Tensor]]:
    """Values and scales, as they lie and of x.T."""
    return ([(quantised._rowwise_data, quantised._rowwise_scale_inv)] * rows
            + [(quantised._columnwise_data, quantised._columnwise_scale_inv)] * columns)


def te_blocks(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
              history: Tensor | None, noise: Tensor | None) -> Results:
    """Scales of 1 x 128 lie column by column, and all are padded to four."""
    _lacks("stochastic rounding", noise)
    (down, side), dtype, results = cast.block, _dtype(cast), []
    square = down > 1
    quantised = _quantised(x, "Float8BlockQuantizer", _te(".constants:TE_DType")[dtype],
                           rowwise=rows, columnwise=columns, force_pow_2_scales=POWERS[cast.scale],
                           block_scaling_dim=1 + square)
    for data, scale in _ways(quantised, rows, columns):
        R, C = data.shape
        scale = scale[:R // side, :C // side] if square else scale.T[:R]
        results += [data.view(dtype), scale]
    return tuple(results)


def te_mx(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
          history: Tensor | None, noise: Tensor | None) -> Results:
    """Values of x.T lie as those of x."""
    _lacks("stochastic rounding, and scales as products read them alone", noise, not swizzled)
    _lacks("scale under which the largest saturates", cast.scale != "power-of-two")
    dtype = _dtype(cast)
    quantised = _quantised(x, "MXFP8Quantizer", _te(".constants:TE_DType")[dtype], rowwise=rows,
                           columnwise=columns)
    results = [t for pair in _ways(quantised, rows, columns) for t in pair]
    results[::2] = [t.view(dtype) for t in results[::2]]
    results[1::2] = [t.view(torch.float8_e8m0fnu).flatten() for t in results[1::2]]
    if columns:
        results[-2] = results[-2].T
    return tuple(results)


def te_nvfp4(x: Tensor, cast: Cast, rows: bool, columns: bool, swizzled: bool,
             history: Tensor | None, noise: Tensor | None) -> Results:
    _lacks("rounding by given noise, and scales as products read them alone", noise, not swizzled)
    _lacks("least scale that is normal", cast.scale != "e4m3")
    mix, square = cast.transform != "none", cast.block[0] > 1
    quantised = _quantised(x, "NVFP4Quantizer", rowwise=rows, columnwise=columns, with_rht=mix,
                           with_post_rht_amax=mix, with_2d_quantization=square)
    results = [t for pair in _ways(quantised, rows, columns) for t in pair]
    results[1::2] = [t.view(torch.float8_e4m3fn).flatten() for t in results[1::2]]
    top = quantised._amax_columnwise if mix else quantised._amax_rowwise
    return *results, top.view(()) / (6 * 448)


# ---- Liger

def liger(name: str, implementation: str = "") -> Any:
    """Of Liger's operators, `module:name`; of `implementation`, what LIGER_KERNEL_IMPL would select
    for a whole process. Raises ImportError."""
    module, _, what = name.partition(":")
    return resolve_name(
        f"liger_kernel.ops.{f'{implementation}.ops' if implementation else module}:{what}")


def liger_rms_norm(x: Tensor, w: Tensor, eps: float, implementation: str = "") -> Tensor:
    # all of it in float32, and dx in a place of its own
    return liger("rms_norm:LigerRMSNormFunction", implementation).apply(x, w, eps, 0.0, "gemma",
        False)


def liger_layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    return liger("layer_norm:LigerLayerNormFunction").apply(x, w, b, eps)


def liger_add_rms_norm(x: Tensor, delta: Tensor, w: Tensor, eps: float) -> Results:
    y, s = liger("fused_add_rms_norm:LigerFusedAddRMSNormFunction").apply(x, delta, w, eps, 0.0,
        "gemma", False)
    return s, y


def liger_swiglu(x: Tensor, implementation: str = "") -> Tensor:
    return liger("swiglu:LigerSiLUMulFunction", implementation).apply(*x.chunk(2, -1))


def liger_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """It turns q and k together, in place: k is one head here."""
    function = liger("rope:LigerRopeFunction")
    return function.apply(x.clone(), x[:, :1].clone(), cos[None], sin[None])[0]


def liger_in_place(logits: Tensor, targets: Tensor, implementation: str = "") -> Results:
    forward = liger("cross_entropy:cross_entropy_forward", implementation)
    # without requires_grad it makes no gradient
    nats, *_, gradient = forward(logits.detach().requires_grad_(), targets, None, -100, 0.0, 0.0,
                                 "none", None, False)
    return nats.float(), gradient.detach()


def liger_cross_entropy(logits: Tensor, targets: Tensor, implementation: str = "") -> Results:
    return liger_in_place(logits.clone(), targets, implementation)


# ---- QuACK

def quack_rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, w, eps=eps)


def quack_add_rms_norm(x: Tensor, delta: Tensor, w: Tensor, eps: float) -> Results:
    from quack.rmsnorm import rmsnorm

    y, s = rmsnorm(delta, w, residual=x, eps=eps, prenorm=True)
    return s, y


def quack_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    from quack.rotary import apply_rotary_emb

    half = x.shape[-1] // 2         # tokens before heads, and an angle for each pair
    return apply_rotary_emb(x.transpose(1, 2), cos[:, :half], sin[:, :half]).transpose(1, 2)


def quack_cross_entropy(logits: Tensor, targets: Tensor) -> Results:
    from quack.cross_entropy import cross_entropy_fwd

    return cross_entropy_fwd(logits, targets, return_dx=True)


# ---- attention

def torch_attention(by: SDPBackend, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
                    sinks: Tensor | None, rule: Rule) -> Tensor:
    with sdpa_kernel(by):       # PyTorch raises an error if this kernel cannot
        return sdpa(q, k, v, documents, sinks, rule=rule)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None,
                    sinks: Tensor | None, rule: Rule) -> Tensor:
    return flash_attn(q, k, v, documents, sinks, rule=rule)


CUTEDSL = "liger, cutedsl"
PEERS: dict[str, Mapping[str, Version]] = {
    "rms-norm": {"liger": liger_rms_norm, "quack": quack_rms_norm,
                 CUTEDSL: partial(liger_rms_norm, implementation="cutedsl"),
                 "transformer-engine": te_rms_norm},
    "layer-norm": {"liger": liger_layer_norm, "transformer-engine": te_layer_norm},
    "add-rms-norm": {"liger": liger_add_rms_norm, "quack": quack_add_rms_norm},
    "swiglu": {"liger": liger_swiglu, CUTEDSL: partial(liger_swiglu, implementation="cutedsl"),
               "transformer-engine": te_swiglu},
    "rotary": {"liger": liger_rotary, "quack": quack_rotary, "transformer-engine": te_rotary},
    "cross-entropy": {"liger": liger_cross_entropy,
                      CUTEDSL: partial(liger_cross_entropy, implementation="cutedsl"),
                      "quack": quack_cross_entropy, "transformer-engine": te_cross_entropy},
    "flash-attention": {"sdpa, flash": partial(torch_attention, SDPBackend.FLASH_ATTENTION),
                        "sdpa, cudnn": partial(torch_attention, SDPBackend.CUDNN_ATTENTION),
                        "flash-attn": flash_attention},
    "amax": {"torchao": torchao_amax, "transformer-engine": te_amax},
    "cast-tensor": {"torchao": torchao_tensor, "torchao, triton": torchao_tensor_triton,
                    "transformer-engine": te_tensor},
    "cast-rows": {"torchao": torchao_rows},
    "cast-blocks": {"torchao": torchao_blocks, "transformer-engine": te_blocks},
    "cast-mx": {"torchao": torchao_mx, "torchao, cuda": torchao_mx_cuda,
                "transformer-engine": te_mx},
    "cast-nvfp4": {"torchao": torchao_nvfp4, "transformer-engine": te_nvfp4},
    "adamw": {"torchao": torchao_adamw},
}
