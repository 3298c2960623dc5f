"""Forward and backward as one CUDA graph. Without a GPU a tape of PyTorch's operations stands for
it: it, too, writes again where it wrote, and runs no line of Python.

Only these tests catch an update by a graph with other bits than an update of kernels, a graph that
is captured where the host must act, and a capture that fails without a word.
"""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.kernels import wide_product
from lpkit.precision import scaled
from lpkit.techniques.recipes import resolve
from lpkit.training import graphs
from lpkit.training.graphs import Graphs
from lpkit.training.training import Training


@pytest.fixture
def tiny(corpus, monkeypatch) -> Config:
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    # restored when the test ends
    monkeypatch.setattr(graphs, "captured", graphs.captured)
    return Config().replace({
        "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "steps": 9,
        "data.source": str(corpus / "*.py"), "global_batch": 4, "eval_every": 0, "eval_batches": 1,
        "schedule.warmup_steps": 2, "precision.recipe": "fp32", "system.device": "cpu",
        "system.compile": False})


class Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, results))
        return results

    @torch.no_grad()
    def run(self) -> None:
        for func, args, kwargs, results in self.operations:
            again = func(*args, **kwargs)
            for there, now in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if torch.is_tensor(there) and there.data_ptr() != now.data_ptr():
                    there.copy_(now)


def taped(training: Training, tapes: list[Tape], function: Callable) -> tuple[Callable, object]:
    """As `captured`, which runs nothing yet."""
    before = [(t, t.clone()) for t in training.model.buffers()]
    tapes.append(tape := Tape())
    with tape:
        results = function()
    for t, was in before:
        t.copy_(was)
    return tape.run, results


def graphed(training: Training) -> tuple[Training, list[Tape]]:
    tapes: list[Tape] = []
    graphs.captured = partial(taped, training, tapes)
    return replace(training, executor=Graphs()), tapes


# A second part adds to gradients; of one part, a recipe without and with a history.
@pytest.mark.parametrize("parts, changes", [
    (2, {"precision.recipe": "bf16", "model.mlp": "swiglu", "memory.recompute": "block"}),
    (2, {"precision.recipe": "fp8-tensorwise", "memory.cross_entropy": "chunked"}),
    (2, {"precision.recipe": "nvfp4-published"}),
    (1, {"precision.recipe": "fp32"}),
    (1, {"precision.recipe": "fp8-delayed", "optimizer.name": "lion"}),
], ids=lambda value: value if isinstance(value, int) else value["precision.recipe"])
def test_an_update_that_runs_again_is_an_update(tiny, changes, parts, monkeypatch):
    # `product_pytorch` asks for a number of the tensor
    monkeypatch.setattr(scaled, "product_pytorch", wide_product.addmm)
    config = tiny.replace({**changes, "grad_accum_steps": parts, "steps": 9})
    plain, (again, tapes) = Training.build(config), graphed(Training.build(config))
    called = []
    again.model.register_forward_pre_hook(lambda *_: called.append(1))
    kept = []
    for step in range(graphs.WARM_UP + 4):
        want, got = plain.update(step), again.update(step)
        kept.append((want, got))
        assert [t is None for t in gradients(again)] == [t is None for t in gradients(plain)]
    for want, got in kept:       # of all steps at the end: no loss is written over
        assert torch.equal(want.loss, got.loss) and torch.equal(want.grad_norm, got.grad_norm)
    assert len(tapes) == 1 and len(called) in (0, parts * (graphs.WARM_UP + 1))
    ours, theirs = again.state_dict(), plain.state_dict()
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=0, atol=0)


def gradients(training: Training) -> list:
    return [p.grad for p in training.model.parameters()]


def test_who_watches_sees_every_kernel_and_the_next_update_is_the_graphs(tiny):
    plain, (again, tapes) = Training.build(tiny), graphed(Training.build(tiny))
    called, timed = [], []
    again.model.register_forward_pre_hook(lambda *_: called.append(1))
    for step in range(graphs.WARM_UP + 4):
        watched = step == graphs.WARM_UP + 2
        called.clear()
        with watching(again) if watched else nullcontext():
            two = again.update(step)
        assert len(called) == (step <= graphs.WARM_UP or watched)
        assert torch.equal(plain.update(step).loss, two.loss)
    again.update(step + 1, phases=lambda phase: timed.append(phase) or nullcontext())
    assert timed == ["forward", "backward", "optimizer"] and len(tapes) == 1


