"""Peaks of memory that others published of LoRA and QLoRA, beside what `lpkit predict` would say of
them.

    lpkit bench adapter-peaks --out data/measured      seconds; nothing is run

data/published/adapters.csv has the runs, all of LitGPT on one GPU: weights, adapters and moments in
bf16, PyTorch without a compiler, RMSNorm written out (litgpt/model.py, `RMSNorm.forward`), the peak
by `torch.cuda.max_memory_allocated`. All are held out: nothing is fitted to them. What this stack
keeps and lpkit does not is `besides`, each with its source. Not counted are an adapter of the head,
a head in NF4, and that the loss is taken of 128 tokens at a time. Runs with rows that lpkit has no
config for (parallel blocks, Gemma's heads) are not in the file.
"""

import csv
from collections.abc import Mapping
from functools import partial

from lpkit.config import Config
from lpkit.files import resource
from lpkit.predict.ledger import Memory, memory
from tests.bench.harness import Result, paired
from tests.bench.published import DEVICE

TARGET = 0.15       # of the published peak, at the median
PAGES = ({"resource-tables":
        "https://github.com/Lightning-AI/litgpt/blob/26857050fe3ff627cd714fe92f5838f51a3d5efa/tutorials/resource-tables.md",
        "config-hub":
        "https://github.com/Lightning-AI/litgpt/blob/26857050fe3ff627cd714fe92f5838f51a3d5efa/config_hub/finetune/README.md"})
SHAPE = ("layers", "width", "heads", "kv_heads", "mlp_width", "vocab", "context")
STYLE = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "tied": False}


def published() -> list[dict[str, str]]:
    with (resource("data/published") / "adapters.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def config(run: Mapping[str, str]) -> Config:
    lora = {"name": "lora", "rank": int(run["rank"]), "targets": [run["targets"]]}
    base = ([{"name": "quantised-base", "format": "nf4", "double": run["base"] == "nf4-double"}]
            if run["base"] else [])
    model = ({f"model.{name}": int(run[name]) for name in SHAPE}
             | {f"model.{name}": value for name, value in STYLE.items()})
    return Config().replace(model | {"model.changes": [lora, *base], "memory.param_dtype": "bf16",
                                     "system.stack": "eager-unfused",
                                     "global_batch": int(run["micro_batch"]),
                                     "grad_accum_steps": 1})


def predicted(run: Mapping[str, str]) -> Memory:
    return memory(config(run), "a100-80", precision="bf16")


def besides(run: Mapping[str, str]) -> int:
    """Bytes that these runs keep and lpkit's would not. Dropout of 5% before each A
    (config_hub/finetune/*/lora.yaml) keeps a mask of a byte, and its result: of attention's output,
    and of the MLP's input once for `fc_1` and once for `fc_2` (litgpt/lora.py, `LoRALinear`).
    bitsandbytes kept the input of a frozen Linear until 0.43.2 (bitsandbytes#1270; LitGPT asks for
    0.42, litgpt/finetune/lora.py line 146)."""
    D, F = int(run["width"]), int(run["mlp_width"])
    masks, dropped = (4 * D + F, 2 * D) if run["targets"] == "*" else (D, 0)
    # of q, k and v, of the MLP, of its last product; attention keeps that of `out`
    inputs = 2 * D + F if run["base"] else 0
    return (int(run["layers"]) * int(run["context"]) * int(run["micro_batch"])
            * (masks + 2 * dropped + 2 * inputs))


def run(rounds: int = 1) -> list[Result]:
    """Formulas do not vary: `rounds` is not used."""
    rows = [{**run, "source": PAGES[run["source"]],
             "predicted_gigabytes": predicted(run).peak_bytes / 1e9,
             "besides_gigabytes": besides(run) / 1e9} for run in published()]
    case = partial(paired, "adapter-peaks", better="lower", unit="relative error", packages=(),
                   device=DEVICE,
                   peer_name="median of the published peak", target=TARGET, facts={"table": rows})
    results = []
    for name, runs in {"LoRA": [row for row in rows if not row["base"]],
                       "QLoRA": [row for row in rows if row["base"]]}.items():
        off = [abs((row["predicted_gigabytes"] + row["besides_gigabytes"]) / float(row["gigabytes"])
                   - 1) for row in runs]
        results.append(case(ours=off, peer=[1.0] * len(off), case=f"{name}, {len(off)} runs"))
    return results
