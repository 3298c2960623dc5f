"""Predict whether low precision would be faster for any model on a machine. `lpkit.modules.predict`
predicts the steps, and `lpkit.measure.advice` compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.measure import advice
from lpkit.measure.advice import BASES, Advice, RecipePrediction
from lpkit.modules.predict import predict
from lpkit.techniques import machines
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES


def advise(of: Config | nn.Module, *args: Any, **how: Any) -> Advice:
    """Return an Advice on which recipe to use. `of`: a Config (then the arguments are those of
    `lpkit.measure.advice.advise`), or a model (then those of `advise_model`)."""
    return (advice.advise if isinstance(of, Config) else advise_model)(of, *args, **how)


def advise_model(model: nn.Module, batch: Any, machine: str | Machine = "h200", *,
                 recipes: Sequence[str] | None = None, base: str | None = None,
                 **how: Any) -> Advice:
    """Predict a step of `model` under each recipe, compare it with a step in the dtype `base`, and
    return an Advice.

    batch:   arguments of the model, as for `lpkit.modules.predict.predict`
    machine: a row of the catalogue of machines, or its name
    recipes: names of rows of RECIPES; None: every recipe that casts
    base:    bf16, fp16 or fp32; None: the fastest of them on this machine
    how:     further arguments of `lpkit.modules.predict.predict`

    Raises ConfigError.
    """
    on = machines.find(machine)
    base = base or max((dtype for dtype in BASES if dtype in on.flops), key=on.flops.get)
    plain, plans = predict(model, batch, machine=on, precision=base, **how), []
    for name in recipes or [name for name, row in RECIPES.items() if row.products]:
        try:
            cast = predict(model, batch, machine=on, precision=name, **how)
        except ConfigError:
            if recipes:
                raise
            continue        # no Linear of the model has sizes that fit the tiles of this recipe
        cost = advice.compared(plain.step, cast.step, cast.work.products, cast.casts)
        more = advice.difference(cast.footprint.rows, plain.footprint.rows)
        plans.append(RecipePrediction(
            recipe=name, backend=cast.converted.backend, why=cast.converted.why,
            status="emulated" if cast.step.emulated else "native", cost=replace(cost, bytes=more)))
    if not plans:
        raise ConfigError("no recipe casts a Linear of this model; lpkit.convert says why")
    plans.sort(key=lambda plan: (plan.status != "native", -plan.speedup))
    choice, sentence = advice.verdict(plans, on, base)
    return Advice(machine=on.title, base=base, choice=choice, sentence=sentence, plans=tuple(plans),
                  efficiency=plain.step.efficiency)
