"""How far off the ledger is: the closed form and the trace against the peak of a real step, config
by config.

Beside them the rules of thumb in use, on the same configs: accelerate's estimate, DeepSpeed's
(ZeRO-2 on one device), and 16 bytes a parameter plus Korthikanti's activations. A rule that does
not know a technique answers as if it were off. `make ledger` measures here and writes
docs/ledger.md. On a GPU the peak is the allocator's own count, the models are larger, step time is
compared too, and there is no MemTracker to race.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.commands.estimate import estimate_training_usage
from torch.distributed._tools.mem_tracker import MemTracker

from lpkit import hardware, measure, predict_trace
from lpkit.bench.harness import ROUNDS, Result, paired, provenance, race
from lpkit.config import Config
from lpkit.files import resource
from lpkit.measure.tracking import ROWS
from lpkit.predict import memory, parameter_count
from lpkit.predict.time import step_time
from lpkit.predict.units import duration, quantity
from lpkit.presets import preset
from lpkit.tables import markdown_table
from lpkit.techniques.layouts import Layout
from lpkit.techniques.recipes import RECIPES

NAME, EXAMPLE = "ledger", "gpt2-124m"
RULES = {"formula": "closed form", "traced": "trace", "accelerate": "accelerate",
         "deepspeed": "DeepSpeed", "classic": "16 P +"}
TRACE, TRACE_SECONDS, RANKS, CALL_SECONDS, FASTER = 0.01, 60, 1024, 200e-6, 100
MEDIAN, WORST = {"cpu": 0.02, "gpu": 0.05}, {"cpu": 0.05, "gpu": 0.1}
CAST = tuple(name for name, recipe in RECIPES.items() if recipe.products)
GPT2 = {"model.layers": 3, "model.width": 128, "model.heads": 4, "model.context": 128,
        "global_batch": 4}
LLAMA = {**GPT2, "model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False, "model.init": "llama", "model.mlp_width": 384,
         "model.kv_heads": 2}
STYLES = {"gpt2": GPT2, "llama": LLAMA}
LARGER = {"model.layers": 12, "model.width": 768, "model.heads": 12, "model.context": 1024,
          "global_batch": 8, "model.vocab": 50_304}
SHAPES: dict[str, dict[str, Any]] = {
    "as it is": {}, "deep": {"model.layers": 10},
    "wide, few tokens": {"model.width": 512, "model.context": 64, "global_batch": 1},
    "long": {"model.context": 1024, "global_batch": 1},
    "accumulated": {"global_batch": 8, "grad_accum_steps": 4},
    "vocabulary 8k": {"model.vocab": 8192},
    "vocabulary 128k": {"model.vocab": 128_256, "global_batch": 1, "model.width": 64},
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "recompute block": {"memory.recompute": "block"},
    "recompute every 2nd": {"memory.recompute": "block", "memory.recompute.every": 2},
    "recompute selective": {"memory.recompute": "selective"},
    "chunked loss": {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 64,
                     "model.vocab": 4096},
    "8-bit moments": {"memory.moment_format": "int8", "model.context": 32},
    "update in backward": {"memory.optimizer_step": "in-backward", "optimizer.clip": 0,
                           "model.context": 32},
}


def configs(larger: dict[str, Any] | None = None) -> Iterator[tuple[str, Config]]:
    """Both styles of model; every shape in 32 and 16 bits, every recipe, every technique in 16 bits
    and in FP8."""
    for style, shape in STYLES.items():
        cases = [*((f"{precision}, {name}", {"precision.recipe": precision, **changes})
                   for precision in ("fp32", "bf16") for name, changes in SHAPES.items()),
                 *((f"{recipe}, {name}", {"precision.recipe": recipe, **SHAPES[name]})
                   for recipe in CAST for name in ("as it is", "accumulated")),
                 *((f"{recipe}, {name}", {"precision.recipe": recipe, **changes})
                   for recipe in ("bf16", "fp8-tensorwise")
                   for name, changes in TECHNIQUES.items()),
                 *((f"{recipe}, recompute selective, sdpa",
                    {"precision.recipe": recipe, "memory.recompute": "selective",
                     "model.attention": "sdpa"}) for recipe in CAST)]
        for name, changes in cases:
            yield f"{style}, {name}", Config().replace({**shape, **(larger or {}), **changes})


def run(rounds: int = ROUNDS) -> list[Result]:
    gpu = torch.cuda.is_available()
    here = hardware.machine()
    table = [_case(name, config, here) for name, config in configs(LARGER if gpu else None)]
    facts = provenance(["torch", "accelerate"],
                       torch.cuda.get_device_name() if gpu else None) | {"table": table}

    def error(case: str, key: str, target: float | None, worst: bool = False,
              of: str = "measured_bytes") -> Result:
        errors = [abs(row[key] / row[of] - 1) for row in table]
        return paired(NAME, ours=[max(errors)] if worst else errors,
                      peer=[1.0] * (1 if worst else len(errors)), peer_name="the measured peak",
                      better="lower", unit="relative error", target=target, case=case, facts=facts)

    config = Config().replace(GPT2 | {"precision.recipe": "bf16"})
    call = race(NAME, ours=lambda: memory(config, here, attention="blocked"),
                peers={} if gpu else {"PyTorch's MemTracker": _mem_tracker(config)},
                check=lambda: None, rounds=rounds, target=FASTER, case="one prediction",
                packages=("torch",))
    seconds = [paired(NAME, ours=[call[0].ours_median], peer=[1.0], peer_name="a second",
                      better="lower", unit="s", target=CALL_SECONDS,
                      case="one call of the closed form", facts=facts)] if call else []
    start = time.perf_counter()
    predict_trace(preset("llama-8b").replace({"global_batch": RANKS, "grad_accum_steps": 1}), RANKS)
    world = paired(NAME, ours=[time.perf_counter() - start], peer=[1.0], peer_name="a second",
                   better="lower", unit="s", target=TRACE_SECONDS,
                   case=f"llama-8b traced on {RANKS:,} ranks", facts=facts)
    times = [error("step time, median", "predicted_seconds", 0.1, of="step_seconds")] if gpu else []
    return [error(f"closed form, {len(table)} configs, median", "formula_bytes", MEDIAN[here.kind]),
            error("closed form, worst", "formula_bytes", WORST[here.kind], worst=True),
            error("trace, worst", "traced_bytes", TRACE, worst=True),
            error("accelerate's estimate, median", "accelerate_bytes", None),
            error("DeepSpeed's rule, median", "deepspeed_bytes", None),
            error("16 P + activations, median", "classic_bytes", None), world, *times, *seconds,
            *call]


def _case(name: str, config: Config, here: Any) -> dict[str, Any]:
    found = measure.memory(config)
    said = memory(config, here, attention=found.chosen["attention"].used)
    m, count = config.model, parameter_count(config.model)
    tokens = config.global_batch // config.grad_accum_steps * m.T
    dtype = {"fp32": "float32"}.get(config.precision.recipe.name, "bfloat16")
    korthikanti = m.L * tokens * m.D * (34 + 5 * m.H * m.T / m.D)
    timed = {} if here.kind == "cpu" else {"step_seconds": measure.step(config).step_seconds,
                                           "predicted_seconds": step_time(config,
                                                                          here).step_seconds}
    return {
        "name": name, "parameters": count,
        "measured_bytes": found.counted_bytes or found.peak_bytes,
        "formula_bytes": said.peak_bytes, "peak_moment": said.peak_moment,
        "traced_bytes": predict_trace(config,
                                      device=found.chosen["device"].used.partition(":")[
                                          0]).peak_bytes,
        "accelerate_bytes": max(estimate_training_usage(4 * count, dtype).values()),
        # estimate_zero2_model_states_mem_needs: 4 P + 16 P / devices
        "deepspeed_bytes": 20 * count,
        "classic_bytes": 16 * count + korthikanti, **timed}


def _mem_tracker(config: Config):
    """One update under PyTorch's own tracker."""
    bench = measure.Bench(config, "cpu")
    bench.train()

    def once() -> None:
        tracker = MemTracker()
        tracker.track_external(bench.model, bench.training.optimizer)
        with tracker:
            bench.train()

    return once


