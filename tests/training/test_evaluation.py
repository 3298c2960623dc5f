"""Only these tests catch a loss that is not the weighted sum over the sum of weights, that depends
on how a batch or an evaluation is cut, or that is a NaN where no token counts."""

import pytest
import torch
from torch.nn import functional

from lpkit.contracts import IGNORED, Batch
from lpkit.parallel.processes import Processes
from lpkit.parallel.ranks import Ranks
from lpkit.training.runs import RunFailedError
from lpkit.training.training import Training
from tests.training import evaluation
from tests.training.evaluation import EQUAL, SMALL, Handed

CUTS = [("random-documents", "data"), ("-100", "pipeline"), ("zeros", "context")]


@pytest.fixture(scope="module")
def source():
    with evaluation.text() as source:
        yield source


@pytest.mark.dist
def test_an_evaluation_is_the_same_number_however_it_is_cut(source, parent):
    """Over 1, 2 and 4 micro-batches on 1 and 2 ranks, to 1e-6 of the float64 sum over the sum;
    `python -m tests.training.evaluation` asks it of 40 configurations."""
    for (batches, way, *_), loss in evaluation.val_losses(CUTS, source, parent).items():
        right = evaluation.due(batches, evaluation.config_of(batches, way, source))
        assert loss == pytest.approx(right, rel=EQUAL), (batches, way)


@pytest.mark.parametrize("policy", ["random-windows", "masked"])
def test_micro_batches_read_the_same_text(source, policy):
    """As many sequences as without them, and the same ones: an evaluation has eval_batches *
    global_batch. A micro-batch is no larger than in training, for the logits of a whole batch may
    not fit where a micro-batch's do."""
    whole, cut = (Training.build(evaluation.config_of(policy, "data", source, n)) for n in (1, 4))
    for i in range(2):
        a, b = whole.val.batch(i), cut.val.batch(i)
        assert len(b.tokens) == SMALL.global_batch and all(map(torch.equal, a.tensors, b.tensors))
    sizes = []
    cut.model.register_forward_pre_hook(lambda model, args: sizes.append(len(args[0])))
    cut.evaluate()
    assert sizes == [2] * 12


@pytest.mark.parametrize("loss, pieces", [("full", 1), ("chunked", 4)])
def test_an_update_in_which_no_token_counts_has_loss_and_gradients_of_0(loss, pieces):
    class Nothing(Handed):
        def batch(self, step):
            batch = super().batch(step)
            return Batch(batch.tokens, batch.targets, weights=torch.zeros(batch.targets.shape))

    config = SMALL.replace({"memory.cross_entropy": loss, "grad_accum_steps": pieces,
                            "optimizer.weight_decay": 0})
    training = Training.build(config, data=Nothing("uneven", config))
    before = [p.clone() for p in training.model.parameters()]
    assert training.forward_backward(training.batch(0)) == 0
    assert all(p.grad is not None and not p.grad.any() for p in training.model.parameters())
    done = training.update(0)
    assert done.loss == done.grad_norm == 0
    assert all(map(torch.equal, before, training.model.parameters()))
    with pytest.raises(RunFailedError, match="every token of the evaluated batches has"):
        training.evaluate()


@pytest.mark.parametrize("pieces, weighted", [(1, True), (4, False)])
def test_targets_of_minus_100_count_for_nothing(pieces, weighted):
    """As PyTorch and every collator of transformers have it: the loss and the gradients are
    PyTorch's of the whole batch, in one piece."""

    class Collated:
        def batch(self, step):
            batch = Handed("-100", SMALL).batch(step)
            return Batch(batch.tokens, batch.targets, weights=torch.full(batch.targets.shape, 0.5)
                         if weighted else None)

    batch = Collated().batch(0)
    training, whole = (Training.build(SMALL.replace({"grad_accum_steps": n}), data=Collated())
                       for n in (pieces, 1))
    due = functional.cross_entropy(whole.model(batch.tokens).flatten(0, 1),
                                   batch.targets.flatten(), ignore_index=IGNORED)
    due.backward()
    loss = training.forward_backward(training.batch(0))
    torch.testing.assert_close([loss, *(p.grad for p in training.model.parameters())],
                               [due.detach(), *(p.grad for p in whole.model.parameters())],
                               rtol=1e-5, atol=1e-7)


@pytest.mark.dist
def test_a_rank_without_tokens_changes_nothing(source, parent):
    """The first update has no token at all; in the second one rank 1, or a stage's last
    micro-batches, have none."""
    cases = [("zeros", way, 2) for way in evaluation.WAYS]
    with Processes("tests.training.evaluation:updates", {"cases": cases, "source": source}, world=2,
                   parent=parent) as running:
        results = running.wait()
    assert results[0] == results[1]
    for (batches, way, _), got in zip(cases, results[0]):
        config = evaluation.config_of(batches, way, source, 2)
        due = evaluation.two_updates(evaluation.built(batches, config, Ranks()))
        assert got[:2] == [0, 0] and got == pytest.approx(due, rel=1e-5) and got[3] > 0, way
