"""Wrong and right answers to the exercises of notebooks 16 on, as a learner writes them:
test_drawn_answers.py judges them.

Exercises are named by their definition's function, whatever their notebook's number. For each, two
kinds of mistake were drawn by a fixed seed (`drawn_kinds`) before any was written; `MISTAKES` has
an answer of each drawn kind, and some more. `RIGHT_FORMS` has right answers that the definitions do
not resemble.
"""

import math
from collections import deque
from fractions import Fraction
from itertools import count, product
from random import Random
from statistics import NormalDist, fmean

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

SEED = 47
OF_NUMBERS = ("off by one", "scale", "swapped", "edge size", "rounding")
OF_TENSORS = ("axis", "in place", "dtype", "device", "edge size", "scale", "swapped", "off by one")
KINDS = {       # of mistakes that an exercise's arguments allow
    "pairs": (*OF_NUMBERS, "one rank"), "gate_up_rows": (*OF_TENSORS, "one rank"),
    "nats": (*OF_TENSORS, "forbidden size", "one rank"),
    "bubble": OF_NUMBERS, "one_f_one_b": (*OF_NUMBERS, "one rank"),
    "step_seconds": (*OF_NUMBERS, "in place"), "false_share": OF_NUMBERS, "seeds": OF_NUMBERS,
    "sign_flip": (*OF_NUMBERS, "in place"), "adamw": OF_TENSORS, "lion": OF_TENSORS,
    "muon_step": OF_TENSORS, "factored": OF_TENSORS,
    "overhead_of": (*OF_NUMBERS, "axis"), "noise_scale_of": OF_NUMBERS, "price": OF_NUMBERS,
    "adam_at": OF_NUMBERS, "mup_rate": OF_NUMBERS,
    "running_mean": (*OF_TENSORS, "forbidden size"), "branch_scale": OF_NUMBERS,
    "zero_queries": OF_TENSORS, "attended": OF_TENSORS, "probabilities": OF_NUMBERS,
    "area": OF_NUMBERS, "some_tokens": OF_TENSORS, "split": OF_TENSORS, "merged": OF_TENSORS,
    "trained": (*OF_NUMBERS, "axis"),
    "rslora": OF_NUMBERS, "pissa": OF_TENSORS, "c_attn": OF_TENSORS,
    "power": (*OF_NUMBERS, "in place"), "trials_needed": OF_NUMBERS, "coin": OF_NUMBERS,
}


def drawn_kinds() -> dict[str, list[str]]:
    chance = Random(SEED)
    return {name: chance.sample(kinds, 2) for name, kinds in KINDS.items()}


# Of an answer on ranks the text alone travels, so these call no helper.

def nats_of_first_rank(logits, target, rank, ranks, all_reduce_max, all_gather):
    top = all_reduce_max(logits.max())
    total = all_gather((logits - top).exp().sum()[None]).sum()
    own = logits[target] if target < len(logits) else torch.zeros(())
    return top + total.log() - all_gather(own[None]).sum()


