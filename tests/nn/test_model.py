"""The model against an independent one: transformers' GPT-2, Llama, Qwen2 and Qwen3 with the same
random weights.

Only these tests catch: a logit, a gradient or a distribution of first weights that is not that of
transformers' model.
"""

from dataclasses import replace

import pytest
import torch

from lpkit.config import ModelConfig
from lpkit.errors import ConfigError
from lpkit.nn.layers import RotaryPositions
from lpkit.nn.transformer import Transformer
from lpkit.techniques.inits import INITS

GPT2 = ModelConfig(layers=2, width=96, heads=6, vocab=100, context=40)
LLAMA = ModelConfig(layers=2, width=96, heads=6, kv_heads=2, mlp_width=128, vocab=100, context=40,
                    norm="rmsnorm",
                    norm_eps=1e-5, position="rope", rope_theta=5e5, mlp="swiglu", bias=False,
                    tied=False, init="llama")
QWEN2 = replace(LLAMA, qkv_bias=True, tied=True)
QWEN3 = replace(LLAMA, head_dim=20, qk_norm=True)       # width 96 is not 6 heads of 20
# float32 rounding: 2 layers of sums over at most 4 * 96 terms, logits of order 1.
ROUNDING = dict(rtol=0, atol=5e-6)


def theirs_gpt2(config: ModelConfig):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=config.V, n_positions=config.T, n_embd=config.D, n_layer=config.L,
        n_head=config.H,
        n_inner=config.F, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0,
        eos_token_id=0)).eval()


def like_llama(family: str, **settings):
    """A builder of one of the families of models that transformers describes by Llama's settings
    and some more."""

    def build(config: ModelConfig):
        import transformers

        return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers,
            f"{family}Config")(
            vocab_size=config.V, max_position_embeddings=config.T, hidden_size=config.D,
            num_hidden_layers=config.L,
            num_attention_heads=config.H, num_key_value_heads=config.G, intermediate_size=config.F,
            rms_norm_eps=config.norm_eps, rope_parameters={"rope_type": "default",
                "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied, pad_token_id=0, bos_token_id=0, eos_token_id=0,
            **settings)).eval()

    return build


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_slow_pairs_are_slowed_down_as_in_llama_3(factor):
    """One token on, an angle is a speed: to some roundings of float32."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours = ModelConfig(position="rope", width=512, heads=4, rope_theta=5e5, rope_factor=factor)
    theirs = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters={
        "rope_type": "llama3", "rope_theta": 5e5, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192})
    speeds, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    cos, sin = RotaryPositions(ours).rotation(1, 1, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(torch.atan2(sin, cos)[0, :64].float(), speeds, rtol=2e-6, atol=0)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Rows of separate q, k, v in the order of `Attention.qkv`."""
    parts = [t.unflatten(0, (config.G, -1, config.E)) for t in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def weights_gpt2(model, config) -> dict[str, torch.Tensor]:
    out = {"embed.weight": model.transformer.wte.weight,
           "positions.embed.weight": model.transformer.wpe.weight,
           "norm.weight": model.transformer.ln_f.weight, "norm.bias": model.transformer.ln_f.bias,
           "head.weight": model.transformer.wte.weight}
    for i, block in enumerate(model.transformer.h):
        ours = f"blocks.{i}."
        for kind in ("weight", "bias"):
            turn = (lambda t: t.mT) if kind == "weight" else (lambda t: t)   # GPT-2 keeps (in, out)
            out[ours + f"norm1.{kind}"] = getattr(block.ln_1, kind)
            out[ours + f"norm2.{kind}"] = getattr(block.ln_2, kind)
            qkv = turn(getattr(block.attn.c_attn, kind)).chunk(3)
            out[ours + f"attention.qkv.{kind}"] = grouped(*qkv, config)
            out[ours + f"attention.out.{kind}"] = turn(getattr(block.attn.c_proj, kind))
            out[ours + f"mlp.up.{kind}"] = turn(getattr(block.mlp.c_fc, kind))
            out[ours + f"mlp.down.{kind}"] = turn(getattr(block.mlp.c_proj, kind))
    return out


def weights_llama(model, config) -> dict[str, torch.Tensor]:
    out = {"embed.weight": model.model.embed_tokens.weight, "norm.weight": model.model.norm.weight,
           "head.weight": model.lm_head.weight}
    for i, block in enumerate(model.model.layers):
        ours, a, m = f"blocks.{i}.", block.self_attn, block.mlp
        out[ours + "norm1.weight"] = block.input_layernorm.weight
        out[ours + "norm2.weight"] = block.post_attention_layernorm.weight
        for kind in ("weight", "bias") if config.biased_qkv else ("weight",):
            out[ours + f"attention.qkv.{kind}"] = grouped(
                *(getattr(part, kind) for part in (a.q_proj, a.k_proj, a.v_proj)), config)
        out[ours + "attention.out.weight"] = a.o_proj.weight
        if config.qk_norm:
            out[ours + "attention.q_norm.weight"] = a.q_norm.weight
            out[ours + "attention.k_norm.weight"] = a.k_norm.weight
        out[ours + "mlp.gate_up.weight"] = torch.cat((m.gate_proj.weight, m.up_proj.weight))
        out[ours + "mlp.down.weight"] = m.down_proj.weight
    return out


PAIRS = {
    "gpt2": (GPT2, theirs_gpt2, weights_gpt2), "llama": (LLAMA, like_llama("Llama"), weights_llama),
    "qwen2": (QWEN2, like_llama("Qwen2"), weights_llama),
    "qwen3": (QWEN3, like_llama("Qwen3", head_dim=QWEN3.head_dim), weights_llama),
}


@pytest.fixture(params=PAIRS)
def pair(request):
    config, build, weights = PAIRS[request.param]
    torch.manual_seed(1)
    theirs, ours = build(config), Transformer(config)
    with torch.no_grad():
        # biases and gains too, so that none hides behind a zero or a one
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.05 + (p.ndim == 1))
    missing = ours.load_state_dict({k: v.detach().clone()
                                    for k, v in weights(theirs, config).items()}, strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return ours, theirs


def test_logits_equal_the_reference(pair):
    ours, theirs = pair
    tokens = torch.randint(0, 100, (3, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, **ROUNDING)


def test_gradients_equal_the_reference(pair):
    ours, theirs = pair
    tokens = torch.randint(0, 100, (2, 20), generator=torch.Generator().manual_seed(0))
    for model in pair:
        logits = model(tokens) if model is ours else model(tokens).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1),
            tokens[:, 1:].flatten()).backward()
    config, weights = ours.config, weights_gpt2 if hasattr(theirs, "transformer") else weights_llama
    for p in theirs.parameters():
        p.data = p.grad
    want = weights(theirs, config)
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-6)


