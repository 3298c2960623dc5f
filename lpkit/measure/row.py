"""This machine as a row that predictions take (`lpkit measure`): its ceilings, the products of a
config's Linears, what its GPUs hear of one another, and one real update."""

import math
import statistics
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import torch

from lpkit import hardware
from lpkit.config import Config
from lpkit.parallel.processes import Processes, told
from lpkit.predict.evidence import catalogued
from lpkit.predict.flops import products
from lpkit.timing import interleaved_seconds
from lpkit.training.build import decide
from lpkit.training.formulas import refuse_what_cannot_fit
from lpkit.training.training import RandomTokens, Training


def row(config: Config, command: str) -> dict[str, Any]:
    """Returns the row as `machines.from_dict` reads it; `command` is recorded. Raises ConfigError
    for a config of several devices, and as a run does."""
    told(config)
    decisions = decide(config)
    refuse_what_cannot_fit(config, decisions)
    device, chosen = decisions.device, decisions.choices
    training = Training.build(config, data=RandomTokens(config, device), decisions=decisions)
    update = hardware.synchronised(lambda: training.update(0), device)
    (seconds,) = interleaved_seconds([update], rounds=9, warm_up=2, within_seconds=20)
    used = config.replace({
        "precision.recipe": chosen["precision"].used, "system.threads": chosen["threads"].used,
        "system.attention": chosen["attention"].used})
    here, rates = hardware.machine(str(device)), _rates(config, device)
    best = {dtype: max(here.flops[dtype], *each.values()) for dtype, each in rates.items()}
    on, ranks = here, torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type == "cuda":       # links and prices of its kind
        on = replace(catalogued(here.title) or here, title=here.title, memory_bytes=here.memory_bytes,
                     bytes_per_second=here.bytes_per_second)
    if ranks > 1:
        with Processes("lpkit.measure.ranks:run", {"program": "all-gather", "backend": "nccl"},
                       world=ranks) as running:
            on = replace(on, link_bytes_per_second=2 * min(running.wait()), devices_per_node=ranks)
    shares = {dtype: [[*shape, rate / best[dtype]] for shape, rate in each.items()]
              for dtype, each in rates.items()}
    return {"measured": {
        "device": here.title, "torch": str(torch.__version__), "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "ranks": ranks,
        "products": shares, "seconds": statistics.median(seconds), "config": used.to_dict()},
        **{key: value for key, value in asdict(on).items() if value and value != "this" and key not in (
            "details", "flops")}, "source": f"measured by `{command}`", "flops": {**on.flops, **best}}


def _rates(config: Config, device: torch.device) -> dict[str, dict[tuple[int, ...], float]]:
    """FLOP/s of every Linear's product and its gradients, by dtype and M, N, K."""
    shapes = sorted({shape for one in products(config.model, batch=config.micro_batch)
                     if not one.pairs for shape in one.shapes.values()})
    rates: dict[str, dict[tuple[int, ...], float]] = {}
    for dtype in (*hardware.DTYPES, *hardware.low_formats(device)):
        ways = [hardware.product]
        if dtype == "bf16" and device.type == "cpu":    # as `hardware.squares`
            ways.append(hardware.widened)
        for M, N, K in shapes:
            if dtype in hardware.DTYPES or not (M % 16 or N % 16 or K % 16):    # else no kernel
                tries = interleaved_seconds([way((M, K), (K, N), dtype, device) for way in ways],
                                            rounds=9, within_seconds=0.2)
                least = min(map(min, tries))
                rates.setdefault(dtype, {})[M, N, K] = 2 * math.prod((M, N, K)) / least
    return rates
