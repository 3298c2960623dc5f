"""A language model from nothing, at the sizes of CS336's first assignment (4 heads of 16, 128 wide
MLPs, 3 layers), beside float64 by hand."""

import collections
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lpkit.config import ModelConfig
from lpkit.datasets.tokenizers import BPE
from lpkit.memory.update import after
from lpkit.nn.attention import plain, sdpa
from lpkit.nn.layers import RMSNorm
from lpkit.nn.transformer import Transformer, cross_entropy
from lpkit.techniques.attention import Rule
from lpkit.techniques.schedules import SCHEDULES, schedule

B, T, D, H, WIDE, V, L = 4, 12, 64, 4, 128, 1000, 3
MODEL = {"layers": L, "width": D, "heads": H, "mlp_width": WIDE, "vocab": V, "context": 16,
         "norm": "rmsnorm", "position": "rope", "mlp": "swiglu",
         "bias": False, "tied": False}
GPT = {**MODEL, "norm": "layernorm", "position": "learned", "mlp": "gelu", "bias": True}
STYLES = {"llama": MODEL, "gpt": GPT, "grouped": {**MODEL, "kv_heads": 2},
          "tied": {**MODEL, "tied": True}, "normed": {**MODEL, "qk_norm": True}}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, due: torch.Tensor, share: float = 1e-5) -> None:
    assert (found.shape == due.shape and (found.double() - due).abs().max() <= share
            * due.abs().max())


def model_of(style: str, seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**STYLES[style]), sdpa)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.1)
    return model.eval()