def test_a_head_may_be_wider_than_its_share_of_the_width():
    """Gemma-7B at a twelfth of its width: 16 heads of 256 numbers over a width of 3,072. Its MLP is
    gated by a gelu, of swiglu's size."""
    ours = ModelConfig(layers=2, width=256, heads=16, head_dim=24, mlp_width=2048, vocab=100,
                       context=40, norm="rmsnorm",
                       position="rope", mlp="swiglu", bias=False)
    theirs = like_llama("Gemma", head_dim=ours.head_dim)(ours)
    assert (sum(p.numel() for p in Transformer(ours).parameters())
            == sum(p.numel() for p in theirs.parameters()))
    with pytest.raises(ConfigError,
                       match=r"model\.width=256 is not a multiple of model\.heads=12; .* or set "
                             r"model\.head_dim"):
        replace(ours, heads=12, head_dim=None)
    with pytest.raises(ConfigError,
                       match=r"a head has 25 numbers; set model\.head_dim, or width/heads, to an"):
        replace(ours, head_dim=25)


@pytest.mark.parametrize("name", PAIRS)
def test_initialisation_is_the_reference_distribution(name):
    """Same standard deviation per kind of weight: 4 standard errors of a normal sample, 1/sqrt(2n)
    each."""
    config, build, weights = PAIRS[name]
    torch.manual_seed(0)
    want, ours = weights(build(config), config), Transformer(config)
    INITS[config.init.name].load()(ours)
    for key, p in ours.named_parameters():
        std, n = want[key].std().item(), p.numel()
        assert p.mean().item() == pytest.approx(want[key].mean().item(), abs=6 * 0.02 / n**0.5), key
        assert p.std().item() == pytest.approx(std, rel=6 / (2 * n) ** 0.5 if std else 0,
            abs=0), key


def test_too_many_tokens_are_refused():
    with pytest.raises(ConfigError, match=r"41 tokens do not fit model.context=40"):
        Transformer(GPT2)(torch.zeros(1, 41, dtype=torch.long))
