"""Models that are not written with the kit: small models of transformers classes and of PyTorch
modules, and a batch for each."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    vocab: int = 512
    width: int = 64
    layers: int = 2
    heads: int = 4
    context: int = 64
    image: int = 32


SMALL = Size()
VOCAB, WIDTH = SMALL[:2]


class NanoBlock(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width, self.heads = size.width, size.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(self.ln_1(x)).split(D, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Nano(nn.Module):
    """A GPT as in single-file training loops: a tied head, and a loss if targets are given."""

    def __init__(self, size: Size = SMALL):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(size.vocab, size.width), nn.Embedding(size.context,
            size.width)
        self.h = nn.ModuleList(NanoBlock(size) for _ in range(size.layers))
        self.ln_f, self.lm_head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocab,
            bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def _transformers(kind: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers,
                     f"{kind[:kind.index('For') if 'For' in kind else kind.index('LMHead')]}Config")
    return getattr(transformers, kind)(config(**settings))


def _llama(kind: str, s: Size, **more: Any) -> nn.Module:
    return _transformers(f"{kind}ForCausalLM", vocab_size=s.vocab, hidden_size=s.width,
                         intermediate_size=2 * s.width, num_hidden_layers=s.layers,
                         num_attention_heads=s.heads, num_key_value_heads=s.heads // 2,
                         max_position_embeddings=s.context, bos_token_id=1,
                         eos_token_id=2, pad_token_id=0, **more)


def _bert(s: Size) -> dict[str, int]:
    return {"hidden_size": s.width, "intermediate_size": 2 * s.width, "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads}


MODELS = {
    "gpt2": lambda s=SMALL: _transformers("GPT2LMHeadModel", vocab_size=s.vocab, n_layer=s.layers,
        n_embd=s.width, n_head=s.heads,
                                          n_positions=s.context, bos_token_id=1, eos_token_id=2),
    "llama": lambda s=SMALL: _llama("Llama", s),
    "qwen3": lambda s=SMALL: _llama("Qwen3", s, head_dim=s.width // s.heads),
    "gemma": lambda s=SMALL: _llama("Gemma", s, head_dim=s.width // s.heads),
    "mistral": lambda s=SMALL: _llama("Mistral", s),
    "phi": lambda s=SMALL: _llama("Phi", s),
    "olmo": lambda s=SMALL: _llama("Olmo", s),
    "bert": lambda s=SMALL: _transformers("BertForMaskedLM", vocab_size=s.vocab, **_bert(s)),
    "t5": lambda s=SMALL: _transformers("T5ForConditionalGeneration", vocab_size=s.vocab,
        d_model=s.width, d_ff=2 * s.width, num_layers=s.layers,
                                        num_heads=s.heads, d_kv=s.width // s.heads,
        decoder_start_token_id=0),
    "vit": lambda s=SMALL: _transformers("ViTForImageClassification", image_size=s.image,
        patch_size=8, num_labels=10, **_bert(s)),
    "mamba": lambda s=SMALL: _transformers("MambaForCausalLM", vocab_size=s.vocab,
        hidden_size=s.width, state_size=16, num_hidden_layers=s.layers,
                                           bos_token_id=1, eos_token_id=2, pad_token_id=0),
    "nano": Nano,
    "encoder": lambda s=SMALL: nn.TransformerEncoder(nn.TransformerEncoderLayer(s.width, s.heads,
        2 * s.width, batch_first=True), s.layers),
    "mlp": lambda s=SMALL: nn.Sequential(nn.Linear(s.width, 2 * s.width), nn.GELU(),
        nn.Linear(2 * s.width, s.width)),
}
# else lm_head
HEAD_OF = {"bert": "cls.predictions.decoder", "vit": None, "encoder": None, "mlp": None}


def model_of(name: str, seed: int = 0, size: Size = SMALL) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name](size).train()


def batch_of(name: str, sequences: int = 4, tokens: int = 32, seed: int = 0,
             size: Size = SMALL) -> Any:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, size.vocab, (sequences, tokens), generator=g)
    others = {"vit": lambda: {"pixel_values": torch.randn(sequences, 3, size.image, size.image,
        generator=g), "labels": ids[:, 0] % 10},
              "nano": lambda: (ids, ids), "encoder": lambda: torch.randn(sequences, tokens,
                  size.width, generator=g),
              "mlp": lambda: torch.randn(sequences * tokens, size.width, generator=g)}
    return others.get(name, lambda: {"input_ids": ids, "labels": ids})()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def loss_for(name: str) -> Any:
    """Return the loss function for `lpkit.predict`: PyTorch's own modules return no loss."""
    return squares if name in ("encoder", "mlp") else None
