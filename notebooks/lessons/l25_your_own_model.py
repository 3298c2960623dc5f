"""Lesson 25, Your own model: two models that are not the kit's, their study, figures and exercises.

The kit's functions for other models (predict, convert, watch, advise) are applied to a Llama of the
library transformers, with random weights, and to a language model around PyTorch's
`nn.TransformerEncoder`. Units: bytes, seconds, losses in nats per token, SQNR in dB.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lpkit
from lessons.draws import normal
from lessons.figures import waiting as waiting
from lessons.figures.colours import ROLE_COLOURS, lines_of
from lessons.figures.drawing import NAMES, axis, figure, rule, scatter
from lessons.figures.style import COLOURS
from lessons.judging.judge import adding_to
from lpkit import hardware
from lpkit.config import DataConfig
from lpkit.datasets import RandomWindows, prepare
from lpkit.measure.telemetry import Sample
from lpkit.modules.watch import Watch
from lpkit.tables import FAINT, html_table
from lpkit.timing import Watch as Progress

# the notebook imports these names of other modules from here
__all__ = ["Path", "hardware"]

VOCAB, HEADS = 256, 4       # tokens are bytes
RECIPES = ("int8", "fp8-rowwise", "mxfp8", "nvfp4")     # recipes whose casts telemetry compares
LLAMA, ENCODER = "Llama", "TransformerEncoder"
_ABSENT = ("transformers is not installed, so a model of PyTorch's own modules replaces its Llama: "
           "it has the same Linears and no rotary embedding.")

# ---- Models

def absent() -> str:
    """Return a message if transformers is not installed; empty if it is."""
    return "" if find_spec("transformers") else _ABSENT


def llama(width: int, layers: int, context: int, vocab: int = VOCAB, heads: int = HEADS
          ) -> nn.Module:
    """Return the Llama of transformers with random weights, or GatedLM if transformers is not
    installed. Nothing is downloaded."""
    if absent():
        return GatedLM(width, layers, context)
    with warnings.catch_warnings():     # from optional libraries that do not fit this PyTorch
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            theirs = import_module("transformers")
            return theirs.LlamaForCausalLM(theirs.LlamaConfig(
                vocab_size=vocab, hidden_size=width, intermediate_size=3 * width,
                num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=heads // 2, max_position_embeddings=context,
                bos_token_id=1, eos_token_id=2, pad_token_id=0))
        finally:
            logging.disable(logging.NOTSET)


def next_token_loss(logits: Tensor, labels: Tensor) -> SimpleNamespace:
    """Return an object with the mean cross-entropy as `loss`, like the output of a model of
    transformers. logits (B, T, V), labels (B, T); logits at t predict the label at t + 1."""
    return SimpleNamespace(loss=F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()))


class EncoderLM(nn.Module):
    """A language model around `nn.TransformerEncoder`, as in PyTorch's tutorial."""

    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(width, HEADS, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, layers)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        T = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=input_ids.device)
        x = self.tokens(input_ids) + self.places.weight[:T]
        return next_token_loss(self.head(self.encoder(x, mask=mask, is_causal=True)), labels)


class GatedBlock(nn.Module):
    """A block with the Linears of a Llama: (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        linear = lambda into, out: nn.Linear(into, out, bias=False)
        self.self_attn = nn.ModuleDict({
            "q_proj": linear(width, width), "k_proj": linear(width, width // 2),
            "v_proj": linear(width, width // 2), "o_proj": linear(width, width)})
        self.mlp = nn.ModuleDict({"gate_proj": linear(width, 3 * width),
                                  "up_proj": linear(width, 3 * width),
                                  "down_proj": linear(3 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        h, attention, mlp = self.norms[0](x), self.self_attn, self.mlp
        q, k, v = (attention[f"{name}_proj"](h).unflatten(-1, (heads, -1)).transpose(1, 2)
                   for name, heads in (("q", HEADS), ("k", HEADS // 2), ("v", HEADS // 2)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + attention["o_proj"](y.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


class GatedLM(nn.Module):
    """A replacement for the Llama: its Linears, with learned position embeddings."""

    def __init__(self, width: int, layers: int, context: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(context, width)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(
            GatedBlock(width) for _ in range(layers))})
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.apply(lambda module: isinstance(module, nn.Linear | nn.Embedding) and
                   nn.init.normal_(module.weight, std=0.02))

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.tokens(input_ids) + self.places.weight[:input_ids.shape[1]]
        for block in self.model["layers"]:
            x = block(x)
        return next_token_loss(self.lm_head(self.norm(x)), labels)


def models(width: int, layers: int, context: int) -> dict[str, Callable[[int], nn.Module]]:
    """Return functions that make each model from a seed, on the device of training."""
    def seeded(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
        def model(seed: int = 0) -> nn.Module:
            torch.manual_seed(seed)
            return make().to(hardware.usable())

        return model

    return {LLAMA: seeded(lambda: llama(width, layers, context)),
            ENCODER: seeded(lambda: EncoderLM(width, layers, context))}


def wide_llama() -> nn.Module:
    """Return a model of two blocks with the width of Llama 2 7B on the meta device, so its weights
    take no memory."""
    if absent():
        with torch.device("meta"):
            return GatedLM(4096, 2, 4096)
    with torch.device("meta"):
        return llama(4096, 2, 4096, heads=32)


def text(sequences: int, context: int, steps: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return `steps` batches of the kit's corpus, as keyword arguments of a model of transformers.
    Ids are (sequences, context)."""
    policy = RandomWindows(tokens=prepare(DataConfig(), vocab=VOCAB).train, batch=sequences,
                           context=context, seed=seed)
    ids = [policy.batch(step).tokens.to(hardware.usable()) for step in range(steps)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in ids]


