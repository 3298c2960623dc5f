"""Configs over all settings that a step's bytes depend on, drawn at random: odd widths, padding,
every recipe, every technique and every kind of attention with their settings, and combinations of
them.

A family of `config.memory` is drawn for a third of the configs, with any row and any of its
settings; a row that is added later is drawn too. What a run would refuse is drawn again.

    python -m tests.bench.drawn layouts 60      # the formula's peaks beside the trace's, of ranks
    python -m tests.bench.drawn configs 300     # that split the model; and of one process

ends with 1 if a peak is more than 5% off without a doubt, or outside the bounds of its doubt.
"""

import random
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from statistics import median
from types import MappingProxyType
from typing import Any, Literal

import lessons.rows.activations
import lessons.rows.disk
import lessons.rows.linear_attention
import lessons.rows.masked
import lessons.rows.optimizers
import lessons.rows.sparse_attention  # noqa: F401  adds rows
from lpkit import predict_trace
from lpkit.config import Config, MemoryConfig
from lpkit.errors import ConfigError
from lpkit.hardware import room
from lpkit.measure.tracking import Footprint
from lpkit.predict import memory
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION, Attending, why_not
from lpkit.techniques.blocks import MLPS, NORMS
from lpkit.techniques.layouts import check, divisors, refuse_untrainable
from lpkit.techniques.operation import POSITIONS
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.techniques.pipelines import PIPELINES
from lpkit.techniques.recipes import RECIPES
from lpkit.techniques.row import Settings
from lpkit.training.training import RandomTokens, Training

# kinds of attention, in the order that draws depend on; others come after them
ORDER = ("full", "window", "block-sparse", "documents", "bidirectional", "linear", "performer",
         "delta")
VALUES: Mapping[str, tuple] = MappingProxyType({        # of settings that are numbers or names
    "every": (1, 2, 3), "chunk_tokens": (7, 64, 300, 2048), "history": (1, 16, 100),
    "high_precision_layers": (("head",), ("head",), (), ("head", "first"), ("head", "last")),
    "size": (1, 7, 64, 200), "global_tokens": (0, 1, 20), "block": (5, 16, 64),
    "local": (1, 2, 3), "stride": (1, 2, 4), "soft_cap": (None, 30.0), "sinks": (False, True),
    "features": (5, 64)})


def configs(count: int, seed: int = 0) -> Iterator[tuple[str, Config]]:
    """`count` of them that run on a CPU, always the same ones for a seed."""
    draw, valid = random.Random(seed), 0
    while valid < count:
        try:
            config = Config().replace(_changes(draw))
            Training.build(config, data=RandomTokens(config))
        except ConfigError:
            continue
        valid += 1
        yield f"drawn {valid}", config


def _changes(draw: random.Random) -> dict[str, Any]:
    heads, batch = draw.choice((1, 2, 3, 4, 6)), draw.randint(1, 3)
    parts = draw.choice((1, 1, 2, 3, 5))
    changes: dict[str, Any] = {
        "system.device": "cpu", "global_batch": batch * parts, "grad_accum_steps": parts,
        "model.layers": draw.randint(1, 6), "model.heads": heads,
        "model.kv_heads": draw.choice(divisors(heads)), "model.head_dim": draw.randint(3, 40),
        "model.width": draw.randint(20, 200), "model.mlp_width": draw.randint(30, 500),
        "model.vocab": round(2 ** draw.uniform(6, 13)), "model.context": draw.randint(8, 300),
        "precision.cache_weight_casts": draw.random() < 0.25,
        "optimizer.clip": draw.choice((0.0, 1.0))}
    if draw.random() < 0.5:         # sizes that tile
        changes |= {"model.width": 128, "model.head_dim": 32, "model.mlp_width": 384,
                    "model.context": 128, "model.heads": 4, "model.kv_heads": 4}
    for key, table in {"norm": NORMS, "position": POSITIONS, "mlp": MLPS}.items():
        changes[f"model.{key}"] = draw.choice(list(table))
    for key in ("bias", "tied", "qkv_bias", "qk_norm"):
        changes[f"model.{key}"] = draw.random() < 0.5
    if draw.random() < 0.5:
        order = {name: KINDS[name] for name in dict.fromkeys((*ORDER, *KINDS))}
        changes |= _row(draw, "model.attention", order)
    here = Attending(model=Config().replace(changes).model)
    changes["system.attention"] = draw.choice(
        [name for name, row in ATTENTION.items()
         if row.assumed and not why_not(name, here)])
    changes |= _row(draw, "precision.recipe", RECIPES)
    changes |= _row(draw, "optimizer", dict(sorted(OPTIMIZERS.items())))
    if changes["optimizer"] in ("galore", "shampoo", "soap"):
        # the update that is measured has all that comes every n-th
        changes["optimizer.every"] = 1
    if changes["optimizer"] == "shampoo":
        # eigenvectors of 3,000 rows take 11 s of a core
        changes["model.vocab"] = min(changes["model.vocab"], 512)
    for f in fields(MemoryConfig):
        # few bits last, whichever module came first: draws depend on the order
        rows = sorted(f.metadata["table"].items(), key=lambda pair: pair[0].startswith("int"))
        table = {name: row for name, row in rows if not getattr(row, "needs_compile", "")}
        if draw.random() < 1 / 3:
            changes |= _row(draw, f"memory.{f.name}", table)
    return changes


