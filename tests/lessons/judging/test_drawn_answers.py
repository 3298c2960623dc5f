"""Wrong answers to the exercises of notebooks 16 on that are no change of one place (those are in
test_mutants.py), and right ones in forms that come near a limit of the judge.

Only these tests catch: a judge that lets pass an answer that changes its argument, needs another
dtype, is rounded, fails at an edge alone, or makes what the exercise forbids (16.nats,
22.mean); and a limit of bytes that refuses an answer within it.
"""

import math
from itertools import product
from random import Random
from statistics import NormalDist, fmean

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lessons.judging import judge, learner
from tests.lessons.judging.course import EXERCISES, ON_RANKS
from tests.lessons.judging.mutants import on_threads

# Of an answer on ranks the text alone travels, so these call no helper.


def nats_of_first_rank(logits, target, rank, ranks, all_reduce_max, all_gather):
    top = all_reduce_max(logits.max())
    total = all_gather((logits - top).exp().sum()[None]).sum()
    own = logits[target] if target < len(logits) else torch.zeros(())
    return top + total.log() - all_gather(own[None]).sum()


def nats_of_all_logits(logits, target, rank, ranks, all_reduce_max, all_gather):
    return F.cross_entropy(all_gather(logits), torch.tensor(target))


def nats_of_logits_one_by_one(logits, target, rank, ranks, all_reduce_max, all_gather):
    whole = torch.stack([all_gather(logit[None]) for logit in logits], 1).flatten()
    return whole.logsumexp(0) - whole[target]


