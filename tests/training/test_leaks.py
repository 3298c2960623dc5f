"""Only these tests catch a tensor that outlives the update that made it, and a model that outlives
its run."""

import gc
import signal
import warnings
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import lessons.rows.disk
import lessons.rows.linear_attention
import lessons.rows.masked
import lessons.rows.optimizers
import lessons.rows.sparse_attention
import lessons.tasks  # noqa: F401  two policies more
import lpkit
from lessons.rows.activations_torch import within
from lpkit.config import Config, MemoryConfig
from lpkit.contracts import Stage, Transform
from lpkit.techniques import changes, data, optimizers, recipes
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION, Attending
from lpkit.techniques.row import Settings, TechniqueRow
from lpkit.training import loop
from lpkit.training.background import train
from lpkit.training.runs import RunFailedError
from lpkit.training.training import RandomTokens, Training
from tests.attack import leaks
from tests.attack.leaks import TINY, Live

BASE = Config().replace(TINY)


class Seen(Transform):
    """A toy that looks at what the head gives, and one that moves a weight: rows from outside."""

    stage = Stage.PRECISION

    def __init__(self, settings: Settings):
        self.last = torch.zeros(())

    def __call__(self, model):
        model.head.register_forward_hook(self.look)
        return model

    def look(self, module, inputs, out) -> None:
        self.last.copy_(out.detach().mean())

    def begin(self, training: Training, step: int) -> None:
        with torch.no_grad():
            training.model.norm.weight.mul_(0.99)

    def state_dict(self):
        return {}


TOY = TechniqueRow(implementation=f"{__name__}:Seen")
FITS = {    # what else a row wants
    "masked": {"model.attention": "bidirectional", "model.vocab": 257},
    "in-backward": {"optimizer.clip": 0},
    "fp8-blockwise": {"model.width": 128, "model.context": 128},
    "fp8-blockwise-pow2": {"model.width": 128, "model.context": 128},
    "nvfp4": {"model.layers": 2},       # the last one stays in 16 bits
    "sgd": {"memory.moment_format": "float32"},
    "copy": {"model.context": 32},
    "recall": {"model.context": 32},
}


def cases() -> dict[str, dict]:
    settings = [{"precision.recipe": name} | FITS.get(name, {}) for name in recipes.RECIPES]
    settings += [{"precision.recipe": name, "precision.cache_weight_casts": True,
                  "grad_accum_steps": 2}
                 for name in ("mxfp8", "fp8-delayed")]
    settings += [{"optimizer": name, "memory.moment_format": "int8"} | FITS.get(name, {})
                 for name in optimizers.OPTIMIZERS]
    settings += [{"system.attention": name} for name, row in ATTENTION.items()
                 if not row.why_not(Attending(model=Config().model))]
    settings += [{"model.attention": name, "system.attention": next(iter(row.operations))}
                 for name, row in KINDS.items() if row.operations]
    settings += [{"data.policy": name} | FITS.get(name, {}) for name in data.POLICIES]
    for key, field in MemoryConfig.__dataclass_fields__.items():
        table = field.metadata["table"]
        settings += [{f"memory.{key}": name} | FITS.get(name, {}) for name, row in table.items()
                     if not row.needs_compile]
    settings += [{"memory.recompute": "block", "memory.activation_offload": "disk",
                  "precision.recipe": "fp8-delayed", "grad_accum_steps": 2}]
    settings += [{"transforms": "toy", "governors": "toy"}]
    return {", ".join(f"{key}={value}" for key, value in case.items()): case for case in settings}


CASES = cases()


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What is there already is not looked through by every gc.collect()."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def toys(monkeypatch, tmp_path):
    monkeypatch.setitem(changes.MODEL_TRANSFORMS, "toy", TOY)
    monkeypatch.setitem(changes.GOVERNORS, "toy", TOY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def grows(training: Training) -> int:
    """Bytes that live after the third step beyond those after the second."""
    training.update(0)
    with Live() as live:
        training.update(1)
        second = live.bytes
        training.update(2)
        return live.bytes - second


@pytest.mark.parametrize("case", CASES)
def test_what_an_update_makes_ends_with_it_and_a_training_with_its_last_name(toys, tmp_path, case):
    config = leaks.config(tmp_path).replace(CASES[case])
    tokens = None if "data.policy" in CASES[case] else RandomTokens(config)
    training = Training.build(config, data=tokens)
    assert not grows(training)
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None, gc.get_referrers(model())


# ---- whole runs

@pytest.fixture
def models(monkeypatch):
    """References to every model that is built from here on."""
    references, build = [], Training.build.__func__

    def seen(cls, *args, **kwargs):
        training = build(cls, *args, **kwargs)
        references.append(weakref.ref(training.model))
        return training

    monkeypatch.setattr(Training, "build", classmethod(seen))
    return references


@pytest.fixture
def tiny(toys, tmp_path):
    return leaks.config(tmp_path).replace({"steps": 4})


def all_gone(models) -> bool:
    gc.collect()
    return bool(models) and not any(model() for model in models)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"),
                                   KeyboardInterrupt()], ids=repr)
def test_who_keeps_an_error_keeps_no_model(tiny, tmp_path, models, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(loop.Training, "evaluate", fail)
    with pytest.raises((RunFailedError, type(error))) as kept:
        train(tiny, out=tmp_path / "run")
    assert kept.value.__traceback__ is not None and all_gone(models)


def test_nothing_stays_after_ctrl_c(tiny, tmp_path, models):
    def interrupt(record):
        signal.raise_signal(signal.SIGINT)

    run = train(tiny, out=tmp_path / "run", observers=[interrupt])
    assert run.summary["stopped_by"] == "SIGINT" and all_gone(models)


def test_a_handle_and_a_series_keep_runs_and_no_models(tiny, tmp_path, models, monkeypatch):
    handle = lpkit.start(tiny.replace({"precision.telemetry_every": 3}), out=tmp_path / "run")
    handle.result()
    series = lpkit.start_each({"one": tiny, "two": tiny.replace({"seed": 1})},
                              out=tmp_path / "series")
    series.result()
    assert len(models) == 3 and all_gone(models) and handle.done and series.done
    monkeypatch.setattr(loop.Training, "evaluate", lambda self, **more: 1 / 0)
    failed = lpkit.start(tiny, out=tmp_path / "failed")
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert len(models) == 4 and isinstance(failed.error, ZeroDivisionError) and all_gone(models)


# ---- what a mode does not see

def test_a_compiled_update_within_a_budget_gives_back_what_it_took(toys, monkeypatch):
    """By PyTorch's own count of what the CPU's allocator gave out and took back in the third
    update."""
    monkeypatch.setitem(within.__kwdefaults__, "compiler", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    config = BASE.replace({"memory.recompute": "budget", "system.compile": True,
                           "precision.recipe": "fp32"})
    training = Training.build(config, data=RandomTokens(config))
    for step in range(2):
        training.update(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # the profiler's own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            training.update(2)
    counted = [event.nbytes() for event in profiler.profiler.kineto_results.events()
               if event.name() == "[memory]"]
    assert sum(counted) == 0 < max(counted)
    model = weakref.ref(training.model)
    del training
    gc.collect()
    assert model() is None
