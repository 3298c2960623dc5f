"""The efficiency that machines reach in training, and the error range of predicted seconds.

There are four kinds of numbers, which stay separate:

- GENERATIONS: for each generation of GPUs, the share of the datasheet's peak that published kernels
  reach at their best shape, with its source.
- Fitted numbers (data/published/fit.json, written by `python -m tests.bench.fit`): the share of
  kernel speed and bandwidth that a whole step keeps, the bytes that a stack's compiler or fused
  kernels save, the share of its messages that overlaps with work, and the time between its kernels.
  No table has these numbers, so they are fitted to published runs. Runs of held-out sources are
  never used for a fit.
- Measurements of the machine itself, which replace the numbers above: `lpkit measure`, and for the
  speed of FP8 relative to bf16 a recorded `lpkit bench fp8-linear`.
- Errors of the predictions on the runs of held-out sources, by kind of run (in fit.json). They are
  the range of every prediction.

If the ceilings of a machine were measured on this machine, the prediction assumes that a step
reaches them in full (`roofline.REACHED`).
"""

import functools
import json
import re
import statistics
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpkit.errors import ConfigError, pick
from lpkit.files import resource
from lpkit.predict.casts import TENSORWISE, cast_passes
from lpkit.predict.recipes import PRECISIONS
from lpkit.predict.roofline import ASSUMED, FOUR_BITS, REACHED, Efficiency
from lpkit.predict.stacks import AS_THEY_ARE, DEFAULT, STACKS
from lpkit.techniques import machines
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import Machine
from lpkit.techniques.recipes import RECIPES

MEASURED = resource("data/measured")
FIT = resource("data/published") / "fit.json"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Shares of the datasheet's dense peaks that kernels reach on one generation of GPUs. The rows
    are in data/published/machines.toml."""

    machines: tuple[str, ...]       # names in the catalogue
    sixteen: float                  # matmuls in bf16, fp16 and tf32
    eight: float | None = None      # matmuls in FP8 and int8; None: as `sixteen`
    thirty_two: float = 0.7         # matmuls in float32
    attention: float                # attention kernels, of the 16-bit peak
    source: str


GENERATIONS = {name: Generation(**row) for name, row in machines.TABLES["reached"].items()}
OTHER = Generation(machines=(), sixteen=0.78, eight=0.68, attention=0.35,
                   source="assumed: no table says what this machine reaches")
# Generations without a published run to fit, and the generation whose fitted number they use.
LIKE = {"gb200": "b200", "mi355x": "mi325x"}
KEPT_BY_OTHERS = "h100"     # its fitted number is used for all other machines
# share of float32 matmul speed that a step keeps, from data/measured/ledger-nvidia-h200.json
FP32_KEPT = 0.95
SIXTEEN, EIGHT = ("tf32", "bf16", "fp16"), ("fp8", "int8")


@functools.cache
def fitted() -> Mapping[str, Any]:
    """Return data/published/fit.json."""
    return json.loads(FIT.read_text(encoding="utf-8"))


def generation_of(machine: Machine) -> str | None:
    """Return the name of the machine's row in GENERATIONS; None: it has no row."""
    return next((name for name, row in GENERATIONS.items() if machine.name in row.machines), None)


def efficiency(machine: Machine, stack: str = DEFAULT, *, folder: Path = MEASURED) -> Efficiency:
    """Return the efficiency that a step of the `stack` reaches on the `machine`. `folder` has
    recorded benches. Raises ConfigError for an unknown stack."""
    generation, row = generation_of(machine), machine.measured
    here = machine.name == "this" or (row and not generation)
    efficiency = REACHED if here else _efficiency(generation, stack)
    sheet = machines.CATALOGUE[machine.name] if row and generation else machine
    for path, bench in benches(machine, folder):
        if bench["name"] == "fp8-linear" and bench["cases"]:
            with whole(path):
                eight = efficiency.products["bf16"] * _reached(bench["cases"], sheet, efficiency)
            efficiency = replace(
                efficiency, products=efficiency.products | {"fp8": eight},
                source=f"FP8 matmuls over bf16, recorded: {path.name}; others: "
                       f"{efficiency.source}")
    files = recorded_products(machine, folder)
    # Records have the speeds of lpkit's matmuls, which only these two stacks use.
    if files and stack in ("eager", DEFAULT):
        efficiency = replace(efficiency, ratios={**ChainMap(*files.values())})
    return _as_measured(efficiency, machine, sheet) if row else efficiency


