"""Ranks that never have a whole model draw, and read, what one process has: the same bits, and less
memory.

Only these tests catch: a rank that draws other rows, moves the generator otherwise or has it all,
and a read of what is not there that passes in silence.
"""

from contextlib import nullcontext
from threading import Thread

import pytest
import torch
from torch import nn

import lessons.rows.linear_attention  # noqa: F401  adds rows
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.execution.kernels import Kernels
from lpkit.nn.transformer import Transformer
from lpkit.parallel.drawn import drawing
from lpkit.techniques.inits import INITS
from lpkit.training.build import initial_model
from tests.parallel.test_messages import UNEVEN
from tests.parallel.training_ranks import digest_of

CPU = torch.device("cpu")
SMALL = Config().replace({
    "model.layers": 8, "model.width": 64, "model.heads": 4, "model.context": 32, "global_batch": 12,
    "grad_accum_steps": 1,
    "precision.recipe": "fp32", "system.device": "cpu", "system.threads": 1, "eval_batches": 1,
    "steps": 2})
MODELS = {"gpt": {}, "uneven, untied": UNEVEN,
          "delta": {"model.attention": "delta", "model.bias": True},
          "performer": {"model.attention": "performer"}}


def rows(ranks: int, rank: int):
    return lambda whole: (*whole.chunk(ranks), *[whole[:0]] * ranks)[rank]


@pytest.mark.parametrize("name, ranks", [*((name, 3) for name in MODELS), ("gpt", 1)])
def test_rows_are_those_of_one_process(name, ranks):
    """And so is the generator after it, and what is no parameter."""
    config = SMALL.replace(MODELS[name])
    due = initial_model(config, "plain")
    state, models = torch.get_rng_state(), []
    for rank in range(ranks):
        with drawing(rows(ranks, rank), CPU) as drawn:
            model = initial_model(config, "plain")
        assert (torch.equal(torch.get_rng_state(), state)
                and sum(p.untyped_storage().nbytes() for p in model.parameters()) < (
            sum(p.nbytes for p in due.parameters()) / 5))
        models.append(model)
        for a, b in zip(model.buffers(), due.buffers(), strict=True):
            assert torch.equal(a, b)
        for (ours, p), (theirs, whole) in zip(model.named_parameters(), due.named_parameters(),
                strict=True):
            assert (ours == theirs and p.shape == whole.shape
                    and torch.equal(drawn.rows[p], rows(ranks, rank)(whole)))


@pytest.mark.parametrize("init", [name for name, row in INITS.items() if not row.again])
def test_every_init_fills_rows(init):
    config = SMALL.replace({"model.init": init, "model.layers": 1})
    with drawing(rows(2, 1), CPU) as drawn:
        model = initial_model(config, "plain")
    expected = initial_model(config, "sdpa")
    for p, whole in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(drawn.rows[p], whole.chunk(2)[1])


def test_other_ways_to_fill():
    """Orthogonal rows come by a view, and what a module drew before it was a parameter is kept."""
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.linear = nn.Parameter(torch.randn(6)), nn.Linear(4, 6)
            nn.init.orthogonal_(self.linear.weight)
            nn.init.trunc_normal_(self.linear.bias.data, std=0.1)

    torch.manual_seed(1)
    due = Drawn()
    torch.manual_seed(1)
    with drawing(rows(2, 1), CPU) as drawn:
        model = Drawn()
    for p, whole in zip(model.parameters(), due.parameters(), strict=True):
        assert torch.equal(drawn.rows[p], whole[3:])


def test_what_was_left_cannot_be_read():
    with (pytest.raises(ConfigError, match=r"calls mul_ on a parameter that is not there, for "
                                           r"parallel\.zero=2 and 3"),
          drawing(rows(2, 0), CPU)):
        first, second = nn.Linear(2, 4, bias=False), nn.Linear(2, 4, bias=False)
        with torch.no_grad():
            second.weight.mul_(2)      # it is at work
            first.weight.mul_(2)


def test_kernels_see_a_forward_like_others():
    """What stands for weights gives activations that are finite, and as large as those of the
    weights, within a half."""
    config = SMALL.replace({"model.norm": "rmsnorm", "model.position": "rope"})
    deviations = []
    kernels = Kernels(asked="rms-norm:reference", batch=(2, 32), autocast=nullcontext())
    with drawing(rows(2, 1), CPU):
        model = initial_model(config, "plain")
    for kind in (model, initial_model(config, "plain")):
        at_hand = kernels._at_hand(kind)
        deviations.append([t.std().item() for name in ("add-rms-norm", "rotary")
                      for t in at_hand[name][1][0][:2]])
    assert deviations[0] == pytest.approx(deviations[1], rel=0.5) and min(deviations[0]) > 0
    assert kernels(model) is model and "kernel:rms-norm" in kernels.choices


def test_other_threads_are_left_alone():
    layers = []
    with drawing(rows(2, 0), CPU):
        thread = Thread(target=lambda: layers.append(nn.Linear(2, 4)))
        thread.start()
        thread.join()
    assert layers[0].weight.is_contiguous()


LAYOUTS = {2: [{"shard": 2, "zero": 2}, {"shard": 2, "zero": 3, "gathered": "float32"}],
           4: [{"data": 2, "shard": 2}]}


@pytest.mark.dist
@pytest.mark.parametrize("world", LAYOUTS)
def test_ranks_start_from_the_same_bits_and_never_have_them_all(on_ranks, world):
    """Of the whole weights, eight blocks and tables: a rank has its rows; while FSDP2 cuts them a
    block whole (0.12) and its rows twice, the largest parameter once more (0.04), and what stands
    for parameters (0.04)."""
    due = digest_of(Transformer.parameters(initial_model(SMALL, "sdpa")))
    for of_rank in on_ranks("starts", SMALL, world, layouts=LAYOUTS[world]):
        for digest, built, shard in of_rank:
            assert digest == due and built < 1 / shard + 0.3


@pytest.mark.dist
def test_ranks_go_on_without_having_it_all(on_ranks, tmp_path):
    """Three ranks save, two go on: beside the rows of weights and moments there are those that are
    read, half of what one process has of them; all of it were three times the weights more."""
    (due, *_), *_ = on_ranks("saves", SMALL, 3, out=str(tmp_path), shard=3)
    for digest, peak in on_ranks("goes_on", SMALL, 2, out=str(tmp_path), shard=2):
        assert digest == due and peak < (1 + 3) / 2 + 0.2
