"""Telemetry: each statistic against loops in float64 and ml_dtypes' casts; nothing of the run
changes; off is off.

Only these tests catch: a statistic that is another number, a biased draw of rows, a look that
changes a bit of a run, grows it or stays when it is off, a sample that is lost at a kill, and a map
whose cells are other numbers.
"""

import gc
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import lpkit
from lessons.figures.heat import METRICS, heat_map, quality_table
from lessons.l07_when_fp8_fails import nonfinite_report, telemetry_explorer
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.machine_facts import status_bytes
from lpkit.measure import telemetry
from lpkit.measure.telemetry import ROLES, Telemetry, cast_of, draw, measure, quality, read
from lpkit.precision.scaled import quantise
from lpkit.techniques.formats import FORMATS
from lpkit.techniques.recipes import RECIPES
from lpkit.training.loop import fit
from lpkit.training.training import Training
from tests.kernels.test_cast import hadamard_matrix

TINY = Config().replace({
    "model.layers": 2, "model.width": 64, "model.heads": 2, "model.context": 32, "global_batch": 8,
    "steps": 5, "eval_batches": 1,
    "system.device": "cpu", "system.threads": 1, "precision.recipe": "fp8-tensorwise",
    "precision.backend": "emulated"})
ROWS_OF = [(name, role) for name, recipe in RECIPES.items() if recipe.products
           for role in (ROLES if name == "nvfp4-published" else ("x", "dy.T"))]
GRIDS = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
         "e2m1": ml_dtypes.float4_e2m1fn}


def stats(drawn, cast, **amax):
    return quality(measure(drawn, cast, **amax).tolist(), cast)


def naive_scales(amax: np.ndarray, cast) -> np.ndarray:
    """Return a scale for each block, from its largest magnitude."""
    largest, unit = FORMATS[cast.format].largest, np.float32(1)
    if cast.scale == "float32":
        return np.maximum(amax, np.float32(2.0**-100)) / np.float32(largest)
    if cast.scale == "power-of-two":
        return np.array([[2.0 ** math.ceil(math.log2(a / largest)) if a else 2.0**-127 for a in row]
                         for row in amax])
    if cast.scale == "e4m3":
        encode = np.float32(largest * 448) / np.float32(amax.max())
        scales = (np.float32(amax) * (encode * np.float32(1 / largest))).clip(0, 448 * unit)
        return scales.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / encode
    tensor = amax.max() / np.float32(largest * 448)
    return ((amax / np.float32(largest) / tensor).clip(2.0**-6 * unit,
        448 * unit).astype(ml_dtypes.float8_e4m3fn) \
        .astype(np.float32) * tensor)


def naive(x: torch.Tensor, cast, fixed_amax: float | None = None) -> dict:
    """Return the statistics, computed by loops over blocks."""
    x = x.double().numpy().astype(np.float32)
    if cast.transform == "hadamard":
        x = (x.reshape(len(x), -1, 16) @ hadamard_matrix().float().numpy()).reshape(x.shape)
    r, c = cast.block[0] or x.shape[0], cast.block[1] or x.shape[1]
    fmt = FORMATS[cast.format]
    tiles = [[x[i:i + r, j:j + c] for j in range(0, x.shape[1], c)]
             for i in range(0, x.shape[0], r)]
    amax = (np.array([[abs(t).max() for t in row] for row in tiles]) if fixed_amax is None
            else np.float32([[fixed_amax]]))
    scales = naive_scales(amax, cast)
    top = fmt.largest + 2.0 ** (math.floor(math.log2(fmt.largest)) - fmt.mantissa_bits) / 2
    elements = vanished = beyond = signal = noise = 0
    per_block, empty = [], []
    for i, row in enumerate(tiles):
        for j, tile in enumerate(row):
            # with a scale of 0, all elements become 0
            scaled = tile.astype(np.float32) / np.float32(scales[i, j] or np.inf)
            clipped = scaled.clip(-fmt.largest, fmt.largest)
            grid = (np.rint(clipped) if cast.format == "int8"
                    else clipped.astype(GRIDS[cast.format]).astype(np.float64))
            y = grid.astype(np.float64) * float(scales[i, j])
            some = tile != 0
            s, n = (tile.astype(np.float64) ** 2).sum(), ((tile - y) ** 2).sum()
            elements, vanished = elements + some.sum(), vanished + (some & (y == 0)).sum()
            over = (abs(tile.astype(np.float64)) > top * float(scales[i, j] or np.inf)).sum()
            beyond, signal, noise = beyond + over, signal + s, noise + n
            empty.append(not some.any())
            if some.any():
                per_block.append((s, n, over, (y != 0).sum(), scales[i, j]))
    high, low = (math.log2(f(b[4] for b in per_block if b[4])) for f in (max, min))
    return {
        "sqnr_db": 10 * math.log10(signal / noise), "underflow": vanished / elements,
        "saturated": beyond / elements,
        "scale_octaves": high - low,
        "worst_block_db": min(10 * math.log10(s / n) for s, n, *_ in per_block if n),
        "saturated_blocks": np.mean([b[2] > 0 for b in per_block]),
        "zeroed_blocks": np.mean([b[3] == 0 for b in per_block]),
        "zero_blocks": np.mean(empty),
        "window": (high + math.log2(fmt.smallest), high + math.log2(fmt.largest))}