# ---- Runs

@dataclass(frozen=True, kw_only=True)
class Trained:
    """The result of one training run."""

    losses: list[float]         # of each step
    seen: Watch                 # telemetry of the first and the last step
    others: float = 0.0         # share of the cores that other processes used

    @property
    def end(self) -> float:
        """The mean loss of the last fifth of the steps."""
        return fmean(self.losses[-max(1, len(self.losses) // 5):])


def trained(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], recipe: str | None,
            lr: float) -> Trained:
    """Train the model under a recipe (None: bf16 by autocast) and watch it. With a recipe, the
    first and the last step are sampled."""
    if recipe:
        lpkit.convert(model, recipe)
    optimizer, losses, share = torch.optim.AdamW(model.parameters(), lr=lr), [], hardware.others()
    every = len(batches) - 1 if recipe else None
    with lpkit.watch(model, optimizer, telemetry_every=every, counterfactuals=RECIPES) as seen:
        for batch in batches:
            optimizer.zero_grad()
            with torch.autocast(hardware.usable(), torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return Trained(losses=losses, seen=seen, others=share())


Runs = dict[tuple[str, str], Trained]   # by model and recipe, or by model and "bf16, seed 0"


def study(makers: Mapping[str, Callable[[int], nn.Module]], batches: Sequence[Any], lr: float,
          done: Runs, watch: Progress = iter, seeds: int = 3) -> Runs:
    """Train each model under two recipes, and in bf16 with several seeds of its weights. `makers`:
    by name, a function that makes the model from a seed; `done`: finished runs, which are not
    repeated."""
    cases = [(name, recipe, 0) for name in makers for recipe in ("int8", "nvfp4")]
    cases += [(name, None, seed) for name in makers for seed in range(seeds)]
    cases = [case for case in cases if case[:2] not in done]
    return done | {(name, recipe or f"bf16, seed {seed}"):
                   trained(makers[name](seed), batches, recipe, lr)
                   for name, recipe, seed in watch(cases)}


def spread(runs: Runs, name: str) -> float:
    """Return the standard deviation over seeds of the final bf16 loss."""
    return stdev(run.end for (of, how), run in runs.items() if of == name and "seed" in how)


def behind(runs: Runs, name: str, recipe: str) -> float:
    """Return the final loss under a recipe minus the final loss in bf16 from the same initial
    weights."""
    return runs[name, recipe].end - runs[name, "bf16, seed 0"].end


# ---- Noise

def short(layer: str) -> str:
    """Return the kind of a Linear, the last part of its name: "q_proj"."""
    return layer.rpartition(".")[2]


def noise(samples: Iterable[Sample], recipe: str, role: str, step: int | None = None
          ) -> dict[str, float]:
    """Return the SQNR in dB of an operand under a recipe, by layer. `role`: x, w or dy; `step`:
    None means the last sampled step."""
    samples = list(samples)
    step = step or max(sample.step for sample in samples)
    by_layer = {sample.layer: sample.others[recipe].sqnr_db for sample in samples
                if (sample.role, sample.step) == (role, step) and sample.others}
    return {layer: db for layer, db in by_layer.items() if db is not None}


def by_kind(noise_of: Mapping[str, float]) -> dict[str, float]:
    """Return the lowest SQNR of each kind of Linear, the noisiest kind first."""
    kinds = {short(layer): min(db for other, db in noise_of.items()
                               if short(other) == short(layer)) for layer in noise_of}
    return dict(sorted(kinds.items(), key=lambda pair: pair[1]))


def noise_table(runs: Runs, recipe: str = "int8") -> str:
    """Return an HTML table of the SQNR of each kind of Linear's input, at the first and the last
    step, by model."""
    lines = []
    for name in dict.fromkeys(of for of, _ in runs):
        samples = runs[name, recipe].seen.samples
        first = by_kind(noise(samples, recipe, "x", min(sample.step for sample in samples)))
        last = by_kind(noise(samples, recipe, "x"))
        lines += [(name, kind, f"{db:.1f} dB", f"{last[kind]:.1f} dB")
                  for kind, db in first.items()]
    return html_table(("model", "Linear", "input at the first step", "input at the last step"),
                      lines, caption=f"SQNR of the input under {recipe}, in the noisiest block")


SHAPES = {"x": "circle", "w": "square", "dy": "diamond"}


def noise_figure(samples: Sequence[Sample], recipe: str, step: int, heads: Iterable[str] = ()
                 ) -> dict:
    """Return the plotly spec of the SQNR under a recipe: a line per layer with a mark per operand.
    Linears in `heads` have hollow marks."""
    kept, dots = set(heads), []
    of = {role: noise(samples, recipe, role, step) for role in ROLE_COLOURS}
    layers = list(of["x"])              # in forward order
    for role, colour in ROLE_COLOURS.items():
        db, shape = of[role], SHAPES[role]
        dots.append(scatter(
            [db.get(layer) for layer in layers], map(_label, layers), role, colour, mode="markers",
            marker={"size": 11, "opacity": 0.85,
                    "symbol": [shape + "-open" * (layer in kept) for layer in layers],
                    "line": {"width": [2 if layer in kept else 0 for layer in layers],
                             "color": colour}},
            hover="%{y}: %{x:.1f} dB"))
    return figure(dots, f"SQNR of the operands under {recipe}, step {step}",
                  height=130 + 24 * len(layers), xaxis=axis("SQNR, dB", range=[5, 50]),
                  yaxis={**NAMES, "showgrid": True, "type": "category", "categoryorder": "array",
                         "categoryarray": list(map(_label, layers))},
                  shapes=[rule(x=db, colour=FAINT) for db in (20, 40)])


def _label(layer: str) -> str:
    """Return a layer's name from the number of its block on: "0.self_attn.q_proj"."""
    parts = layer.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[at:])


def losses_figure(runs: Runs, name: str) -> dict:
    """Return the plotly spec of the loss minus the loss of bf16 with seed 0, by step: for each
    recipe (from the same weights) and for bf16's other seeds."""
    base = runs[name, "bf16, seed 0"].losses
    of = {how: run.losses for (model, how), run in runs.items() if model == name}
    lines, traces = lines_of([how for how in of if "seed" not in how]), []
    for how, losses in sorted(of.items(), key=lambda item: "seed" not in item[0]):
        if losses is not base:      # all other seeds are one series with one colour
            traces.append(scatter(
                range(1, len(base) + 1), [a - b for a, b in zip(losses, base)],
                how if how in lines else "bf16, other seeds", showlegend=how in lines or not traces,
                line=lines.get(how, {"color": COLOURS[6], "width": 1.5}),
                opacity=1.0 if how in lines else 0.5, hover="step %{x}: %{y:+.4f} nats"))
    return figure(traces, f"{name}: loss minus that of bf16, seed 0", height=380,
                  xaxis=axis("step", dtick=max(1, len(base) // 10)),
                  yaxis=axis("difference of losses, nats per byte"))


def losses_table(runs: Runs) -> str:
    """Return an HTML table of each recipe's noisiest input, of its loss minus bf16's, and of the
    standard deviation over seeds."""
    lines = []
    for name, recipe in (key for key in runs if "seed" not in key[1]):
        worst = by_kind(noise(runs[name, recipe].seen.samples, recipe, "x"))
        kind, db = next(iter(worst.items()))
        lines.append((name, recipe, f"{db:.1f} dB ({kind})",
                      f"{behind(runs, name, recipe):+.4f}", f"{spread(runs, name):.4f}"))
    return html_table(("model", "recipe", "noisiest input", "loss minus bf16's, same weights",
                       "standard deviation of bf16 over seeds"), lines)


def svg(path: str) -> Any:
    """Return the picture of an SVG file, for display in a notebook."""
    from IPython.display import SVG  # imported here: the judge's processes display nothing

    return SVG(filename=path)


# ---- Exercises

EXERCISES: dict = {}
exercise = adding_to(EXERCISES)


def _weights(r: Random) -> list[Tensor]:
    own = [torch.zeros(r.randint(1, 6), r.randint(1, 6)) for _ in range(r.randint(1, 4))]
    return own + [r.choice(own) for _ in range(r.randint(0, 2))]


TIED = torch.zeros(5, 3)


@exercise("25.distinct", ([torch.zeros(2, 3)],), ([TIED, torch.zeros(3, 3), TIED],), minutes=4,
          draw=lambda r: (_weights(r),), drawn=60, tolerance=0.0,
          mistakes={"count a tensor that two modules share only once": lambda weights: sum(
                        w.numel() for w in weights),
                    "count two tensors with the same shape twice": lambda weights: sum(
                        a * b for a, b in {tuple(w.shape) for w in weights})})
def distinct(weights: list[Tensor]) -> int:
    return sum(w.numel() for w in {id(w): w for w in weights}.values())


@exercise("25.untiled", (64, 64, 64, 32), (64, 48, 64, 32), (17, 64, 40, 16), minutes=5,
          draw=lambda r: (*(r.choice((16, 32, 40, 48, 64, 96, 100)) for _ in range(3)),
                          r.choice((16, 32))),
          mistakes={"y sums over K, dx over N, dw over M": lambda M, N, K, block: [
                        name for name, side in (("y", N), ("dx", K), ("dw", M)) if side % block],
                    "check dw, too: it sums over the tokens": lambda M, N, K, block: [
                        name for name, side in (("y", K), ("dx", N)) if side % block]})
def untiled(M: int, N: int, K: int, block: int) -> list[str]:
    return [name for name, side in (("y", K), ("dx", N), ("dw", M)) if side % block]


def _db(x: Tensor, amax: Tensor) -> float:
    scale = amax / 127
    noisy = (x / scale).round().clamp(-127, 127) * scale
    return float(10 * torch.log10(x.square().sum() / (x - noisy).square().sum()))


def _operand(r: Random) -> Tensor:
    """Draw rows of different sizes, some with a large outlier."""
    x = normal(r, r.randint(1, 4), r.randint(3, 9)).clone() + 0.25
    x *= torch.tensor([[10.0 ** r.uniform(-2, 2)] for _ in range(len(x))])
    if r.random() < 0.5:
        x[0, 0] *= 50
    return x


@exercise("25.input_db", (torch.tensor([[1.0, 0.3, -0.55]]),),
          (torch.tensor([[1.0, 0.3, -0.55], [100.0, 30.3, -55.1]]),), minutes=6, stars=2, drawn=60,
          draw=lambda r: (_operand(r),), tolerance=1e-3,
          mistakes={"each row has its own scale": lambda x: _db(x, x.abs().amax()),
                    "take one ratio of sums over the whole tensor, not a mean of the rows' dB":
                        lambda x: sum(_db(row[None], row.abs().amax()) for row in x) / len(x),
                    "use 10 log10 for energies; 20 log10 is for magnitudes":
                        lambda x: 2 * input_db(x)})
def input_db(x: Tensor) -> float:
    return _db(x, x.abs().amax(1, keepdim=True))


@exercise("25.speedup", (10.0, 5.0, 1.0, 2.0), (1.0, 9.0, 1.0, 1.6), minutes=5,
          draw=lambda r: (r.uniform(0.1, 20), r.uniform(0.1, 20), r.uniform(0, 3),
                          r.uniform(1.1, 4)),
          mistakes={"only the products are faster; the rest of the step stays":
                        lambda products, rest, casts, times: (products + rest) / (
                            (products + rest) / times + casts),
                    "the casts add seconds to the FP8 step only":
                        lambda products, rest, casts, times: (products + rest) / (
                            products / times + rest),
                    "divide bf16's seconds by FP8's": lambda products, rest, casts, times: (
                        products / times + rest + casts) / (products + rest)})
def speedup(products: float, rest: float, casts: float, times: float) -> float:
    return (products + rest) / (products / times + rest + casts)


