"""What torch.compile is given: graphs are counted and looked into; code is generated only where
bytes are counted.

Only these tests catch a compiled update with other bits than an eager one, a graph too many, logits
that leave their graph, and a cache of compiled code that another user could have planted.
"""

import ast
import contextlib
import errno
import fcntl
import itertools
import logging
import os
import pickle
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import lessons
import lessons.rows.activations
import lpkit
from lpkit.config import Config
from lpkit.contracts import Batch
from lpkit.errors import ConfigError
from lpkit.execution import compiled as compiling
from lpkit.kernels import jit
from lpkit.kernels.cross_entropy import cross_entropy, on_cpu
from lpkit.measure import telemetry
from lpkit.memory import loss as loss_rows
from lpkit.techniques.row import Settings
from lpkit.training.build import decide
from lpkit.training.sampling import generate
from lpkit.training.training import RandomTokens, Training

V = 259
TINY = Config().replace({
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 32, "model.vocab": V,
    "global_batch": 4, "eval_batches": 1, "precision.recipe": "bf16", "system.device": "cpu",
    "system.compile": True, "system.threads": 1})
LOSSES = {"full": {}, "chunked": {"memory.cross_entropy": "chunked",
                                  "memory.cross_entropy.chunk_tokens": 32}}


# they are counted, and not differentiated ahead
COUNTED = pytest.mark.parametrize("graphs", ["eager"], indirect=True, ids=["counted"])


@pytest.fixture
def graphs(request, monkeypatch) -> list:
    """Those that are compiled, in order."""
    compiled_graphs, compile = [], torch.compile

    def backend(graph, inputs):
        compiled_graphs.append(graph.graph)
        return lookup_backend(getattr(request, "param", "aot_eager"))(graph, inputs)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=backend))
    return compiled_graphs


def built(**changes) -> Training:
    config = TINY.replace({key.replace("__", "."): value for key, value in changes.items()})
    data = RandomTokens(config)
    torch.manual_seed(0)
    assert data.drawn
    return Training.build(config, data=data)


def given_back(graph) -> list[tuple[int, ...]]:
    [output] = [node for node in graph.nodes if node.op == "output"]
    return [tuple(node.meta["example_value"].shape) for node in output.all_input_nodes
            if "example_value" in node.meta]


@pytest.mark.parametrize("loss, how", [("full", "model"), ("chunked", "blocks")])
def test_compiled_updates_are_the_eager_ones(graphs, loss, how):
    """Bit for bit: the graphs run by PyTorch's own operations. Accumulated, evaluated, and a copy
    too."""
    changes = {**LOSSES[loss], "grad_accum_steps": 2}
    compiled = built(**changes, system__compile=how)
    # a graph has PyTorch's own
    eager = built(**changes, system__compile=False, system__products="bf16")
    copy = compiled.copy()
    for step in range(2):
        want = eager.update(step)
        for training in (compiled, copy):
            got = training.update(step)
            assert torch.equal(got.loss, want.loss) and torch.equal(got.grad_norm, want.grad_norm)
    assert graphs and compiled.evaluate() == eager.evaluate()
    for training in (compiled, copy):
        assert all(map(torch.equal, training.model.parameters(), eager.model.parameters()))


@COUNTED
# what a block does and what the head does are graphs of their own
@pytest.mark.parametrize("loss, more", [
    ("chunked", {}), ("full", {"memory.recompute": "block"}),
    ("full", {"precision.recipe": "fp8-tensorwise", "precision.backend": "scaled_mm"})],
    ids=["chunked", "recomputed", "fp8"])
def test_compile_time_does_not_grow_with_depth(graphs, loss, more):
    """One graph for all blocks, one for the last norm, one for head and loss; a loss in pieces is a
    kernel of its own."""
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
    targets = [str(node.target) for node in graphs[-1].nodes]
    for name in ("cross_entropy", "linear"):        # the loss, and the head's product
        assert any(name in target for target in targets)


