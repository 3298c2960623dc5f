"""The numbers that stand beside the sentences of data/published/claims.toml: by formula, from
records of data/measured, and from tables of the sources, by the name of the claim (NUMBERS)."""

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lessons.rows.activations  # noqa: F401  adds rows
from lessons import l31_whole_stack
from lessons.activations import kept
from lessons.decoding import cache_bytes
from lessons.l09_predict_before_you_rent import Candidate, triangle
from lessons.l24_start_from_a_run import PUBLISHED, adapted, gpt3
from lessons.published import Run, runs, seconds
from lpkit.config import Config, ModelConfig
from lpkit.files import resource
from lpkit.predict.activations import OUTSIDE
from lpkit.predict.casts import plain_seconds
from lpkit.predict.evidence import MEASURED, efficiency
from lpkit.predict.flops import (
    Product,
    forward_flops,
    products,
    recomputed_flops,
    training_flops,
)
from lpkit.predict.governed import governed
from lpkit.predict.ledger import USABLE_MEMORY_SHARE, memory, model_states
from lpkit.predict.params import parameter_count
from lpkit.predict.time import HOST, step_time
from lpkit.presets import preset
from lpkit.techniques.blocks import operations
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine, find
from lpkit.techniques.operation import MicroBatch
from lpkit.techniques.optimizers import OPTIMIZERS
from lpkit.training.training import Training
from tests.bench import protocol


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """By condition, in the claim's unit: the kit's, measured ones, the kit's elsewhere."""

    kit: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, float] = field(default_factory=dict)
    elsewhere: Mapping[str, float] = field(default_factory=dict)


SIZES = ("gpt2-124m", "gpt2-1.5b", "llama-8b", "llama-70b")
STYLES, SHAPES = ("gpt2", "llama"), ("as it is", "deep", "wide, few tokens", "long", "accumulated")


def _of(name: str, sequences: int, recipe: str = "bf16", attention: str = "auto",
        **model: Any) -> Config:
    """A preset with one micro-batch of `sequences` an update."""
    return preset(name).replace({
        "global_batch": sequences, "grad_accum_steps": 1, "precision.recipe": recipe,
        "system.attention": attention,
        **{f"model.{key}": value for key, value in model.items()}})


def _peak(config: Config, machine: str = "h200", **how: Any) -> float:
    return memory(config, machine, **how).peak_bytes


def _most(fits: Callable[[int], bool], most: int = 4096) -> int:
    """The largest number from 1 to `most` that fits, if those below it do."""
    return max(1, bisect_left(range(1, most + 1), True, key=lambda n: not fits(n)))


def _usable(machine: str) -> float:
    return USABLE_MEMORY_SHARE * find(machine).memory_bytes


def _deepest(machine: str, devices: int = 1, zero: int = 3, **memory_settings: Any) -> int:
    """Parameters of the deepest model of llama-8b's width that fits, one sequence per device."""
    base = _of("llama-8b", devices).replace({f"memory.{key}": value for key, value in {
        "recompute": "block", **memory_settings}.items()} | {"optimizer.clip": 0})
    layout = Layout(shard=devices, zero=zero)
    layers = _most(lambda n: _peak(base.replace({"model.layers": n}), machine, layout=layout)
                   <= _usable(machine))
    return parameter_count(base.replace({"model.layers": layers}).model)


def _seconds(config: Config, machine: str = "h100", layout: Layout | None = None,
             **how: Any) -> float:
    return step_time(config, machine, layout, **how).step_seconds


def _messages(config: Config, layout: Layout, on: str | Machine = "h100",
              **how: Any) -> tuple[float, float, float]:
    """Seconds on H100s: of a step, of the messages that it waits for, and of all messages."""
    step = step_time(config, on, layout, **how)
    waited = step.phases["communication"]
    return step.step_seconds, waited, waited + sum(
        row.hidden_seconds for row in step.rows if row.name != HOST)


def _recorded(before: str, after: str) -> dict[str, list[float]]:
    """Peaks that `lpkit bench ledger` recorded, the second over the first, by shape."""
    ratios_by_shape: dict[str, list[float]] = {}
    for path in sorted(resource("data/measured").glob("ledger-*.json")):
        peaks = {row["name"]: row["measured_bytes"]
                 for row in json.loads(path.read_text())["table"]}
        for style, shape in itertools.product(STYLES, SHAPES):
            first, second = (peaks.get(f"{style}, {name.format(shape)}")
                             for name in (before, after))
            if first and second:
                ratios_by_shape.setdefault(shape, []).append(second / first)
    return ratios_by_shape


def mixed_precision_memory() -> Numbers:
    full = _of("gpt2-124m", 16).replace({"memory.param_dtype": "bf16"})
    return Numbers(
        kit={f"{n} sequence{'s' * (n > 1)}":
             1 - _peak(_of("gpt2-124m", n)) / _peak(_of("gpt2-124m", n, "fp32"))
             for n in (1, 4, 16, 64)},
        measured={shape: 1 - median(ratios)
                  for shape, ratios in _recorded("fp32, {}", "bf16, {}").items()},
        elsewhere={"16 sequences, weights and gradients in bf16 too":
                   1 - _peak(full) / _peak(_of("gpt2-124m", 16, "fp32"))})


def mixed_precision_batch() -> Numbers:
    def most(name: str, recipe: str) -> int:
        return _most(lambda n: _peak(_of(name, n, recipe), "a100-80") <= _usable("a100-80"))

    return Numbers(kit={name: most(name, "bf16") / most(name, "fp32")
                        for name in ("gpt2-124m", "gpt2-1.5b")})