def wild(rows: int = 256, columns: int = 256) -> torch.Tensor:
    """Return a tensor with magnitudes over six decades, outliers, zeros and a block of zeros."""
    g = torch.Generator().manual_seed(3)
    x = (torch.randn(rows, columns, generator=g)
         * 10 ** (3 * torch.randn(rows, columns, generator=g).clamp(-1, 1)))
    x[:, 7] *= 300
    x[5] = 0
    x[128:, 128:] *= 1e-5
    x[:16, 32:64] = 0
    return x


@pytest.mark.parametrize("name, role", ROWS_OF)
def test_every_statistic_is_its_definition(name, role):
    cast = replace(cast_of(RECIPES[name], role), rounding="nearest-even")
    x = wild()
    quality = stats(draw(x, [cast], None), cast)
    for field, want in naive(x, cast).items():
        exact = field in ("underflow", "saturated", "saturated_blocks", "zeroed_blocks",
                          "zero_blocks")
        # Mixing by a Hadamard matrix in another order moves elements that lie on a midpoint.
        tolerance = 1e-12 if exact and cast.transform == "none" else 1e-3
        assert getattr(quality, field) == pytest.approx(want, rel=tolerance,
            abs=1e-3 if cast.transform != "none" else 1e-4), field


def test_a_stale_scale_saturates():
    cast, x = cast_of(RECIPES["fp8-delayed"], "x"), wild()
    amax = x.abs().max() / 64
    quality = stats(draw(x, [cast], None), cast, amax=amax)
    want = naive(x, cast, fixed_amax=amax.item())
    assert quality.saturated == want["saturated"] > 0.001
    assert quality.sqnr_db == pytest.approx(want["sqnr_db"], rel=1e-4)
    fresh = stats(draw(x, [cast], None), cast)
    assert fresh.saturated == 0 and fresh.sqnr_db > quality.sqnr_db + 10


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_tensors_have_the_same_ratio(size):
    cast, x = cast_of(RECIPES["fp8-tensorwise"], "x"), torch.randn(64, 64,
        generator=torch.Generator().manual_seed(0))
    usual, other = (stats(draw(t, [cast], None), cast) for t in (x, x * size))
    assert other.sqnr_db == pytest.approx(usual.sqnr_db, abs=0.1)
    assert usual.worst_block_db == pytest.approx(usual.sqnr_db)


def test_stochastic_rounding_is_seen_as_noise():
    down = cast_of(RECIPES["nvfp4"], "dy")
    nearest = replace(down, rounding="nearest-even")
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    drawn = draw(x, [down], None)
    assert stats(drawn, down).sqnr_db < stats(drawn, nearest).sqnr_db - 1


def test_exponents_are_counted():
    x = torch.tensor([0.0, 1.0, 1.99, -2.0, 0.25, 3e-39, math.inf, math.nan, -6.5])
    assert telemetry.exponents(x) == {0: 2, 1: 1, -2: 1, 2: 1}


