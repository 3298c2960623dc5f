"""The prediction of one training run on one kind of machine, before it runs."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lpkit.config import Config, flat
from lpkit.errors import ConfigError
from lpkit.predict.device import to_search
from lpkit.predict.flops import training_flops_per_token
from lpkit.predict.governed import governed
from lpkit.predict.ledger import Memory, memory
from lpkit.predict.params import nonzero_count, parameter_count, parameters
from lpkit.predict.recipes import precision_of
from lpkit.predict.roofline import flat_mfu
from lpkit.predict.stacks import STACKS
from lpkit.predict.time import Bill, StepTime, bill, step_time
from lpkit.tables import picked
from lpkit.techniques import machines
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.values import Count, Place, PositiveOrZero, Text, checked

PRIVATE = ("data.", "start.", "imports")     # settings with paths, which a card must not contain
UNBILLED = ("days", "device_hours", "energy_how", "energy_wh_per_million_tokens")   # not printed
SOURCES = (
    "FLOPs and MFU: Chowdhery et al. 2022, PaLM, appendix B, https://arxiv.org/abs/2204.02311",
    "model states and sharding: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054",
    "activations: the method of Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198",
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of a step and of a run. Memory is per device; all other numbers are for all
    devices."""

    parameters: int
    nonzero_parameters: int             # without the zeros of pruned matrices
    parameters_by_part: dict[str, int]
    flops_per_token: float              # forward and backward, full attention
    flops_per_token_causal: float       # the same with only the pairs that a causal mask allows
    memory: Memory
    step: StepTime
    layout: Layout
    run: Bill                           # time, energy and cost of all steps of the config
    machine: Machine
    assumptions: dict[str, Any]
    config: Config
    # the same run by two common training programs, if the config names no stack
    other_stacks: tuple[dict[str, Any], ...] = ()

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak_bytes

    def card(self, path: Place, name: str = "a Config", **measured: Any) -> list[str]:
        """Write this prediction to the card PATH.json and PATH.svg, and return both paths, as
        `lpkit.predict.cards.write` does. `measured`: `device`, `peak_bytes` and other measured
        numbers."""
        # imported late, because the planner's page does not ship this module
        from lpkit.predict import cards

        usual = flat(Config()).items()
        changed = dict(item for item in flat(self.config).items()
                       if item not in usual and not item[0].startswith(PRIVATE))
        about = {key: self.assumptions[key] for key in ("precision", "optimizer")}
        return cards.write(path, {"name": name, "config": changed, **about, **picked(
            self, "parameters config.model.layers")}, self, **measured)

    @property
    def step_seconds(self) -> float:
        return self.step.step_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        m, rows = self.machine, self.memory.rows
        held = picked(self.memory, "peak_bytes peak_moment fits reserved_bytes doubt")
        bill = {key: value for key, value in self.run.to_dict().items() if key not in UNBILLED}
        return {
            **picked(self, "parameters nonzero_parameters parameters_by_part flops_per_token "
                     "flops_per_token_causal"),
            "bytes": {**{row.name: row.bytes for row in rows}, "peak_bytes": self.peak_bytes},
            **held,
            "rows": [{**row._asdict(), "bytes": row.bytes} for row in rows],
            "time_rows": [row.to_dict() for row in self.step.rows],
            **picked(self.step, "mfu phases tokens_per_second step_seconds",
                     step_seconds_range="seconds_range"), **bill, "currency": "USD",
            "machine": picked(m, "name title memory_bytes bytes_per_second flops watts "
                              "price_per_hour source"),
            "devices": self.layout.devices, "assumptions": self.assumptions,
            "other_stacks": self.other_stacks,
            "sources": [*SOURCES, f"machine: {m.source}", f"price: {m.price_source}",
                        f"efficiency: {self.step.efficiency.source}"]}