def by_hand(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """Logits in float64, from the weights alone."""
    c, w = model.config, {name: p.detach().double() for name, p in model.state_dict().items()}
    E, G = c.E, c.G

    def norm(x, name):
        if c.norm == "rmsnorm":
            return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * w[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        return (centred / (centred.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
                * w[f"{name}.weight"] + w[f"{name}.bias"])

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rope(x):
        angles = torch.arange(x.shape[-2]).double()[:,
            None] * c.rope_theta ** (-torch.arange(0, E, 2).double() / E)
        turned = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), dim=-1)

    def attention(x, name):
        # rows of the product by group: its queries, its key, its value
        heads = linear(x, f"{name}.qkv").unflatten(-1, (G, c.H // G + 2, E)).permute(0, 2, 3, 1, 4)
        q, k, v = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
        if c.qk_norm:
            q, k = (t / (t.square().mean(-1, keepdim=True) + c.norm_eps).sqrt()
                    * w[f"{name}.{which}_norm.weight"] for t, which in ((q, "q"), (k, "k")))
        if c.position == "rope":
            q, k = rope(q), rope(k)
        scores = q @ k.mT / math.sqrt(E)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        return linear(out.flatten(1, 2).transpose(1, 2).flatten(2), f"{name}.out")

    def mlp(x, name):
        if c.mlp == "swiglu":
            gate, up = linear(x, f"{name}.gate_up").chunk(2, dim=-1)
            return linear(gate * gate.sigmoid() * up, f"{name}.down")
        h = linear(x, f"{name}.up")
        return linear(0.5 * h * (1 + torch.tanh((2 / torch.pi)**0.5 * (h + 0.044715 * h**3))),
                      f"{name}.down")

    x = w["embed.weight"][tokens]
    if c.position == "learned":
        x = x + w["positions.embed.weight"][:tokens.shape[1]]
    for i in range(c.L):
        x = x + attention(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attention")
        x = x + mlp(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp")
    return norm(x, "norm") @ w["head.weight"].T


@pytest.mark.parametrize("length", [1, 12, 16])
@pytest.mark.parametrize("style", STYLES)
def test_a_language_model_and_a_truncated_text(style, length):
    model, tokens = model_of(style), torch.randint(V, (B, length),
        generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        close(model(tokens), by_hand(model, tokens), 2e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rmsnorm_of_small_and_large_numbers(scale):
    norm, x = RMSNorm(D, eps=1e-5), drawn(B, T, D) * scale
    norm.weight.data.copy_(drawn(D, seed=1))
    close(norm(x).detach(), x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
          * norm.weight.detach().double())


@pytest.mark.parametrize("shift, causal", [(100.0, False), (-1e4, True)])
@pytest.mark.parametrize("attend", [plain, sdpa], ids=["plain", "sdpa"])
def test_attention_whose_scores_are_shifted(attend, causal, shift):
    """Softmax does not see what all scores share, however large: keys get a part that every query
    scores alike."""
    q, k, v = (drawn(B, H, T, 16, seed=i) for i in range(3))
    q[..., 0], k[..., 0] = 4.0, shift
    scores = q.double() @ k.double().mT / 4.0
    if causal:
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf)
    found = attend(q, k, v) if causal else attend(q, k, v, rule=Rule(causal=False))
    # products of the shift are rounded
    close(found, scores.softmax(-1) @ v.double(), 1e-5 * max(1.0, abs(shift)))


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize("shape", [(8, 5), (2, 3, 7), (1, 1, 2)], ids=str)
def test_cross_entropy_of_small_and_large_logits(shape, scale):
    logits = drawn(*shape) * scale
    y = torch.randint(shape[-1], shape[:-1], generator=torch.Generator().manual_seed(1))
    logits, y = (logits, y) if len(shape) == 3 else (logits[None], y[None])
    close(cross_entropy(logits, y), F.cross_entropy(logits.double().flatten(0, 1), y.flatten()),
          1e-6)


# ---- the update

@pytest.mark.parametrize("most, frozen", [(1e-2, True), (100.0, False)])
def test_gradients_are_clipped_by_the_norm_of_all(most, frozen):
    parameters = [torch.nn.Parameter(torch.zeros(5, 5)) for _ in range(6)]
    parameters[-1].requires_grad_(not frozen)
    each = [drawn(5, 5, seed=i) * 3 for i in range(6)]
    for p, g in zip(parameters, each, strict=True):
        p.grad = g.clone() if p.requires_grad else None
    taken = [g.double() for p, g in zip(parameters, each, strict=True) if p.requires_grad]
    norm = torch.cat([g.flatten() for g in taken]).norm()
    found = after(torch.optim.SGD(parameters, lr=1.0), parameters, most)()
    assert found.item() == pytest.approx(norm.item(), rel=1e-6)
    for p, g in zip(parameters, taken):
        close(-p.detach(), g * min(1.0, most / norm.item()), 1e-5)


@pytest.mark.parametrize("it", [1, 6, 7, 8, 14, 21, 22, 24])
def test_a_cosine_schedule_with_a_warm_up(it):
    """A warm-up of 7 and a floor of a tenth at 21, as their function of the iteration says it. Our
    first update is their iteration 1: an update at a rate of 0 moves nothing."""
    at = schedule(replace(SCHEDULES["cosine"].settings, name="cosine", warmup_steps=7,
                          final_lr_ratio=0.1), 22)
    due = (it / 7 if it < 7 else 0.1 if it > 21
           else 0.1 + 0.5 * (1 + math.cos(math.pi * (it - 7) / 14)) * 0.9)
    assert at(it - 1 if it < 7 else it) == pytest.approx(due, rel=1e-12)


# ---- batches and checkpoints

# ---- byte-pair encoding

TEXTS = {"nothing": "", "a character": "s", "a character of four bytes": "🙃",
         "ASCII": "Hello, how are you?", "Unicode": "Héllò hôw are ü? 🙃",
         "German": "Die Leland Stanford Junior University hat ihren Sitz in Kalifornien, "
                   "südöstlich von San Francisco.\n",
         "an address": "353 Jane Stanford Way\nStanford, CA 94305\n",
         "its end marker": "one<|endoftext|>two", "two end markers": "<|endoftext|><|endoftext|>",
         "spaces": "   a  \n\n\t b   ", "line ends": "a\r\nb\rc\n",
         "code": "def f(x):\n    return {'x': x ** 2}\n", "Chinese": "大家好这是一个测试。",
         "a joined family": "👨‍👩‍👧", "a zero byte": "a\0b",
          "long": "the cat sat on the mat " * 500}


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    texts = [*TEXTS.values(), "low low low low low lower lower widest widest widest newest newest "
                              "newest newest newest newest\n" * 9]
    return BPE.build(400, lambda: iter(texts), tmp_path_factory.mktemp("bpe"))


def merges_of(bpe: BPE) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(bpe._model.to_str())["model"]
    return model["vocab"], [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" "))
                            for pair in model["merges"]]


def encoded_by_hand(bpe: BPE, text: str) -> list[int]:
    """GPT-2's pieces and characters of bytes, then the earliest merge, again and again."""
    regex = pytest.importorskip("regex")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (i for i in range(256) if i not in printable)
    letters = {**{b: chr(b) for b in printable}, **{b: chr(256 + n) for n, b in enumerate(others)}}
    vocab, merges = merges_of(bpe)
    rank, ids = {pair: i for i, pair in enumerate(merges)}, []
    for piece in regex.findall(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| "
                               r"?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text):
        parts = [letters[b] for b in piece.encode()]
        while (len(parts) > 1 and (best := min(pairwise(parts),
                key=lambda pair: rank.get(pair, math.inf))) in rank):
            joined, i = [], 0
            while i < len(parts):
                both = tuple(parts[i:i + 2]) == best
                joined.append("".join(parts[i:i + 1 + both]))
                i += 1 + both
            parts = joined
        ids += [vocab[part] for part in parts]
    return ids


@pytest.mark.parametrize("name", [name for name, text in TEXTS.items() if len(text) < 1000])
def test_a_text_is_encoded_as_by_hand(name, bpe):
    """What a text spells as an end marker is text there too: the marker's own id appears in
    none."""
    found = bpe.encode(TEXTS[name])
    assert found == encoded_by_hand(bpe, TEXTS[name]) and bpe.end not in found


def test_each_merge_is_of_a_most_frequent_pair(tmp_path):
    """So that it holds however ties are broken, where CS336 takes the greatest pair."""
    regex = pytest.importorskip("regex")
    text = ("low low low low low lower lower widest widest widest newest newest newest newest "
            "newest newest\n" * 9)
    learned = BPE.build(275, lambda: iter([text]), tmp_path)
    _, merges = merges_of(learned)
    words = collections.Counter(tuple(piece.replace(" ", "Ġ").replace("\n", "Ċ"))
                                for piece in regex.findall(r" ?\p{L}+|\s+(?!\S)|\s+", text))
    assert len(merges) > 12     # then each word is one entry
    for best in merges:
        pairs = collections.Counter()
        for word, n in words.items():
            for pair in pairwise(word):
                pairs[pair] += n
        assert pairs[best] == max(pairs.values()), best
        joined: collections.Counter = collections.Counter()
        for word, n in words.items():
            parts, i = [], 0
            while i < len(word):
                both = word[i:i + 2] == best
                parts.append("".join(word[i:i + 1 + both]))
                i += 1 + both
            joined[tuple(parts)] += n
        words = joined
