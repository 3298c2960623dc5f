"""Predictions and recipes of `lpkit.modules` on fourteen models that are not the kit's, and on the
kit's own through both doors.

    lpkit bench your-model --out data/measured                      ten minutes of two cores
    lpkit bench your-model --pieces peaks,doors

peaks          the peak that `lpkit.predict(model, batch)` names, against the peak of a real second
update, and beside three peers doors          `lpkit.predict` of a Config, and of the module that
this Config builds recipes        50 steps on the kit's own text under each recipe that casts,
against the spread of bf16 over seeds checkpointing  the losses of transformers' gradient
checkpointing under each recipe, bit by bit

What a step really holds is counted without the kit: on a CPU by PyTorch's profiler, which sees
every allocation, also those inside a kernel; on a GPU by the allocator. Peers: torch-kitsune's
`predict_memory`, called as its own door for models of transformers calls it; accelerate's
`estimate_training_usage`; PyTorch's MemTracker under FakeTensorMode. A peer that raises, or is not
installed, has its reason in its place. What a step holds before its gradients are there is the same
in both, so that gradients are dropped before counting begins.
"""

import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only

import lpkit
from lpkit import hardware
from lpkit.config import DataConfig
from lpkit.datasets.prepared import prepare
from lpkit.errors import ConfigError, pick
from lpkit.files import resource
from lpkit.machine_facts import cores
from lpkit.modules.step import loss_of, without_memory
from lpkit.predict.stacks import stack_of
from lpkit.presets import preset
from lpkit.techniques.recipes import RECIPES
from lpkit.training.build import initial_model
from tests.bench.harness import Result, paired, recorded
from tests.bench.ledger import _by_accelerate
from tests.modules.others_models import MODELS, Size, batch_of, loss_for, model_of
from tests.pages import markdown_table

NAME = "your-model"
Case = Callable[..., Result]
SIZE, SEQUENCES = Size(vocab=4096, width=256, layers=4, context=128, image=88), 8
# transformers' Mamba goes through tokens one by one where its kernels are not installed
SIZES = {"mamba": Size(vocab=4096, width=128, layers=2, context=32)}
WITHIN, OF_MODELS, CLOSED_FORM = 0.005, 12, 0.05
PEERS = ("torch-kitsune", "accelerate", "MemTracker")
CASTING = tuple(name for name, row in RECIPES.items() if row.products)
# what is compared through both doors
PRESETS = {"cpu-3m": 4, "gpt2-124m": 2, "llama-1b": 1}      # and its sequences
PRECISIONS, MACHINES = ("bf16", "fp8-tensorwise", "mxfp8"), ("h100", "b200")
SECONDS, BYTES = 0.03, 0.02
# training on text
TRAINED = ("gpt2", "llama", "qwen3", "bert", "t5", "nano")
TEXT_SIZE, STEPS, LAST, SEEDS, AGAIN, DEVIATIONS = Size(context=64), 50, 10, 5, 8, 3.0
MASK = TEXT_SIZE.vocab - 1


def run(rounds: int = 1, *, pieces: str | None = None) -> list[Result]:
    """`rounds`: seeds of bf16, at least SEEDS."""
    names = [name.strip() for name in pieces.split(",")] if pieces else list(PIECES)
    steps = [pick(PIECES, name, "piece") for name in names]
    facts: dict[str, Any] = {}
    case = partial(paired, NAME, better="lower", facts=facts,
                   device=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                   packages=("torch", "transformers", "torch-kitsune", "accelerate"))
    return [result for step in steps for result in step(case, facts, max(rounds, SEEDS))]


def _worst(case: Case, what: str, errors: Sequence[float], target: float | None, *,
           peer: str = "the measured peak",
           unit: str = "relative error") -> Result:
    return case(ours=[max(errors)], peer=[1.0], peer_name=peer, case=what, target=target, unit=unit)


# ---- peaks

def peaks(case: Case, facts: dict[str, Any], _: int) -> Iterator[Result]:
    table = facts["models"] = [peak_of(name, precision) for precision in (None, "bf16")
                               for name in MODELS]
    for precision in ("as it is", "bf16"):
        rows = [row for row in table if row["precision"] == precision]
        errors = sorted(row["error"] for row in rows if row["error"] is not None)
        # a model without a prediction is in neither
        for count, target in ((OF_MODELS, WITHIN), (len(rows), None)):
            if len(errors) >= count:
                yield case(ours=[errors[count - 1]], peer=[1.0], peer_name="the measured peak",
                           unit="relative error", target=target,
                           case=f"peak, {precision}: {count} of {len(rows)} models are within")
        for peer in PEERS:
            off = [abs(row[peer] / row["measured_bytes"] - 1) for row in rows
                   if isinstance(row[peer], int)]
            if off:
                yield case(ours=off, peer=[1.0] * len(off), peer_name="the measured peak",
                           unit="relative error",
                           case=f"{peer}, {precision}: median of {len(off)} models")
        closed = [row for row in rows if row["closed_error"] is not None]
        sure = [row["closed_error"] for row in closed if not row["doubt"]]
        yield _worst(case, f"closed form, {precision}: worst of the {len(sure)} of {len(closed)} "
                           f"models without a doubt", sure, CLOSED_FORM)


