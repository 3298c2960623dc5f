"""A step of the kit beside nanoGPT's, eager and compiled: the same weights, the same batches,
losses that must agree. On a GPU GPT-2 124M, on random tokens.

The peer is the GPT and the update that https://github.com/karpathy/nanoGPT describes (model.py,
train.py at 3adf61e), written anew: a sum of embeddings, q, k and v from one Linear, PyTorch's fused
attention, an erf GELU, a tied head, cross-entropy inside bf16 autocast, clipping by PyTorch. One
thing is better than there: AdamW is fused, which nanoGPT leaves to GPUs.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpkit.config import Config, ModelConfig
from lpkit.kernels import jit
from lpkit.machine_facts import cores
from lpkit.training.graphs import WARM_UP
from lpkit.training.training import RandomTokens, Training
from tests.bench.harness import ROUNDS, Result, last_losses, paired, steps_in_turns

STEP_TARGET = 1.2           # times as many updates a second
LOSS_TOLERANCE = 0.01       # relative, of the mean of the last steps
LEAST_STEPS, LAST = 20, 5
WIDE = {"model.layers": 6, "model.width": 384, "model.heads": 6}
CASES = {
    "6 x 384, 16 x 256 tokens": {**WIDE, "model.context": 256, "global_batch": 16},
    "6 x 384, 4 x 1,024 tokens": {**WIDE, "model.context": 1024, "global_batch": 4},
    "cpu-3m": {},
}
ON_A_GPU = {"GPT-2 124M, 16 x 1,024 tokens": {
    "model.layers": 12, "model.width": 768, "model.heads": 12, "model.context": 1024,
    "model.vocab": 50_304, "global_batch": 16}}


class Attention(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.heads = m.H
        self.c_attn, self.c_proj = nn.Linear(m.D, 3 * m.D), nn.Linear(m.D, m.D)

    def forward(self, x: Tensor) -> Tensor:     # (B, T, D) -> (B, T, D)
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2)
                   for t in self.c_attn(x).split(D, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, D))


class Block(nn.Module):
    def __init__(self, m: ModelConfig):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(m.D), nn.LayerNorm(m.D)
        self.attn = Attention(m)
        self.mlp = nn.Sequential(nn.Linear(m.D, 4 * m.D), nn.GELU(), nn.Linear(4 * m.D, m.D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """tokens and targets (B, T) -> mean nats per token."""

    def __init__(self, m: ModelConfig):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(m.V, m.D), nn.Embedding(m.T, m.D)
        self.h = nn.ModuleList(Block(m) for _ in range(m.L))
        self.ln_f, self.lm_head = nn.LayerNorm(m.D), nn.Linear(m.D, m.V, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def weights(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Of the kit's GPT-2 under the peer's names. A head's rows of q, k and v lie together there."""
    m, renamed = training.config.model, {
        "embed.": "wte.", "positions.wte.": "wpe.", "blocks.": "h.", "norm1.": "ln_1.",
        "norm2.": "ln_2.", "attention.qkv.": "attn.c_attn.", "attention.out.": "attn.c_proj.",
        "mlp.up.": "mlp.0.", "mlp.down.": "mlp.2.", "head.": "lm_head."}
    for name, t in training.model.state_dict().items():
        if ".qkv." in name:
            t = t.unflatten(0, (m.H, 3, m.E)).transpose(0, 1).flatten(0, 2)
        for ours, theirs in renamed.items():
            name = name.replace(ours, theirs)
        yield name.replace("norm.", "ln_f.") if name.startswith("norm.") else name, t.clone()


def adamw(model: nn.Module, o: Any) -> torch.optim.AdamW:
    """With the settings `o` of the kit's: vectors do not decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": o.weight_decay},
                              {"params": vectors, "weight_decay": 0.0}],
                             lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


class Peer:
    """Takes updates as a `Training` does: the weights, batches and rates of `training`."""

    def __init__(self, training: Training, *, compiled: bool):
        config = training.config
        self.training, self.clip = training, config.optimizer.clip
        self.model = GPT(config.model).to(training.device)
        self.model.load_state_dict(dict(weights(training)))
        self.optimizer = adamw(self.model, config.optimizer)
        self.forward = jit.compiled(self.model) if compiled else self.model

    def update(self, step: int) -> SimpleNamespace:
        batch = self.training.batch(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.config.optimizer.lr * self.training.schedule(step)
        with torch.autocast(self.training.device.type, torch.bfloat16):
            loss = self.forward(batch.tokens, batch.targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return SimpleNamespace(loss=loss.detach(), grad_norm=norm)


def run(rounds: int = ROUNDS) -> list[Result]:
    """Each step by the kit, by nanoGPT, and by nanoGPT compiled, in turns; on a CPU by one thread
    and by all. The kit chooses what it chooses for a run of as many steps as `lpkit train`
    takes."""
    results, gpu = [], torch.cuda.is_available()
    cases = [(f"{case}, {threads} threads", settings | {"system.threads": threads})
             for case, settings in CASES.items() for threads in sorted({1, cores()})]
    for case, settings in ON_A_GPU.items() if gpu else cases:
        steps = max(rounds, LEAST_STEPS)
        base = Config().replace({"system.device": "cuda" if gpu else "cpu",
                                 "precision.recipe": "bf16", **settings})
        torch.compiler.reset()      # the number of threads is compiled in
        ours = Training.build(base, data=RandomTokens(base, "cuda") if gpu else None)
        peers = {"nanoGPT": Peer(ours, compiled=False),
                 "nanoGPT, compiled": Peer(ours, compiled=True)}
        seconds, losses = steps_in_turns({"ours": ours, **peers}, steps, warm_up=WARM_UP + 1)
        last = last_losses(losses, "nanoGPT", last=LAST, tolerance=LOSS_TOLERANCE)
        chosen = {name: choice.used for name, choice in ours.decisions.choices.items()}
        results += [paired("train-nanogpt", ours=seconds["ours"], peer=seconds[name], case=case,
                           peer_name=f"{name}, bf16 autocast", target=STEP_TARGET,
                           device=torch.cuda.get_device_name() if gpu else None,
                           facts={"losses": last, "chosen": chosen, "steps": steps})
                    for name in peers]
    return results
