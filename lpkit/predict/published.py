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

from dataclasses import replace

from lpkit.config import Config, ModelConfig
from lpkit.predict.compare import Comparison, Row, percent
from lpkit.predict.flops import training_flops
from lpkit.predict.roofline import ASSUMED, Efficiency
from lpkit.predict.time import StepTime, calibrate, step_time
from lpkit.predict.units import quantity
from lpkit.techniques.layouts import Layout

EAGER = replace(ASSUMED, fused=1.0)
NARAYANAN = "Narayanan et al. 2021, table 1, A100 80GB, all recomputed, https://arxiv.org/abs/2104.04473"
KORTHIKANTI = "Korthikanti et al. 2022, table 5, A100 80GB, {}, https://arxiv.org/abs/2205.05198"
LLAMA = "Llama 3 team 2024, table 4, H100, https://arxiv.org/abs/2407.21783"
TITAN = "torchtitan docs/performance.md, 64 A100 80GB, FSDP2, {}, https://github.com/pytorch/torchtitan"
TITAN_H200 = ("torchtitan benchmarks, 2025-06, H200, FSDP2, torch.compile, FP8, selective op, "
              "https://github.com/pytorch/torchtitan")
# section 3.3.2: the first and the last chunk hold no layer, so a chunk is one of 128 slots
LLAMA_CHUNKS = 8


def published() -> Comparison:
    """A row a run: FLOP/s or tokens/s of a device, or seconds of a step."""
    return Comparison((*_narayanan(), *_korthikanti(), *_llama(), *_torchtitan()))


def published_table() -> str:
    """The rows of docs/plan.md. tests/test_time.py holds the page to them."""
    return "".join(f"| {row.name} | {quantity(row.measured, row.unit)} | "
                   f"{quantity(row.formula, row.unit)} | {percent(row.error)} | "
                   f"{row.where.partition(', https')[0]} |\n" for row in published())


def calibrated() -> Comparison:
    """Llama 3's other two rows, with one factor from the first: what a short measured run is good
    for."""
    first, *others = LLAMA_RUNS
    batch, layout, context, theirs = first
    config = _llama_config(batch, context)
    one = _llama_time(config, layout)
    factor = calibrate(config, "h100", one.step_seconds * _causal(config, one) / theirs, layout,
                       precision="bf16-master")
    return Comparison(tuple(
        Row(name=_llama_name(layout, context), unit="FLOP/s", where=LLAMA, measured=theirs,
            formula=_causal(config, step_time(config, "h100", layout, precision="bf16-master",
                                              calibration=factor)))
        for batch, layout, context, theirs in others for config in [_llama_config(batch, context)]))


def _gpt(layers: int, width: int, heads: int, *, batch: int, micro: int = 1) -> Config:
    return Config(global_batch=batch, grad_accum_steps=batch // micro, model=ModelConfig(
        layers=layers, width=width, heads=heads, vocab=51_200, context=2048, attention="plain"))


def _narayanan():
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
        step = step_time(_gpt(layers, width, heads, batch=batch), "a100-80", layout,
                         precision="bf16-master", recompute="block", efficiency=EAGER)
        # their equation 3 counts the recomputed forward pass too
        flops = (96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width)
                                                          + 51_200 / (16 * layers * width)))
        yield Row(name=f"GPT {name}, {devices} GPUs, tensor {tensor}, pipeline {pipeline}",
                  unit="FLOP/s", where=NARAYANAN, measured=theirs * 1e12,
                  formula=flops / step.step_seconds / devices)


def _korthikanti():
    for name, layers, width, heads, pipeline, chunks, batch, micro, block, selective in (
            ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
            ("175B", 96, 12_288, 96, 8, 3, 64, 1, 18.13, 13.75),
            ("530B", 105, 20_480, 128, 35, 3, 280, 1, 49.05, 37.83),
            ("1T", 128, 25_600, 160, 64, 1, 512, 1, 94.42, 71.49)):
        for recompute, words, theirs in (("block", "all recomputed", block),
                                         ("selective", "selective", selective)):
            layout = Layout(tensor=8, pipeline=pipeline, interleave=chunks)
            step = step_time(_gpt(layers, width, heads, batch=batch, micro=micro), "a100-80",
                             layout, precision="bf16-master", recompute=recompute, efficiency=EAGER)
            yield Row(name=f"GPT {name}, {layout.devices} GPUs, {words}", unit="seconds",
                      where=KORTHIKANTI.format(words), measured=theirs, formula=step.step_seconds)


# sequences, layout, context, FLOP/s of a device; data-parallel ranks shard optimizer states
LLAMA_RUNS = tuple(
    (batch, Layout(shard=ranks, tensor=8, pipeline=16, context=context_ranks, zero=1,
                   interleave=LLAMA_CHUNKS), context, theirs * 1e12)
    for batch, ranks, context_ranks, context, theirs in (
        (32 * 64, 64, 1, 8192, 430), (16 * 128, 128, 1, 8192, 400), (16 * 8, 8, 16, 131_072, 380)))


def _llama():
    for batch, layout, context, theirs in LLAMA_RUNS:
        config = _llama_config(batch, context)
        yield Row(name=_llama_name(layout, context), unit="FLOP/s", where=LLAMA, measured=theirs,
                  formula=_causal(config, _llama_time(config, layout)))


def _torchtitan():
    """Tokens a second of a device; `batch` is of a device, and the step has one micro-batch."""
    eight = _llama_like(32, 4096, 32, 8, 14_336, 128_256, 8192)
    seventy = _llama_like(80, 8192, 64, 8, 28_672, 128_256, 8192)
    thirteen, old = (_llama_like(40, 5120, 40, 40, 13_824, 32_000, 4096),
                     replace(seventy, vocab=32_000, context=4096))
    for name, model, batch, recompute, theirs in (
            ("Llama 3 8B", eight, 1, "selective", 2973), ("Llama 3 70B", seventy, 1, "block", 331),
            ("Llama 2 13B", thirteen, 2, "none", 2162),
            ("Llama 2 13B", thirteen, 2, "selective", 1904),
            ("Llama 2 70B", old, 1, "selective", 355), ("Llama 2 70B", old, 2, "block", 353)):
        words = {"none": "nothing recomputed", "selective": "selective op",
                 "block": "all recomputed"}[recompute]
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
    passes = (sum(row.seconds for row in step.rows if row.name.startswith(("attention.", "mlp.")))
              / 3)
    again = passes / 2 if recompute == "selective" else 0.0
    return step.tokens / (step.step_seconds + again) / devices


def _llama_like(layers: int, width: int, heads: int, kv_heads: int, mlp_width: int, vocab: int,
                context: int) -> ModelConfig:
    return ModelConfig(layers=layers, width=width, heads=heads, kv_heads=kv_heads,
                       mlp_width=mlp_width, vocab=vocab, context=context, norm="rmsnorm",
                       position="rope", mlp="swiglu", bias=False, tied=False)


def _llama_config(batch: int, context: int) -> Config:
    return Config(global_batch=batch, grad_accum_steps=batch,
                  model=_llama_like(126, 16_384, 128, 8, 53_248, 128_256, context))


def _llama_time(config: Config, layout: Layout) -> StepTime:
    return step_time(config, "h100", layout, precision="bf16-master")


def _llama_name(layout: Layout, context: int) -> str:
    return f"Llama 3.1 405B, {layout.devices} GPUs, {context:,} tokens"


def _causal(config: Config, step: StepTime) -> float:
    return (training_flops(config.model, batch=config.global_batch,
                           attention="causal") / step.step_seconds / step.devices)