def peak_of(name: str, precision: str | None) -> dict[str, Any]:
    """A model's predicted and measured peak, what peers say, and the closed form where the family
    is known."""
    size = SIZES.get(name, SIZE)
    model, batch, loss = model_of(name, size=size), batch_of(name, SEQUENCES, size.context,
        size=size), loss_for(name)
    row: dict[str, Any] = {"name": name, "precision": precision or "as it is",
                           "parameters": sum(p.numel() for p in model.parameters())}
    here, predicted = hardware.machine(), None
    try:
        predicted = lpkit.predict(model, batch, machine=here, loss=loss, precision=precision)
        row |= {"predicted_bytes": predicted.peak_bytes,
                "at": f"{predicted.footprint.phase}, {predicted.footprint.module or 'the model'}",
                "rows": predicted.footprint.rows, "why": ""}
    except ConfigError as error:
        row |= {"predicted_bytes": None, "at": "", "rows": {}, "why": str(error)}
    row |= {"torch-kitsune": _guarded(kitsune, model, batch),
            "MemTracker": _guarded(mem_tracker, model, batch, loss or loss_of, precision),
            "accelerate": _by_accelerate(4 * row["parameters"],
                                         "bfloat16" if precision else "float32") or "not installed",
            "closed_bytes": predicted and predicted.formula_bytes,
            "doubt": predicted and predicted.doubt}
    measured = row["measured_bytes"] = real_peak(model, batch, loss or loss_of, precision)
    return row | {key: None if row[of] is None else abs(row[of] / measured - 1)
                  for key, of in (("error", "predicted_bytes"), ("closed_error", "closed_bytes"))}


def _update(model: nn.Module, batch: Any, loss: Callable, optimizer: torch.optim.Optimizer,
            precision: str | None, device: str) -> None:
    with torch.autocast(device, torch.bfloat16, enabled=precision is not None):
        loss_value = loss(model, batch)
    loss_value.backward()
    optimizer.step()


