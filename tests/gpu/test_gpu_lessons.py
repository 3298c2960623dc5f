"""Every lesson's `gpu` tier, executed without a GPU as far as the first launch on a device.

Only these tests catch a name, key or package that is missing in a cell that a GPU's tier takes
(before the first launch, and in cells that do not depend on it), and a claim that fails on a GPU
for a reason that decides nothing: noise between runs, or a run that was stopped.
"""

import ast
import asyncio
import inspect
import json
import linecache
import symtable
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# looks at each function of torch once, as it is imported: before any is in the place of another
import torch._dynamo

import lpkit
from hosting import parameters
from lessons import l03_number_formats as linear_operands
from lessons import l06_fp8_training as recipe_race
from lessons import l08_recompute_and_offload as memory_techniques
from lessons import l12_flash_attention as attention_tiles
from lessons.judging import puzzles
from lessons.race import race_figure
from lpkit import hardware
from lpkit.config import Config
from lpkit.measure import attention as attention_cells
from lpkit.measure import trace
from lpkit.nn.attention import backend
from lpkit.parallel import processes
from lpkit.predict.compare import disturbance
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.recipes import RECIPES
from lpkit.training.training import Training
from tests.execution.test_graphs import graphed
from tests.gpu.fake_gpus import H100, gpus

pytestmark = pytest.mark.timeout(900)       # one fixture runs the cells of all notebooks
BOOKS = sorted(Path(__file__).parents[2].glob("notebooks/*.ipynb"))
AWAITS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


class LaunchedError(BaseException):
    """The first call that only a GPU can answer. Nothing in the kit takes it for a failure."""


class Generator(torch.Generator):
    def __new__(cls, device: object = "cpu") -> torch.Generator:
        if torch.device(device).type == "cuda":
            raise LaunchedError
        return super().__new__(cls)


@contextmanager
def promised(count: int = 1) -> Iterator[None]:
    """PyTorch says that there are GPUs, and whoever uses one is stopped."""
    def launched(*_: object, **__: object) -> None:
        raise LaunchedError

    about = SimpleNamespace(**H100)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"is_available": True, "device_count": count, "current_device": 0,
                            "get_device_name": about.name,
                            "get_device_capability": (9, 0), "get_device_properties": about,
                            "mem_get_info": (about.total_memory, about.total_memory),
                            "memory_reserved": 0, "memory_allocated": 0}.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
        for owner, name in ((torch.cuda, "_lazy_init"), (torch.cuda, "set_device"),
                            (torch.cuda, "synchronize"),
                            (processes.Processes, "__init__"), (processes.WarmParent, "__init__"),
                            (puzzles, "run"), (puzzles, "moved")):
            patch.setattr(owner, name, launched)
        patch.setattr(torch, "Generator", Generator)
        traced = trace._decide      # of a GPU by a build that has CUDA, alone
        patch.setattr(trace, "_decide", lambda config, device: launched() if device == "cuda"
                      else traced(config, device))
        patch.setattr(parameters, "check", lambda: None)      # asks IPython, which is not here
        hardware._machine.cache_clear()
        yield