def _as_measured(efficiency: Efficiency, on: Machine, sheet: Machine) -> Efficiency:
    """Return `efficiency`, which is the one of the datasheet's machine `sheet`, changed by the
    measurements that `lpkit measure` wrote for the machine `on`.

    If `on` has a datasheet, its measured peaks replace the datasheet's, and the shares of the
    peaks are converted. If `on` has none, `sheet` is `on`, and each matmul takes the share of the
    measured shape that is nearest to its own."""
    row, known = on.measured, sheet is not on
    products = {dtype: max(shape[3] for shape in table)
                for dtype, table in row["products"].items()}
    attention, bandwidth = efficiency.attention, efficiency.bandwidth
    if known:       # shares of the datasheet's peaks become shares of the measured peaks
        over = {dtype: peak / on.flops.get(dtype, peak) for dtype, peak in sheet.flops.items()}
        products = {dtype: share * over.get(dtype, 1)
                    for dtype, share in efficiency.products.items()}
        attention *= over.get("bf16", 1)
        bandwidth /= ASSUMED.bandwidth
    return replace(
        efficiency, products={**efficiency.products, **products}, shapes=row["products"],
        fades=known, attention=attention, bandwidth=bandwidth,
        casts=bandwidth if known else efficiency.casts,
        links=1.0 if row["ranks"] > 1 else efficiency.links, factor=row.get("factor", 1.0),
        source=f"matmuls and copies as {row['device']} took them on {row['date']}, "
        f"torch {row['torch']} (`{row['command']}`){row.get('why', '')}; others: "
        f"{efficiency.source}")


@functools.cache
def _efficiency(name: str | None, stack: str) -> Efficiency:
    return reached(name, stack, fitted()["numbers"])


def reached(name: str | None, stack: str, numbers: Mapping[str, float]) -> Efficiency:
    """Return the efficiency of the generation `name` (None: unknown) with the fitted `numbers` of
    fit.json, or of a fit in progress. Raises ConfigError for an unknown stack."""
    row, how = GENERATIONS.get(name, OTHER), pick(STACKS, stack, "stack")
    kept = numbers.get(f"{LIKE.get(name, name)} keeps", numbers[f"{KEPT_BY_OTHERS} keeps"])

    def of(field: str) -> float:
        """Return a number of the stack: from its row, else fitted to it, else fitted to eager."""
        if (value := getattr(how, field)) is not None:
            return value
        own = f"{stack} {field}"
        return numbers[own if own in numbers else f"eager {field}"]

    low = kept * of("low_bits")

    return replace(
        ASSUMED, products={**dict.fromkeys(SIXTEEN, kept * row.sixteen),
                           "fp32": FP32_KEPT * row.thirty_two,
                           **dict.fromkeys(EIGHT, low * (row.eight or row.sixteen)),
                           "fp4": low * FOUR_BITS},
        bandwidth=min(1.0, kept) * ASSUMED.bandwidth, casts=min(1.0, kept) * ASSUMED.casts,
        kernel_seconds=ASSUMED.kernel_seconds / kept, attention=row.attention * of("attention"),
        **{field: of(field) for field in AS_THEY_ARE},
        source=f"{row.source}; a step reaches {kept:.2f} of the speed of single kernels, with "
        f"{how.words}: fitted to published runs, data/published/fit.json")


# Recorded benches.

@contextmanager
def whole(path: Path) -> Iterator[None]:
    """Turn an error in this block into a ConfigError that says: the file `path` is not a record of
    `lpkit bench`. The block reads such a record."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} in {path.parent.name} is not a recorded bench ({error!r}); "
                          f"write it again with `lpkit bench`, or remove it") from None


def benches(on: Machine, folder: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return (path, record) of the recorded benches of this machine in `folder`. Raises ConfigError
    if a file is not the record of a bench."""
    try:
        records = _benches(folder, folder.stat().st_mtime_ns)
    except OSError:     # there is no such folder
        return []
    return [(path, bench) for path, bench, device, title in records
            if on.kind == "gpu" and on.title in (device, title)]