def test_padding_counts_nowhere():
    x = wild(120, 100)
    cast = cast_of(RECIPES["mxfp8"], "x")
    padded = torch.nn.functional.pad(x, (0, 60, 0, 24))
    usual, other = (stats(draw(t, [cast], None), cast) for t in (x, padded))
    assert usual.sqnr_db == pytest.approx(other.sqnr_db)
    assert usual == replace(other, zero_blocks=usual.zero_blocks, sqnr_db=usual.sqnr_db)


def test_a_draw_is_unbiased_and_keeps_the_scale_of_the_whole():
    """For each granularity, the mean over many draws is the value over all rows, and each draw has
    the amax of the whole tensor."""
    x, rng = wild(512, 256), torch.Generator().manual_seed(1)
    x[:, 7] = x[:, 8]
    casts = [cast_of(RECIPES[name], "x") for name in ("fp8-tensorwise", "mxfp8", "nvfp4")]
    drawn = [draw(x, casts, 64, rng) for _ in range(400)]
    assert all(d.rows == 64 and d.amax == x.abs().max() for d in drawn)
    for cast in casts:
        whole, qualities = stats(draw(x, casts, None), cast), [stats(d, cast) for d in drawn]
        # each underflow is a mean over elements
        underflow = np.array([quality.underflow for quality in qualities])
        assert abs(underflow.mean() - whole.underflow) < 4 * underflow.std() / 20 + 1e-9
        tops = {quality.window for quality in qualities}
        assert max(tops) == whole.window and (cast.block != (0, 0) or tops == {whole.window})


def test_a_row_that_was_not_drawn_still_sets_the_scale():
    x = torch.ones(1024, 64)
    x[700, 3] = 448.0 * 4
    cast = cast_of(RECIPES["fp8-tensorwise"], "x")
    drawn = draw(x, [cast], 16, torch.Generator().manual_seed(0))
    assert drawn.x.abs().max() == 1792 and len(drawn.x) == 16 + 4
    assert stats(drawn, cast).window[1] == math.log2(1792)


# ---- a run

def trained(tmp_path: Path, config: Config, name: str, **settings):
    folder = tmp_path / name
    folder.mkdir()
    training = Training.build(config)
    watched = telemetry.attach(training, folder, **settings) if settings else None
    return fit(training, folder), watched