def nats_by_maximum_of_each(logits, target, rank, ranks, all_reduce_max, all_gather):
    top = all_reduce_max(logits).max()
    total = all_gather((logits - top).exp().sum()[None]).sum()
    own = logits[target % len(logits)] * (target // len(logits) == rank)
    return top + total.log() - all_gather(own[None]).sum()


def order_of_too_few(rank, ranks, micro_batches):
    first = ranks - rank
    return [f"F{i}" for i in range(first)] + [step for i in range(micro_batches)
        for step in [f"B{i}"] + [f"F{first + i}"] * (
        first + i < micro_batches)]


def order_half_filled(rank, ranks, micro_batches):
    first = min((ranks - rank + 1) // 2, micro_batches)
    return [f"F{i}" for i in range(first)] + [step for i in range(micro_batches)
        for step in [f"B{i}"] + [f"F{first + i}"] * (
        first + i < micro_batches)]


def ends_of(orders, forward, backward):
    """Longest paths, until no end moves any more."""
    ends, before = {}, None
    while ends != before:
        before = dict(ends)
        for rank, actions in enumerate(orders):
            at = 0.0
            for action in actions:
                at = (max(at, ends.get((rank + (1 if action[0] == "B" else -1), action), 0.0))
                      + (forward if action[0] == "F" else backward))
                ends[rank, action] = at
    return ends


def step_of_one_rank(orders, forward, backward):
    return (forward + backward if len(orders) == 1
            else max(ends_of(orders, forward, backward).values()))


def step_that_pops(orders, forward, backward):
    seconds = max(ends_of(orders, forward, backward).values())
    while any(orders):
        for actions in orders:
            actions and actions.pop(0)
    return seconds


def doubled_tail(gains):
    sums = [sum(s * g for s, g in zip(signs, gains))
            for signs in product((-1, 1), repeat=len(gains))]
    return 2 * fmean(total >= abs(sum(gains)) for total in sums)


def by_sampled_signs(gains):
    chance = Random(0)
    return fmean(abs(sum(chance.choice((-1, 1)) * g for g in gains)) >= abs(sum(gains))
                 for _ in range(1000))


def adamw_of_rows(w, g, m, v, update, lr, decay):
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (g**2).mean(-1, keepdim=True)
    return w * (1 - lr * decay) - lr * m / (1 - 0.9**update) / ((v / (1 - 0.95**update)).sqrt()
        + 1e-8), m, v


def adamw_in_place(w, g, m, v, update, lr, decay):
    m.lerp_(g, 0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    w.mul_(1 - lr * decay).addcdiv_(m, (v / (1 - 0.95**update)).sqrt().add_(1e-8),
                                    value=-lr / (1 - 0.9**update))
    return w, m, v


def lion_of_two_signs(w, g, m, lr, decay):
    direction = torch.where(0.9 * m + 0.1 * g >= 0, 1.0, -1.0)
    return w * (1 - lr * decay) - lr * direction, 0.99 * m + 0.01 * g


def factored_but_for_vectors(rows, columns, g, share):
    rows, columns = rows + share * ((g**2).mean(1) - rows), columns + share * ((g**2).mean(0)
        - columns)
    return rows, columns, g**2 if min(g.shape) == 1 else rows[:, None] * columns / rows.mean()


def coin_of_normal(ahead, behind):
    return min(1.0, 2 * NormalDist().cdf(-abs(ahead - behind) / math.sqrt(ahead + behind)))


def noise_scale_of_a_large_batch(small, large, b, B):
    return ((small - large) * b / large if B >= 16 * b
            else (small - large) / (1 / b - 1 / B) / ((B * large - b * small) / (B - b)))


def counts_of(v, axis=-2, **kinds):
    return torch.arange(1, v.shape[axis] + 1, **kinds)[:, None]


def mean_by_matrix(v):
    return torch.ones(v.shape[-2], v.shape[-2]).tril() / counts_of(v) @ v


def mean_over_second_axis(v):
    return v.cumsum(1) / counts_of(v, 1)


def mean_by_bool_mask(v):
    seen = torch.ones(v.shape[-2], v.shape[-2], dtype=torch.bool).tril()
    return torch.stack([v[..., row, :].mean(-2) for row in seen], -2)


def mean_by_numpy_matrix(v):
    return (torch.from_numpy(np.tril(np.ones((v.shape[-2], v.shape[-2]))) @ v.double().numpy())
            / counts_of(v))


def mean_by_lists(v):
    seen = [[i >= j for j in range(v.shape[-2])] for i in range(v.shape[-2])]
    return torch.stack([v[..., torch.tensor(row), :].mean(-2) for row in seen], -2)


def zeroed_in_place(w, heads):
    w.unflatten(0, (heads, 2, -1))[:, 0] = 0
    return w


def gram_of(G, a, A):
    size = G.diag().sqrt()
    return G + a * A @ (G / size[:, None] / size) @ A.mT


def past(T, shift=0):
    seen = torch.ones(T, T).tril(shift)
    return seen / seen.sum(1, keepdim=True).clamp(min=1)


def pissa_of_wide_alone(w, rank):
    U, S, Vh = torch.linalg.svd(w, full_matrices=False)
    keep = (torch.arange(len(w)) < rank).to(w.dtype)[:len(S)]
    product = U * (S * keep) @ Vh if len(w) <= w.shape[1] else w
    return w - product, product


def nats_of_two_numbers(logits, target, rank, ranks, all_reduce_max, all_gather):
    own = F.one_hot(torch.tensor(target), ranks * len(logits)).view(ranks, -1)[rank]
    both = all_gather(torch.stack((logits.logsumexp(0), (own * logits).sum()))).view(ranks, 2)
    return both[:, 0].logsumexp(0) - both[:, 1].sum()


def nats_in_float64(logits, target, rank, ranks, all_reduce_max, all_gather):
    wide = logits.double()
    top = all_reduce_max(wide.max())
    own = (wide[target % len(wide)] - top) * (target // len(wide) == rank)
    shares = all_gather(torch.stack((torch.exp(wide - top).sum(), own)))
    return shares[0::2].sum().log() - shares[1::2].sum()


def by_torch_adamw(w, g, m, v, update, lr, decay):
    p = nn.Parameter(w.double())
    optimizer = torch.optim.AdamW([p], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    optimizer.state[p] = {"step": torch.tensor(float(update - 1)), "exp_avg": m.double(),
                          "exp_avg_sq": v.double()}
    p.grad = g.double()
    optimizer.step()
    return p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]


def adamw_on_copies(*given):
    return adamw_in_place(*(argument.clone() if isinstance(argument, torch.Tensor) else argument
                            for argument in given))


def mean_in_blocks(v):
    before, means = torch.zeros_like(v[..., :1, :]), []
    for block in v.split(16, -2):
        means.append(before + torch.ones(block.shape[-2], block.shape[-2]).tril() @ block)
        before = means[-1][..., -1:, :]
    return torch.cat(means, -2) / counts_of(v)

WRONG = [       # exercise, kind, answer
    ("16.nats", "one rank", nats_of_first_rank),
    ("16.nats", "forbidden size", nats_of_all_logits),
    ("16.nats", "forbidden size", nats_of_logits_one_by_one),
    ("16.nats", "forbidden size", nats_by_maximum_of_each),
    ("17.bubble", "edge size", lambda ranks, m, chunks: (ranks - 1) / ranks if m < ranks
     else (ranks - 1) / (m * chunks + ranks - 1)),
    ("17.order", "edge size", order_of_too_few),
    ("17.order", "rounding", order_half_filled),
    ("17.step", "edge size", step_of_one_rank),
    ("17.step", "in place", step_that_pops),
    ("19.false_share", "rounding", lambda bar, sigma, n: round(
        NormalDist(0, sigma * math.sqrt(2 / n)).cdf(-bar), 2)),
    ("19.sign_flip", "edge size", doubled_tail),
    ("19.sign_flip", "rounding", by_sampled_signs),
    ("20.adamw", "axis", adamw_of_rows),
    ("20.lion", "edge size", lion_of_two_signs),
    ("20.factored", "edge size", factored_but_for_vectors),
    ("21.noise_scale", "edge size", noise_scale_of_a_large_batch),
    ("22.mean", "axis", mean_over_second_axis),
    ("22.mean", "forbidden size", mean_by_matrix),
    ("22.mean", "forbidden size", mean_by_bool_mask),
    ("22.mean", "forbidden size", mean_by_numpy_matrix),
    ("22.mean", "forbidden size", mean_by_lists),
    ("22.identity", "in place", zeroed_in_place),
    ("22.identity", "dtype", lambda w, heads: w.bfloat16().unflatten(0, (heads, 2, -1)).index_fill(
        1, torch.tensor([0]), 0).flatten(0, 2)),
    ("22.gram", "edge size", lambda G, a: gram_of(G, a, past(len(G), -1))),
    ("23.probabilities", "rounding", lambda layers, rate: [
        round(1 - rate * (i + 1) / layers, 2) for i in range(layers)]),
    ("24.trained", "edge size", lambda weights, rank: sum(
        min(rank, *w.shape) * sum(w.shape) for w in weights)),
    ("24.pissa", "edge size", pissa_of_wide_alone),
    ("24.c_attn", "edge size", lambda qkv, heads: qkv if heads == 1
     else qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).mT),
    ("28.trials", "edge size", lambda q, p: 1 if q >= 0.5
     else math.ceil(math.log(1 - p) / math.log(1 - q))),
    ("28.coin", "edge size", lambda ahead, behind: 0.5**ahead if not behind else min(1.0, 2 * sum(
        math.comb(ahead + behind, k) for k in range(max(ahead, behind), ahead + behind + 1))
        / 2 ** (ahead + behind))),
    ("28.coin", "rounding", coin_of_normal),
    ("30.cycles", "edge size", lambda rows, columns, M, N, K: (2 * rows + columns + M - 2)
     * (K // rows + 1) * (N // columns + 1)),
    ("30.cycles", "rounding", lambda rows, columns, M, N, K: (2 * rows + columns + M - 2)
     * max(1, round(K / rows)) * max(1, round(N / columns))),
    ("30.skipping", "edge size", lambda nonzeros, columns: sum(
        max(nonzeros[i:i + columns]) for i in range(0, len(nonzeros) - columns + 1, columns))),
    ("30.frequency", "rounding", lambda a, c: round((a / (2 * c)) ** (1 / 3), 2)),
    ("31.with_pairs", "edge size", lambda singles, pairs: pairs[0] if len(singles) == 2
     else math.prod(singles)),
    ("31.same_seconds", "edge size", lambda share, a, b: a * b if share > 0.9
     else 1 / (1 - share + share / (a * b))),
]
RIGHT = [("16.nats", nats_of_two_numbers), ("16.nats", nats_in_float64),
         ("20.adamw", by_torch_adamw), ("20.adamw", adamw_on_copies), ("22.mean", mean_in_blocks)]


def verdict(name, attempt):
    """In this process, which is quick; ranks are threads."""
    if name in ON_RANKS:
        why = on_threads(EXERCISES[name], attempt)
        return judge.Verdict("wrong" if why else "right", "; ".join(why))
    return judge.check(EXERCISES[name], attempt)


@pytest.mark.parametrize("name, kind, attempt", WRONG)
def test_a_mistake_is_caught(name, kind, attempt):
    result = verdict(name, attempt)
    says = {"in place": "it changes its argument", "forbidden size": "the limit"}
    assert result.status == "wrong" and says.get(kind, "") in result.detail


@pytest.mark.parametrize("name, attempt", RIGHT)
def test_a_right_form_is_accepted(name, attempt):
    assert verdict(name, attempt).status == "right"


@pytest.mark.usefixtures("judged_on_ranks")
@pytest.mark.parametrize("name, attempt, message", [
    ("22.mean", mean_by_matrix, "its tensors take 2.10 MB at once; the limit is 262 kB"),
    ("22.mean", mean_by_numpy_matrix, "its arrays and lists take"),
    ("22.identity", zeroed_in_place,
     "it changes its argument `w`: change a copy (`w.clone()`) instead"),
    ("16.nats", nats_of_all_logits, "a rank sends 8 numbers; the limit is 4"),
    ("22.mean", mean_in_blocks, ""), ("16.nats", nats_of_two_numbers, ""),
])
def test_the_learners_own_judge_says_the_same(name, attempt, message):
    """Where an attempt runs in a process of its own, and ranks are processes."""
    result = learner.check(EXERCISES[name], attempt)
    assert result.status == ("wrong" if message else "right") and message in result.detail