class Lesson:
    """A notebook's cells, executed in order. A cell that needs what a launch would have made is
    passed over, and so are exercises and `without`."""

    def __init__(self, path: Path, tier: str, without: frozenset[str] = frozenset()):
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.done, self.launched, self.passed, self.missing = [], [], [], set()
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                tags = cell["metadata"].get("tags", [])
                self._run(cell["id"], "".join(cell["source"]),
                          skip=cell["id"] in without or "exercise" in tags)
                if "parameters" in tags:
                    self.names["tier"] = tier

    def _run(self, name: str, source: str, skip: bool) -> None:
        tree = ast.parse(source)
        of = {kind: {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)
                     and isinstance(node.ctx, kind)} for kind in (ast.Load, ast.Store)}
        inner = {node for clause in ast.walk(tree) if isinstance(clause, ast.comprehension)
                 for node in ast.walk(clause.target) if isinstance(node, ast.Name)}
        # to Python 3.12 a comprehension's names are the cell's
        alone = {node.id for node in inner} - {
            node.id for node in set(ast.walk(tree)) - inner
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        symbols = symtable.symtable(source, name, "exec").get_symbols()
        assigned = {symbol.get_name() for symbol in symbols if symbol.is_assigned()} - alone
        if skip or (of[ast.Load] - (of[ast.Store] - assigned)) & self.missing:
            self.passed.append(name)
            self.missing |= assigned
            return
        # as IPython does, for who asks for a text
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        try:
            result = eval(compile(tree, name, "exec", flags=AWAITS), self.names)
            if inspect.iscoroutine(result):
                # a browser's test may have left this thread a loop that runs
                with ThreadPoolExecutor(1) as own:
                    own.submit(asyncio.run, result).result()
            self.done.append(name)
        except LaunchedError:
            self.launched.append(name)
            self.missing |= assigned - self.names.keys()


# Seconds of a CPU's work, which are the same on a GPU's machine
WORK = frozenset({"scale-06", "scale-12", "rent-18", "rent-unseen", "rent-25", "kernels-11",
                  "matmul-13", "kinds-11", "kinds-13", "kinds-15", "kinds-16",
                  "unseen-10", "fewer-14", "fewer-22", "stack-24"})
FIRST = {"00": "start-09", "01": "memory-09", "02": "time-08", "03": "formats-11", "04": "scale-19",
         "05": "mixed-10", "06": "fp8-03", "07": "fail-06",
         "08": "buys-08", "09": "rent-14", "10": "kernels-13", "11": "matmul-15", "12": "flash-10",
         "14": "zero-17", "15": "full-15", "16": "split-14", "17": "pipe-18", "18": "talk-17",
         "20": "rules-14",
         "22": "blocks-21", "24": "start-09", "25": "own-03", "26": "muon-11"}


@pytest.fixture(scope="module")
def lessons() -> dict[str, Lesson]:
    lessons_by_number = {}
    for path in BOOKS:
        with promised(2 if path.stem[:2] in ("14", "15") else 1):
            lessons_by_number[path.stem[:2]] = Lesson(path, "gpu", WORK)
    return lessons_by_number


@pytest.mark.parametrize("stem", [path.stem[:2] for path in BOOKS])
def test_a_gpu_s_tier_goes_to_its_first_launch(lessons, stem):
    """What else stops a cell is an error, and fails. Sizes are chosen and formulas shown before;
    what does not need the launch goes on after it."""
    lesson = lessons[stem]
    assert lesson.launched[:1] == ([FIRST[stem]] if stem in FIRST else [])
    chosen = [name for name, source in cells(stem).items() if "[tier" in source
              and name not in WORK]
    assert set(chosen) <= {*lesson.done, *lesson.launched} and len(lesson.done) >= 4


def test_what_looks_into_a_step_does_not_compile_it(lessons):
    """What is compiled keeps other tensors, and runs a block again otherwise."""
    configs = [lessons["01"].names["config"], lessons["08"].names["config"]]
    assert [config.system.compile for config in configs] == [False, False]
    assert '"system.compile": False' in cells("12")["flash-cache-3"], (
        "a token of a compiled model is another graph")


@pytest.mark.parametrize("gpus, size, device", [(1, (128, 3), "cpu"), (2, (1024, 12), "cuda")])
def test_ranks_without_a_gpu_each_train_what_a_cpu_can(gpus, size, device):
    with promised(gpus):
        names = {"torch": torch, "lpkit": lpkit, "processes": 2, "tier": "gpu"}
        exec(cells("15")["full-02-sizes"], names)
    config = names["tiny"]
    assert ((config.model.width, config.model.layers), config.system.device) == (size, device)


# ---- what a GPU computes otherwise

def test_who_is_not_installed_is_said_and_not_called(monkeypatch):
    """As 12 asks, on a fake GPU: each that it goes on to call has been tried."""
    monkeypatch.setattr(attention_cells, "LENGTHS", (1, 20))
    source = cells("12")["flash-21"]
    names = {"torch": torch, "kind": "gpu", "device": "cuda", "heads": 2, "before": 32,
             "head_width": 16, "cell": attention_tiles.cell,
             "ATTENTION": {name: ATTENTION[name]
                           for name in ("plain", "sdpa", "sdpa-cudnn", "flash-attn")},
             "backend": backend,
             "models": {32: attention_tiles.model_of(32, heads=2, head_width=16)}}
    with gpus():
        exec(source, names)
    assert list(names["runs"]) == ["plain", "sdpa"] and max(names["off"].values()) < 2**-6
    assert names["there"]["flash-attn"].startswith(
        "needs the package flash-attn, which is not installed here")


def cells(stem: str) -> dict[str, str]:
    [path] = [path for path in BOOKS if path.stem.startswith(stem)]
    return {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]}


def test_operands_are_seen_in_what_is_compiled(corpus, monkeypatch):
    """A GPU's blocks are compiled, and what was compiled before a hook came does not call it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(corpus / "cache"))
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: real(function,
        **how | {"backend": "eager"}))
    config = Config().replace({
        "model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32,
        "data.source": str(corpus / "*.py"), "global_batch": 2, "precision.recipe": "fp32",
        "system.device": "cpu", "system.threads": 1})
    operands = [linear_operands.operands(Training.build(config.replace({"system.compile": how})),
                                         steps=2) for how in (False, "blocks")]
    as_a_graph, tapes = graphed(Training.build(config))
    operands.append(linear_operands.operands(as_a_graph, steps=4))
    assert len(tapes) == 1 and all(len(operands[2][role]) == 5 for role in operands[0]), (
        "what is captured calls no hook")
    for role, eager in operands[0].items():
        assert len(eager) == len(operands[1][role]) == 5
        for ours, theirs in zip(operands[1][role], eager):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_block_runs_again_as_it_ran(recipe="bf16"):
    """By hand, in 08: a GPU's tier trains in bf16, and backward is no part of autocast."""
    source, config = cells("08"), lpkit.preset("cpu-3m").replace({
        "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32,
        "global_batch": 2, "precision.recipe": recipe,
        "system.attention": "sdpa", "system.device": "cpu", "system.compile": False,
        "system.threads": 1})
    names = {"torch": torch, "config": config, "lesson": memory_techniques,
             "here": SimpleNamespace(kind="cpu")}
    for cell in ("buys-hand-0", "buys-hand-1"):
        exec(source[cell], names)       # asserts equal bits
    assert names["again_bytes"] < names["plain_bytes"]


