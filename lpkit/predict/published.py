"""Runs that others published, beside the formula of `lpkit.predict.time`. Theirs; none was measured
by this project.

Only what the papers state is given to the formula: shapes, batch, layout, recomputation, machine.
What they do not state and the formula needs is said here: PyTorch of 2021 and 2022 ran attention in
pieces (model.attention = "plain") and fused little (fused = 1); Meta does not say how it counts
attention's FLOPs: half of the square, which a mask leaves, makes the three rows agree with one
another, so they are compared in that count. torchtitan's "selective op" makes every second product
again, which is added to the formula's "selective"; its A100 runs are taken without a compiler,
which the page does not name.
"""

from collections.abc import Iterator
from dataclasses import replace

from lpkit.config import Config, ModelConfig
from lpkit.predict.compare import Comparison, Row, percent
from lpkit.predict.flops import training_flops
from lpkit.predict.roofline import ASSUMED, Efficiency
from lpkit.predict.time import Calibration, step_time
from lpkit.predict.units import quantity
from lpkit.techniques.layouts import Layout

EAGER = replace(ASSUMED, fused=1.0)
NARAYANAN = ("Narayanan et al. 2021, table 1, A100 80GB, all recomputed, "
             "https://arxiv.org/abs/2104.04473")
KORTHIKANTI = "Korthikanti et al. 2022, table 5, A100 80GB, {}, https://arxiv.org/abs/2205.05198"
LLAMA = "Llama 3 team 2024, table 4, H100, https://arxiv.org/abs/2407.21783"
TITAN = ("torchtitan docs/performance.md, 64 A100 80GB, FSDP2, {}, "
         "https://github.com/pytorch/torchtitan")
TITAN_H200 = ("torchtitan benchmarks, 2025-06, H200, FSDP2, torch.compile, FP8, selective op, "
              "https://github.com/pytorch/torchtitan")
# section 3.3.2: the first and the last chunk hold no layer, so a chunk is one of 128 slots
LLAMA_CHUNKS = 8


LLAMA_LIKE = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "tied": False,
              "kv_heads": 8}


def published() -> Comparison:
    """A row a run: FLOP/s or tokens/s of a device, or seconds of a step."""
    llama = (row for row, _ in _llama())
    return Comparison((*_narayanan(), *_korthikanti(), *llama, *_torchtitan()))


def published_table() -> str:
    """The rows of docs/plan.md. tests/test_time.py holds the page to them."""
    return "".join(f"| {row.name} | {quantity(row.measured, row.unit)} | "
                   f"{quantity(row.formula, row.unit)} | {percent(row.error)} | "
                   f"{row.where.partition(', https')[0]} |\n" for row in published())


def calibrated() -> Comparison:
    """Llama 3's other two rows, with one factor from the first, as of a short measured run."""
    row, seconds = next(_llama())
    factor = Calibration(predicted_seconds=seconds,
                         measured_seconds=seconds * row.formula / row.measured)
    _, *others = _llama(factor)
    return Comparison(tuple(row for row, _ in others))


def _gpt(layers: int, width: int, heads: int, *, batch: int, micro: int = 1) -> Config:
    return Config(global_batch=batch, grad_accum_steps=batch // micro, model=ModelConfig(
        layers=layers, width=width, heads=heads, vocab=51_200, context=2048, attention="plain"))


def _gpt_seconds(config: Config, layout: Layout, recompute: str) -> float:
    return step_time(config, "a100-80", layout, precision="bf16-master", recompute=recompute,
                     efficiency=EAGER).step_seconds


def _narayanan() -> Iterator[Row]:
    for name, layers, width, heads, tensor, pipeline, devices, batch, theirs in (
            ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137), ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138),
            ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142),
            ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 135),
            ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 138),
            ("76.1B", 60, 10_240, 80, 8, 4, 1024, 1792, 140),
            ("145.6B", 80, 12_288, 96, 8, 8, 1536, 2304, 148),
            ("310.1B", 96, 16_384, 128, 8, 16, 1920, 2160, 155),
            ("529.6B", 105, 20_480, 128, 8, 35, 2520, 2520, 163),
            ("1008B", 128, 25_600, 160, 8, 64, 3072, 3072, 163)):
        layout = Layout(data=devices // tensor // pipeline, tensor=tensor, pipeline=pipeline,
                        zero=0)
        seconds = _gpt_seconds(_gpt(layers, width, heads, batch=batch), layout, "block")
        # their equation 3 counts the recomputed forward pass too
        flops = (96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width)
                                                          + 51_200 / (16 * layers * width)))
        yield Row(name=f"GPT {name}, {devices} GPUs, tensor {tensor}, pipeline {pipeline}",
                  unit="FLOP/s", where=NARAYANAN, measured=theirs * 1e12,
                  formula=flops / seconds / devices)