@contextmanager
def watching(training: Training):
    training.watchers.append(lambda step: nullcontext())
    yield
    training.watchers.clear()


def test_a_copy_records_its_own(tiny):
    first, tapes = graphed(Training.build(tiny))
    for step in range(graphs.WARM_UP + 1):
        first.update(step)
    copied = first.copy()
    assert len(tapes) == 1 and copied.executor.recorded is None
    assert copied.executor is not first.executor


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_where_nothing_can_be_captured_kernels_start_one_by_one_and_it_is_said(tiny, capsys, error):
    def no_room(function):
        function()      # its gradients are there, and must not be added to
        raise error("planted\nat length")

    plain = Training.build(tiny)
    again = replace(Training.build(tiny), executor=Graphs())
    graphs.captured = no_room
    for step in range(graphs.WARM_UP + 3):
        assert torch.equal(plain.update(step).loss, again.update(step).loss)
    asked = replace(Training.build(tiny), config=tiny.replace({"system.cuda_graphs": True}),
                    executor=Graphs())
    with pytest.raises(ConfigError, match=r"system\.cuda_graphs=true: no CUDA graph could be "
                                          r"captured \(planted\); set it to auto"):
        for step in range(graphs.WARM_UP + 3):
            asked.update(step)
    words = "no CUDA graph could be captured (planted); this run's kernels"
    assert capsys.readouterr().err.count(words) == 1
    torch.testing.assert_close(dict(plain.state_dict()), dict(again.state_dict()), rtol=0, atol=0)


def test_a_run_on_a_cpu_starts_kernels_one_by_one_and_says_so(tiny):
    choice = Training.build(tiny).decisions.choices["cuda_graphs"]
    assert (choice.asked, choice.used, choice.why) == ("auto", "off", "a CPU has none")
    with pytest.raises(ConfigError, match=r"system\.cuda_graphs=true: a CPU has none; set "
                                          r"system\.cuda_graphs=auto"):
        Training.build(tiny.replace({"system.cuda_graphs": True}))


@pytest.mark.parametrize("changes, why", [
    ({"precision.recipe": "fp16"}, "the loss's scale is decided by the host"),
    ({"memory.optimizer_step": "in-backward", "optimizer.clip": 0},
     "memory.optimizer_step lets the host act"),
    ({"memory.activation_offload": "cpu"}, "memory.activation_offload lets the host act"),
    ({"data.policy": "random-documents"}, "where documents end differs"),
    ({"precision.telemetry_every": 5}, "telemetry watches"), ({}, "")], ids=str)
def test_what_a_graph_cannot_hold_is_said(tiny, changes, why):
    config = tiny.replace(changes)
    recipe = resolve(config.precision.recipe)
    choice = graphs.choose(config, recipe, torch.device("cuda"), 1)
    assert choice.used == ("off" if why else "on") and why in choice.why
    assert graphs.why_not(config, recipe, torch.device("cuda"), 2)
    if why:
        with pytest.raises(ConfigError, match=rf"system\.cuda_graphs=true: {why}"):
            graphs.choose(config.replace({"system.cuda_graphs": True}), recipe,
                          torch.device("cuda"), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("changes", [
    {"precision.recipe": "bf16"}, {"precision.recipe": "fp8-delayed"},
    {"precision.recipe": "fp8-tensorwise", "memory.recompute": "block"},
    {"precision.recipe": "bf16", "memory.cross_entropy": "chunked"}],
    ids=lambda changes: "-".join(changes.values()))
def test_on_a_gpu_a_graph_has_the_bits_of_its_kernels(tiny, changes, compiled):
    config = tiny.replace({
        **changes, "model.width": 256, "model.context": 256, "model.heads": 4,
        "grad_accum_steps": 2, "system.device": "cuda", "system.compile": compiled,
        "system.kernels": "reference", "system.attention": "sdpa"})
    runs = [Training.build(config.replace({"system.cuda_graphs": used})) for used in (True, False)]
    for step in range(graphs.WARM_UP + 4):
        got, want = (run.update(step) for run in runs)
        assert torch.equal(got.loss, want.loss) and torch.equal(got.grad_norm, want.grad_norm)
    assert runs[0].executor.recorded and runs[0].evaluate() == runs[1].evaluate()
    torch.testing.assert_close(*({name: t for name, t in run.state_dict().items()
                                  if not name.startswith("rng")} for run in runs),
                               rtol=0, atol=0)