def real_peak(model: nn.Module, batch: Any, loss: Callable, precision: str | None) -> int:
    """Bytes that the second update of `model` holds at its peak, with AdamW as PyTorch makes it."""
    if gpu := torch.cuda.is_available():
        # cuBLAS keeps its workspace
        torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        model, batch = model.cuda(), tree_map_only(Tensor, Tensor.cuda, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    update = partial(_update, model, batch, loss, optimizer, precision, "cuda" if gpu else "cpu")
    update()
    optimizer.zero_grad()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        update()
        return torch.cuda.max_memory_allocated() - before
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tree_leaves(
        [list(model.parameters()), list(model.buffers()), list(optimizer.state.values()), batch])
        if isinstance(t, Tensor)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        update()
    changes = sorted((event.start_ns(), event.nbytes())
                     for event in seen.profiler.kineto_results.events()
                     if event.name() == "[memory]")
    now = most = 0
    for _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return sum(held.values()) + most


def _guarded(peer: Callable[..., int], *args: Any) -> int | str:
    """A peer's bytes, or the reason why there are none."""
    try:
        return peer(*args)
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:      # anything that another library raises
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


def kitsune(model: nn.Module, batch: Any) -> int:
    from kitsune import predict_memory

    first = next(t for t in tree_leaves(batch) if isinstance(t, Tensor))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return predict_memory(model, tuple(first.shape[1:]), batch_size=len(first),
                              optimizer="adamw", training=True).total_bytes


def mem_tracker(model: nn.Module, batch: Any, loss: Callable, precision: str | None) -> int:
    """PyTorch's own ledger of a second update on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, batch, _ = without_memory(model, batch, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=torch.cuda.is_available())
        update = partial(_update, model, batch, loss, optimizer, precision, "cpu")
        update()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, optimizer,
                               *[t for t in tree_leaves(batch) if isinstance(t, Tensor)])
        with tracker:
            update()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


# ---- both doors

def doors(case: Case, facts: dict[str, Any], _: int) -> Iterator[Result]:
    table = facts["doors"] = [row for name in PRESETS for row in through_both(name)]
    for key, target in (("parameters", 0.0), ("flops", 0.0), ("bytes", BYTES),
                        ("seconds", SECONDS)):
        errors = [abs(row[key][0] / row[key][1] - 1) for row in table]
        yield _worst(case, f"both doors, {key}: worst of {len(errors)}", errors, target,
                     peer="lpkit.predict(config)")


def through_both(name: str) -> Iterator[dict[str, Any]]:
    """A preset's module, and the preset: of each number what either door says."""
    sequences = PRESETS[name]
    config = preset(name).replace({"system.device": "cpu", "system.attention": "sdpa",
                                   "global_batch": sequences, "grad_accum_steps": 1})
    with torch.device("meta"):
        model = initial_model(config, "sdpa")
        ids = torch.empty(sequences, config.model.T, dtype=torch.int64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten())

    for precision, machine in product(PRECISIONS, MACHINES):
        ours = lpkit.predict(model, ids, machine=machine, precision=precision, loss=loss,
                             stack=stack_of(config))
        theirs = lpkit.predict(config, machine, precision=precision)
        yield {"name": name, "precision": precision, "machine": machine,
               "parameters": (ours.parameters, theirs.parameters),
               "flops": (3 * ours.forward_flops, theirs.flops_per_token * ids.numel()),
               "bytes": (ours.peak_bytes, theirs.memory.peak_bytes),
               "seconds": (ours.step_seconds, theirs.step_seconds)}


# ---- training

def recipes(case: Case, facts: dict[str, Any], seeds: int) -> Iterator[Result]:
    facts |= {"steps": STEPS, "last": LAST, "seeds": seeds}
    asked = [(name, "bf16", seed, False) for name in TRAINED for seed in range(seeds)]
    asked += [(name, recipe, 0, False) for name in TRAINED for recipe in CASTING]
    means = {key: statistics.fmean(losses[-LAST:]) for key, losses in _all(asked, STEPS).items()}
    table = facts["recipes"] = []
    for name in TRAINED:
        plain = [means[name, "bf16", seed, False] for seed in range(seeds)]
        mean, spread = statistics.fmean(plain), statistics.stdev(plain)
        for recipe in CASTING:
            loss = means[name, recipe, 0, False]
            table.append({"name": name, "recipe": recipe, "loss": loss, "bf16": mean,
                          "bf16_same_seed": plain[0], "deviation": spread,
                          "deviations": abs(loss - mean) / spread,
                          "deviations_same_seed": abs(loss - plain[0]) / spread})
    for recipe in CASTING:
        off = [row["deviations"] for row in table if row["recipe"] == recipe]
        yield _worst(case, f"{recipe}: loss after {STEPS} steps, worst of {len(off)} models", off,
                     DEVIATIONS, peer=f"bf16, {seeds} seeds",
                     unit="standard deviations")


def checkpointing(case: Case, facts: dict[str, Any], _: int) -> Iterator[Result]:
    models = [name for name in TRAINED if name != "nano"]       # which is not transformers'
    curves = _all([(name, recipe, 0, again) for name in models for recipe in ("bf16", *CASTING)
                   for again in (False, True)], AGAIN)
    table = facts["checkpointing"] = [
        {"name": name, "recipe": recipe, "equal": curves[name, recipe, 0, False] == curves[name,
            recipe, 0, True],
         "losses": [curves[name, recipe, 0, again][-1] for again in (False, True)]}
        for name in models for recipe in ("bf16", *CASTING)]
    yield _worst(case, f"gradient checkpointing: pairs of {len(table)} whose {AGAIN} losses are "
                       f"not bit-equal",
                 [sum(not row["equal"] for row in table)], 0.0, peer="losses without it",
                       unit="pairs")


def _all(asked: Sequence[tuple], steps: int) -> dict[tuple, list[float]]:
    _text()         # before workers look for it
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        return dict(zip(asked, pool.map(_losses, asked, [steps] * len(asked))))


def _text() -> Any:
    """The kit's own text as bytes."""
    return prepare(DataConfig(), TEXT_SIZE.vocab).train


def _losses(asked: tuple[str, str, int, bool], steps: int) -> list[float]:
    """Train a small model on text from one seed."""
    name, recipe, seed, again = asked
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of(name, seed, TEXT_SIZE).to(device)
    if recipe in CASTING:
        lpkit.convert(model, recipe, pad=True)      # blocks of 128 are wider than these layers
    if again:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer, text, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), _text(), []
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        at = torch.randint(len(text) - 129, (8,), generator=g).tolist()
        windows = torch.stack([torch.from_numpy(text[i:i + 128].astype("int64")) for i in at])
        batch = tree_map_only(Tensor, lambda t: t.to(device), batch_on(name, windows, g))
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batch_on(name: str, windows: Tensor, g: torch.Generator) -> Any:
    """What a model is trained on, of windows of 128 tokens."""
    ids, later = (half.contiguous() for half in windows.chunk(2, 1))
    if name == "nano":
        return ids, windows[:, 1:ids.shape[1] + 1].contiguous()
    if name == "bert":      # masked tokens
        hidden = torch.rand(ids.shape, generator=g) < 0.15
        return {"input_ids": ids.masked_fill(hidden, MASK),
                "labels": ids.masked_fill(~hidden, -100)}
    return {"input_ids": ids, "labels": later if name == "t5" else ids}


