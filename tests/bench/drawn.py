"""Configs over all settings that a step's bytes depend on, drawn at random: odd widths, padding,
every recipe, every technique and every kind of attention with their settings, and combinations of
them.

A family of `config.memory` is drawn for a third of the configs, with any row and any of its
settings; a row that is added later is drawn too. What a run would refuse is drawn again.
"""

import random
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal

import lessons.rows.activations
import lessons.rows.disk
import lessons.rows.linear_attention
import lessons.rows.masked
import lessons.rows.optimizers
import lessons.rows.sparse_attention  # noqa: F401  adds rows
from lpkit.config import Config, MemoryConfig
from lpkit.errors import ConfigError
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION, Attending, why_not
from lpkit.techniques.blocks import MLPS, NORMS
from lpkit.techniques.layouts import divisors
from lpkit.techniques.operation import POSITIONS
from lpkit.techniques.optimizers import OPTIMIZERS
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
    draw, found = random.Random(seed), 0
    while found < count:
        try:
            config = Config().replace(_changes(draw))
            Training.build(config, data=RandomTokens(config))
        except ConfigError:
            continue
        found += 1
        yield f"drawn {found}", config


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
        rows = sorted(f.metadata["table"].items(), key=lambda one: one[0].startswith("int"))
        table = {name: row for name, row in rows if not getattr(row, "needs_compile", "")}
        if draw.random() < 1 / 3:
            changes |= _row(draw, f"memory.{f.name}", table)
    return changes


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