def mixed_precision_speed() -> Numbers:
    machines = ("a100-80", "h100")
    return Numbers(
        kit={name: _seconds(_of("gpt2-124m", 16, "fp32"), name)
             / _seconds(_of("gpt2-124m", 16), name) for name in machines},
        elsewhere={f"peak of {name} over {dtype}": find(name).peak_flops("bf16")
                   / find(name).peak_flops(dtype)
                   for name in machines for dtype in ("fp32", "tf32")})


def fsdp_doubles() -> Numbers:
    def deeper(zero: int) -> dict[str, float]:
        return {f"{n} devices{', weights and gradients too' * (zero == 3)}":
                _deepest("h200", n, zero) / _deepest("h200") for n in (2, 8, 64)}

    return Numbers(kit=deeper(1), elsewhere=deeper(3))


def communication() -> Numbers:
    def less(bits: int) -> float:
        sent = 0.32 * 4 / bits
        return 1 - sent / (1 - 0.32 + sent) / 0.32

    return Numbers(kit={f"4 bits instead of {bits} in all messages": less(bits)
                        for bits in (16, 32)})


def _attention(name: str, context: int) -> float:
    """Bytes that attention keeps and needs in backward: a sequence of gpt2-124m, 16 bits."""
    model = _of("gpt2-124m", 1, context=context).model
    block = operations(MicroBatch(model=model, compute_bytes=2, kind="gpu", attention=name)).block
    return sum(op.saved_bytes + op.backward[0].nbytes for op in block if op.pairs)


def flash_attention_linear() -> Numbers:
    def doubled(name: str) -> dict[str, float]:
        return {f"{name}, {2 * T:,} tokens over {T:,}":
                _attention(name, 2 * T) / _attention(name, T) - 1 for T in (2048, 8192)}

    return Numbers(kit=doubled("sdpa"), elsewhere=doubled("plain"))


def flash_attention_10x() -> Numbers:
    def whole(T: int, name: str) -> float:
        return _peak(_of("gpt2-124m", 1, context=T, attention=name))

    less = {T: _attention("plain", T) / _attention("sdpa", T) for T in (2048, 4096)}
    return Numbers(
        kit={"2,048 tokens": less[2048]},
        elsewhere={"4,096 tokens": less[4096], **{
            f"peak of gpt2-124m, a sequence of {T:,}": whole(T, "plain") / whole(T, "sdpa")
            for T in less}})


def _h200(bench: str) -> list[dict[str, Any]]:
    return json.loads((MEASURED / f"{bench}-nvidia-h200.json").read_text())["cases"]


def flash_attention_speed() -> Numbers:
    """Dao et al. 2022, table 2: days of training."""
    alone = {case["peer"]: case["peer_median"] for case in _h200("kernels")
             if "16x16x1024x64" in case["case"] and case["case"].endswith("and backward")}
    days = {"GPT-2 small": (9.5, 4.7, 2.7), "GPT-2 medium": (21.0, 11.5, 6.9)}
    return Numbers(
        kit={name: _seconds(_of(name, 16, attention="plain"), "a100-80")
             / _seconds(_of(name, 16), "a100-80") for name in ("gpt2-124m", "gpt2-1.5b")},
        measured={f"{name} over {peer}": row[i] / row[-1] for name, row in days.items()
                  for i, peer in enumerate(("Hugging Face", "Megatron-LM"))},
        elsewhere={"attention alone on an H200, FlashAttention 2 by PyTorch":
                   alone["reference"] / alone["sdpa, flash"]})


# github.com/JonasGeiping/cramming, at 2009755ebe1a, cramming/config/arch/crammed-bert.yaml
CRAMMED = ModelConfig(
    layers=16, width=768, heads=12, mlp_width=1536, mlp="swiglu", vocab=32_768, context=128,
    position="rope", bias=False)


def _values_and_outputs(m: ModelConfig) -> int:
    """Weights."""
    return m.L * m.D * m.E * (m.G + m.H)


def _simplified(change: Callable[[ModelConfig], float]) -> dict[str, float]:
    return {"that BERT": change(CRAMMED), **{name: change(preset(name).model) for name in SIZES}}


def simplified_blocks_parameters() -> Numbers:
    return Numbers(kit=_simplified(lambda m: _values_and_outputs(m) / parameter_count(m)))


def simplified_blocks_speed() -> Numbers:
    def quicker(m: ModelConfig) -> float:
        whole = forward_flops(m, attention="causal")
        return whole / (whole - 2 * m.T * _values_and_outputs(m))

    return Numbers(kit=_simplified(quicker), measured=_by_bench("blocks", "sas-p, "))


def _by_bench(name: str, case: str) -> dict[str, float]:
    """Returns the ratios of cases that begin so, by what follows."""
    return {case_row["case"].removeprefix(case): case_row["ratio"]
            for path in sorted(resource("data/measured").glob(f"{name}-*.json"))
            for case_row in json.loads(path.read_text())["cases"]
            if case_row["case"].startswith(case)}


def _of_optimizer(lean: Callable[[Config], float]) -> dict[str, float]:
    """Less of the peak, by `lean`, than AdamW in float32 takes."""
    return {f"peak of {name}, {n} sequences": 1 - lean(_of(name, n)) / _peak(_of(name, n))
            for name, n in (("llama-1b", 1), ("gpt2-124m", 16))}


def lion_lighter() -> Numbers:
    lion, adamw = (OPTIMIZERS[name].state_bytes() for name in ("lion", "adamw"))
    return Numbers(kit={"a parameter": 1 - lion / adamw},
                   elsewhere=_of_optimizer(lambda config: _peak(config, optimizer="lion")))


def lion_faster() -> Numbers:
    def quicker(config: Config, machine: str) -> float:
        return _seconds(config, machine) / _seconds(config, machine, optimizer="lion")

    return Numbers(kit={f"{name}, {n} sequence{'s' * (n > 1)} an update":
                        quicker(_of("gpt2-124m", n).replace({"grad_accum_steps": pieces}), name)
                        for name in ("a100-80", "h100")
                        for n, pieces in ((1, 1), (8, 1), (512, 32))})