# The page.

def page(measured: list[dict[str, Any]]) -> str:
    """docs/ledger.md from the files that `lpkit bench ledger --out data/measured` wrote."""
    config = preset(EXAMPLE).replace({"precision.recipe": "fp8-delayed"})
    variants = [memory(config, "h200", precision="bf16-master"),
                memory(config, "h200", layout=Layout(shard=8)),
                memory(config.replace({"memory.recompute": "block",
                                       "memory.moment_format": "int8"}), "h200"),
                memory(config, "h200")]      # the last word is the plain one's
    example = {row.name: row for one in variants for row in one.rows}
    lines = [HEAD.strip(), "", "## Rows", "", f"With the most that each is for `{EXAMPLE}` under "
             f"fp8-delayed on one H200; what it has not there, with bf16 weights and float32 "
             f"masters, on 8 shards, or recomputed with 8-bit moments. The closed form counts rows "
             f"without a figure under temporaries.", ""]
    rows = []
    for name, what in ROWS.items():
        row = example.get(name)
        rows.append((name, what, *((quantity(row.bytes, "bytes"), row.formula, row.source) if row
                                   else ("", "", ""))))
    lines += [markdown_table(("row", "what", "bytes", "formula", "source"), rows), ""]
    for result in measured:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        errors = [(row["name"], f"{row['parameters']:,}", quantity(row["measured_bytes"], "bytes"),
                   row["peak_moment"], *(f"{row[f'{rule}_bytes'] / row['measured_bytes'] - 1:+.2%}"
                                         for rule in RULES)) for row in result["table"]]
        lines += [f"## {result['device']}", "", f"Measured {result['date'][:10]} at commit "
                  f"{result['commit']} with {versions}, {result['threads']} threads: "
                  f"`{result['command']}`.", "",
                  markdown_table(("", "result", "target"),
                                 [(case["case"], _said(case), case["verdict"])
                                  for case in result["cases"]]), "",
                  markdown_table(("config", "parameters", "measured peak", "at", *RULES.values()),
                                 errors), ""]
    return "\n".join(lines)


