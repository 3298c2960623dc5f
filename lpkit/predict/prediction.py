"""One answer about one training run on one kind of machine, before it runs."""

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

from lpkit.config import Config, ConfigError, nearest
from lpkit.predict.activations import TRIED
from lpkit.predict.flops import recomputed_flops, training_flops, training_flops_per_token
from lpkit.predict.ledger import PRECISIONS, Memory, attention_of, memory, micro_batch
from lpkit.predict.params import parameter_count, parameters
from lpkit.techniques import machines
from lpkit.techniques.machines import Machine

SOURCES = (
    "FLOPs and MFU: Chowdhery et al. 2022, PaLM, appendix B, https://arxiv.org/abs/2204.02311",
    "model states and sharding: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054",
    "activations: the method of Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198",
)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one training step, unless a name says otherwise. Memory is per device, the rest is for all of them."""

    parameters: int
    parameters_by_part: dict[str, int]
    flops_per_token: float              # forward and backward, attention in full
    flops_per_token_causal: float       # what a causal kernel has to do
    memory: Memory
    tokens_per_step: int
    step_seconds: float
    run_seconds: float                  # all steps
    energy_wh: float | None             # all steps, at rated power
    cost: float | None                  # US dollars, all steps
    machine: Machine
    devices: int
    assumptions: dict[str, Any]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def sources(self) -> tuple[str, ...]:
        return (*SOURCES, f"machine: {self.machine.source}", f"price: {self.machine.price_source}")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        m, mem = self.machine, self.memory
        tokens = self.tokens_per_step * self.run_seconds / self.step_seconds
        return {
            "parameters": self.parameters, "parameters_by_part": self.parameters_by_part,
            "flops_per_token": self.flops_per_token, "flops_per_token_causal": self.flops_per_token_causal,
            "bytes": {**{row.name: row.bytes for row in mem.rows}, "peak_bytes": mem.peak_bytes},
            "peak_bytes": mem.peak_bytes, "peak_moment": mem.peak_moment, "fits": mem.fits,
            "rows": [{**asdict(row), "bytes": row.bytes} for row in mem.rows],
            "tokens_per_second": self.tokens_per_second, "step_seconds": self.step_seconds,
            "run_seconds": self.run_seconds, "energy_wh": self.energy_wh, "cost": self.cost,
            "cost_per_million_tokens": None if self.cost is None else self.cost / tokens * 1e6, "currency": "USD",
            "machine": {"name": m.name, "title": m.title, "memory_bytes": m.memory_bytes,
                        "bytes_per_second": m.bytes_per_second, "flops": dict(m.flops), "watts": m.watts,
                        "price_per_hour": m.price_per_hour, "source": m.source},
            "devices": self.devices, "assumptions": self.assumptions, "sources": list(self.sources),
        }


def predict(config: Config, machine: str | Machine = "h200", devices: int = 1, *, mfu: float = 0.4,
            precision: str | None = None, optimizer: str | None = None, zero: int | None = None,
            recompute: str | None = None, price_per_hour: float | None = None) -> Prediction:
    """Memory, time, energy and cost of `config` on `devices` machines, data-parallel.

    mfu        model FLOPs utilisation to assume, before recomputation; 0.4 is a good large run (PaLM reports 0.46)
    precision  a row of `ledger.PRECISIONS`; None: as the config asks, where "auto" is bf16 if the machine has it
    zero       stage 0 to 3; None: the lowest stage that fits, or 3
    recompute  a row of `activations.RECOMPUTE`; None: the config's, or the first that fits
    A low-precision recipe counts with its bytes, and with the time of 16 bits: `lpkit advise` weighs its casts and products.
    Raises ConfigError.
    """
    on = machines.find(machine)
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu is a fraction of the peak, above 0 and at most 1; got {mfu}")
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"devices must be a whole number, 1 or more; got {devices}")
    asked = precision or config.precision.recipe
    chosen = ("bf16" if "bf16" in on.flops else "fp32") if asked == "auto" else asked
    if chosen not in PRECISIONS:
        raise ConfigError(f"there is no precision {chosen!r}; {nearest(chosen, PRECISIONS)}")
    low = PRECISIONS[chosen].low
    dtype = "bf16" if low else PRECISIONS[chosen].dtype     # what a recipe's casts leave of its faster products: advise
    peak = on.peak_flops(dtype)
    attention = attention_of(config, on, PRECISIONS[chosen])
    price = on.price_per_hour if price_per_hour is None else price_per_hour
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"price_per_hour must be 0 or more dollars, got {price}")
    stages = [zero] if zero is not None else [0] if devices == 1 else [0, 1, 2, 3]
    modes = [recompute] if recompute else [config.memory.recompute] if config.memory.recompute != "none" else TRIED
    for again, stage in itertools.product(modes, stages):
        held = memory(config, on, devices, precision=chosen, optimizer=optimizer, zero=stage, recompute=again,
                      attention=attention)
        if held.fits:
            break
    sequences, pieces = micro_batch(config, devices)
    flops = (training_flops(config.model, batch=config.batch)
             + recomputed_flops(config.model, batch=config.batch, recompute=again))
    step_seconds = flops / (devices * peak * mfu)
    run_seconds = step_seconds * config.steps
    device_hours = devices * run_seconds / 3600
    return Prediction(
        parameters=parameter_count(config.model), parameters_by_part=parameters(config.model),
        flops_per_token=training_flops_per_token(config.model),
        flops_per_token_causal=training_flops_per_token(config.model, attention="causal"),
        memory=held, tokens_per_step=config.tokens_per_step, step_seconds=step_seconds, run_seconds=run_seconds,
        energy_wh=None if on.watts is None else on.watts * device_hours,
        cost=None if price is None else price * device_hours,
        machine=on, devices=devices,
        assumptions={
            "mfu": mfu, "precision": chosen, "dtype": dtype, "peak_flops_per_device": peak, "optimizer": optimizer or config.optimizer.name,
            "zero": stage, "recompute": again,
            "layout_why": "asked for" if zero is not None and recompute is not None else
            "the first that fits: recomputing none, selective, block, and in each ZeRO 0 to 3" if held.fits else
            "nothing that was tried fits; the leanest is shown",
            "attention": attention, "layout": "data parallel",
            "sequences_per_device": sequences, "micro_batches": pieces, "steps": config.steps,
            "price_per_hour": price, "communication": "inside the MFU", "power": "rated, all of it, all the time",
        })