@pytest.mark.slow
@COUNTED
def test_each_training_compiles_for_itself(graphs):
    """PyTorch runs the ninth variant of a function eagerly, and gives the second one dynamic sizes:
    a bench of ten recipes or sizes would time something else."""
    counts = []
    for sequences in range(1, 10):
        before = len(graphs)
        built(model__layers=1, global_batch=2 * sequences).update(0)
        counts.append(len(graphs) - before)
    assert counts == [3] * 9
    inputs = [node.meta.get("example_value") for graph in graphs for node in graph.nodes
              if node.op == "placeholder"]
    assert not any(isinstance(value, torch.SymInt) for value in inputs)


def test_telemetry_compiles_nothing(graphs, loss="full"):
    """It sees into what is compiled, and what was compiled before it looked is what runs after
    it."""
    training = built(**LOSSES[loss])
    training.update(0)      # compiled before anybody looks
    before = len(graphs)
    watched = telemetry.attach(training, None, every=2, counterfactuals=("mxfp8",))
    for step in (1, 2, 3, 4):
        training.update(step)
    assert {sample.step for sample in watched.samples} == {3, 5}
    # x, w and dy of four Linears in each of two blocks, and the head
    assert len(watched.samples) == 2 * 3 * 9
    assert len(graphs) == before


def test_weights_of_tokens_are_in_the_graph_too(graphs):
    """Against the eager loss in float32."""
    training, eager = (built(precision__recipe="fp32", system__compile=compiled)
                       for compiled in (True, False))
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randint(V, (4, 32), generator=draw) for _ in range(2))
    batch = Batch(x, y, weights=torch.rand(4, 32, generator=draw))
    got, want = training.forward_backward(batch), eager.forward_backward(batch)
    assert torch.equal(got, want)
    for ours, theirs in zip(training.model.parameters(), eager.model.parameters()):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("asked, used, why", [
    ("auto", "off", "on a CPU"), (False, "off", "requested"),
    (True, "blocks", "each block is compiled once"),
    ("blocks", "blocks", "requested"), ("model", "model", "all blocks in one graph")])
def test_what_is_compiled_is_recorded(asked, used, why):
    choice = decide(TINY.replace({"system.compile": asked})).choices["compile"]
    assert (choice.asked, choice.used) == (str(asked).lower(), used) and why in choice.why
    assert compiling.choose("auto", torch.device("cuda")).used == "blocks"


@pytest.mark.parametrize("device, variable, needed", [("cuda", "CC", "gcc"), ("cpu", "CXX", "g++")])
def test_without_a_compiler_nothing_is_compiled(device, variable, needed, tmp_path, monkeypatch):
    """Triton builds its launchers by a C compiler; what is generated for a CPU is C++."""
    on = torch.device(device)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match=rf"^system.compile=true: there is no compiler here "
                                          rf"\({re.escape(needed)}, .*; install .*, or set "
                                          r"system.compile=false$"):
        compiling.choose(True, on)
    choice = compiling.choose("auto", on)
    assert choice.used == "off" and ("no compiler here" in choice.why) == (device == "cuda")
    assert compiling.choose(False, on).used == "off"
    for name, words in {needed: "", "of-mine": "of-mine -m64"}.items():
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv(variable, words)
        assert compiling.choose(True, on).used == "blocks"
    monkeypatch.setenv(variable, "nobody's")
    with pytest.raises(ConfigError, match="no compiler here \\(nobody's\\)"):
        compiling.choose(True, on)


def test_text_comes_from_a_compiled_model_of_blocked_attention(graphs, kind="window"):
    """Prompts of several lengths: PyTorch makes their size a symbol, and blocks are of sizes that
    are known."""
    compiled, eager = (built(system__attention="blocked", precision__recipe="fp32",
                             model__attention=kind, system__compile=how) for how in (True, False))
    texts = []
    for training in (compiled, eager):
        training.model.eval()
        prompts = [[7] * 3, [5, 6] * 4, list(range(1, 12))]
        rngs = [torch.Generator().manual_seed(0) for _ in prompts]
        texts.append(list(generate(training, prompts, 5, 0.0, None, rngs)))
    assert texts[0] == texts[1] and len(texts[0]) == 5
    assert any(isinstance(node.meta.get("example_value"), torch.SymInt) for graph in graphs
               for node in graph.nodes), "a size is a symbol"


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(ConfigError, match=r"does not go with system\.compile=model"):
        decide(TINY.replace({"memory.activation_offload": "int8", "system.compile": "model"}))


