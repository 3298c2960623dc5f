"""A loss is the weighted sum over the sum of weights, however its batch is cut, and 0 where no
token counts."""

import pytest
import torch
from torch.nn import functional

from lpkit.contracts import IGNORED, Batch
from lpkit.datasets.policies import Ramped
from lpkit.parallel.processes import Processes
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.data import POLICIES
from lpkit.training.runs import RunFailedError
from lpkit.training.training import Training
from tests.training import evaluation
from tests.training.evaluation import EQUAL, SMALL, Handed

CUTS = [("random-documents", "data"), ("-100", "pipeline"), ("zeros", "context")]


@pytest.fixture(scope="module")
def source():
    with evaluation.text() as source:
        yield source


class Given:
    """A user's batches that all count as `counts` says."""

    def __init__(self, counts, config=SMALL):
        self.counts, self.all = counts, Handed("uneven", config)

    def batch(self, step):
        batch = self.all.batch(step)
        return Batch(batch.tokens, batch.targets, weights=self.counts(batch).float())


@pytest.mark.dist
def test_an_evaluation_is_the_same_number_however_it_is_cut(source, parent):
    """Over 1, 2 and 4 micro-batches on 1 and 2 ranks, to 1e-6 of the float64 sum over the sum;
    `python -m tests.training.evaluation` asks it of 40 configurations."""
    for (batches, way, *_), loss in evaluation.found(CUTS, source, parent).items():
        right = evaluation.due(batches, evaluation.config_of(batches, way, source))
        assert loss == pytest.approx(right, rel=EQUAL), (batches, way)


@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
def test_micro_batches_read_the_same_text(source, pieces):
    """As many sequences as without them, and the same ones: an evaluation has eval_batches *
    global_batch."""
    for policy in ("random-windows", "masked"):
        one, cut = (Training.build(evaluation.config_of(policy, "data", source, n))
                    for n in (1, pieces))
        for i in range(2):
            a, b = one.val.batch(i), cut.val.batch(i)
            assert (len(b.tokens) == SMALL.global_batch
                    and all(map(torch.equal, a.tensors, b.tensors)))


def test_a_micro_batch_is_no_larger_than_in_training(source):
    """The logits of a whole batch may not fit where a micro-batch's do."""
    training = Training.build(evaluation.config_of("random-windows", "data", source, 4))
    seen = []
    training.model.register_forward_pre_hook(lambda model, args: seen.append(len(args[0])))
    training.evaluate()
    assert seen == [2] * 12


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_an_update_in_which_no_token_counts_has_loss_and_gradients_of_0(loss, pieces):
    config = SMALL.replace({"memory.cross_entropy": loss, "grad_accum_steps": pieces,
                            "optimizer.weight_decay": 0})
    training = Training.build(config, data=Given(lambda batch: torch.zeros(batch.targets.shape)))
    before = [p.clone() for p in training.model.parameters()]
    loss = training.forward_backward(training.batch(0))
    assert loss == 0 and all(p.grad is not None and not p.grad.any()
                             for p in training.model.parameters())
    done = training.update(0)
    assert (done.loss == 0 and done.grad_norm == 0
            and all(map(torch.equal, before, training.model.parameters())))
    with pytest.raises(RunFailedError, match="no token of the validation data counts"):
        training.evaluate()


def test_micro_batches_without_tokens_change_nothing():
    """The last half of the sequences counts for nothing: the loss and the gradients are those of
    the first half."""
    half = SMALL.global_batch // 2
    found = []
    for pieces in (1, 4, 8):
        training = Training.build(SMALL.replace({"grad_accum_steps": pieces}), data=Given(
            lambda batch: (torch.arange(len(batch.targets)) < half)[:,
                None].expand_as(batch.targets)))
        found.append([training.forward_backward(training.batch(0)),
                      *(p.grad for p in training.model.parameters())])
    batch = Handed("uneven", SMALL).batch(0)
    model = Training.build(SMALL, data=Given(None)).model
    due = functional.cross_entropy(model(batch.tokens[:half]).flatten(0, 1),
                                   batch.targets[:half].flatten())
    due.backward()
    for one in found:
        torch.testing.assert_close(one, [due.detach(), *(p.grad for p in model.parameters())],
                                   rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_targets_of_minus_100_count_for_nothing(pieces, weighted):
    """As PyTorch and every collator of transformers have it; the loss and the gradients are
    PyTorch's of the whole batch."""

    class Collated:
        def batch(self, step):
            batch = Handed("-100", SMALL).batch(step)
            return Batch(batch.tokens, batch.targets, weights=torch.full(batch.targets.shape, 0.5)
                         if weighted else None)

    training, batch = Training.build(SMALL.replace({"grad_accum_steps": pieces}),
                                     data=Collated()), Collated().batch(0)
    model = Training.build(SMALL, data=Collated()).model
    due = functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(),
                                   ignore_index=IGNORED)
    due.backward()
    loss = training.forward_backward(training.batch(0))
    torch.testing.assert_close([loss, *(p.grad for p in training.model.parameters())],
                               [due.detach(), *(p.grad for p in model.parameters())], rtol=1e-5,
                               atol=1e-7)


@pytest.mark.dist
def test_a_rank_without_tokens_changes_nothing(source, parent):
    """The first update has no token at all; in the second one rank 1, or a stage's last
    micro-batches, have none."""
    cases = [("zeros", way, 2) for way in evaluation.WAYS]
    with Processes("tests.training.evaluation:updates", {"cases": cases, "source": source}, world=2,
                   parent=parent) as running:
        found = running.wait()
    assert found[0] == found[1]
    for case, got in zip(cases, found[0]):
        due = evaluation.two_updates(evaluation.built(*case[:1],
            evaluation.config_of(*case[:2], source, 2), Ranks()))
        assert got[:2] == [0, 0] and got == pytest.approx(due, rel=1e-5) and got[3] > 0, case


@pytest.mark.parametrize("policy", ["copy", "recall"])
def test_a_ramp_of_lengths_that_asks_nothing_at_first_is_no_nan(policy):
    config = SMALL.replace({"imports": ["lessons.l21_noise_scale_and_schedules", "lessons.tasks"],
                            "sizes": "length-ramp",
                            "data.policy": policy, "model.context": 64, "steps": 20})
    settings = {key: value for key, value in vars(config.data.policy).items() if key != "name"}
    task = POLICIES[policy].load()(batch=8, context=64, **settings)
    training = Training.build(config, data=Ramped(task, 8, config.sizes_at))
    assert not training.batch(0).weights.any()      # else this asks nothing
    assert [training.update(0).loss.item(), training.update(0).grad_norm.item()] == [0, 0]
    assert all(p.isfinite().all() for p in training.model.parameters())
