"""What torch.compile is given: graphs are counted and looked into, their code is not generated but where bytes are counted."""

import logging

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.kernels.cross_entropy import cross_entropy, on_cpu
from lpkit.measure import telemetry
from lpkit.memory import loss as loss_rows
from lpkit.techniques.row import Settings
from lpkit.training import compiled as compiling
from lpkit.training.build import decide
from lpkit.training.training import RandomTokens, Training

V = 259
TINY = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "model.vocab": V, "global_batch": 4, "eval_batches": 1,
    "precision.recipe": "bf16", "system.device": "cpu", "system.compile": True, "system.threads": 1})
LOSSES = {"full": {}, "chunked": {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 32}}


@pytest.fixture
def graphs(monkeypatch) -> list:
    """Those that are compiled, in order."""
    found, compile = [], torch.compile

    def backend(graph, inputs):
        found.append(graph.graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=backend))
    return found


def built(**changes) -> Training:
    config = TINY.replace({key.replace("__", "."): value for key, value in changes.items()})
    data = RandomTokens(config)
    torch.manual_seed(0)
    assert data.drawn
    return Training.build(config, data=data)


def given_back(graph) -> list[tuple[int, ...]]:
    [output] = [node for node in graph.nodes if node.op == "output"]
    return [tuple(node.meta["example_value"].shape) for node in output.all_input_nodes if "example_value" in node.meta]


@pytest.mark.parametrize("how", ["blocks", "model"])
@pytest.mark.parametrize("loss", LOSSES)
def test_compiled_updates_are_the_eager_ones(graphs, loss, how):
    """Bit for bit: the graphs run by PyTorch's own operations. Accumulated, evaluated, and a copy too."""
    changes = {**LOSSES[loss], "grad_accum_steps": 2}
    compiled = built(**changes, system__compile=how)
    eager = built(**changes, system__compile=False, system__products="bf16")    # a graph has PyTorch's own
    copy = compiled.copy()
    for step in range(2):
        want = eager.update(step)
        for training in (compiled, copy):
            got = training.update(step)
            assert torch.equal(got.loss, want.loss) and torch.equal(got.grad_norm, want.grad_norm)
    assert graphs and compiled.evaluate() == eager.evaluate()
    for training in (compiled, copy):
        assert all(map(torch.equal, training.model.parameters(), eager.model.parameters()))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("more", [{}, {"memory.recompute": "block"}, {"precision.recipe": "fp8-tensorwise", "precision.backend": "scaled_mm"}],
                         ids=["plain", "recomputed", "fp8"])
def test_compile_time_does_not_grow_with_depth(graphs, loss, more):
    """One graph for all blocks, one for the last norm, one for head and loss; a loss in pieces is a kernel of its own."""
    counts = []
    for layers in (2, 5):
        before = len(graphs)
        built(model__layers=layers, **LOSSES[loss], **more).update(0)
        counts.append(len(graphs) - before)
    assert counts == ([3, 3] if loss == "full" else [2, 2])


@pytest.mark.parametrize("how", ["blocks", "model"])
def test_logits_stay_in_the_graph(graphs, how):
    built(system__compile=how).update(0)
    assert given_back(graphs[-1]) == [()], "the loss alone"
    assert not [shape for graph in graphs for shape in given_back(graph) if V in shape]
    assert any("cross_entropy" in str(node.target) for node in graphs[-1].nodes)
    assert any("linear" in str(node.target) for node in graphs[-1].nodes), "the head's product is in it"


@pytest.mark.slow
def test_each_training_compiles_for_itself(graphs):
    """PyTorch runs the ninth variant of a function eagerly, and gives the second one dynamic sizes: a bench of ten recipes or sizes
    would time something else."""
    counts = []
    for sequences in range(1, 11):
        before = len(graphs)
        built(model__layers=1, global_batch=2 * sequences).update(0)
        counts.append(len(graphs) - before)
    assert counts == [3] * 10
    assert not [node for graph in graphs for node in graph.nodes
                if node.op == "placeholder" and isinstance(node.meta.get("example_value"), torch.SymInt)]