def _said(case: dict[str, Any]) -> str:
    if case["unit"] == "relative error":
        return f"{case['ratio']:.3%}"
    return (duration(case["ratio"]) if case["better"] == "lower"
            else f"{case['ratio']:,.0f} times faster")


HEAD = """
# The ledger, and how far off it is

One question, three answers, in the same rows:

    lpkit.predict.memory(config, "h200")                    # closed form: standard library, under 200 us
    lpkit.predict_trace(config, world_size=1024)            # the real model and step on shapes alone, any number of ranks
    lpkit.measure.memory(config)                            # a real step, every live byte under its row
    lpkit.reconcile(config)                                 # side by side, and which row explains the difference

`lpkit predict cpu-3m --machine this --measure` does the same from the command line, and puts the seconds of a profiled step
beside the rooflines, row by row. A row lives at some moments of a step, so the peak is the largest moment and not the sum:
the closed form walks through the backward pass of the last block and of the first, where the peak must lie
(`lpkit/predict/walk.py`).

Below, the peak of the closed form and of the trace against a measured one, and beside them the rules of thumb in use:
accelerate's estimate, DeepSpeed's `estimate_zero2_model_states_mem_needs` on one device, and 16 bytes a parameter plus the
activations of Korthikanti et al. 2022 (34 s b h + 5 a s^2 b a layer). These know neither vocabularies nor techniques; small
models, where logits and activations are most of it, are their worst case.

Errors are signed: +5% means that a rule says 5% more than was measured. On a CPU the peak is that of the storages that
PyTorch's operations make, as the tracker counts them; what a kernel takes and gives back inside one operation is not in it
(up to 3% more by PyTorch's profiler, `measure.memory(config, count=True)`). On a GPU it is the allocator's count. Shards are
held to a trace of FSDP2, within 4% (`tests/test_predict.py`); tensor, pipeline and context ranks by arithmetic alone.
Activations away (`memory.activation_offload`) are within 10%. This page is made by `make ledger`.
"""


def measured_files() -> list[dict[str, Any]]:
    paths = sorted(resource("data/measured").glob(f"{NAME}-*.json"))
    return [json.loads(path.read_text()) for path in paths]


if __name__ == "__main__":
    if sys.argv[1:] != ["--page"]:
        sys.exit("usage: python -m lpkit.bench.ledger --page > docs/ledger.md")
    print(page(measured_files()), end="")