@functools.lru_cache(maxsize=8)
def _benches(folder: Path, changed: int) -> list[tuple[Path, Mapping[str, Any], str, str | None]]:
    """Return the path, the record, the device and the device's title in the catalogue for each
    recorded bench in `folder`. `changed` is the folder's modification time, a key of the cache: if
    a file is added, the folder is read again."""
    records = []
    for path in sorted([*folder.glob("fp8-*.json"), *folder.glob("measure-*.json")]):
        with whole(path):
            bench = json.loads(path.read_text(encoding="utf-8"))
            row = catalogued(bench["device"])
            cases = {} if bench["name"] == "measure" else bench["cases"]
            records.append((path, {"name": bench["name"], "cases": cases, "ratios": _ratios(bench)},
                          bench["device"], row and row.title))
    return records


def catalogued(device: str) -> Machine | None:
    """Return the catalogue's row for a GPU, or None. `device` is the GPU's name as its driver
    reports it ("NVIDIA H100 80GB HBM3").

    The model in the row's title (H100, 4090) must be a word of this name. If several rows fit,
    return the row whose title has most words in common with the name."""
    words, best, most = set(re.findall(r"\w+", device)), None, 0
    for row in machines.CATALOGUE.values():
        title = re.findall(r"\w+", row.title)
        model = next((word for word in title if re.search(r"\d", word)), "")
        common = len(words & set(title))
        if row.kind == "gpu" and model in words and common > most:
            best, most = row, common
    return best


def recorded_products(on: Machine, folder: Path = MEASURED) -> dict[str, dict[str, list[Sequence]]]:
    """Return recorded speeds of low-precision matmuls relative to bf16: by file and recipe, a list
    of (M, N, K, ratio). Files of `lpkit measure` come last, because their matmuls do not apply
    scales to the result. Raises ConfigError."""
    return {path.name: bench["ratios"] for path, bench in benches(on, folder) if bench["ratios"]}


def _ratios(bench: Mapping[str, Any]) -> dict[str, list[Sequence]]:
    """Return the speeds over bf16 in one record, by recipe: a list of (M, N, K, ratio). Recipes
    with the same casts of `y` share a list."""
    ratios: dict[str, list[Sequence]] = {}
    for case in bench["cases"] if bench["name"] == "fp8-products" else ():
        sizes, name, how = case["case"].split(", ")     # y MxKxN, int8, fast accumulation
        M, K, N = map(int, re.findall(r"\d+", sizes))
        fast = sizes.split()[0] in RECIPES[name].fast_accumulation
        if case["peer"] == "bf16" and how.startswith("fast" if fast else "full"):
            ratios.setdefault(name, []).append((M, N, K, case["ratio"]))
    if bench["name"] == "measure":
        peak, shares = bench["row"]["flops"], bench["row"]["measured"]["products"]
        base = {tuple(shape): share * peak["bf16"] for *shape, share in shares["bf16"]}
        for name, dtype in (("fp8-tensorwise", "fp8"), ("int8", "int8")):
            ratios[name] = [(*shape, share * peak[dtype] / base[tuple(shape)])
                           for *shape, share in shares.get(dtype, ())]
    return {recipe: rows for name, rows in ratios.items() for recipe, same in RECIPES.items()
            if rows and same.y == RECIPES[name].y}


def _reached(cases: Sequence[Mapping[str, Any]], on: Machine, assumed: Efficiency
             ) -> float:
    """Return the share of its peak that FP8 reaches in a recorded bench, divided by the share that
    bf16 reaches.

    Each share is the median over the cases: with it, the formula predicts the recorded seconds of
    a case. Only the ratio of the shares is used, because the share that a whole step keeps of this
    speed is fitted to whole steps."""
    shares: dict[str, list[float]] = {"bf16": [], "fp8": []}
    bandwidth = on.bytes_per_second * assumed.bandwidth
    for case in cases:
        if case["peer"] != "bf16":
            continue
        M, K, _, N = map(int, re.split("x| @ ", case["case"]))      # "MxK @ KxN"
        results = 2 * (M * N + M * K + N * K) / bandwidth + 3 * assumed.start_seconds
        # torchao's casts, which the bench times, are the passes of `cast_passes`. The bench's
        # weight is already bf16, so no weight copy is counted.
        casts = sum(each.bytes for each in cast_passes(TENSORWISE, M=M, N=N, K=K)) / bandwidth
        for dtype, seconds in (("bf16", case["peer_median"] - results),
                               ("fp8", case["ours_median"] - results - casts)):
            if seconds > 0:
                shares[dtype].append(min(1.0, 6 * M * N * K / on.peak_flops(dtype) / seconds))
    return statistics.median(shares["fp8"]) / statistics.median(shares["bf16"])