def claimed(stem: str, cell: str, **names: object) -> None:
    """Raises AssertionError where the cell's claim does not hold."""
    exec(cells(stem)[cell], {"claim": lambda what: nullcontext(), "cannot_tell": lambda *_: None,
                             **names})


def test_runs_that_were_stopped_before_their_first_step_decide_nothing():
    """Stop in 15 ended in a TypeError: a run without a step has no loss."""
    whole = SimpleNamespace(summary={"steps": 3, "final_loss": 1.0},
                            metrics=[{"step": step, "loss": 1.0} for step in (1, 2, 3)])
    stopped = SimpleNamespace(summary={"steps": 0, "final_loss": None}, metrics=[])
    runs = {"bf16": whole, "fp8": stopped, "resumed": whole}
    trained = SimpleNamespace(losses=[1.0], most={}, sent_bytes={})
    names = {**runs, "processes": 2, "reached": 0, "begun_at": 0, "stop_at": 2, "steps": 3,
             "race_figure": race_figure, "Figure": lambda spec: spec,
             "counted": {"FP8": trained, "FP8, sent in float32": trained},
             "pick_bits": SimpleNamespace(scored=str), "DIGITS": 1, "SAME": 0}
    for cell in ("full-35", "full-39"):
        exec(cells("15")[cell], names)
    names |= {"counted": {}, "due": {}, "traced": {}, "ways": {}, "here": {}, "expected": {},
              "device": "cpu", "blamed": "rank 1 of 2 died", "ranks": 2}
    with pytest.raises(InterruptedError, match=r"were stopped; steps done: .*: 0"):
        claimed("15", "full-40", **names, cannot_tell=leaves)


@pytest.mark.parametrize(("base", "step", "others", "message"), [
    ((1.0, 1.53), 1.4, 0.0, "two runs of bf16 differ by 53%"),      # noise is no evidence for it
    ((1.53, 1.0), 0.7, 0.0, "two runs of bf16 differ by 53%"),      # and none against it
    ((1.0, 1.03), 1.4, 0.0, None),
    ((1.0, 1.03), 0.8, 0.0, "AssertionError: an emulated step takes 0.80"),
    ((1.0, 1.03), 0.8, 0.5, "others took 50% of the cores"),        # nor is a busy machine
    ((1.0, None), 3.0, 0.0, "'bf16 with another seed': 'never begun'"),
])
def test_noise_between_two_runs_decides_nothing_about_emulation(tmp_path, base, step, others,
                                                                message):
    """06 held its claim as true wherever the emulated step times that noise was above 1."""
    def run(seconds, backend):
        lines = [{"step": at, "loss": 1.0, "val_loss": 1.0,
                  "step_seconds": seconds * (2 if at == 4 else 1)} for at in range(6)]
        return SimpleNamespace(metrics=lines, path=tmp_path,
                               summary={"status": "complete",
                                        "chosen": {"backend": {"used": backend}}})

    named = {recipe_race.BASE: (base[0], "pytorch"), "fp8-tensorwise": (step, "emulated"),
             recipe_race.AGAIN: (base[1], "pytorch")}
    runs = {name: run(*arguments) for name, arguments in named.items() if arguments[0]}
    outcomes = recipe_race.outcomes(runs)
    names = {"lesson": recipe_race, "series": SimpleNamespace(configs=named), "runs": runs,
             "outcomes": outcomes, "RECIPES": RECIPES, "device": "cpu",
             "hardware": SimpleNamespace(bf16_choice=lambda device: SimpleNamespace(used="bf16")),
             "disturbance": disturbance, "disturbed": others,
             "gaps": {"fp8-tensorwise": {5: 0.0}}, "measured": {"fp8-tensorwise": 20.0},
             "predicted": {"fp8-tensorwise": 20.5}}
    words = (message or "").removeprefix("AssertionError: ")
    refused = AssertionError if message and message.startswith("Assert") else InterruptedError
    with pytest.raises(refused, match=words) if message else nullcontext():
        claimed("06", "fp8-20", **names, cannot_tell=leaves)


def leaves(when: object, why: str) -> None:
    if when:
        raise InterruptedError(why)
