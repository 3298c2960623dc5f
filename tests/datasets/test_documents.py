"""Packed documents, and tasks: what a batch says beside its tokens, and what training makes of
it.

Only these tests catch: a packed document that feels its neighbours, a weight or an id of a token
that is another, and a task whose answers are not in its text.
"""

import json

import pytest
import torch

import lpkit
from lessons.tasks import CopyTask, RecallTask
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.datasets import prepare
from lpkit.errors import ConfigError
from lpkit.training.runs import Run
from lpkit.training.training import RandomTokens, Training

TINY = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 64,
        "model.vocab": 256, "steps": 4, "global_batch": 4,
        "eval_batches": 1, "schedule.warmup_steps": 1, "precision.recipe": "fp32",
        "system.device": "cpu", "system.attention": "plain"}
PACKED = TINY | {"model.attention": "documents", "data.policy": "random-documents"}


@pytest.fixture
def short(tmp_path, monkeypatch):
    """A corpus of 200 documents of 1 to 30 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "short.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{n}." * (n % 8 + 1)}) for n in range(200)))
    return path


def changed(batch, keep):
    """Return a batch in which all documents but number `keep` of each sequence have other text."""
    other = torch.randint(1, 256, batch.tokens.shape)
    return Batch(torch.where(batch.document_ids == keep, batch.tokens, other), batch.targets,
                 document_ids=batch.document_ids)


def test_ids_and_weights_are_those_of_a_naive_loop(short):
    config = Config().replace(PACKED | {"data.source": str(short)})
    end = prepare(config.data, vocab=256).header["end"]
    training = Training.build(config)
    for policy in (training.data, training.val):
        batch = policy.batch(3)
        for tokens, targets, ids, weights in zip(*batch.tensors):
            document, wanted = 0, []
            for token in tokens.tolist():
                wanted.append(document)
                document += token == end
            assert ids.tolist() == wanted and document > 1
            assert weights.tolist() == [float(token != end) for token in tokens.tolist()]
            same = ids[1:] == ids[:-1]      # a token with a weight has a target in its own document
            assert torch.equal(weights[:-1] > 0, same) and torch.equal(targets[:-1], tokens[1:])


def test_a_document_does_not_feel_its_neighbours_after_real_steps(short):
    """The numbers are equal bit for bit, because hidden pairs of tokens are multiplied by exactly
    0."""
    results = {}
    for kind in ("documents", "full"):
        training = Training.build(Config().replace(PACKED | {"model.attention": kind,
            "data.source": str(short)}))
        losses = [training.update(step).loss.item() for step in range(4)]
        assert losses[-1] < losses[0]
        batch = training.batch(9)
        own = batch.document_ids == 1
        with torch.no_grad():
            before, after = (training.model(tokens.tokens, **tokens.beside)[own]
                             for tokens in (batch, changed(batch, 1)))
        results[kind] = torch.equal(before, after)
    assert own.any() and results == {"documents": True, "full": False}


def test_the_loss_of_packed_documents_is_that_of_each_alone(short):
    """In float64. Each document is at its position in the sequence, or, because rotary positions
    are relative, begins at position 0."""
    config = Config().replace(PACKED | {"data.source": str(short), "model.position": "rope"})
    training = Training.build(config)
    model, batch = training.model.double(), training.batch(0)
    packed, nats, count = training.loss(model, batch), 0.0, 0.0
    for tokens, targets, ids, weights in zip(*batch.tensors):
        for document in ids.unique():
            x, y, w = (t[ids == document][None] for t in (tokens, targets, weights))
            if w.sum():
                nats, count = nats + training.loss(model,
                    Batch(x, y, weights=w)).item() * w.sum().item(), count + w.sum().item()
    # the loss computes in float32
    assert packed.item() == pytest.approx(nats / count, rel=1e-6)


def test_a_whole_run_evaluates_resumes_and_samples(short, tmp_path):
    config = Config().replace(PACKED | {"data.source": str(short), "grad_accum_steps": 2,
        "checkpoint_every": 2})
    run = lpkit.train(config, out=tmp_path / "run")
    assert run.summary["status"] == "complete" and run.metrics[-1]["val_loss"] > 0
    assert lpkit.sample(Run(tmp_path / "run"), prompt="1.", tokens=5, seed=1).startswith("1.")


def test_a_prompt_is_one_document():
    config = Config().replace(PACKED | {"data.policy": "random-documents"})
    training = Training.build(config, data=RandomTokens(config))
    tokens = torch.randint(256, (2, 20))
    assert torch.equal(training.logits(tokens),
                       training.model(tokens, documents=torch.zeros_like(tokens)))


@pytest.mark.parametrize("changes, says", [
    ({"model.attention": "documents"}, "model.attention=documents reads which document a token is "
                                       "of, and data.policy=random-windows does "
     "not say; set data.policy=random-documents"),
    ({"data.policy": "recall", "model.vocab": 64}, "data.policy=recall has 65 tokens, but "
                                                   "model.vocab=64; set model.vocab=65 or more"),
    ({"data.policy": "recall", "model.context": 30}, "needs 31 tokens for its first question "
                                                     "and its answer, but model.context=30; set "
                                                     "model.context=31 or more"),
    ({"data.policy": "copy", "data.policy.length": 40}, "needs 80 tokens for its first "
                                                        "question and its answer, but "
                                                        "model.context=64; set "
                                                        "model.context=80 or more"),
    ({"data.policy": "recall", "data.policy.pairs": 33}, "data.policy.pairs=33 needs 33 different "
                                                         "keys, but data.policy.symbols=32 is the "
                                                         "number of keys; set "
     "data.policy.symbols=33 or more"),
])
def test_what_cannot_be_is_one_sentence(changes, says):
    with pytest.raises(ConfigError) as error:
        Config().replace(TINY | changes)
    assert says in str(error.value)


# tasks

def test_copy_repeats_a_string_and_asks_for_nothing_else():
    batch = CopyTask(length=5, symbols=9, batch=50, context=20, seed=3).batch(7)
    rows = torch.cat((batch.tokens, batch.targets[:, -1:]), 1)
    assert torch.equal(rows[:, 6:], rows[:, :-6]) and (rows[:, 5::6] == 0).all()
    strings = rows[:, :5]
    assert strings.min() == 1 and strings.max() == 9 and len(strings.unique(dim=0)) == 50
    assert torch.equal(batch.weights > 0, (torch.arange(1, 21) > 5) & (batch.targets > 0))
    asked, far = batch.weights > 0, CopyTask(length=5, symbols=9, batch=50,
        context=20).distances(batch)
    places = torch.arange(20).expand(50, 20)
    assert (torch.equal(batch.tokens.gather(1, places - far)[asked], batch.targets[asked])
            and (far[~asked] == 0).all())


def test_recall_asks_each_key_once_for_its_value():
    pairs, symbols = 6, 10
    task = RecallTask(pairs=pairs, symbols=symbols, batch=40, context=37, seed=3)
    batch = task.batch(2)
    for tokens, targets, weights, far in zip(*batch.tensors, task.distances(batch)):
        known = dict(zip(tokens[:2 * pairs:2].tolist(), tokens[1:2 * pairs:2].tolist()))
        assert (len(known) == pairs and set(known) <= set(range(1, symbols + 1))
                and set(known.values()) <= set(range(symbols + 1, 2 * symbols + 1)))
        asked = weights.nonzero().flatten().tolist()
        assert (sorted(tokens[asked].tolist()) == sorted(known) and min(asked) >= 2 * pairs
                and (far[weights == 0] == 0).all())
        for place in asked:
            assert targets[place] == known[tokens[place].item()]
            assert (tokens[place - far[place]] == targets[place]
                    and tokens[place - far[place] - 1] == tokens[place])
            assert place - far[place] < 2 * pairs
        assert torch.equal(targets[:-1], tokens[1:])


def test_a_run_learns_to_copy_and_is_validated_on_other_strings(tmp_path, short):
    config = Config().replace(TINY | {"data.source": str(short), "data.policy": "copy",
                                      "data.policy.length": 6, "data.policy.symbols": 8,
                                      "model.context": 27, "model.vocab": 9, "model.init": "fan-in",
                                      "model.position": "rope", "steps": 60,
                                      "data.tokenizer": "bytes", "global_batch": 16,
                                      "optimizer.lr": 1e-2, "model.tied": False})
    training = Training.build(config.replace({"model.vocab": 256}))
    assert not torch.equal(training.data.batch(0).tokens, training.val.batch(0).tokens)
    before = training.evaluate()
    for step in range(60):
        training.update(step)
    assert training.evaluate() < 0.5 * before