# The error range of a prediction.

@dataclass(frozen=True, kw_only=True)
class Spread:
    """The error range of predicted seconds: in nine of ten published runs of a kind, measured /
    predicted seconds were between `low` and `high`."""

    low: float
    high: float
    words: str      # the runs that the range was measured on

    def around(self, value: float) -> tuple[float, float]:
        return self.low * value, self.high * value


GIVEN = Spread(low=1.0, high=1.0, words="at the given MFU")
# A run is host-bound if its device waits for the host during more than this share of a step.
HOST_BOUND = 0.1
# If the predicted seconds of two layouts differ by less than this share, the prediction does not
# tell which one is faster (docs/plan.md).
TELLS = 0.08
KINDS = ("consumer and workstation GPUs", "bound by the host", "adapters",
         "below 1 billion weights", "MI300X and after", "8 bits or fewer",
         "A100, H100 and after in 16 bits")
SMALL = 1e9             # weights; smaller models are a kind of run
UNSEEN = "no published run is of this kind"


def kind_of(machine: Machine, precision: str, *, weights: float = SMALL, adapted: bool = False,
            host_share: float = 0.0) -> str:
    """Return the kind of a run, which is the key of its range in fit.json: the first of KINDS that
    applies. `adapted`: the run trains adapters. `host_share`: the share of the step in which the
    device waits for the host."""
    name = generation_of(machine)
    if name is None:
        return UNSEEN
    of = (name.startswith("sm_"), host_share > HOST_BOUND, adapted, weights < SMALL,
          name.startswith("mi"), PRECISIONS[precision].low is not None, True)
    return next(kind for kind, is_of in zip(KINDS, of, strict=True) if is_of)


def shape_of(layout: Layout) -> str:
    """Return in words how the layout splits the model: "tensor + pipeline", "ZeRO 3", "replicas" or
    "one device"."""
    split = [axis for axis in ("tensor", "pipeline", "context") if getattr(layout, axis) > 1]
    alone = "replicas" if layout.data > 1 else "one device"
    return " + ".join(split) or (f"ZeRO {layout.zero}" if layout.shard > 1 else alone)


def spread(kind: str, layout: Layout, stack: str = DEFAULT, *, calibrated: float = 0.0) -> Spread:
    """Return the error range of a step's seconds for a kind of run.

    `calibrated`: the weight of one measured step, from 0 (no step was measured) to 1 (a step of
    these shapes was measured). A measured step removes the bias of the machine, so the range with
    weight 1 is narrower. The smaller the weight, the wider is the range."""
    known, shape = fitted(), shape_of(layout)
    known_as, limits = range_of(known["kinds"], kind, stack)
    if calibrated:
        known_as, after = range_of(known["calibrated"], kind, stack)
        limits = {side: after[side]**calibrated * far(after[side], limits[side])**(1 - calibrated)
                  for side, far in (("low", min), ("high", max))}
    words = f"nine of ten held-out runs ({known_as})" if known_as else f"{UNSEEN}; the widest range"
    most = known["most_devices"].get(shape, 0)
    if layout.devices > most:
        words += (f"; extrapolated, since no published run has {shape}" if not most else
                  f"; extrapolated beyond the {most:,} devices of published runs with {shape}")
    if calibrated:
        words += ", after one measured step" + (
            f" of other shapes (its weight is {calibrated:.2f} of 1)" * (calibrated < 1))
    return Spread(low=limits["low"], high=limits["high"], words=words)


def range_of(kinds: Mapping[str, Mapping[str, float]], kind: str, stack: str
             ) -> tuple[str, Mapping[str, float]]:
    """Return the key of a range in `kinds`, and its limits `low` and `high`: the range of this kind
    in this stack, else of this kind in all stacks. If no run of this kind was published, return ""
    and the widest range of all kinds."""
    for name in (f"{kind}, {stack}", kind):
        if name in kinds:
            return name, kinds[name]
    return "", {side: choose(limits[side] for limits in kinds.values())
                for side, choose in (("low", min), ("high", max))}