@pytest.mark.parametrize("loss", LOSSES)
def test_telemetry_compiles_nothing(graphs, loss):
    """It sees into what is compiled, and what was compiled before it looked is what runs after it."""
    training = built(**LOSSES[loss])
    training.update(0)      # compiled before anybody looks
    before = len(graphs)
    watched = telemetry.attach(training, None, every=2, counterfactuals=("mxfp8",))
    for step in (1, 2, 3, 4):
        training.update(step)
    assert {sample.step for sample in watched.samples} == {3, 5}
    assert len(watched.samples) == 2 * 3 * 9, "x, w and dy of four Linears in each of two blocks, and the head"
    assert len(graphs) == before


def test_weights_of_tokens_are_in_the_graph_too(graphs):
    """Against the eager loss in float32."""
    training, eager = built(precision__recipe="fp32"), built(precision__recipe="fp32", system__compile=False)
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randint(V, (4, 32), generator=draw) for _ in range(2))
    batch = Batch(x, y, weights=torch.rand(4, 32, generator=draw))
    got, want = training.forward_backward(batch), eager.forward_backward(batch)
    assert torch.equal(got, want) and all(torch.equal(p.grad, q.grad) for p, q in zip(training.model.parameters(), eager.model.parameters()))


@pytest.mark.parametrize("asked, used, why", [
    ("auto", "off", "on a CPU"), (False, "off", "asked for"), (True, "blocks", "each block is compiled once"),
    ("blocks", "blocks", "asked for"), ("model", "model", "all blocks in one graph")])
def test_what_is_compiled_is_recorded(asked, used, why):
    choice = decide(TINY.replace({"system.compile": asked})).choices["compile"]
    assert (choice.asked, choice.used) == (str(asked).lower(), used) and why in choice.why
    assert compiling.choose("auto", torch.device("cuda")).used == "blocks"


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(ConfigError, match=r"does not go with system\.compile=model"):
        decide(TINY.replace({"memory.activation_offload": "int8", "system.compile": "model"}))


@pytest.fixture
def bytes_moved(monkeypatch):
    """What the graphs that `run` compiles read and write, by the compiler's own count."""
    import torch._inductor.config as settings
    import torch._inductor.metrics as metrics

    monkeypatch.setattr(logging.getLogger("torch._inductor.compile_fx.__inductor_metrics"), "propagate", False)

    def count(run) -> int:
        torch._dynamo.reset()
        metrics.reset()
        run()
        return metrics.num_bytes_accessed

    torch._logging.set_logs(inductor_metrics=True)
    with settings.patch(force_disable_caches=True):     # of what is found there nothing is counted
        yield count
    torch._logging.set_logs()


class Head(torch.nn.Module):
    """As much of a model as a loss needs. tokens (B, T) -> (B, T, 32)"""

    def __init__(self, vocab: int):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab, 32), torch.nn.Linear(32, vocab, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


@pytest.mark.slow
def test_a_logit_moves_eight_bytes(bytes_moved):
    """Beside its product: the logits in 2 bytes, read for their sum and again for their gradient, and its 2 bytes. An eager loss
    moves 36 and more (a float32 copy, log-softmax, its gradient, its cast back)."""
    vocab, batch = 8192, Batch(*(torch.randint(8192, (4, 64)) for _ in range(2)))
    model, autocast = Head(vocab), torch.autocast("cpu", torch.bfloat16)
    loss = compiling.with_head(loss_rows.full(Settings(name="full"), autocast), autocast)
    product = compiling.compiled(lambda h, head: head(h))

    def alone() -> None:
        with autocast:
            product(model.hidden(batch.tokens), model.head).float().sum().backward()

    moved = bytes_moved(lambda: loss(model, batch).backward()) - bytes_moved(alone)
    assert moved / (batch.tokens.numel() * vocab) == pytest.approx(8, rel=0.02)


@pytest.mark.slow
def test_a_logit_of_a_piece_moves_four_bytes(bytes_moved):
    logits, y = torch.randn(128, 8192).bfloat16(), torch.randint(8192, (128,))
    of_logits = compiling.compiled(cross_entropy)
    assert bytes_moved(lambda: of_logits(logits, y, None)) / logits.numel() == pytest.approx(4, rel=0.02)
    for got, want in zip(of_logits(logits, y, None), on_cpu(logits, y)):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-6)