def nats_by_mean(logits, target, rank, ranks, all_reduce_max, all_gather):
    top = all_reduce_max(logits.max())
    total = all_gather((logits - top).exp().sum()[None]).mean()
    own = logits[target % len(logits)] * (target // len(logits) == rank)
    return top + total.log() - all_gather(own[None]).sum()


def nats_of_all_logits(logits, target, rank, ranks, all_reduce_max, all_gather):
    return F.cross_entropy(all_gather(logits), torch.tensor(target))


def nats_of_logits_one_by_one(logits, target, rank, ranks, all_reduce_max, all_gather):
    whole = torch.stack([all_gather(one[None]) for one in logits], 1).flatten()
    return whole.logsumexp(0) - whole[target]


def nats_by_maximum_of_each(logits, target, rank, ranks, all_reduce_max, all_gather):
    top = all_reduce_max(logits).max()
    total = all_gather((logits - top).exp().sum()[None]).sum()
    own = logits[target % len(logits)] * (target // len(logits) == rank)
    return top + total.log() - all_gather(own[None]).sum()


def order_of_too_few(rank, ranks, micro_batches):
    first = ranks - rank
    return [f"F{i}" for i in range(first)] + [one for i in range(micro_batches)
        for one in [f"B{i}"] + [f"F{first + i}"] * (
        first + i < micro_batches)]


def order_half_filled(rank, ranks, micro_batches):
    first = min((ranks - rank + 1) // 2, micro_batches)
    return [f"F{i}" for i in range(first)] + [one for i in range(micro_batches)
        for one in [f"B{i}"] + [f"F{first + i}"] * (
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


def first_begins_at_one(orders, forward, backward):
    return max(ends_of(orders, forward, backward).values()) - backward


def step_of_one_rank(orders, forward, backward):
    return (forward + backward if len(orders) == 1
            else max(ends_of(orders, forward, backward).values()))


def step_by_formula(orders, forward, backward):
    """Of GPipe and of 1F1B."""
    return (sum(action[0] == "F" for action in orders[-1]) + len(orders) - 1) * (forward + backward)


def step_that_pops(orders, forward, backward):
    seconds = max(ends_of(orders, forward, backward).values())
    while any(orders):
        for actions in orders:
            actions and actions.pop(0)
    return seconds


def doubled_tail(gains):
    sums = [sum(s * g for s, g in zip(signs, gains))
            for signs in product((-1, 1), repeat=len(gains))]
    return 2 * fmean(one >= abs(sum(gains)) for one in sums)


def by_sampled_signs(gains):
    chance = Random(0)
    return fmean(abs(sum(chance.choice((-1, 1)) * g for g in gains)) >= abs(sum(gains))
                 for _ in range(1000))


def adamw_of_rows(w, g, m, v, update, lr, decay):
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * (g**2).mean(-1, keepdim=True)
    return w * (1 - lr * decay) - lr * m / (1 - 0.9**update) / ((v / (1 - 0.95**update)).sqrt()
        + 1e-8), m, v


def adamw_of_swapped_betas(w, g, m, v, update, lr, decay):
    m, v = 0.95 * m + 0.05 * g, 0.9 * v + 0.1 * g**2
    return w * (1 - lr * decay) - lr * m / (1 - 0.95**update) / ((v / (1 - 0.9**update)).sqrt()
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


def five_steps(x, a=3.4445, b=-4.7750, c=2.0315):
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def factored_on_another_device(rows, columns, g, share):
    share = torch.full((), share, device="meta")
    rows, columns = torch.lerp(rows, (g**2).mean(1), share), torch.lerp(columns, (g**2).mean(0),
        share)
    return rows, columns, rows[:, None] * columns / rows.mean()


def factored_but_for_vectors(rows, columns, g, share):
    rows, columns = rows + share * ((g**2).mean(1) - rows), columns + share * ((g**2).mean(0)
        - columns)
    return rows, columns, g**2 if min(g.shape) == 1 else rows[:, None] * columns / rows.mean()


def muon_with(orthogonalised, turned=False):
    """A step that orthogonalises so, and with another factor if `turned`."""
    def attempt(w, g, m, lr, decay):
        m = 0.95 * m + 0.05 * g
        sides = w.shape[::-1] if turned else w.shape
        return w * (1 - lr * decay) - lr * max(1,
            sides[0] / sides[1]) ** 0.5 * orthogonalised(0.05 * g + 0.95 * m), m
    return attempt


def muon_on_another_device(w, g, m, lr, decay):
    return muon_in_place(w, g, torch.lerp(m, g, torch.full_like(m, 0.05, device="meta")), lr, decay)


def muon_in_place(w, g, m, lr, decay):
    m.lerp_(g, 0.05)
    x = five_steps((direction := g.lerp(m, 0.95)) / direction.norm())
    return w * (1 - lr * decay) - lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * x, m


def turned_power(widths, changes):
    """One over the slope of the widths: it minimises the distances along the other axis."""
    return 1 / float(np.polyfit(np.log(changes), np.log(widths), 1)[0])


def power_in_place(widths, changes):
    for values in (widths, changes):
        values[:] = map(math.log, values)
    return float(np.polyfit(widths, changes, 1)[0])


def coin_of_normal(ahead, behind):
    return min(1.0, 2 * NormalDist().cdf(-abs(ahead - behind) / math.sqrt(ahead + behind)))


def muon_flops(shape):
    n, m = shape
    return 5 * (4 * n * n * m + 2 * n**3)


def noise_scale_of_a_large_batch(small, large, b, B):
    return ((small - large) * b / large if B >= 16 * b
            else (small - large) / (1 / b - 1 / B) / ((B * large - b * small) / (B - b)))


def averages(T, **kinds):
    counts = torch.arange(1, T + 1, **kinds)[:, None]
    return torch.ones(T, T).tril() / counts


def counts_of(v, axis=-2, **kinds):
    return torch.arange(1, v.shape[axis] + 1, **kinds)[:, None]


def mean_by_matrix(v):
    return averages(v.shape[-2]) @ v


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


def mean_by_broadcast(v):
    T = v.shape[-2]
    return torch.where(torch.arange(T)[:, None] >= torch.arange(T), v.mT[..., None, :],
                       0.0).sum(-1).mT / counts_of(v)


def zeroed_in_place(w, heads):
    w.unflatten(0, (heads, 2, -1))[:, 0] = 0
    return w


def gram_of(G, a, A):
    size = G.diag().sqrt()
    return G + a * A @ (G / size[:, None] / size) @ A.mT


def past(T, shift=0):
    seen = torch.ones(T, T).tril(shift)
    return seen / seen.sum(1, keepdim=True).clamp(min=1)


def some_tokens_in_place(x, w, kept):
    some = x[kept]
    x[kept] += some.cumsum(0) / counts_of(some) @ w
    return x


def some_tokens_by_sum(x, w, kept):
    return x.index_add(0, kept, x[kept].cumsum(0) @ w)


def split_beside(up, bias, down, i):
    def twice(t, dim=0):
        return torch.cat((t.narrow(dim, 0, i + 1), t.narrow(dim, i, t.shape[dim] - i)), dim)
    down = twice(down, 1)
    down[:, i:i + 2] /= 2
    return twice(up), twice(bias), down


def split_by_root(up, bias, down, i):
    root = down.clone()
    root[:, i] /= math.sqrt(2)
    return torch.cat((up, up[i:i + 1])), torch.cat((bias, bias[i:i + 1])), torch.cat((root,
        root[:, i:i + 1]), 1)


def merged_in_place(w, A, B, alpha):
    w += alpha / len(A) * B @ A
    return w


def largest_part(w, rank, **kinds):
    U, S, Vh = torch.linalg.svd(w, full_matrices=False)
    return U[:, :rank] * S[:rank] @ torch.eye(rank, **kinds) @ Vh[:rank]


def pissa_on_another_device(w, rank):
    product = largest_part(w, rank, device="meta")
    return w - product, product


def pissa_of_wide_alone(w, rank):
    U, S, Vh = torch.linalg.svd(w, full_matrices=False)
    keep = (torch.arange(len(w)) < rank).to(w.dtype)[:len(S)]
    product = U * (S * keep) @ Vh if len(w) <= w.shape[1] else w
    return w - product, product


def pissa_by_columns(w, rank):
    U, S, Vh = torch.linalg.svd(w)
    product = U[:, :rank] * S[:rank] @ Vh[:, :rank].mT
    return w - product, product


MISTAKES = {
    "pairs": {"swapped": lambda rank, ranks, step: [(b, a) for a in (rank, 2 * ranks - 1 - rank)
        for source in [(rank - step) % ranks]
                                                   for b in (source, 2 * ranks - 1 - source)
        if b <= a],
              "off by one": lambda rank, ranks, step: [(a, b) for a in (rank, 2 * ranks - rank)
                  for source in [(rank - step) % ranks]
                                                      for b in (source, 2 * ranks - source)
                  if b <= a]},
    "gate_up_rows": {"swapped": lambda w, rank, ranks: w.unflatten(0,
        (ranks, 2, -1))[rank].flatten(0, 1),
                "off by one": lambda w, rank, ranks: torch.cat(
                    [half[rank * (len(half) // ranks):(rank + 1) * (len(half) // ranks) - 1]
                                                                for half in w.chunk(2)])},
    "nats": {"one rank": nats_of_first_rank, "scale": nats_by_mean,
             "forbidden size": nats_of_all_logits,
             "forbidden size, one by one": nats_of_logits_one_by_one,
             "forbidden size, reduced": nats_by_maximum_of_each},
    "bubble": {"swapped": lambda ranks, m, chunks: (m - 1) / (ranks * chunks + m - 1),
               "edge size": lambda ranks, m, chunks: (ranks - 1) / ranks if m < ranks
               else (ranks - 1) / (m * chunks + ranks - 1)},
    "one_f_one_b": {"edge size": order_of_too_few, "rounding": order_half_filled},
    "step_seconds": {"off by one": first_begins_at_one, "edge size": step_of_one_rank,
                     "in place": step_that_pops, "scale": step_by_formula},
    "false_share": {"off by one": lambda bar, sigma, n: NormalDist(0,
        sigma * math.sqrt(2 / max(1, n - 1))).cdf(-bar),
                    "rounding": lambda bar, sigma, n: round(NormalDist(0,
                        sigma * math.sqrt(2 / n)).cdf(-bar), 2)},
    "seeds": {"off by one": lambda effect, sigma: int(15.6977586 * (sigma / effect) ** 2),
              "swapped": lambda effect, sigma: math.ceil(15.6977586 * (effect / sigma) ** 2)},
    "sign_flip": {"edge size": doubled_tail, "rounding": by_sampled_signs},
    "adamw": {"axis": adamw_of_rows, "swapped": adamw_of_swapped_betas, "in place": adamw_in_place},
    "lion": {"scale": lambda w, g, m, lr, decay: (w * (1 - decay) - lr * (0.9 * m + 0.1 * g).sign(),
        0.99 * m + 0.01 * g),
             "edge size": lion_of_two_signs},
    "factored": {"device": factored_on_another_device, "edge size": factored_but_for_vectors},
    "overhead_of": {"rounding": lambda weights, tokens: sum(muon_flops(sorted(w.shape))
        for w in weights) // (
                     6 * tokens * sum(w.numel() for w in weights)),
                 "swapped": lambda weights, tokens: sum(muon_flops(sorted(w.shape)[::-1])
                     for w in weights) / (
                     6 * tokens * sum(w.numel() for w in weights))},
    "noise_scale_of": {"edge size": noise_scale_of_a_large_batch,
                    "scale": lambda small, large, b, B: (small - large) / (1 / b - 1 / B)
                    / (B * large - b * small)},
    "price": {"off by one": lambda batch, scale: (scale / batch, batch / scale),
              "swapped": lambda batch, scale: (1 + scale / batch,) * 2},
    "adam_at": {"swapped": lambda lr, beta1, beta2, k: (math.sqrt(k) * lr, 1 - k * (1 - beta2),
        1 - k * (1 - beta1)),
                "rounding": lambda lr, beta1, beta2, k: (math.sqrt(k) * lr,
                    *(round(1 - k * (1 - beta), 2) for beta in (beta1, beta2)))},
    "mup_rate": {"rounding": lambda kind, width, base, lr: lr / max(1, width // base)
                 if kind in ("hidden", "head") else lr,
                 "scale": lambda kind, width, base, lr: lr * math.sqrt(base / width)
                 if kind in ("hidden", "head") else lr},
    "running_mean": {"device": lambda v: v.cumsum(-2) / counts_of(v, device="meta"),
                     "axis": mean_over_second_axis,
             "forbidden size": mean_by_matrix, "forbidden size, of bool": mean_by_bool_mask,
             "forbidden size, broadcast": mean_by_broadcast,
                     "forbidden size, of NumPy": mean_by_numpy_matrix,
             "forbidden size, of lists": mean_by_lists},
    "branch_scale": {"scale": lambda layers, branches, variance: 1
                     / (math.sqrt(layers * branches) * variance),
              "swapped": lambda layers, branches, variance:
                     math.sqrt(variance / (layers * branches))},
    "zero_queries": {"in place": zeroed_in_place,
                     "dtype": lambda w, heads: w.bfloat16().unflatten(0, (heads, 2, -1)).index_fill(
        1, torch.tensor([0]), 0).flatten(0, 2)},
    "attended": {"swapped": lambda G, a: gram_of(G, a, past(len(G)).mT),
                 "edge size": lambda G, a: gram_of(G, a, past(len(G), -1))},
    "probabilities": {"rounding": lambda layers, rate: [round(1 - rate * (i + 1) / layers, 2)
        for i in range(layers)],
                      "swapped": lambda layers, rate: [1 - rate * i / layers
                          for i in range(layers, 0, -1)]},
    "area": {"off by one": lambda layers, steps, theta, gamma: 1 - fmean(
                 (1 - theta) * (1 - math.exp(-gamma * t)) * i / layers for t in range(steps)
                 for i in range(layers)),
             "scale": lambda layers, steps, theta, gamma: 1 - fmean(
                 (1 - theta) * (1 - math.exp(-gamma * t)) * i for t in range(steps)
                 for i in range(1, layers + 1))},
    "some_tokens": {"scale": some_tokens_by_sum, "in place": some_tokens_in_place},
    "split": {"off by one": split_beside, "scale": split_by_root},
    "merged": {"in place": merged_in_place,
               "swapped": lambda w, A, B, alpha: w + alpha / len(A) * (A.mT @ B.mT).mT.flip(0)},
    "trained": {"edge size": lambda weights, rank: sum(min(rank, *w.shape) * sum(w.shape)
        for w in weights),
                "rounding": lambda weights, rank:
                sum(int(rank * w.numel() * (1 / w.shape[0] + 1 / w.shape[1])) for w in weights)},
    "rslora": {"swapped": lambda alpha, rank: (alpha * rank**0.5, alpha / rank**0.5),
               "rounding": lambda alpha, rank: (alpha / math.isqrt(rank),
                   alpha * math.isqrt(rank))},
    "pissa": {"device": pissa_on_another_device, "swapped": pissa_by_columns,
              "edge size": pissa_of_wide_alone},
    "c_attn": {"edge size": lambda qkv, heads: qkv if heads == 1
               else qkv.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2).mT,
               "dtype": lambda qkv, heads: qkv.half().unflatten(0, (heads, 3, -1)).transpose(0,
                   1).flatten(0, 2).mT},
    "muon_step": {"axis": muon_with(lambda m: five_steps(m / m.norm()), turned=True),
                  "swapped": muon_with(lambda m: five_steps(m / m.norm(), b=2.0315, c=-4.7750)),
                  "device": muon_on_another_device, "in place": muon_in_place},
    "power": {"in place": power_in_place, "swapped": turned_power,
              "rounding": lambda widths, changes: round(
                  float(np.polyfit(np.log(widths), np.log(changes), 1)[0]), 2)},
    "trials_needed": {"edge size": lambda q, p: 1 if q >= 0.5
                      else math.ceil(math.log(1 - p) / math.log(1 - q)),
                      "off by one": lambda q, p: math.ceil(math.log(1 - p) / math.log(1 - q)) + 1,
                      "swapped": lambda q, p: math.ceil(math.log(1 - q) / math.log(1 - p))},
    "coin": {"edge size": lambda ahead, behind: 0.5**ahead if not behind else min(1.0, 2 * sum(
                 math.comb(ahead + behind, k) for k in range(max(ahead, behind),
                     ahead + behind + 1)) / 2 ** (ahead + behind)),
             "swapped": lambda ahead, behind: min(1.0,
                 2 * sum(math.comb(ahead + behind, k) for k in range(max(ahead, behind) + 1))
                 / 2 ** (
                 ahead + behind)), "rounding": coin_of_normal,
             "scale": lambda ahead, behind: min(1.0, sum(
        math.comb(ahead + behind, k) for k in range(max(ahead, behind), ahead + behind + 1))
                 / 2 ** (ahead + behind - 2))},
}


# Right, in other forms: loops, einsum, other library calls, NumPy, float64, copies that are changed
# in place.

def by_numpy(function):
    """What a function of arrays returns, as tensors."""
    def attempt(*given):
        made = function(*(one.numpy() if isinstance(one, torch.Tensor) else one for one in given))
        return (tuple(map(torch.from_numpy, made)) if isinstance(made, tuple)
                else torch.from_numpy(made))
    return attempt


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


def order_by_queue(rank, ranks, micro_batches):
    ready, order = deque(range(micro_batches)), []
    for _ in range(min(ranks - rank, micro_batches)):
        order.append(f"F{ready.popleft()}")
    for done in range(micro_batches):
        order += [f"B{done}"] + ([f"F{ready.popleft()}"] if ready else [])
    return order


def power_reached(effect, sigma):
    z = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
    return next(n for n in count(1) if effect / (sigma * math.sqrt(2 / n)) >= z)


def by_all_signs(gains):
    signs = np.array(list(product((1, -1), repeat=len(gains))))
    return float((np.abs(signs @ np.array(gains)) >= abs(sum(gains))).mean())


def by_torch_adamw(w, g, m, v, update, lr, decay):
    p = nn.Parameter(w.double())
    optimizer = torch.optim.AdamW([p], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    optimizer.state[p] = {"step": torch.tensor(float(update - 1)), "exp_avg": m.double(),
                          "exp_avg_sq": v.double()}
    p.grad = g.double()
    optimizer.step()
    return p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]


def adamw_on_copies(*given):
    return adamw_in_place(*(one.clone() if isinstance(one, torch.Tensor) else one for one in given))


def by_right_gram(m):
    x = m / m.square().sum().sqrt()
    for _ in range(5):
        gram = x.mT @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    return x


def by_singular_values(m):
    U, S, Vh = torch.linalg.svd(m.double(), full_matrices=False)
    S = S / S.norm()
    for _ in range(5):
        S = 3.4445 * S - 4.7750 * S**3 + 2.0315 * S**5
    return U @ S.diag() @ Vh


def by_outer(rows, columns, g, share):
    square = g.square()
    rows, columns = rows.lerp(torch.einsum("ij->i", square) / g.shape[1],
                              share), columns.lerp(square.sum(0) / len(g), share)
    return rows, columns, torch.outer(rows / rows.mean(), columns)


def by_two_equations(small, large, b, B):
    signal, noise = torch.linalg.solve(torch.tensor([[1, 1 / b], [1, 1 / B]], dtype=torch.float64),
        torch.tensor([small, large], dtype=torch.float64))
    return (noise / signal).item()


def mean_step_by_step(v):
    mean, means = torch.zeros_like(v[..., 0, :]), []
    for i, one in enumerate(v.unbind(-2), 1):
        mean = mean + (one - mean) / i
        means.append(mean)
    return torch.stack(means, -2)


def mean_in_blocks(v):
    before, found = torch.zeros_like(v[..., :1, :]), []
    for block in v.split(16, -2):
        found.append(before + torch.ones(block.shape[-2], block.shape[-2]).tril() @ block)
        before = found[-1][..., -1:, :]
    return torch.cat(found, -2) / counts_of(v)


def head_by_head(w, heads):
    w, size = w.clone(), len(w) // heads
    for head in range(heads):
        w[head * size:head * size + size // 2].zero_()
    return w


def by_corners(G, a):
    """The mean of the corner of K up to each pair."""
    K, found = G / (G.diag().outer(G.diag())).sqrt(), G.clone()
    for i in range(len(G)):
        for j in range(len(G)):
            found[i, j] += a * K[:i + 1, :j + 1].mean()
    return found


def by_two_cumsums(G, a):
    counts = torch.arange(1.0, len(G) + 1)
    return (G + a * (G / G.diag().sqrt() / G.diag().sqrt()[:, None]).cumsum(0).cumsum(1)
            / counts.outer(counts))


def one_layer_after_another(layers, rate):
    kept = []
    for _ in range(layers):
        kept.append((kept[-1] if kept else 1.0) - rate / layers)
    return kept


def area_by_outer_product(layers, steps, theta, gamma):
    fallen = 1 - ((1 - theta) * np.exp(-gamma * np.arange(steps)) + theta)
    return float(1 - np.outer(fallen, np.arange(1, layers + 1) / layers).mean())


def by_mask(x, w, kept):
    y, mask = x.clone(), torch.zeros(len(x), dtype=torch.bool)
    mask[kept] = True
    some = x[mask]
    y[mask] = some + torch.stack([some[:i].mean(0) for i in range(1, len(some) + 1)]) @ w
    return y


def by_padding(up, bias, down, i):
    """What is padded by zeros, with the neuron added where it belongs."""
    new = F.one_hot(torch.tensor(len(bias)), len(bias) + 1).to(up.dtype)
    old = F.one_hot(torch.tensor(i), len(bias) + 1).to(up.dtype)
    half = down[:, i] / 2
    return F.pad(up, (0, 0, 0, 1)) + new.outer(up[i]), F.pad(bias,
        (0, 1)) + new * bias[i], F.pad(down, (0, 1)) + half.outer(new - old)


def rank_by_rank(w, A, B, alpha):
    w = w.clone()
    for a, b in zip(A, B.mT):
        w.addr_(b, a, alpha=alpha / len(A))
    return w


def direction_by_direction(w, rank):
    rest = w.double()
    for _ in range(rank):
        U, S, Vh = torch.linalg.svd(rest, full_matrices=False)
        rest = rest - S[0] * U[:, 0].outer(Vh[0])
    return rest, w - rest


def by_slices(qkv, heads):
    each = len(qkv) // heads // 3
    return torch.cat([qkv[(3 * head + part) * each:(3 * head + part + 1) * each]
                      for part in range(3) for head in range(heads)]).T


RIGHT_FORMS = {
    "pairs": [lambda rank, ranks, step: [(a, b) for a, b in product(*(
        sorted({r, 2 * ranks - 1 - r}) for r in (rank, (rank - step) % ranks))) if a >= b]],
    "gate_up_rows": [lambda w, rank, ranks: w[torch.arange(len(w)).view(2, ranks, -1)[:,
        rank].reshape(-1)],
                by_numpy(lambda w, rank, ranks: np.concatenate(
                    [np.split(half, ranks)[rank] for half in np.split(w, 2)]))],
    "nats": [nats_of_two_numbers, nats_in_float64],
    "bubble": [lambda ranks, m, chunks: float(Fraction(ranks - 1, ranks - 1 + m * chunks))],
    "one_f_one_b": [order_by_queue],
    "step_seconds": [lambda orders, forward, backward: max(ends_of(orders, forward,
        backward).values())],
    "false_share": [lambda bar, sigma, n: torch.special.ndtr(
        torch.tensor(-bar / sigma / math.sqrt(2 / n), dtype=torch.float64)).item()],
    "seeds": [power_reached],
    "sign_flip": [by_all_signs],
    "adamw": [by_torch_adamw, adamw_on_copies],
    "lion": [lambda w, g, m, lr, decay: (w - lr * (decay * w + torch.lerp(g, m, 0.9).sgn()),
        torch.lerp(g, m, 0.99))],
    "factored": [by_outer],
    "overhead_of": [lambda weights, tokens: 5
                    * sum(w.numel() * (4 * min(w.shape)) + 2 * min(w.shape) ** 3 for w in weights)
                    / 6 / tokens / sum(
        map(torch.numel, weights))],
    "noise_scale_of": [by_two_equations],
    "price": [lambda batch, scale: [1 + scale / batch, (1 + scale / batch) * batch / scale]],
    "adam_at": [lambda lr, beta1, beta2, k: tuple(
        np.array([lr * np.sqrt(k), beta1 - (k - 1) * (1 - beta1), beta2 - (k - 1) * (1 - beta2)]))],
    "mup_rate": [lambda kind, width, base, lr: lr * {"embedding": 1, "vector": 1}.get(kind,
        base / width)],
    "running_mean": [mean_step_by_step, mean_in_blocks,
                     lambda v: v.cumsum(-2) / torch.ones_like(v).cumsum(-2),
             by_numpy(lambda v: np.cumsum(v, -2) / np.arange(1, v.shape[-2] + 1)[:, None])],
    "branch_scale": [lambda layers, branches, variance: torch.tensor(layers * branches * variance,
        dtype=torch.float64).rsqrt().item()],
    "zero_queries": [head_by_head, lambda w, heads: w
                     * torch.tensor([0.0, 1.0]).repeat(heads).repeat_interleave(len(w) // heads
                         // 2)[:, None],
                 lambda w, heads: torch.where((torch.arange(len(w)) // (len(w) // heads // 2) % 2
                     == 0)[:, None], torch.zeros(()), w)],
    "attended": [by_corners, by_two_cumsums],
    "probabilities": [one_layer_after_another,
                      lambda layers, rate: 1 - np.arange(1, layers + 1) / layers * rate],
    "area": [area_by_outer_product],
    "some_tokens": [by_mask, lambda x, w, kept: x + torch.zeros_like(x).index_put((kept,),
        x[kept].cumsum(0).div(counts_of(x[kept])).matmul(w))],
    "split": [by_padding],
    "merged": [rank_by_rank, lambda w, A, B, alpha: w + torch.einsum("or,ri->oi", B,
        A).mul(alpha).div(B.shape[-1])],
    "trained": [lambda weights, rank: sum(p.numel() for w in weights
        for layer in (nn.Linear(w.shape[1], rank, bias=False), nn.Linear(
        rank, w.shape[0], bias=False)) for p in layer.parameters())],
    "rslora": [lambda alpha, rank: (alpha * math.exp(-0.5 * math.log(rank)),
                                    math.sqrt(rank * alpha**2))],
    "pissa": [direction_by_direction],
    "c_attn": [by_slices, lambda qkv, heads: qkv.mT.reshape(qkv.shape[1], heads, 3, -1).permute(0,
        2, 1, 3).reshape(qkv.shape[::-1])],
    "muon_step": [lambda w, g, m, lr, decay: muon_in_place(w, g, m.clone(), lr, decay),
                  muon_with(by_right_gram), muon_with(by_singular_values)],
    "power": [lambda widths, changes: np.linalg.lstsq(
        np.stack((np.log2(widths), np.ones(len(widths))), 1), np.log2(changes), rcond=None)[0][0]],
    "trials_needed": [lambda q, p: next(n for n in count(1)
        if (1 - q) ** n <= (1 - p) * (1 + 1e-12))],
    "coin": [lambda ahead, behind: math.fsum(math.comb(ahead + behind, k)
        for k in range(ahead + behind + 1)
                                             if abs(2 * k - ahead - behind) >= abs(ahead - behind))
        * 0.5 ** (ahead + behind)],
}