@pytest.fixture
def bytes_moved(monkeypatch):
    """What the graphs that `run` compiles read and write, by the compiler's own count."""
    import torch._inductor.config as settings
    import torch._inductor.metrics as metrics

    monkeypatch.setattr(logging.getLogger("torch._inductor.compile_fx.__inductor_metrics"),
                        "propagate", False)

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
        self.embed = torch.nn.Embedding(vocab, 32)
        self.head = torch.nn.Linear(32, vocab, bias=False)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


@pytest.mark.slow
def test_a_logit_moves_eight_bytes(bytes_moved):
    """Beside its product: the logits in 2 bytes, read for their sum and again for their gradient,
    and its 2 bytes. An eager loss moves 36 and more (a float32 copy, log-softmax, its gradient, its
    cast back)."""
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
    moved = bytes_moved(lambda: of_logits(logits, y, None))
    assert moved / logits.numel() == pytest.approx(4, rel=0.02)
    for got, want in zip(of_logits(logits, y, None), on_cpu(logits, y)):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-6)


# ---- whose code runs

TINY_GRAPH = """
import sys, torch
from lpkit.kernels import jit
def tiny(x): return x * 2 + 1
torch.set_num_threads(1)
compile = {"plain": torch.compile, "ours": jit.compiled}[sys.argv[1]]
assert torch.equal(compile(tiny)(torch.ones(8)), torch.full((8,), 3.0))
"""


class Payload:
    def __init__(self, harm: Path):
        self.harm = harm

    def __reduce__(self):
        return Path.touch, (self.harm,)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))),
                    reason="what inductor makes for a CPU is C++")