def _korthikanti() -> Iterator[Row]:
    for name, layers, width, heads, pipeline, chunks, batch, micro, block, selective in (
            ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
            ("175B", 96, 12_288, 96, 8, 3, 64, 1, 18.13, 13.75),
            ("530B", 105, 20_480, 128, 35, 3, 280, 1, 49.05, 37.83),
            ("1T", 128, 25_600, 160, 64, 1, 512, 1, 94.42, 71.49)):
        layout = Layout(tensor=8, pipeline=pipeline, interleave=chunks)
        config = _gpt(layers, width, heads, batch=batch, micro=micro)
        for recompute, words, theirs in (("block", "all recomputed", block),
                                         ("selective", "selective", selective)):
            yield Row(name=f"GPT {name}, {layout.devices} GPUs, {words}", unit="seconds",
                      where=KORTHIKANTI.format(words), measured=theirs,
                      formula=_gpt_seconds(config, layout, recompute))


def _llama(calibration: Calibration | None = None) -> Iterator[tuple[Row, float]]:
    """And the seconds of a step. Data-parallel ranks shard optimizer states."""
    for batch, ranks, context_ranks, context, theirs in (
            (2048, 64, 1, 8192, 430), (2048, 128, 1, 8192, 400), (128, 8, 16, 131_072, 380)):
        layout = Layout(shard=ranks, tensor=8, pipeline=16, context=context_ranks, zero=1,
                        interleave=LLAMA_CHUNKS)
        config = Config(global_batch=batch, grad_accum_steps=batch, model=ModelConfig(
            layers=126, width=16_384, heads=128, mlp_width=53_248, vocab=128_256, context=context,
            **LLAMA_LIKE))
        step = step_time(config, "h100", layout, precision="bf16-master", calibration=calibration)
        flops = training_flops(config.model, batch=batch, attention="causal")
        yield Row(name=f"Llama 3.1 405B, {layout.devices} GPUs, {context:,} tokens", unit="FLOP/s",
                  where=LLAMA, measured=theirs * 1e12,
                  formula=flops / step.step_seconds / step.devices), step.step_seconds


def _torchtitan() -> Iterator[Row]:
    """Tokens a second of a device; `batch` is of a device, and the step has one micro-batch."""
    eight = ModelConfig(layers=32, width=4096, heads=32, mlp_width=14_336, vocab=128_256,
                        context=8192, **LLAMA_LIKE)
    seventy = replace(eight, layers=80, width=8192, heads=64, mlp_width=28_672)
    old = replace(seventy, vocab=32_000, context=4096)
    thirteen = replace(old, layers=40, width=5120, heads=40, kv_heads=40, mlp_width=13_824)
    said = {"none": "nothing recomputed", "selective": "selective op", "block": "all recomputed"}
    for name, model, batch, recompute, theirs in (
            ("Llama 3 8B", eight, 1, "selective", 2973), ("Llama 3 70B", seventy, 1, "block", 331),
            ("Llama 2 13B", thirteen, 2, "none", 2162),
            ("Llama 2 13B", thirteen, 2, "selective", 1904),
            ("Llama 2 70B", old, 1, "selective", 355), ("Llama 2 70B", old, 2, "block", 353)):
        words = said[recompute]
        yield Row(name=f"{name}, 64 GPUs, {batch} x {model.T:,} tokens, {words}", unit="tokens/s",
                  where=TITAN.format(words), measured=theirs,
                  formula=_sharded(model, batch, 64, "a100-80", recompute, "bf16", EAGER))
    for devices, theirs in ((32, 10_938), (64, 10_753)):
        yield Row(name=f"Llama 3.1 8B, {devices} GPUs, 2 x 8,192 tokens", unit="tokens/s",
                  where=TITAN_H200, measured=theirs,
                  formula=_sharded(eight, 2, devices, "h200", "selective", "fp8-tensorwise",
                                   ASSUMED))


def _sharded(model: ModelConfig, batch: int, devices: int, machine: str, recompute: str,
             precision: str, efficiency: Efficiency) -> float:
    step = step_time(Config(global_batch=batch * devices, grad_accum_steps=devices, model=model),
                     machine, Layout(shard=devices), precision=precision, recompute=recompute,
                     efficiency=efficiency)
    again = 0.0
    if recompute == "selective":
        linears = [row for row in step.rows if row.name.startswith(("attention.", "mlp."))]
        again = sum(row.seconds for row in linears) / 3 / 2
    return step.tokens / (step.step_seconds + again) / devices
