"""Models that are not the kit's: small ones of transformers' classes and of PyTorch's modules, and a batch for each."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LAYERS, HEADS = 512, 64, 2, 4


class NanoBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (t.view(B, T, HEADS, -1).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(WIDTH, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, WIDTH))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Nano(nn.Module):
    """A GPT as loops of one file have it: a tied head, and the loss where targets are given."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(NanoBlock() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


def _transformers(kind: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind[:kind.index('For') if 'For' in kind else kind.index('LMHead')]}Config")
    return getattr(transformers, kind)(config(**settings))


LLAMA = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BERT = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
MODELS = {
    "gpt2": lambda: _transformers("GPT2LMHeadModel", vocab_size=VOCAB, n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=64, bos_token_id=1,
                                  eos_token_id=2),
    "llama": lambda: _transformers("LlamaForCausalLM", **LLAMA),
    "qwen3": lambda: _transformers("Qwen3ForCausalLM", head_dim=16, **LLAMA),
    "gemma": lambda: _transformers("GemmaForCausalLM", head_dim=16, **LLAMA),
    "mistral": lambda: _transformers("MistralForCausalLM", **LLAMA),
    "phi": lambda: _transformers("PhiForCausalLM", **LLAMA),
    "olmo": lambda: _transformers("OlmoForCausalLM", **LLAMA),
    "bert": lambda: _transformers("BertForMaskedLM", vocab_size=VOCAB, **BERT),
    "t5": lambda: _transformers("T5ForConditionalGeneration", vocab_size=VOCAB, d_model=WIDTH, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=HEADS, d_kv=16,
                                decoder_start_token_id=0),
    "vit": lambda: _transformers("ViTForImageClassification", image_size=32, patch_size=8, num_labels=10, **BERT),
    "mamba": lambda: _transformers("MambaForCausalLM", vocab_size=VOCAB, hidden_size=WIDTH, state_size=16, num_hidden_layers=LAYERS, bos_token_id=1,
                                   eos_token_id=2, pad_token_id=0),
    "nano": Nano,
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True), LAYERS),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)),
}
HEAD_OF = {"bert": "cls.predictions.decoder", "vit": None, "encoder": None, "mlp": None}      # else lm_head


def model_of(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().train()


def batch_of(name: str, sequences: int = 4, tokens: int = 32, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (sequences, tokens), generator=g)
    others = {"vit": lambda: {"pixel_values": torch.randn(sequences, 3, 32, 32, generator=g), "labels": ids[:, 0] % 10},
              "nano": lambda: (ids, ids), "encoder": lambda: torch.randn(sequences, tokens, WIDTH, generator=g),
              "mlp": lambda: torch.randn(sequences * tokens, WIDTH, generator=g)}
    return others.get(name, lambda: {"input_ids": ids, "labels": ids})()


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def loss_for(name: str) -> Any:
    """What `lpkit.predict` is given: PyTorch's own modules return no loss."""
    return squares if name in ("encoder", "mlp") else None