PIECES = {"peaks": peaks, "doors": doors, "recipes": recipes, "checkpointing": checkpointing}


# ---- the page

INTRODUCTION = """\
# Your own model: the numbers

Errors of `lpkit.predict(model, batch)`, and losses with recipes, for fourteen models from outside \
the kit: `transformers`' classes
with width 256, 4 layers and 8 sequences of 128 tokens (Mamba: width 128, 2 layers, 32 tokens), a \
GPT in one file,
`nn.TransformerEncoder` and an MLP. The measured peak is that of the second update with PyTorch's \
AdamW. On a CPU it is the bytes
held before the update plus the allocations in PyTorch's profiler; on a GPU it is the allocator's \
count. The numbers are from
`lpkit bench your-model --out data/measured`.

Known limits:

- A prediction for a GPU traces the step with a CPU's operations: the saved tensors of the CPU's \
attention kernel, and the CPU's list of autocast.
- Bytes that a kernel allocates and frees inside one operation are not predicted (ViT's \
convolution in bf16 on a CPU).
- Under a trace, autograd sums two gradients of one tensor into a new tensor; without a trace it \
sums in place. The peak of Mamba
  without its kernels is at such a sum, and its prediction is 7% too high.
- The closed form counts the kit's Transformer. `transformers`' GPT-2 computes GELU in several \
operations, which all save tensors, and has
  dropout in attention by default, so PyTorch saves all scores on a CPU. There `lpkit.predict` \
recommends the trace.
- `nn.LSTM` on a CPU runs in a kernel with a workspace. A trace does not see the workspace: its \
peak for two layers of 64 is 43% too low.
"""


def page() -> str:
    """docs/your_model_numbers.md."""
    lines = [INTRODUCTION]
    for path in sorted(resource("data/measured").glob(f"{NAME}-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        lines += [*recorded(record, f", {record['threads']} threads"),
                  markdown_table(("", "result", "target"), [
            (case["case"], _shown(case), case["verdict"]) for case in record["cases"]]), ""]
        for title, key, heads, row in TABLES:
            if key in record:
                lines += [f"### {title}", "", markdown_table(heads, map(row, record[key])), ""]
    return "\n".join(lines)


def _shown(case: dict[str, Any]) -> str:
    return (f"{case['ratio']:.3%}" if case["unit"] == "relative error"
            else f"{case['ratio']:.2f} {case['unit']}")


def _peak_row(row: dict[str, Any]) -> tuple[str, ...]:
    def off(value: int | str | None) -> str:
        return (f"{value / row['measured_bytes'] - 1:+.2%}" if isinstance(value, int) else value
                or "no such family")

    return (row["name"], row["precision"], f"{row['measured_bytes'] / 1e6:.2f} MB", row["at"],
            off(row["predicted_bytes"] or row["why"]),
            *(off(row[peer]) for peer in PEERS), off(row["closed_bytes"]))


TABLES = ((
    ("Peaks", "models", ("model", "precision", "measured peak", "predicted at", "predicted", *PEERS,
                        "closed form"), _peak_row),
    ("Both doors", "doors", ("preset", "recipe", "machine", "parameters", "FLOPs", "bytes",
                            "seconds"), lambda row: (
        row["name"], row["precision"], row["machine"],
        *(f"{row[key][0] / row[key][1] - 1:+.2%}" for key in ("parameters", "flops", "bytes",
                                                                                      "seconds")))),
    ("Losses", "recipes", ("model", "recipe", "loss", "bf16, mean", "standard deviations off",
                          "of the same seed"), lambda row: (
        row["name"], row["recipe"], f"{row['loss']:.4f}", f"{row['bf16']:.4f}",
        f"{row['deviations']:.2f}", f"{row['deviations_same_seed']:.2f}")),
    ("Gradient checkpointing", "checkpointing", ("model", "recipe", "losses bit-equal"),
     lambda row: (
        row["name"], row["recipe"], "yes" if row["equal"] else "NO")),
))
