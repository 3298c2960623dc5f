"""How far off the ledger is: the closed form and the trace against the peak of a real step, config
by config.

Beside them the rules of thumb in use, on the same configs: accelerate's estimate, DeepSpeed's
(ZeRO-2 on one device), and 16 bytes a parameter plus Korthikanti's activations. A rule that does
not know a technique answers as if it were off. Beside them, DRAWN configs over all settings
(`tests.bench.drawn`). `make ledger` measures here and writes docs/ledger.md from "Rows" on. On a
GPU the peak is the allocator's own count, the models are
larger, step time is compared too, and there is no MemTracker to race.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from lpkit import hardware, measure, predict_trace
from lpkit.config import Config, flat
from lpkit.files import resource
from lpkit.measure.tracking import ROWS
from lpkit.predict import memory, parameter_count
from lpkit.predict.compare import Row, percent
from lpkit.predict.time import step_time
from lpkit.predict.units import duration, quantity
from lpkit.presets import preset
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES
from tests.bench import peaks
from tests.bench.drawn import configs as draws
from tests.bench.harness import ROUNDS, Result, paired, race, recorded
from tests.pages import markdown_table

NAME, EXAMPLE = "ledger", "gpt2-124m"
PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"
RULES = {"formula": "closed form", "traced": "trace", "accelerate": "accelerate",
         "deepspeed": "DeepSpeed", "classic": "16 P +"}
# targets: relative errors, seconds, times faster
MEDIAN, WORST = {"cpu": 0.02, "gpu": 0.05}, {"cpu": 0.05, "gpu": 0.1}
TRACE, STEP_TIME, TRACE_SECONDS, CALL_SECONDS, FASTER = 0.01, 0.1, 60, 200e-6, 100
RANKS = 1024
ON_A_GPU = 24       # configs: a few minutes
DRAWN, DRAWN_99, DRAWN_WORST = 200, 0.02, 0.05      # configs; errors of 99 in 100, and of all
CAST = tuple(name for name, recipe in RECIPES.items() if recipe.products)
Changes = dict[str, Any]
GPT2: Changes = {"model.layers": 3, "model.width": 128, "model.heads": 4, "model.context": 128,
                 "global_batch": 4}
LLAMA = {**GPT2, "model.norm": "rmsnorm", "model.position": "rope", "model.mlp": "swiglu",
         "model.bias": False, "model.tied": False, "model.init": "llama", "model.mlp_width": 384,
         "model.kv_heads": 2}
LARGER: Changes = {"model.layers": 12, "model.width": 768, "model.heads": 12,
                   "model.context": 1024, "global_batch": 8, "model.vocab": 50_304}
SHAPES: dict[str, Changes] = {
    "as it is": {}, "deep": {"model.layers": 10},
    "wide, few tokens": {"model.width": 512, "model.heads": 4, "model.context": 64,
                         "global_batch": 1},
    "long": {"model.context": 1024, "global_batch": 1},
    "accumulated": {"global_batch": 8, "grad_accum_steps": 4},
    "vocabulary 8k": {"model.vocab": 8192},
    "vocabulary 128k": {"model.vocab": 128_256, "global_batch": 1, "model.width": 64,
                        "model.heads": 4},
}
TECHNIQUES: dict[str, Changes] = {
    "recompute block": {"memory.recompute": "block"},
    "recompute every 2nd": {"memory.recompute": "block", "memory.recompute.every": 2},
    "recompute selective": {"memory.recompute": "selective"},
    "chunked loss": {"memory.cross_entropy": "chunked", "memory.cross_entropy.chunk_tokens": 64,
                     "model.vocab": 4096},
    "8-bit moments": {"memory.moment_format": "int8", "model.context": 32},
    "update in backward": {"memory.optimizer_step": "in-backward", "optimizer.clip": 0,
                           "model.context": 32},
}
SELECTIVE_SDPA = {"recompute selective, sdpa": {"memory.recompute": "selective",
                                                "system.attention": "sdpa"}}
CASES: tuple[tuple[tuple[str, ...], dict[str, Changes]], ...] = (
    (("fp32", "bf16"), SHAPES),
    (CAST, {name: SHAPES[name] for name in ("as it is", "accumulated")}),
    (("bf16", "fp8-tensorwise"), TECHNIQUES),
    (CAST, SELECTIVE_SDPA),
)


def configs(larger: Changes | None = None) -> Iterator[tuple[str, Config]]:
    """Both styles of model; every shape in 32 and 16 bits, every recipe, every technique in 16 bits
    and in FP8."""
    for style, shape in (("gpt2", GPT2), ("llama", LLAMA)):
        base = {**shape, **(larger or {})}
        for recipes, cases in CASES:
            for recipe in recipes:
                for name, changes in cases.items():
                    config = Config().replace({**base, "precision.recipe": recipe, **changes})
                    yield f"{style}, {recipe}, {name}", config


def spread(cases: list[Any], count: int | None) -> list[Any]:
    """`count` of them, the first and the last among them."""
    if count is None or count >= len(cases):
        return cases
    return [cases[round(i * (len(cases) - 1) / max(count - 1, 1))] for i in range(count)]


def run(rounds: int = ROUNDS, *, only: int | None = None) -> list[Result]:
    """`only`: this many, spread over all of them; None: all, or on a GPU as many as take it some
    minutes."""
    here = hardware.machine()
    gpu = here.kind == "gpu"
    cases = spread(list(configs(LARGER if gpu else None)),
                   only or (ON_A_GPU if gpu else None))
    table = [_case(name, config, here) for name, config in cases]
    drawn = [] if gpu else [_drawn_case(name, config, here)
                            for name, config in draws(only or DRAWN)]
    how = {"better": "lower", "facts": {"table": table, "drawn": drawn},
           "packages": ("torch", "accelerate"),
           "device": torch.cuda.get_device_name() if gpu else None}

    def errors(key: str, of: str = "measured_bytes") -> list[float]:
        return [abs(row[key] / row[of] - 1) for row in table]

    formula = errors("formula_bytes")
    claims = [(f"closed form, {len(table)} configs, median", formula, MEDIAN[here.kind]),
              ("closed form, worst", [max(formula)], WORST[here.kind]),
              ("trace, worst", [max(errors("traced_bytes"))], TRACE),
              *([("accelerate's estimate, median", errors("accelerate_bytes"), None)]
                if table[0]["accelerate_bytes"] else []),
              ("DeepSpeed's rule, median", errors("deepspeed_bytes"), None),
              ("16 P + activations, median", errors("classic_bytes"), None)]
    if gpu:
        claims.append(("step time, median", errors("predicted_seconds", "step_seconds"), STEP_TIME))
    else:
        claims += drawn_claims(drawn)
    results = [paired(NAME, ours=off, peer=[1.0] * len(off), peer_name="the measured peak",
                      unit="relative error", case=case, target=target, **how)
               for case, off, target in claims]

    def within(case: str, seconds: float, target: float) -> Result:
        return paired(NAME, ours=[seconds], peer=[1.0], peer_name="a second", case=case,
                      target=target, **how)

    start = time.perf_counter()
    predict_trace(preset("llama-8b").replace({"global_batch": RANKS, "grad_accum_steps": 1}), RANKS)
    results.append(within(f"llama-8b traced on {RANKS:,} ranks", time.perf_counter() - start,
                          TRACE_SECONDS))
    if gpu:
        return results
    config = Config().replace(GPT2 | {"precision.recipe": "bf16"})
    bench = measure.Bench(config, "cpu")
    bench.train()

    def mem_tracker() -> None:
        tracker = MemTracker()
        tracker.track_external(bench.model, bench.training.optimizer)
        with tracker:
            bench.train()

    call = race(NAME, ours=lambda: memory(config, here, attention="blocked"),
                peers={"PyTorch's MemTracker": mem_tracker}, check=lambda: None,
                rounds=rounds, target=FASTER, case="one prediction")
    return [*results, within("one call of the closed form", call[0].ours_median, CALL_SECONDS),
            *call]


def drawn_claims(cases: Sequence[dict[str, Any]]
                 ) -> Iterator[tuple[str, list[float], float | None]]:
    """Of those that the formula follows to the end, and of those where it names the trace."""
    for what, ones in (("", [case for case in cases if not case["doubt"]]),
                       (" that name the trace", [case for case in cases if case["doubt"]])):
        off = sorted(abs(case["formula_bytes"] / case["measured_bytes"] - 1) for case in ones)
        if not off:
            continue
        words = f"closed form, {len(off)} drawn configs{what}"
        most, worst = (None, None) if what else (DRAWN_99, DRAWN_WORST)
        yield f"{words}, 99 of 100", [off[math.ceil(0.99 * len(off)) - 1]], most
        yield f"{words}, worst", [off[-1]], worst


def _drawn_case(name: str, config: Config, here: Machine) -> dict[str, Any]:
    measured = measure.memory(config)
    formula = memory(config, here, attention=measured.chosen["attention"].used)
    plain = flat(Config())
    return {"name": name, "measured_bytes": measured.peak_bytes,
            "formula_bytes": formula.peak_bytes, "peak_moment": formula.peak_moment,
            "doubt": formula.doubt,
            "settings": {key: value for key, value in flat(config).items()
                         if plain.get(key) != value}}


def _case(name: str, config: Config, here: Machine) -> dict[str, Any]:
    measured = measure.memory(config)
    formula = memory(config, here, attention=measured.chosen["attention"].used)
    device, _, _ = measured.chosen["device"].used.partition(":")
    m, count = config.model, parameter_count(config.model)
    tokens = config.global_batch // config.grad_accum_steps * m.T
    korthikanti = m.L * tokens * m.D * (34 + 5 * m.H * m.T / m.D)
    dtype = {"fp32": "float32"}.get(config.precision.recipe.name, "bfloat16")
    row = {
        "name": name, "parameters": count,
        "measured_bytes": measured.counted_bytes or measured.peak_bytes,
        "formula_bytes": formula.peak_bytes, "peak_moment": formula.peak_moment,
        "traced_bytes": predict_trace(config, device=device).peak_bytes,
        "accelerate_bytes": _by_accelerate(4 * count, dtype),
        # estimate_zero2_model_states_mem_needs: 4 P + 16 P / devices
        "deepspeed_bytes": 20 * count, "classic_bytes": 16 * count + korthikanti}
    if here.kind == "gpu":
        eager = config.replace({"system.compile": False})       # as what is measured is
        row |= {"step_seconds": measure.seconds(config, rounds=5).step_seconds,
                "predicted_seconds": step_time(eager, here).step_seconds}
    return row


def _by_accelerate(weights: int, dtype: str) -> int | None:
    """None where it is not installed."""
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ModuleNotFoundError:
        return None
    return max(estimate_training_usage(weights, dtype).values())


# The page.

def page() -> str:
    """Return docs/ledger.md, with everything from "Rows" on computed from the files that
    `lpkit bench ledger --out data/measured` wrote."""
    head, _, _ = PAGE.read_text().partition("## Rows\n")
    config = preset(EXAMPLE).replace({"precision.recipe": "fp8-delayed"})
    recomputed = config.replace({"memory.recompute": "block", "memory.moment_format": "int8"})
    example = {}
    for variant in (memory(config, "h200", precision="bf16-master"),
                    memory(config, "h200", layout=Layout(shard=8)), memory(recomputed, "h200"),
                    memory(config, "h200")):     # the last word is the plain one's
        example |= {row.name: (quantity(row.bytes, "bytes"), row.formula, row.source)
                    for row in variant.rows}
    rows = [(name, what, *example.get(name, ("", "", ""))) for name, what in ROWS.items()]
    lines = ["## Rows", "", f"`bytes` is the largest size of a row in a step of `{EXAMPLE}` under "
             f"fp8-delayed on one H200. Rows that this step lacks have their size with bf16 "
             f"weights and float32 master weights, on 8 shards, or recomputed with 8-bit moments. "
             f"The closed form counts rows without a number under temporaries.", "",
             markdown_table(("row", "what", "bytes", "formula", "source"), rows), ""]
    for path in sorted(resource("data/measured").glob(f"{NAME}-*.json")):
        result = json.loads(path.read_text())
        lines += [*recorded(result, f", {result['threads']} threads"),
                  markdown_table(("", "result", "target"),
                                 [(case["case"], _shown(case), case["verdict"])
                                  for case in result["cases"]]), "",
                  markdown_table(("config", "parameters", "measured peak", "at", *RULES.values()),
                                 map(_errors, result["table"])), ""]
    heads, *by_layout = peaks.table()
    lines += ["## Published peaks", "", "Peaks that other people published, compared with the "
              "predicted reserved bytes (`tests.bench.peaks`).", "",
              markdown_table(heads, by_layout), "",
              "The figure of the Ultra-Scale Playbook does not state whether its bytes are "
              "allocated or reserved. Compared with predicted allocated bytes:", "",
              markdown_table(heads, peaks.table(stated=False)[1:]), "",
              markdown_table(("run", "layout", "published", "formula", "off", "where"),
                             map(_peak, peaks.peaks())), ""]
    return head + "\n".join(lines)


def _peak(row: Row) -> tuple[str, ...]:
    title, at, layout, machine, precision = row.where.rsplit(", ", 4)
    return (row.name, layout, f"{row.measured / peaks.GIB:.1f} GiB",
            f"{row.formula / peaks.GIB:.1f} GiB", percent(row.error),
            f"{title}, {at}, {machine}, {precision}")


def _errors(row: dict[str, Any]) -> tuple[str, ...]:
    peak = row["measured_bytes"]
    return (row["name"], f"{row['parameters']:,}", quantity(peak, "bytes"), row["peak_moment"],
            *(f"{row[f'{rule}_bytes'] / peak - 1:+.2%}" if row[f"{rule}_bytes"] else "not installed"
              for rule in RULES))


def _shown(case: dict[str, Any]) -> str:
    if case["unit"] == "relative error":
        return f"{case['ratio']:.3%}"
    if case["better"] == "lower":
        return duration(case["ratio"])
    return f"{case['ratio']:,.0f} times faster"


if __name__ == "__main__":
    print(page(), end="")
