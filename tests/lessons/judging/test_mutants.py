"""No wrong answer is right: definitions changed in one place, and those that a person writes. All
of them: python -m tests.lessons.judging.mutants.

Only these tests catch: an exercise whose cases, tolerance or limit of bytes let a definition pass
that was changed in one place, or an answer of a usual misunderstanding.
"""

import itertools

import numpy as np
import pytest
import torch

from lessons.judging import judge
from lessons.judging.learner import check
from tests.lessons.judging.course import EXERCISES, ON_RANKS, PUZZLES
from tests.lessons.judging.mutants import SAME, is_same, judged_right, mutants, on_threads

EACH = 4        # of a puzzle: an interpreter takes its time
F = torch.nn.functional


@pytest.mark.parametrize("name", [name for name in EXERCISES if name not in PUZZLES])
def test_every_change_of_a_definition_is_wrong(name):
    changed = mutants(name)
    assert (changed and [mutant.change for mutant in judged_right(changed)]
            == [mutant.change for mutant in changed if is_same(mutant)])


def test_some_changes_of_each_kernel_are_wrong():
    chosen = [mutant for name in PUZZLES for every in [mutants(name)]
              for mutant in every[len(name) % 3::len(every) // EACH]]
    assert (len(chosen) >= len(PUZZLES) * EACH and judged_right(chosen)
            == [mutant for mutant in chosen if is_same(mutant)])


def test_there_are_enough_and_each_exception_has_a_reason():
    every = {name: mutants(name) for name in EXERCISES}
    assert sum(map(len, every.values())) > 3000 and all(every.values())
    for name, parts in itertools.chain(*map(dict.items, SAME.values())):
        assert all(any(part in f"{mutant.change}$" for mutant in every[name])
                   for part in parts), name
    same = sum(is_same(mutant) for of_exercise in every.values() for mutant in of_exercise)
    assert same < 0.04 * sum(map(len, every.values()))


def all_logits(h, w, targets, chunk):
    h = h.requires_grad_()
    loss = F.cross_entropy(h @ w.T, targets)
    return loss.detach(), torch.autograd.grad(loss, h)[0]


def all_logits_in_numpy(h, w, targets, chunk):
    h, w, own = h.numpy(), w.numpy(), (np.arange(len(h)), targets.numpy())
    p = np.exp(h @ w.T)
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[own]).mean()
    p[own] -= 1
    return torch.tensor(loss), torch.from_numpy(p @ w / len(h))


def matrix_in_numpy(q, k, v):
    weights = np.tril(q.numpy() @ k.numpy().T)
    return torch.from_numpy(weights @ v.numpy() / weights.sum(1, keepdims=True))


def chunks_that_stay(h, w, targets, chunk):
    """The logits of each chunk, kept for one backward pass over all."""
    h = h.requires_grad_()
    loss = sum(F.cross_entropy(a @ w.T, b, reduction="sum")
               for a, b in zip(h.split(chunk), targets.split(chunk))) / len(h)
    return loss.detach(), torch.autograd.grad(loss, h)[0]


def first_micro_batch_alone(nbytes, ranks, stage, micro_batches):
    return EXERCISES["14.sent_bytes"].spec(nbytes, ranks, stage, 1)


def papers_zero_two(nbytes, ranks, stage, micro_batches):
    return (ranks - 1) / ranks * nbytes * (2, 2, micro_batches + 1, 3 * micro_batches)[stage]


def never_below(least):
    def scaler(finite, scale, interval):
        scales, good = [], 0
        for ok in finite:
            scales.append(scale)
            good = good + 1 if ok else 0
            if not ok:
                scale = max(scale / 2, least)
            elif good == interval:
                scale, good = scale * 2, 0
        return scales
    return scaler


def first_alone_saw_nothing(a, lse_a, b, lse_b):
    """Forgets the first where it is the second that has seen nothing."""
    out, lse = EXERCISES["12.merge"].spec(a, lse_a, b, lse_b)
    return torch.where(lse_b.isinf()[:, None], b, out), torch.where(lse_b.isinf(), lse_b, lse)


def of_the_scores_largest(m, l, acc, scores, v):
    new = torch.maximum(m, scores.max())
    p, shrink = (scores - new[:, None]).exp(), (m - new).exp()
    return new, l * shrink + p.sum(1), acc * shrink[:, None] + p @ v


@pytest.mark.parametrize("name, attempt, message", [
    ("00.cross_entropy", lambda logits, targets: ((x := logits - logits.max()).exp().sum(1).log()
        - x.gather(1, targets[:, None])[:, 0]).mean(),
     "expected"),
    ("02.roofline_seconds", lambda ops, peak, speed: sum(max(f / 1e12, b / 1e9) for f, b in ops),
     "expected"),
    ("03.mx_cast", lambda x: (x / (s := 2.0 ** (torch.frexp(x.amax())[1] - 9.0))).clamp(-448,
        448).to(torch.float8_e4m3fn).float() * s, "expected"),
    ("04.shared_by", lambda rows, columns, high, wide: (high or 256) * (wide or 512), "expected"),
    ("05.loss_scaler", never_below(1.0), "expected"),
    ("07.worst_row",
     lambda x, y: int(torch.nan_to_num((x - y).abs().amax(1) / x.abs().amax(1)).argmax()),
     "expected"),
    ("12.merge", first_alone_saw_nothing, "expected"),
    ("12.step", of_the_scores_largest, "expected"),
    ("13.document_mask", lambda lengths: ((ids := lengths.repeat_interleave(lengths))[:,
        None] == ids[None]).tril(), "expected"),
    ("08.chunked_loss", all_logits, "at once; the limit is 131 kB"),
    ("08.chunked_loss", chunks_that_stay, "at once; the limit is 131 kB"),
    ("08.chunked_loss", all_logits_in_numpy, "its arrays and lists take"),
    ("13.linear_attention", matrix_in_numpy, "its arrays and lists take"),
    ("13.linear_attention", lambda q, k, v: F.normalize((q @ k.T).tril(), p=1, dim=-1) @ v,
     "at once; the limit is 131 kB"),
    ("06.fp8_forward", lambda x, w, sx, sw: (x / sx).to(torch.float8_e4m3fn).float()
     @ (w / sw).to(torch.float8_e4m3fn).float().T * sx * sw,
     "clamp before the cast"),
    ("03.mx_cast", lambda x: (x / (s := 2.0 ** (torch.frexp(x.abs().amax())[1] - 9))).to(
        torch.float8_e4m3fn).float() * s, "clamp before the cast"),
    ("14.sent_bytes", first_micro_batch_alone, "ZeRO 2 and 3 send in every micro-batch"),
    ("14.sent_bytes", papers_zero_two, "that is the paper's ZeRO 2"),
    ("04.int8_db", lambda crest: 10 * torch.tensor(12 * (128 / crest) ** 2).log10().item(),
     "expected"),
    ("05.with_masters", lambda weight, updates: weight - sum(updates), "expected"),
    ("08.recomputed", lambda block, x, dy: (y := block(x.requires_grad_()),
        torch.autograd.grad(y, x, dy)[0]), "the first forward kept"),
])
def test_what_a_person_writes_instead_is_wrong(name, attempt, message):
    verdict = check(EXERCISES[name], attempt)
    assert verdict.status == "wrong" and message in verdict.detail


def test_memory_of_numpy_is_seen_and_what_is_printed_is_not_said_twice(capsys):
    def answer():
        print("once")
        return np.ones(1 << 17).sum()

    assert 0 <= judge.array_bytes(answer) - (8 << 17) < 1 << 14 and capsys.readouterr().out == ""
    assert (judge.array_bytes(lambda: torch.ones(1 << 20))
            < 1 << 14), "torch's tensors have a limit of their own"


def by_momentum(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = m.clone().mul_(0.9).add_(reduce_scatter(g.div(ranks)))
    each = len(w) // ranks
    return all_gather(torch.sub(w[rank * each:(rank + 1) * each], m, alpha=lr)), m


def in_float64(w, g, m, lr, rank, ranks, reduce_scatter, all_gather):
    m = 0.9 * m.double() + reduce_scatter(g).double() / ranks
    return all_gather((w.view(ranks, -1)[rank] - lr * m).float()), m


def by_reciprocal(rows, rank, ranks, all_reduce_max, all_gather_bytes):
    scale = all_reduce_max(rows.abs()).max() / 448
    codes = (rows * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return scale * all_gather_bytes(codes.view(torch.uint8)).view(torch.float8_e4m3fn).to(
        torch.float32)


@pytest.mark.parametrize("name, attempt",
                         [("14.zero_one", by_momentum), ("14.zero_one", in_float64),
                          ("15.eight_bits", by_reciprocal)])
def test_right_answers_on_ranks(name, attempt):
    assert not on_threads(ON_RANKS[name], attempt)