@pytest.mark.parametrize("recipe", ["fp8-delayed", "bf16"])
def test_telemetry_changes_no_bit(tmp_path, recipe):
    layers = {} if recipe == "bf16" else {"precision.recipe.high_precision_layers": "head"}
    config = TINY.replace({"precision.recipe": recipe, "precision.backend": "auto",
                           "grad_accum_steps": 2} | layers)
    plain, _ = trained(tmp_path, config, "plain")
    looked, watched = trained(tmp_path, config, "looked", every=2, rows=16)
    assert [line["loss"] for line in plain.metrics] == [line["loss"] for line in looked.metrics]
    assert plain.summary["val_loss"] == looked.summary["val_loss"]
    samples = read(tmp_path / "looked")
    layers = [f"blocks.{i}.{part}" for i in range(2)
              for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    assert {s.step for s in samples} == {1, 3, 5}
    assert len(samples) == 3 * 3 * 9 and {s.layer for s in samples} == {*layers, "head"}
    assert all(not module._forward_hooks for module in watched.model.modules())
    assert not watched.samples, "they are in the file"


def test_off_is_a_call_and_a_remainder(tmp_path):
    training = Training.build(TINY)
    watched = telemetry.attach(training, tmp_path, every=20)
    training.update(1)      # step 2
    assert not (tmp_path / telemetry.FILE).exists() and not watched.samples
    assert all(not module._forward_hooks and not module._backward_hooks
               for module in training.model.modules())


@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
def test_what_is_said_is_what_the_layer_did(tmp_path, recipe):
    """The Sample's `own` quality, and the quality of the run's recipe in `others`, are those of the
    cast that the layer did."""
    training = Training.build(TINY.replace({"precision.recipe": recipe}))
    watched = telemetry.attach(training, None, every=1, rows=None, roles=tuple(ROLES),
                               layers=("blocks.1.mlp.up",))
    layer, taken = training.model.blocks[1].mlp.up, {}

    def take(module, args, out):
        taken.update(x=args[0].flatten(0, 1), w=module.weight.clone(),
                     history=getattr(module, "amax_history", out).clone())
        out.register_hook(lambda dy: taken.update(dy=dy.flatten(0, 1)))

    layer.register_forward_hook(take)
    for step in range(3):
        with watched.watch(step):       # the weights do not change
            training.forward_backward(training.batch(step))
    samples = watched.samples
    for role in ROLES:
        sample = next(s for s in samples if (s.step, s.role) == (3, role))
        t = taken[role.removesuffix(".T")].detach().float()
        t = t.T.contiguous() if role.endswith(".T") else t
        amax = (taken["history"][["x", "w", "dy"].index(role.removesuffix(".T")), 1:].max()
                if recipe == "fp8-delayed" else None)
        y = quantise(t, cast_of(RECIPES[recipe], role), amax=amax).dequantise(torch.float64)
        want = 10 * torch.log10(t.double().square().sum() / (t.double() - y).square().sum()).item()
        assert sample.own.sqnr_db == pytest.approx(want, abs=1e-4) and sample.amax == t.abs().max()
        assert sample.own == sample.others[recipe]
        assert (sample.total_rows == len(t) and sum(sample.exponents.values())
                == (t.abs() >= 2.0**-126).sum())


def test_other_recipes_are_what_those_would_have_said():
    taken = {}
    for recipe in ("fp8-tensorwise", "mxfp8", "nvfp4"):
        training = Training.build(TINY.replace({"precision.recipe": recipe,
            "precision.recipe.high_precision_layers": "head"}))
        watched = telemetry.attach(training, None, every=1, rows=None, roles=("x", "w"),
                                   layers=("blocks.0.attention.qkv",))
        training.update(0)
        taken[recipe] = watched.samples
    for asked in taken:
        for other in taken:     # the first layer's inputs do not depend on the recipe
            assert [s.others[other] for s in taken[asked]] == [s.own for s in taken[other]]


def test_not_a_number_is_counted_and_named(tmp_path):
    training = Training.build(TINY)
    telemetry.attach(training, tmp_path, every=1, rows=16)
    with torch.no_grad():
        training.model.blocks[1].mlp.up.weight[3, 5] = math.nan
        training.model.blocks[1].mlp.up.weight[9, 5] = math.inf
    training.update(0)
    samples = read(tmp_path)
    bad = next(s for s in samples if s.layer == "blocks.1.mlp.up" and s.role == "w")
    assert bad.nonfinite == 2 and bad.amax is None and bad.own is None and bad.others == {}
    assert "2 in w of blocks.1.mlp.up" in nonfinite_report(samples)
    assert nonfinite_report([s for s in samples if not s.nonfinite]) == ""
    assert all("NaN" not in line for line in (tmp_path / telemetry.FILE).read_text().splitlines())


def test_a_torn_line_is_left_out_and_written_over(tmp_path):
    _, watched = trained(tmp_path, TINY, "run", every=4, rows=16)
    path = tmp_path / "run" / telemetry.FILE
    whole = read(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match="is cut off, as a kill leaves it"):
        assert read(tmp_path / "run") == whole[:-1]
    again = Telemetry(model=watched.model, path=path, every=4)
    again._keep([whole[-1], replace(whole[0], amax=7.0)])
    assert read(path) == [*[s if (s.step, s.layer, s.role) != (1, whole[0].layer, whole[0].role)
                            else replace(s, amax=7.0)
                           for s in whole[:-1]], whole[-1]]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("settings, message", [
    ({"every": 0}, "every N >= 1"), ({"rows": 0}, "rows=0"),
    ({"roles": ("y",)}, "there is no role 'y'"),
    ({"layers": ("block.*",)}, "matches no Linear"), ({"counterfactuals": ("mxfp9",)}, "mxfp8"),
])
def test_bad_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        Telemetry(model=Training.build(TINY).model, **settings)


def test_a_folder_without_samples_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no telemetry\.jsonl"):
        read(tmp_path)


# ---- the pictures

@pytest.fixture(scope="module")
def samples():
    training = Training.build(TINY)
    watched = telemetry.attach(training, None, every=1, rows=16)
    for step in range(2):
        with watched.watch(step):
            training.forward_backward(training.batch(step))
    return watched.samples


def test_the_map_shows_the_numbers_and_the_chosen_cell(samples):
    spec = heat_map(samples, metric="underflow", role="dy", recipe="nvfp4", layer="blocks.1.mlp.up",
                    step=1)
    cells, bars = spec["data"]
    assert cells["x"] == ["1", "2"] and len(cells["y"]) == 9
    for row, layer in zip(cells["z"], cells["y"]):
        for value, step in zip(row, (1, 2)):
            sample = next(s for s in samples if (s.layer, s.step, s.role) == (layer, step, "dy"))
            assert value == 100 * sample.others["nvfp4"].underflow
    chosen = next(s for s in samples if (s.layer, s.step, s.role) == ("blocks.1.mlp.up", 1, "dy"))
    assert (bars["x"] == [e + 0.5 for e in sorted(chosen.exponents)]
            and sum(bars["y"]) == pytest.approx(100))
    window = next(shape for shape in spec["layout"]["shapes"] if shape.get("fillcolor"))
    assert (window["x0"], window["x1"]) == chosen.others["nvfp4"].window


@pytest.mark.parametrize("metric", METRICS)
def test_a_colour_means_one_value_in_every_map(samples, metric):
    """The colour scale is the same in all maps, so 25.0 and 25.9 dB are not its two ends. Only
    exact casts and useless casts are beyond its ends."""
    maps = [heat_map(samples, metric=metric, role=role, recipe=recipe) for role in ("x", "dy")
            for recipe in ("mxfp8", "nvfp4")]
    assert len({(spec["data"][0]["zmin"], spec["data"][0]["zmax"]) for spec in maps}) == 1
    values = [value for spec in maps for line in spec["data"][0]["z"] for value in line
              if value is not None]
    cells = maps[0]["data"][0]
    assert values and cells["zmin"] <= min(values) and max(values) <= cells["zmax"]


def test_a_cell_is_chosen_by_a_click(samples):
    explorer = telemetry_explorer(samples)
    assert explorer.choices["step"] == 2
    explorer.figure.clicked = {"curve": 0, "x": "1", "y": "blocks.1.mlp.down"}
    assert (explorer.choices["layer"], explorer.choices["step"]) == ("blocks.1.mlp.down", 1)
    assert "blocks.1.mlp.down</b><br>x, step 1" in explorer.figure.spec["layout"]["annotations"][
        1]["text"]
    explorer.figure.clicked = {"curve": 1, "x": -3.5, "y": 2}      # a bar is not a cell of the map
    assert explorer.choices["step"] == 1


def test_what_is_not_finite_is_written_into_its_cell(samples):
    broken = [replace(s, nonfinite=3, amax=None, own=None, others={}) if s.role == "w" else s
              for s in samples]
    spec = heat_map(broken, role="w")
    assert (spec["data"][0]["text"][0] == ["NaN", "NaN"]
            and "3 NaN or Inf" in spec["layout"]["annotations"][-1]["text"])


def test_a_map_of_nothing_says_what_there_is(samples):
    with pytest.raises(ConfigError, match="there are x, w, dy"):
        heat_map(samples, role=r"x.T")
    with pytest.raises(ConfigError, match="records the first samples in step 1"):
        telemetry_explorer([])


def test_a_run_writes_telemetry_by_its_setting_alone(tmp_path):
    config = TINY.replace({"steps": 4})
    plain = lpkit.train(config, out=tmp_path / "plain")
    seen = lpkit.start(config.replace({"precision.telemetry_every": 2}),
                       out=tmp_path / "seen").result()
    assert not (plain.path / telemetry.FILE).exists()
    assert {sample.step for sample in read(seen.path)} == {1, 3}
    assert [line["loss"] for line in seen.metrics] == [line["loss"] for line in plain.metrics]


def test_sampled_steps_leave_nothing_in_memory(tmp_path):
    """After 24 sampled steps, Python has as many allocated blocks of memory as after 8, except for
    about two dozen per step, which a run without telemetry has, too."""
    held = {}

    def count(record):
        gc.collect()
        held[record.step] = sys.getallocatedblocks()

    run = lpkit.train(TINY.replace({"steps": 25, "model.layers": 1,
                                    "precision.telemetry_every": 1}), out=tmp_path / "run",
        observers=[count])
    samples = read(run.path)
    assert len(samples) == 25 * 3 * 5, "each takes a hundred blocks"
    assert held[24] - held[8] < 16 * 100, f"{(held[24] - held[8]) / 16:,.0f} blocks a step"


# A run of 450 steps of the smallest model. After step 150, Python, PyTorch and the allocator have
# allocated all memory that they allocate only once.
RESIDENT = """
import json, sys
import lpkit
from lpkit.config import Config
from lpkit.machine_facts import status_bytes

folder, every, retained = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = Config().replace({
    "model.layers": 1, "model.width": 32, "model.heads": 2, "model.context": 32, "global_batch": \
4, "steps": 450, "eval_every": 0, "eval_batches": 1,
    "checkpoint_every": 0, "data.source": f"{folder}/text.txt", "precision.recipe": \
"fp8-tensorwise", "precision.backend": "emulated",
    "precision.telemetry_every": every, "system.device": "cpu", "system.threads": 1})
held, kept = {}, []

def look(record):
    kept.append(b"1" * retained)
    held[record.step] = status_bytes("VmRSS")

run = lpkit.train(config, out=f"{folder}/{every}-{retained}", observers=[look])
assert not run.summary["observer_errors"]
print(json.dumps({"megabytes": (held[450] - held[150]) / 1e6, "run": str(run.path)}))
"""
MOST_MEGABYTES, PLANTED = 8, 200_000     # a sample once left 0.2 MB


@pytest.mark.skipif(status_bytes("VmRSS") is None,
                    reason="the system does not say what is resident")
def test_a_run_that_is_looked_at_at_every_step_grows_as_one_that_is_not(tmp_path):
    """The test above counts live objects; this test compares the memory of the process."""
    (tmp_path / "text.txt").write_text("".join(f"{i} bottles of beer on the wall\n"
        for i in range(20_000)))
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = {how: subprocess.Popen([sys.executable, "-c", RESIDENT, tmp_path, *how], env=env,
                                  stdout=subprocess.PIPE, text=True)
            for how in (("0", "0"), ("1", "0"), ("0", str(PLANTED)))}
    plain, seen, planted = (json.loads(run.communicate(timeout=600)[0]) for run in runs.values())
    assert (len(read(seen["run"])) == 450 * 3 * 5
            and not (Path(plain["run"]) / telemetry.FILE).exists())
    assert seen["megabytes"] - plain["megabytes"] < MOST_MEGABYTES, (seen, plain)
    assert (planted["megabytes"] - plain["megabytes"]
            > MOST_MEGABYTES), "a planted leak would be seen"


def test_fp16_that_overflows_is_not_called_exact():
    """Without a scale, a magnitude above 65,504 becomes infinite. Then the SQNR has no logarithm,
    and neither has the SQNR of an exact cast; the two must not be confused. (Notebook 07 once
    showed "exact" beside 1.56% saturated.)"""
    x = torch.ones(32, 64)
    x[0, 0] = 1e6
    cast = cast_of(RECIPES["fp16"], "x")
    own, exact = (stats(draw(tensor, (cast,), None), cast) for tensor in (x, torch.ones(32, 64)))
    assert cast.format == "fp16" and own.sqnr_db is None is exact.sqnr_db and own.saturated > 0
    sample = telemetry.Sample(step=1, layer="a", role="x", cast={"format": "fp16"}, total_rows=32,
                              sampled_rows=32, amax=1e6, nonfinite=0, own=own,
                              others={"exact": exact}, exponents={0: 1})
    table = quality_table(sample)
    # the name of one, and what it is
    assert table.count("overflows to Inf") == 1 and table.count("exact") == 2
    assert heat_map([sample], metric="SQNR")["data"][0]["text"] == [["Inf"]]
    assert heat_map([sample], metric="SQNR", recipe="exact")["data"][0]["text"] == [[""]]