def layouts(count: int, seed: int = 0) -> Iterator[tuple[str, Config]]:
    """`count` configs of ranks that split the model, tensor and pipeline, alone and together, with
    and without shards, always the same ones for a seed; a rank has a third of the techniques."""
    draw, valid = random.Random(seed), 0
    while valid < count:
        try:
            config = Config().replace(_laid_out(draw))
            check(config, config.parallel)
            refuse_untrainable(config)
        except ConfigError:
            continue
        valid += 1
        yield f"layout {valid}", config


def traced(config: Config) -> Footprint:
    """The rank that holds most, of those that a pipeline begins and ends with. Raises
    ConfigError."""
    layout = config.parallel
    stage = layout.devices // layout.pipeline
    return max((predict_trace(config, layout.devices, layout=layout, rank=rank)
                for rank in sorted({0, stage % layout.devices, layout.devices - stage})),
               key=lambda trace: trace.peak_bytes)


def _laid_out(draw: random.Random) -> dict[str, Any]:
    tensor, pipeline = draw.choice(((2, 1), (2, 1), (4, 1), (1, 2), (1, 2), (1, 4), (2, 2), (2, 2)))
    interleave = draw.choice((1, 2)) if pipeline > 1 else 1
    pieces, shard, zero = draw.choice((1, 2, 4)), draw.choice((1, 1, 2)), draw.choice((1, 3))
    shape = {"heads": draw.choice((4, 8)), "head_dim": draw.randint(2, 20) * 2,
             "kv_heads": 4, "width": draw.randint(3, 20) * 16,
             "mlp_width": draw.randint(4, 40) * 16, "vocab": round(2 ** draw.uniform(2, 9)) * 16,
             "context": draw.randint(1, 16) * 16,
             "layers": draw.randint(1, 2) * pipeline * interleave}
    schedules = [name for name, row in PIPELINES.items()
                 if row.chunks[0] <= interleave <= row.chunks[1]]
    changes = _changes(draw) | {f"model.{key}": value for key, value in shape.items()} | {
        "model.attention": "full", "optimizer": draw.choice(("adamw", "sgd", "lion")),
        "system.attention": draw.choice(("sdpa", "plain")),
        "global_batch": draw.randint(1, 3) * pieces * shard, "grad_accum_steps": pieces * shard,
        "parallel.tensor": tensor, "parallel.pipeline": pipeline, "parallel.shard": shard,
        "parallel.zero": 1 if pipeline > 1 else zero, "parallel.interleave": interleave,
        "parallel.schedule": draw.choice(schedules)}
    return {key: value for key, value in changes.items()
            if not key.startswith(("model.attention.", "optimizer."))}


def _row(draw: random.Random, key: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """One of a family, and its settings that bytes may depend on."""
    name = draw.choice(list(table))
    settings: Settings = table[name].settings
    changes: dict[str, Any] = {key: name}
    for setting, kind in typing.get_type_hints(type(settings)).items():
        values = VALUES.get(setting, ())
        if setting == "pad":
            values = (True,)
        elif typing.get_origin(kind) is Literal:
            values = typing.get_args(kind)
        if values:
            changes[f"{key}.{setting}"] = draw.choice(values)
    return changes


def main(kind: str, count: int, seed: int = 0) -> bool:
    """Prints how far the formula is off the trace, config by config. True: within what it says."""
    off, wrong = [], 0
    for name, config in {"layouts": layouts, "configs": configs}[kind](count, seed):
        try:
            trace = traced(config)
        except ConfigError:     # a recipe or a technique that the formula takes, and a run does not
            continue
        predicted = memory(config, room("cpu"), attention=trace.chosen["attention"].used)
        error = predicted.peak_bytes / trace.peak_bytes - 1
        bounds = re.search(r"was (-?\d+)% too low to (-?\d+)% too high", predicted.doubt)
        low, high = (-int(bounds[1]), int(bounds[2])) if bounds else (-5, 5)
        broken = (bounds or not predicted.doubt) and not low - 0.5 <= 100 * error <= high + 0.5
        off.append(abs(error))
        wrong += bool(broken)
        print(f"{name}: {error:+.1%}{' WRONG' if broken else ''}, {config.parallel}, "
              f"{predicted.peak_moment} ({trace.phase} {trace.module}), "
              f"{predicted.doubt or 'no doubt'}", flush=True)
    print(f"{len(off)} {kind}: median {median(off):.1%}, most {max(off):.1%}, {wrong} wrong")
    return not wrong


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1], *map(int, sys.argv[2:])))