@checked
def predict(config: Config, machine: str | Machine = "h200", devices: Count | None = None, *,
            layout: Layout | None = None, mfu: float | None = None, precision: Text | None = None,
            optimizer: Text | None = None, zero: int | None = None, recompute: Text | None = None,
            price_per_hour: PositiveOrZero | None = None) -> Prediction:
    """Predict memory, time, energy and cost of `config`, by `memory` and `step_time`. `plan`,
    `advise` and the check before a run use the same functions.

    devices    number of data-parallel devices. Then `zero` and `recompute` are searched if they are
               not given, and the first combination that fits is used. None: the config's layout
    layout     a layout to use instead of the config's
    mfu        model FLOPs utilisation to assume for the whole step; None: each operation has an
               efficiency of its own, from `lpkit.predict.evidence`
    precision  a row of `recipes.PRECISIONS`; None: the config's recipe, where "auto" means bf16 if
               the machine has bf16, else fp32
    optimizer  a row of OPTIMIZERS; None: the config's
    zero       ZeRO stage 0 to 3; None: the config's stage; with `devices`, the lowest stage that
               fits, or 3 if none fits
    recompute  a row of `techniques.memory.RECOMPUTE`; None: the config's row; with `devices`, and
               if the config has the default row, the cheapest row that fits
    price_per_hour
               US dollars per device; None: the machine's price

    Raises ConfigError if the settings do not go together.
    """
    on = machines.find(machine)
    efficiency = None if mfu is None else flat_mfu(mfu)
    price = on.price_per_hour if price_per_hour is None else price_per_hour
    how = {"precision": precision_of(config, on, precision),
           "optimizer": optimizer or config.optimizer.name}
    to_try = [layout] if layout else _layouts(config, devices, zero)
    modes: Sequence[str] = [recompute or config.memory.recompute.name]
    if devices is not None and recompute is None:
        modes = to_search(config)
    for how["recompute"], layout in itertools.product(modes, to_try):
        held = memory(config, on, layout=layout, **how)
        if held.fits:
            break
    step = step_time(config, on, layout, efficiency=efficiency, **how)
    others = () if mfu or on.measured or on.kind != "gpu" else _by_others(config, on, layout, how)
    why = "no layout fits; this layout needs the least memory"
    if len(modes) == len(to_try) == 1:
        why = "as requested" + "; --devices searches for a layout that fits" * (not held.fits)
    elif held.fits:
        why = "the first that fits of: recompute none, selective, block, each with ZeRO 0 to 3"
    communication = "inside the MFU"
    if not mfu:
        names = [row.name for row in step.rows if row.phases.get("communication")]
        communication = ", ".join(names) or "hidden, or none"
    return Prediction(
        parameters=parameter_count(config.model), nonzero_parameters=nonzero_count(config.model),
        parameters_by_part=parameters(config.model),
        flops_per_token=training_flops_per_token(seen := governed(config).model),
        flops_per_token_causal=training_flops_per_token(seen, attention="causal"),
        memory=held, step=step, layout=layout, machine=on, config=config,
        other_stacks=tuple(others),
        run=bill(step, on, config.tokens_after(config.steps), price_per_hour=price), assumptions={
            **how, **picked(step, "stack factor dtype emulated attention micro_batches",
                            efficiency="efficiency.source", peak_flops_per_device="peak_flops",
                            sequences_per_device="sequences"),
            "mfu": mfu, "zero": layout.zero if layout.state_ranks > 1 else 0, "layout": str(layout),
            "layout_why": why, "accumulation": _accumulation(config, step), "steps": config.steps,
            "price_per_hour": price,
            "communication": communication, "power": "rated, all of it, all the time"})


def _by_others(config: Config, on: Machine, layout: Layout, how: dict[str, str]
               ) -> Iterator[dict[str, Any]]:
    """Yield the step and the peak of the same run by the two most common stacks, if the config
    names no stack. A prediction shows them because no other setting changes the time as much as the
    stack does."""
    split = layout.tensor * layout.pipeline * layout.context > 1
    for name in ("eager", "megatron" if split else "hf") * (config.system.stack == "auto"):
        by_it = config.replace({"system.stack": name})
        with suppress(ConfigError):     # the other stack cannot run this combination
            step, held = (of(by_it, on, layout=layout, **how) for of in (step_time, memory))
            yield {"stack": name, "words": STACKS[name].words, **picked(
                step, "step_seconds tokens_per_second mfu", step_seconds_range="seconds_range",
                range_is="spread.words"), **picked(held, "peak_bytes fits")}


def _accumulation(config: Config, step: StepTime) -> str:
    """Return in words how many micro-batches a rank accumulates. If this is not `grad_accum_steps`,
    also return the reason: the global batch is shared by several ranks."""
    words = (f"each rank accumulates {step.micro_batches:,} micro-batches of {step.sequences:,} "
             f"sequence{'s' * (step.sequences > 1)}")
    if step.micro_batches == config.grad_accum_steps:
        return words
    return (f"{words}; grad_accum_steps={config.grad_accum_steps} splits the global batch of "
            f"{config.global_batch:,}, of which a rank has {step.micro_batches * step.sequences:,}")


def _layouts(config: Config, devices: int | None, zero: int | None) -> list[Layout]:
    """Return the layouts to try: the config's layout, or data-parallel layouts of `devices` with
    each ZeRO stage, from 0 (most bytes per device) to 3 (fewest bytes)."""
    if devices is None:
        layout = config.parallel
        return [layout if zero is None else replace(layout, zero=zero)]
    stages = [zero] if zero is not None else range(4) if devices > 1 else [0]
    return [Layout(shard=devices, zero=stage) if stage else Layout(data=devices, zero=0)
            for stage in stages]
