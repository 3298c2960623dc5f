"""Gradient clipping, learning rates and byte-pair encoding, as in CS336's first assignment,
compared with float64 and with results by hand."""

import collections
import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lpkit.datasets.tokenizers import BPE
from lpkit.memory.update import after
from lpkit.nn.layers import RMSNorm
from lpkit.techniques.schedules import SCHEDULES, schedule

B, T, D = 4, 12, 64


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(computed: torch.Tensor, due: torch.Tensor, share: float = 1e-5) -> None:
    assert (computed.shape == due.shape and (computed.double() - due).abs().max() <= share
            * due.abs().max())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rmsnorm_of_small_and_large_numbers(scale):
    norm, x = RMSNorm(D, eps=1e-5), drawn(B, T, D) * scale
    norm.weight.data.copy_(drawn(D, seed=1))
    close(norm(x).detach(), x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
          * norm.weight.detach().double())


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
    ours = after(torch.optim.SGD(parameters, lr=1.0), parameters, most)()
    assert ours.item() == pytest.approx(norm.item(), rel=1e-6)
    for p, g in zip(parameters, taken):
        close(-p.detach(), g * min(1.0, most / norm.item()), 1e-5)


@pytest.mark.parametrize("it", [1, 6, 7, 8, 14, 21, 22, 24])
def test_a_cosine_schedule_with_a_warm_up(it):
    """A warm-up of 7 updates, and a floor of a tenth from update 21, as a function of CS336's
    iteration. Our first update is their iteration 1: an update at a rate of 0 changes nothing."""
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
    """Return the tokens of a text: split it into GPT-2's pieces, replace bytes by characters,
    then apply the earliest merge again and again."""
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
    """In a text, the characters of an end marker are ordinary text: the marker's own id does not
    occur."""
    ours = bpe.encode(TEXTS[name])
    assert ours == encoded_by_hand(bpe, TEXTS[name]) and bpe.end not in ours


def test_each_merge_is_of_a_most_frequent_pair(tmp_path):
    """The test holds for any rule for ties; CS336 merges the greatest pair."""
    regex = pytest.importorskip("regex")
    text = ("low low low low low lower lower widest widest widest newest newest newest newest "
            "newest newest\n" * 9)
    learned = BPE.build(275, lambda: iter([text]), tmp_path)
    _, merges = merges_of(learned)
    words = collections.Counter(tuple(piece.replace(" ", "Ġ").replace("\n", "Ċ"))
                                for piece in regex.findall(r" ?\p{L}+|\s+(?!\S)|\s+", text))
    assert len(merges) > 12     # after these merges, each word is one token
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