@pytest.mark.timeout(900)       # three processes that import and compile
def test_what_another_planted_where_torch_looks_is_never_met(tmp_path):
    """PyTorch keeps its graphs as pickles in /tmp/torchinductor_USER, which whoever comes first
    makes."""
    (tmp_path / "tmp").mkdir()
    clean = {key: value for key, value in os.environ.items() if key not in jit.CACHES}
    where = clean | {"TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    harm = tmp_path / "harm"

    def child(how: str) -> None:
        subprocess.run([sys.executable, "-c", TINY_GRAPH, how], env=where, check=True, timeout=300)

    def there() -> dict:
        return {path: (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
                for path in [planted, *planted.rglob("*")]}

    child("plain")
    [planted] = (tmp_path / "tmp").glob("torchinductor_*")
    pickles = [path for room in ("fxgraph", "aotautograd") for path in (planted / room).rglob("*")
               if path.is_file()]
    for path in pickles:
        path.write_bytes(pickle.dumps(Payload(harm)))
    assert pickles
    before = there()
    child("ours")
    assert not harm.exists() and there() == before
    ours = {room: tmp_path / "cache" / "lpkit" / f"kernels-{os.geteuid()}-{room}"
            for room in jit.CACHES.values()}
    assert list(ours["inductor"].rglob("*.so"))
    assert list((ours["inductor"] / "headers").rglob("*.h"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in ours.values()} == {0o700}
    with contextlib.suppress(subprocess.CalledProcessError):    # what it unpickles is no graph
        child("plain")
    assert harm.exists(), "the plant is one that plain torch.compile runs"


@pytest.fixture
def no_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in jit.CACHES:
        monkeypatch.setenv(variable, "")
    return tmp_path


PLANTS = {
    "for all": (lambda place: place.chmod(0o777), "may be written by others"),
    "for a group": (lambda place: place.chmod(0o770), "may be written by others"),
    "another's": (lambda place: os.chown(place, 12345, -1), "belongs to user 12345"),
    "a link": (lambda place: (place.rename(place.with_name("far")), place.symlink_to("far")),
               "is a link"),
    "below a folder for all": (lambda place: place.parent.chmod(0o777),
                               "above'? may be written by others"),
    "below another's": (lambda place: os.chown(place.parent, 12345, -1), "above belongs to others"),
    "a file": (lambda place: (place.rmdir(), place.write_text("")),
               "is a file where a folder is needed")}


@pytest.mark.parametrize("name, variable", [*zip(PLANTS, itertools.cycle(jit.CACHES))])
def test_a_folder_that_the_user_chose_is_held_to_the_same(name, variable, no_caches, monkeypatch):
    plant, words = PLANTS[name]
    place = no_caches / "above" / "chosen"
    place.mkdir(parents=True, mode=0o700)
    monkeypatch.setenv(variable, str(place))
    jit.keep_privately()
    try:
        plant(place)
    except PermissionError:
        pytest.skip("only root gives files away")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it was compiled"))
    with pytest.raises(ConfigError, match=words) as caught:
        jit.compiled(len)
    assert "\n" not in str(caught.value)


def test_a_link_above_into_a_folder_for_all_is_followed_and_refused(no_caches, monkeypatch):
    (no_caches / "open").mkdir()
    (no_caches / "open").chmod(0o777)
    (no_caches / "open" / "mine").mkdir(mode=0o700)
    (no_caches / "through").symlink_to("open/mine")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(no_caches / "through" / "cache"))
    with pytest.raises(ConfigError,
                       match="open may be written by others, who could put another folder"):
        jit.keep_privately()
    (no_caches / "open").chmod(0o1777)      # as /tmp is: a sticky bit keeps names
    jit.keep_privately()


def test_a_cache_without_flock_is_named(no_caches, monkeypatch):
    """PyTorch's own locks have no other way."""
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(ConfigError,
                       match=r"nothing can be locked in .*No locks available.*set "
                             r"TORCHINDUCTOR_CACHE_DIR to a folder on a local disk"):
        jit.keep_privately()


def test_only_one_place_begins_to_compile():
    """torch.compile, triton.jit, triton.compile and PyTorch's builder of extensions, wherever they
    are called."""
    calls = set()
    for path in (*Path(lpkit.__file__).parent.rglob("*.py"),
                 *Path(lessons.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.compile",
                    "triton.jit", "triton.compile", "cpp_extension.load")):
                calls.add((path.name, ast.unparse(node)))
    assert calls == {
        ("jit.py", "torch.compile"), ("jit.py", "triton.jit"),
        ("cuda_norm.py", "cpp_extension.load"),     # into a private folder
        # the kernel puzzles: a process with a private folder for its cache
        # (lessons/judging/puzzles.py)
        ("kernel_parts.py", "triton.jit"), ("kernel_process.py", "triton.jit"),
        ("kernel_process.py", "triton.compile"),
        ("defects.py", "triton.jit")}               # by the interpreter, which keeps nothing


@pytest.mark.skipif(jit.triton is None, reason="Triton is not installed")
def test_the_first_launch_of_a_kernel_looks_after_its_cache(monkeypatch):
    """Each launch may compile; before the first one a driver is built and loaded from the cache."""
    looked, launched = [], []
    monkeypatch.setattr(jit, "INTERPRETED", False)
    monkeypatch.setattr(jit, "keep_privately", lambda: looked.append(1))
    monkeypatch.setattr(jit.triton, "jit", jit.triton.JITFunction)
    monkeypatch.setattr(jit.triton.JITFunction, "run",
                        lambda self, *given, **how: launched.append((given, how)))
    kernel = jit.jit(_call_nothing)
    assert not looked
    for _ in range(2):
        kernel[1,](5)
    assert looked == [1] and launched == [((5,), {"grid": (1,), "warmup": False})] * 2


def _call_nothing(x):
    pass