def _blocks_flops(layers: int, width: int, tokens: int) -> int:
    model = ModelConfig(layers=layers, width=width, heads=width // 64, context=tokens)
    return sum(product.flops for product in products(model, batch=1) if product.name != "head")


def layer_dropping() -> Numbers:
    """Where the whole model has the same loss in as many seconds, nothing is gained."""
    config = preset("gpt2-124m").replace({"imports": "lessons.rows.depth", "steps": 1000,
                                          "governors": "progressive-layer-drop"})
    less = training_flops(config.model) / training_flops(governed(config).model)
    [claim_verdict] = protocol.recorded()[1]["progressive-layer-drop"]["verdicts"]
    survives = claim_verdict["equal_seconds"]["survives"]
    same = {} if survives else {"six layers of 128, by protocol": 1.0}
    return Numbers(kit={"FLOPs of a sample, gpt2-124m": less}, measured=same)


def masked_tokens() -> Numbers:
    blocks = _blocks_flops
    decoder = blocks(8, 512, 196)
    return Numbers(
        kit={"75% masked": (blocks(24, 1024, 196) + decoder) / (blocks(24, 1024, 49) + decoder)},
        measured={f"{case}, 8 x 128, CPU": ratio
                  for case, ratio in _by_bench("masked", "seconds of an update, ").items()},
        elsewhere={"BERT-base, 15% of 512 tokens masked, and no decoder":
                   blocks(12, 768, 512) / blocks(12, 768, round(0.85 * 512))})


def masked_images() -> Numbers:
    """Li et al. 2022, section 3.1: 32 tokens of text, an encoder of 12 layers of 768 as CLIP's;
    section 4.1: 4.4% of the image encoder. Its table 1a: 0.50 and 0.33 of the time."""
    text, whole = _blocks_flops(12, 768, 32), _blocks_flops(24, 1024, 196)
    quicker = {share: (text + whole) / (text + _blocks_flops(24, 1024, round(196 * (1 - share))))
               for share in (0.5, 0.75)}
    return Numbers(kit={"75% masked, both encoders": quicker[0.75]},
                   measured={"75% masked, table 1a of the source": 1 / 0.33},
                   elsewhere={"50% masked, both encoders": quicker[0.5],
                              "50% masked, table 1a of the source": 1 / 0.50})


def combined() -> Numbers:
    record = l31_whole_stack.Record.read()
    last = _seconds(_of("gpt2-124m", 16, "fp8-tensorwise"))
    return Numbers(kit={
        "over float32 and plain attention":
            _seconds(_of("gpt2-124m", 16, "fp32", attention="plain")) / last,
        "over bf16 and a flash kernel": _seconds(_of("gpt2-124m", 16)) / last},
        measured={"five arms at equal loss, CPU seconds, over plain attention":
                  record.factor(l31_whole_stack.WHOLE, "seconds").value},
        elsewhere={"the same five arms, gpt2-124m on an H100":
                   record.factor(l31_whole_stack.WHOLE, "H100 seconds").value})


def impossible_triangle() -> Numbers:
    levers = itertools.product(("gpt2-350m", "gpt2-1.5b", "llama-1b"), ("fp32", "bf16"),
                               (1e10, 3e10), ("a100-80", "h100"))
    points = triangle(Candidate(name=f"run {i}", config=_of(name, 16, recipe), tokens=tokens,
                                machine=machine)
                      for i, (name, recipe, tokens, machine) in enumerate(levers))
    moves = [[point.values[axis] - other.values[axis] for axis in ("days", "dollars", "loss")]
             for point, other in itertools.permutations(points, 2)]
    two = [move for move in moves if sum(change < 0 for change in move) > 1]
    return Numbers(kit={
        "moves that worsen the third": sum(max(move) > 0 for move in two) / len(two)})


def zero(stage: int, elsewhere: Callable[[], dict[str, float]]) -> Numbers:
    def states(devices: int) -> float:
        whole, part = (sum(row.bytes for row in model_states(7.5e9, zero=zero, devices=devices))
                       for zero in (0, stage))
        return whole / part

    return Numbers(kit={"64 devices": states(64)},
                   elsewhere={"8 devices": states(8), **elsewhere()})


def _step_on_64() -> dict[str, float]:
    alone, sharded = (_peak(_of("llama-8b", 64), layout=layout)
                      for layout in (Layout(data=64), Layout(shard=64)))
    return {"peak of llama-8b, one sequence per device": alone / sharded}


def zero_3_communication() -> Numbers:
    # its ring has no switch that adds up, and no latency: seconds are bytes
    ring = replace(find("h100"), link="", link_seconds=1e-15)

    def more(pieces: int, on: Machine = ring) -> float:
        config = _of("llama-70b", 8 * pieces).replace({"grad_accum_steps": 8 * pieces})
        replicas, sharded = (_messages(config, layout, on, precision="bf16-master")[-1]
                             for layout in (Layout(data=8), Layout(shard=8)))
        return sharded / replicas - 1

    return Numbers(kit={"1 micro-batch": more(1)}, elsewhere={
        "8 micro-batches": more(8), "in seconds on H100s, whose switches sum": more(1,
            find("h100"))})


def offload() -> Numbers:
    alone = _deepest("a100-40")
    return Numbers(kit={
        "AdamW's state on the host": _deepest("a100-40", optimizer_state="cpu") / alone,
        "also weights in bf16, no stored gradient": _deepest(
            "a100-40", optimizer_state="cpu", param_dtype="bf16", optimizer_step="in-backward")
        / alone})


def recompute_memory() -> Numbers:
    names = ("gpt2-124m", "gpt2-1.5b")

    def waiting(name: str) -> float:
        whole, less = (kept(preset(name).model, batch=64, recompute=recompute, compute_bytes=2,
                            kind="gpu").waiting_bytes for recompute in ("none", "block"))
        return whole / less

    return Numbers(
        kit={name: _peak(_of(name, 64)) / _peak(_of(name, 64), recompute="block")
             for name in names},
        measured={shape: 1 / median(ratios) for shape, ratios in
                  _recorded("bf16, {}", "bf16, recompute block").items() if shape == SHAPES[0]},
        elsewhere={f"activations of {name}": waiting(name) for name in names})


def recompute_time() -> Numbers:
    return Numbers(
        kit={name: recomputed_flops(preset(name).model)
             / training_flops(preset(name).model) for name in SIZES},
        elsewhere={f"seconds of {name} on one H100": _seconds(_of(name, 1), recompute="block")
                   / _seconds(_of(name, 1)) - 1 for name in ("gpt2-1.5b", "llama-8b")})


def selective() -> Numbers:
    def quicker(of: Callable[[Run], float]) -> dict[str, float]:
        seconds_by_model: dict[str, dict[str | None, float]] = {}
        for run in runs("korthikanti"):
            seconds_by_model.setdefault(run.model, {})[run.recompute] = of(run)
        return {model: by["block"] / by["selective"] for model, by in seconds_by_model.items()}

    return Numbers(kit=quicker(seconds), measured=quicker(lambda run: run.published_seconds))


def _eight_bits(name: str, recipe: str, devices: int) -> float:
    layout = Layout(shard=devices)
    return _seconds(_of(name, devices), layout=layout) / _seconds(_of(name, devices, recipe),
                                                                 layout=layout)


def selective_memory() -> Numbers:
    """Korthikanti et al. 2022, section 4: without sequence parallelism each tensor rank keeps whole
    what norms and the Linears after them read; with it, and without scores, all is divided."""
    reduction_by_model = {}
    for run in runs("korthikanti"):
        sizes = dict(compute_bytes=2, residual_bytes=2, kind="gpu", attention="plain")
        model, ranks = run.config.model, run.layout.tensor
        block = operations(MicroBatch(model=model, **sizes)).block
        every = sum(op.saved_bytes for op in block)
        whole = sum(op.saved_bytes for op in block if op.in_stream or op.cut == "column")
        less = kept(model, batch=1, recompute="core-attention", **sizes).operations
        after = sum(less[name] for name in less.keys() - OUTSIDE) / model.L
        reduction_by_model[run.model] = (whole + (every - whole) / ranks) / (after / ranks)
    return Numbers(kit=reduction_by_model)


def fp8_doubles() -> Numbers:
    return Numbers(
        kit={f"{name} on {n} H100{'s' * (n > 1)}": _eight_bits(name, "fp8-tensorwise", n)
             for name, n in (("gpt2-1.5b", 1), ("llama-8b", 8))},
        measured={"0.34 s per step in bf16, 0.24 s in FP8": 0.34 / 0.24},
        elsewhere={"peak": find("h100").peak_flops("fp8") / find("h100").peak_flops("bf16"),
                   **{f"a Linear on an H200, {case['case']}": case["ratio"]
                      for case in _h200("fp8-linear") if case["peer"] == "bf16"}})


def fp8_rowwise() -> Numbers:
    def quicker(recipe: str, recompute: str, layout: Layout) -> float:
        bf16, fp8 = (_seconds(_of("llama-70b", 1920, name).replace({"memory.recompute": recompute}),
                              "h200", layout=layout) for name in ("bf16", recipe))
        return bf16 / fp8

    layouts = {"FSDP": Layout(shard=1920), "HSDP, groups of 128": Layout(data=15, shard=128)}
    return Numbers(kit={f"{name}, recompute {way}": quicker("fp8-rowwise", way, layout)
                        for name, layout in layouts.items() for way in ("selective", "block")},
                   elsewhere={f"{name}, tensorwise": quicker("fp8-tensorwise", "block", layout)
                              for name, layout in layouts.items()})


def adam_8bit() -> Numbers:
    adamw = OPTIMIZERS["adamw"]
    return Numbers(
        kit={"a parameter": 1 - adamw.state_bytes("int8") / adamw.state_bytes()},
        elsewhere=_of_optimizer(lambda config: _peak(
            config.replace({"memory.moment_format": "int8"}))))


def activations() -> Numbers:
    def kept_bytes(recipe: str, place: str) -> float:
        config = _of("gpt2-124m", 16, recipe).replace({"memory.activation_offload": place})
        return next(row.bytes for row in memory(config).rows if row.name == "activations")

    def most(place: str) -> int:
        return _most(lambda n: _peak(_of("gpt2-124m", n, "fp32").replace(
            {"memory.activation_offload": place}), "a100-80") <= _usable("a100-80"))

    return Numbers(
        kit={recipe: kept_bytes(recipe, "device") / kept_bytes(recipe, "int2")
             for recipe in ("fp32", "bf16")},
        elsewhere={"largest batch on an A100 of 80 GB, fp32": most("int2") / most("device")})


def chunked_loss() -> Numbers:
    def peak(context: int, name: str) -> float:
        config = _of("llama-8b", 64, context=context).replace({
            "memory.recompute": "block", "memory.param_dtype": "bf16",
            "memory.cross_entropy": name})
        return _peak(config, "a100-80", layout=Layout(shard=8))

    return Numbers(kit={f"{T:,} tokens": 1 - peak(T, "chunked") / peak(T, "full")
                        for T in (1024, 4096)})


def update_in_backward() -> Numbers:
    base = _of("llama-8b", 8, context=512, kv_heads=32, mlp_width=11_008, vocab=32_000).replace(
        {"memory.recompute": "block"})
    lean = base.replace({"memory.param_dtype": "bf16", "memory.optimizer_step": "in-backward",
                         "optimizer.clip": 0})
    whole = _peak(base, precision="bf16-master")
    return Numbers(kit={"SGD": 1 - _peak(lean, optimizer="sgd") / whole},
                   measured={"table 1 of the source": 1 - 14.58 / 102.20},
                   elsewhere={"the same with AdamW": 1 - _peak(lean) / whole})


def attention_complexity() -> Numbers:
    def more(times: int) -> float:
        few, many = (sum(product.flops for product in products(_of("gpt2-124m", 1, context=T).model,
                                                       batch=1) if product.pairs)
                     for T in (2048, 2048 * times))
        return many / few - 1

    return Numbers(kit={"16,384 tokens over 2,048": more(8)})


def lower_precision() -> Numbers:
    path = resource("data/measured") / "recipe-losses-amd-epyc.json"
    losses = {name: median(values)
              for name, values in json.loads(path.read_text())["losses"].items()}
    base = losses.pop("bf16")
    [claim_verdict] = protocol.recorded()[1]["fp8"]["verdicts"]
    return Numbers(measured={
        "recipes with a loss 2% above bf16's": sum(
            loss > (1 + protocol.EFFECT) * base for loss in losses.values()) / len(losses),
        "FP8 compared with float32, by protocol": float(claim_verdict["gain"] >= protocol.EFFECT
                                                 and claim_verdict["verdict"] == "better")})


def more_devices() -> Numbers:
    """Dollars of an update go with devices times seconds. Each number of devices recomputes what is
    cheapest of all that fits."""
    base = _of("llama-8b", 64, context=12_288).replace({"grad_accum_steps": 64})

    def device_seconds(devices: int) -> float:
        layout = Layout(shard=devices)
        configs = (base.replace({"memory.recompute": name})
                   for name in ("none", "selective", "block"))
        return devices * min(_seconds(config, layout=layout) for config in configs
                             if _peak(config, "h100", layout=layout) <= _usable("h100"))

    spent = {n: device_seconds(n) for n in (4, 8, 16, 32, 64)}
    pairs = list(itertools.combinations(spent, 2))
    return Numbers(
        kit={"pairs of 4 to 64 H100s": sum(spent[n] > spent[m] for m, n in pairs) / len(pairs)},
        elsewhere={f"{n} for {m} of them": float(spent[n] > spent[m])
                   for m, n in ((4, 8), (8, 64))})


def bytes_of_70b() -> Numbers:
    parameters = parameter_count(preset("llama-70b").model)
    states = sum(row.bytes for row in model_states(parameters))
    return Numbers(kit={"weights in 16 bits": 2 * parameters},
                   elsewhere={"weights in float32": 4 * parameters,
                              "trained by AdamW, 16-bit weights with float32 masters": states})


def two_flops() -> Numbers:
    def each(name: str, **model: Any) -> float:
        m = _of(name, 1, **model).model
        return forward_flops(m, attention="causal") / m.T / parameter_count(m)

    return Numbers(kit={name: each(name) for name in SIZES},
                   elsewhere={"llama-8b, 131,072 tokens": each("llama-8b", context=131_072)})


def shared_heads() -> Numbers:
    def less(name: str, kv_heads: int) -> float:
        all_heads = _of(name, 1, kv_heads=preset(name).model.heads).model
        return 1 - (parameter_count(_of(name, 1, kv_heads=kv_heads).model)
                    / parameter_count(all_heads))

    return Numbers(kit={name: less(name, 1) for name in SIZES},
                   elsewhere={f"{name}, 8 keys and values": less(name, 8)
                              for name in ("llama-8b", "llama-70b")})


def norms_and_softmax() -> Numbers:
    def share(name: str, devices: int, attention: str = "auto") -> float:
        step = step_time(_of(name, 8, attention=attention), "h100", Layout(shard=devices))
        return sum(step[row].seconds for row in ("norms, activations, loss", "attention")
                   ) / step.step_seconds

    shapes = (("gpt2-124m", 1), ("gpt2-1.5b", 1), ("llama-8b", 8))
    return Numbers(kit={name: share(name, n) for name, n in shapes},
                   elsewhere={f"{name}, plain attention": share(name, n, "plain")
                              for name, n in shapes})


def cache_less() -> Numbers:
    full = _of("llama-8b", 1)
    heads = _of("llama-8b", 1, kv_heads=32).model
    same = cache_bytes(full.model, 8192)
    window = full.replace({"model.attention": {"name": "window", "size": 4096}}).model
    return Numbers(kit={
        "in 8 bits": 1 - cache_bytes(full.model, 8192, format="int8") / same,
        "in 4 bits": 1 - cache_bytes(full.model, 8192, format="int4") / same,
        "8 heads of 32": 1 - same / cache_bytes(heads, 8192),
        "window of half the context": 1 - cache_bytes(window, 8192) / same})


def windows() -> Numbers:
    config = _of("llama-8b", 1)
    full, window = config.model, config.replace(
        {"model.attention": {"name": "window", "size": 2048}}).model
    pairs = [model.attention.rule(8192).pairs(8192) for model in (full, window)]
    return Numbers(kit={
        "cache, the last token of 8,192": 1 - cache_bytes(window, 8192) / cache_bytes(full, 8192),
        "pairs of queries and keys, training": 1 - pairs[1] / pairs[0]})


def fused_add_norm() -> Numbers:
    """Unfused, the sum is written, and read by the norm; under autocast the norm writes float32,
    and a cast reads that."""
    def moved(compute: int, residual: int) -> float:
        s = MicroBatch(model=preset("llama-8b").model, compute_bytes=compute,
                       residual_bytes=residual, kind="gpu")
        ops = {op.name: op.moved_bytes for op in operations(s).block}
        return (ops["add1"] + ops["norm2"]) / (s.tokens * s.model.D)

    return Numbers(
        kit={"float32": 4 / moved(4, 4), "16 bits": 2 / moved(2, 2),
             "bf16 autocast": 4 / moved(2, 4)},
        elsewhere={"bf16 autocast, its cast fused too": (4 + 2 * 4) / moved(2, 4)})


def fused_scores() -> Numbers:
    return Numbers(kit={
        f"seconds of a step of {name}, flash over plain": 1 - _seconds(_of(name, 16), "a100-80")
        / _seconds(_of(name, 16, attention="plain"), "a100-80")
        for name in ("gpt2-124m", "gpt2-1.5b")})


def activations_8_bits() -> Numbers:
    """DeiT-B's shape: 12 blocks of 768, 196 patches and a token, 1,000 classes."""
    def peak(place: str, attention: str) -> float:
        config = _of("gpt2-124m", 128, "fp32", attention, context=197, vocab=1024)
        return _peak(config.replace({"memory.activation_offload": place}))

    def less(attention: str) -> float:
        return 1 - peak("int8", attention) / peak("device", attention)

    table = (("DeiT-Ti", 4171, 1858), ("DeiT-S", 8459, 3840), ("DeiT-B", 17691, 8616))
    return Numbers(kit={"plain attention": less("plain")},
                   measured={f"{name}, table of the source": 1 - after / before
                             for name, before, after in table},
                   elsewhere={"a flash kernel": less("auto")})


def lora_3x() -> Numbers:
    """Rank 4 beside attention's first product, where Hu et al. adapt queries and values."""
    def less(config: Config, **memory_settings: Any) -> float:
        replaced = config.replace(
            {f"memory.{key}": value for key, value in memory_settings.items()})
        return _peak(replaced) / _peak(adapted(replaced, 4, targets=["attention.qkv"]))

    sizes = {name: _of(name, 1) for name in ("gpt2-124m", "gpt2-1.5b", "llama-1b", "llama-8b")}
    bf16 = {"param_dtype": "bf16"}
    return Numbers(
        kit={name: less(config) for name, config in {**sizes, "GPT-3 175B": gpt3()}.items()},
        measured={"GPT-3 175B, section 4.2 of the source": PUBLISHED["full"] / PUBLISHED["LoRA"]},
        elsewhere={f"{name}, weights in 16 bits{words}": less(config, **bf16, **more)
                   for name, config in (("llama-8b", sizes["llama-8b"]), ("GPT-3 175B", gpt3()))
                   for words, more in (("", {}), (" and blocks recomputed",
                       {"recompute": "block"}))})


def token_dropping() -> Numbers:
    """Half of the tokens in 6 of 12 layers, as the authors' code has it."""
    def less(tokens: int) -> float:
        half = _blocks_flops(6, 768, tokens) + _blocks_flops(6, 768, tokens // 2)
        return 1 - half / _blocks_flops(12, 768, tokens)

    [claim_verdict] = protocol.recorded()[1]["token-drop"]["verdicts"]
    flops, seconds_of = claim_verdict["step_flops"], claim_verdict["step_seconds"]
    return Numbers(
        kit={f"FLOPs of BERT-base's blocks, {tokens} tokens": less(tokens)
             for tokens in (128, 512)},
        elsewhere={"FLOPs of six layers of 128, by protocol": 1 - flops["dropped"] / flops["whole"],
                   "seconds of these layers": 1 - seconds_of["dropped"] / seconds_of["whole"]})


def rank_collapse() -> Numbers:
    """Of 32 random tokens of 64 numbers: how a layer raises what is left beside the mean token.
    Where it falls from r to r^n, the fall of the third layer's logarithm is n times the second's;
    that of a fourth is below float64."""
    def power(seed: int = 0, **how: bool) -> float:
        x, left = torch.randn(32, 64, dtype=torch.float64, generator=(
            generator := torch.Generator().manual_seed(seed))), []
        for _ in range(4):
            left.append(math.log(((x - x.mean(0)).norm() / x.norm()).item()))
            q, k, v, up, down = (torch.randn(64, 64, dtype=torch.float64, generator=generator) / 8
                                 for _ in range(5))
            scores = (x @ q) @ (x @ k).T / 8
            if how.get("causal"):
                scores = scores.masked_fill(~torch.ones(32, 32).tril().bool(), -math.inf)
            added = scores.softmax(-1) @ (x @ v)
            x = x + added if how.get("skip") else added
            if how.get("mlp"):
                x = torch.nn.functional.gelu(x @ up) @ down
        return (left[3] - left[2]) / (left[2] - left[1])

    return Numbers(kit={f"attention alone, draw {seed}": power(seed) for seed in range(3)},
                   elsewhere={"with MLPs, no skip": power(mlp=True),
                              "causal": power(causal=True)})


def importance() -> Numbers:
    """Samples that equal noise asks for, over what scoring costs: a forward pass of each, which is
    a third of an update."""
    [path] = resource("data/measured").glob("importance-*.json")
    cases = json.loads(path.read_text())["cases"]
    cost = 1 + 1 / 3
    return Numbers(kit={case["case"]: 1 / case["ours_median"] / cost for case in cases},
                   measured={case["case"]: 1 / case["peer_median"] / cost for case in cases},
                   elsewhere={f"{case['case']}, scores for nothing": 1 / case["peer_median"]
                              for case in cases})


def fixup() -> Numbers:
    """A depth is a case: 1 where the loss ends no higher than that with norms."""
    [path] = resource("data/measured").glob("fixup-depth-*.json")
    cases = json.loads(path.read_text())["cases"]
    return Numbers(measured={case["case"]: float(case["ours_median"] <= case["peer_median"])
                             for case in cases})


# Of 2017 and 2018; their numbers: https://docs.cloud.google.com/tpu/docs/v3 and /v2, a chip
TPU_V3 = replace(find("tpu-v5p"), title="TPU v3", flops={"bf16": 123e12}, bytes_per_second=900e9,
                 memory_bytes=32 * 2**30, devices_per_node=1024)
TPU_V2 = replace(TPU_V3, title="TPU v2", flops={"bf16": 45e12}, bytes_per_second=700e9,
                 memory_bytes=16 * 2**30)
BERT_LARGE = {"layers": 24, "width": 1024, "heads": 16}


def _bert(context: int, sequences: int, **model: Any) -> Config:
    return _of("gpt2-124m", sequences, context=context, vocab=30_522, **model)


def large_batch() -> Numbers:
    def each(devices: int, sequences: int, tokens: int) -> float:
        config = _bert(tokens, sequences, **BERT_LARGE)
        return _seconds(config, TPU_V3, Layout(data=devices)) / sequences

    return Numbers(kit={f"1,024 chips instead of 16, {tokens} tokens": each(16, 512, tokens)
                        / each(1024, 32_768, tokens) for tokens in (128, 512)})


def bert_base() -> Numbers:
    """Devlin et al. 2018, A.2: a million updates of 256 sequences, 90% of them of 128 tokens."""
    def days(chip: Machine, *short: float) -> float:
        return sum(1e6 * share / 86_400 * _seconds(_bert(tokens, 256), chip, Layout(data=16))
                   for tokens, share in zip((128, 512), short, strict=True))

    return Numbers(kit={"16 TPU v3": days(TPU_V3, 0.9, 0.1), "16 TPU v2": days(TPU_V2, 0.9, 0.1)},
                   elsewhere={"16 TPU v2, 512 tokens in all updates": days(TPU_V2, 0, 1)})


def gpt3_flops() -> Numbers:
    tokens, model = 300e9, gpt3().model
    return Numbers(kit={"with all pairs": training_flops(model) / model.T * tokens},
                   elsewhere={"6 a parameter and token": 6 * parameter_count(model) * tokens})


def gpt4_flops() -> Numbers:
    peak, day = find("a100-80").peak_flops("bf16"), 86_400
    return Numbers(kit={f"25,000 A100s, {days} days at {share:.0%}":
                        25_000 * peak * share * days * day
                        for days, share in ((90, 0.36), (100, 0.32))},
                   elsewhere={"6 x 280 billion active weights x 13 trillion tokens":
                              6 * 280e9 * 13e12})


def _small_bert() -> int:
    """Parameters of six layers, as DistilBERT has them, without segments and pooler."""
    return parameter_count(_bert(512, 1, layers=6).model)


def distilbert_size() -> Numbers:
    """110 and 66 million are in its table 3."""
    whole = parameter_count(_bert(512, 1).model)
    return Numbers(kit={"6 of 12 layers": 1 - _small_bert() / whole},
                   measured={"table 3 of the source": 1 - 66 / 110})


def distilbert_speed() -> Numbers:
    """Seconds of its table 3."""
    return Numbers(kit={"FLOPs of the blocks": 2.0}, measured={"table 3 of the source": 668 / 410})


def mobilebert() -> tuple[float, float]:
    """Weights and forward FLOPs a token at 128 tokens, as configuration_mobilebert.py of
    transformers has it: 24 layers of 512 with bottlenecks of 128, keys and queries of one, values
    of the input, 4 MLPs of 512, embeddings of 128 of three neighbours."""
    D, b, V, layers, tokens = 512, 128, 30_522, 24, 128
    bottlenecks = 2 * D * b + b * D
    attention = 2 * b * b + D * b + b * b
    weights = bottlenecks + attention + 4 * 2 * b * D
    embedded = 3 * b * D
    return (V * b + 512 * D + embedded + layers * weights,
            2 * (embedded + layers * weights) + layers * 4 * tokens * b)


def mobilebert_smaller() -> Numbers:
    return Numbers(kit={"weights": parameter_count(_bert(512, 1).model) / mobilebert()[0]},
                   measured={"table 4 of the source": 109 / 25.3})


def mobilebert_faster() -> Numbers:
    return Numbers(kit={"FLOPs, 128 tokens": _blocks_flops(12, 768, 128) / 128 / mobilebert()[1]})


def _sparse(machine: str) -> Machine:
    """With the datasheet's rate for weights of which two in each four are zero."""
    dense = find(machine)
    return replace(dense, flops={**dense.flops, "bf16": 2 * dense.peak_flops("bf16")})


def sparsity() -> Numbers:
    """A square product of weights, on dense and on sparse tensor cores."""
    def quicker(size: int) -> float:
        on = find("a100-80")
        dense, sparse = (plain_seconds(
            Product(name="y", M=size, N=size, K=size, calls=1), machine, efficiency(on),
            dtype="bf16", itemsize=2)["y"] for machine in (on, _sparse("a100-80")))
        return dense / sparse

    return Numbers(kit={f"{n:,} x {n:,}": quicker(n) for n in (2048, 4096, 16_384)},
                   elsewhere={"1,024 x 1,024": quicker(1024)})


def sparsity_in_steps() -> Numbers:
    """Seconds of a step whose weight products all run at the sparse rate, backward too."""
    return Numbers(kit={f"{name}, 8 sequences, {machine}": _seconds(_of(name, 8), machine)
                        / _seconds(_of(name, 8), _sparse(machine))
                        for name in ("gpt2-124m", "llama-8b") for machine in ("a100-80", "h100")})


def lanes_times(lanes: int, density: float = 0.1, K: int = 4096) -> float:
    """How many times as fast as a dense product lanes are that skip zeros, and wait for the one
    with most left: of K products each lane keeps a binomial number."""
    chance, below, slowest = (1 - density)**K, 0.0, 0.0
    for count in range(K):
        below = min(1.0, below + chance)
        slowest += 1 - below**lanes
        chance *= (K - count) / (count + 1) * density / (1 - density)
    return K / slowest


def zero_skipping() -> Numbers:
    """A machine is a case: 1 where it is faster than a dense product."""
    return Numbers(kit={f"{lanes} lanes that skip": float(lanes_times(lanes) > 1)
                        for lanes in (16, 256, 4096)},
                   measured={"cuSPARSE on GPUs, by NVIDIA": 0.0})


def gelu_table() -> Numbers:
    """On a GPU GELU is bound by bytes, and a table moves as many."""
    [claim_verdict] = protocol.recorded()[1]["gelu-table"]["verdicts"]
    step = claim_verdict["step_seconds"]
    return Numbers(kit={"bytes of GELU on a GPU": 0.0},
                   measured={"seconds of a step on a CPU": 1 - step["table"] / step["gelu"]})


class _Copies(TorchDispatchMode):
    """Counts transposes, and clones, which are those that move data."""

    def __init__(self):
        super().__init__()
        self.counts = dict.fromkeys(("transpose", "clone"), 0)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def transposes() -> Numbers:
    """Of one block forward on a CPU."""
    counts = {}
    for attention in ("plain", "sdpa"):
        model = Training.build(Config().replace({
            "model.layers": 1, "model.width": 64, "model.heads": 4, "model.context": 64,
            "model.vocab": 257, "system.attention": attention, "system.device": "cpu",
            "system.compile": False, "global_batch": 2, "precision.recipe": "fp32"})).model
        with torch.no_grad(), _Copies() as copies:
            model(torch.zeros(2, 64, dtype=torch.long))
        counts[attention] = copies.counts
    plain, fused = counts["plain"], counts["sdpa"]
    return Numbers(measured={"copies, a fused kernel for plain attention":
                             1 - fused["clone"] / plain["clone"]},
                   elsewhere={"transposes in the program": 1 - fused["transpose"]
                              / plain["transpose"]})


# pJ at 45 nm and 0.9 V, multiply and add: Horowitz 2014, https://doi.org/10.1109/ISSCC.2014.6757323
PICOJOULES = {32: 3.7 + 0.9, 16: 1.1 + 0.4}


def power() -> Numbers:
    """Joules of an update are the machine's watts times its seconds."""
    quicker = _seconds(_of("gpt2-124m", 16, "fp32")) / _seconds(_of("gpt2-124m", 16))
    return Numbers(kit={"energy of a multiply-add, 16 bits over 32":
                        1 - PICOJOULES[16] / PICOJOULES[32],
                        "energy of an update of gpt2-124m, H100": 1 - 1 / quicker},
                   elsewhere={"watts of a busy H100": 0.0})


NUMBERS: dict[str, Callable[[], Numbers]] = {
    "mixed-precision-memory": mixed_precision_memory,
    "mixed-precision-batch": mixed_precision_batch,
    "mixed-precision-speed": mixed_precision_speed,
    "fsdp-doubles": fsdp_doubles, "communication-32-to-18": communication,
    "flash-attention-linear": flash_attention_linear, "flash-attention-10x": flash_attention_10x,
    "flash-attention-speed": flash_attention_speed,
    "simplified-blocks-parameters": simplified_blocks_parameters,
    "simplified-blocks-speed": simplified_blocks_speed,
    "lion-lighter": lion_lighter, "lion-faster": lion_faster, "masked-tokens-3x": masked_tokens,
    "layer-dropping-2-5x": layer_dropping,
    "combined-5x": combined, "impossible-triangle": impossible_triangle,
    "zero-1": lambda: zero(1, dict), "zero-2": lambda: zero(2, dict),
    "zero-3": lambda: zero(3, _step_on_64), "zero-3-communication": zero_3_communication,
    "offload-10x": offload, "recompute-memory": recompute_memory,
    "recompute-time": recompute_time, "recompute-20-percent": recompute_time,
    "selective-29-percent": selective, "fp8-2x": fp8_doubles, "fp8-1-34x": fp8_rowwise,
    "adam-8bit": adam_8bit, "activations-12x": activations, "chunked-loss-60": chunked_loss,
    "update-in-backward-10-8": update_in_backward, "selective-5x": selective_memory,
    "flash-attention-complexity": attention_complexity,
    "lower-precision-accuracy": lower_precision, "more-gpus-expense": more_devices,
    "70b-140-gb": bytes_of_70b, "2-flops-a-parameter": two_flops,
    "shared-heads-15": shared_heads, "norms-softmax-96": norms_and_softmax,
    "kv-cache-40": cache_less, "windows-75": windows, "fused-add-norm-50": fused_add_norm,
    "fused-scores-30": fused_scores, "activations-8-bits": activations_8_bits,
    "flip-3-7x": masked_images, "lora-3x": lora_3x,
    "token-dropping-25": token_dropping, "skipless-rank-collapse": rank_collapse,
    "importance-sampling": importance, "fixup-10000-layers": fixup,
    "large-batch-76-minutes": large_batch, "sparsity-2x": sparsity,
    "sparsity-40-6": sparsity_in_steps, "zero-skipping-90": zero_skipping, "gelu-80": gelu_table,
    "transposes-5-to-1": transposes, "mixed-pipeline-power-40": power,
    "gpt-3-flops": gpt3_flops, "gpt-4-flops": gpt4_flops, "bert-base-4-days": bert_base,
    "distilbert-40": distilbert_size, "distilbert-60": distilbert_speed,
    "mobilebert-4-3x": mobilebert_smaller, "mobilebert-5-5x": mobilebert_faster,
}
