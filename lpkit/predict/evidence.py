"""What machines reach in training, and the error range of predicted seconds.

There are four kinds of numbers, kept separate:

- GENERATIONS, each with its source: the share of a datasheet's peak that published kernels reach at
  their best shape;
- numbers that no table has, fitted to published runs that may be fitted (data/published/fit.json,
  by `python -m tests.bench.fit`): the share of kernel speed and bandwidth that a whole step keeps,
  what a stack's compiler or fused kernels save, how much of its messages overlaps, and the time
  between its kernels;
- measurements of the machine itself, which come first: `lpkit measure`, and for FP8 against bf16 a
  recorded `lpkit bench fp8-linear`;
- the errors of all this on runs of held-out sources, by kind of run (in the same file). They are
  the range of every answer.

A machine whose ceilings were measured on the spot uses them (`roofline.REACHED`).
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
    """Shares of the datasheet's dense peaks, as data/published/machines.toml defines them."""

    machines: tuple[str, ...]
    sixteen: float
    eight: float | None = None
    thirty_two: float = 0.7
    attention: float
    source: str


GENERATIONS = {name: Generation(**row) for name, row in machines.TABLES["reached"].items()}
OTHER = Generation(machines=(), sixteen=0.78, eight=0.68, attention=0.35,
                   source="assumed: no table says what this machine reaches")
# without a run that may be fitted: the generation whose share is used
LIKE = {"gb200": "b200", "mi355x": "mi325x"}
KEPT_BY_OTHERS = "h100"
FP32_KEPT = 0.95        # share of float32 matmul speed in a step: ledger-nvidia-h200.json
SIXTEEN, EIGHT = ("tf32", "bf16", "fp16"), ("fp8", "int8")


@functools.cache
def fitted() -> Mapping[str, Any]:
    """Return data/published/fit.json."""
    return json.loads(FIT.read_text(encoding="utf-8"))


def generation_of(machine: Machine) -> str | None:
    return next((name for name, row in GENERATIONS.items() if machine.name in row.machines), None)


def efficiency(machine: Machine, stack: str = DEFAULT, *, folder: Path = MEASURED) -> Efficiency:
    """Return the efficiency of a step. `folder` has recorded benches. Raises ConfigError for an
    unknown stack."""
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
    # these stacks use the kit's matmuls, as benches do
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
    """Return the efficiency of a generation with these fitted `numbers`. Raises ConfigError."""
    row, how = GENERATIONS.get(name, OTHER), pick(STACKS, stack, "stack")
    kept = numbers.get(f"{LIKE.get(name, name)} keeps", numbers[f"{KEPT_BY_OTHERS} keeps"])

    def of(field: str) -> float:
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
    """Turn an error in this block, which reads a record of `lpkit bench`, into a ConfigError: the
    file is not such a record."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} in {path.parent.name} is not a recorded bench ({error!r}); "
                          f"write it again with `lpkit bench`, or remove it") from None


def benches(on: Machine, folder: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return recorded benches of this machine. Raises ConfigError for a file that is not one."""
    try:
        records = _benches(folder, folder.stat().st_mtime_ns)
    except OSError:     # there is no such folder
        return []
    return [(path, bench) for path, bench, device, title in records
            if on.kind == "gpu" and on.title in (device, title)]


@functools.lru_cache(maxsize=8)
def _benches(folder: Path, changed: int) -> list[tuple[Path, Mapping[str, Any], str, str | None]]:
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
    """Return the catalogue's row for a GPU by the name that its driver gives it, or None.

    The row's model (H100, 4090) must be in the name. Of several rows, the one with most words in
    common is returned."""
    words, best, most = set(re.findall(r"\w+", device)), None, 0
    for row in machines.CATALOGUE.values():
        title = re.findall(r"\w+", row.title)
        model = next((word for word in title if re.search(r"\d", word)), "")
        common = len(words & set(title))
        if row.kind == "gpu" and model in words and common > most:
            best, most = row, common
    return best


def recorded_products(on: Machine, folder: Path = MEASURED) -> dict[str, dict[str, list[Sequence]]]:
    """Return recorded speeds of cast matmuls relative to bf16, by file and recipe, as (M, N, K,
    ratio). Records of `measure` come last; they lack the scales of the result. Raises
    ConfigError."""
    return {path.name: bench["ratios"] for path, bench in benches(on, folder) if bench["ratios"]}


def _ratios(bench: Mapping[str, Any]) -> dict[str, list[Sequence]]:
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
    """Return the share of its peak that FP8 reaches, divided by bf16's share.

    With these shares the formula gives the recorded seconds; median over the cases. The share that
    a whole step keeps of either is fitted to steps."""
    shares: dict[str, list[float]] = {"bf16": [], "fp8": []}
    bandwidth = on.bytes_per_second * assumed.bandwidth
    for case in cases:
        if case["peer"] != "bf16":
            continue
        M, K, _, N = map(int, re.split("x| @ ", case["case"]))      # "MxK @ KxN"
        results = 2 * (M * N + M * K + N * K) / bandwidth + 3 * assumed.start_seconds
        # the bench's weight is bf16 already, and torchao's passes are those of `cast_passes`
        casts = sum(each.bytes for each in cast_passes(TENSORWISE, M=M, N=N, K=K)) / bandwidth
        for dtype, seconds in (("bf16", case["peer_median"] - results),
                               ("fp8", case["ours_median"] - results - casts)):
            if seconds > 0:
                shares[dtype].append(min(1.0, 6 * M * N * K / on.peak_flops(dtype) / seconds))
    return statistics.median(shares["fp8"]) / statistics.median(shares["bf16"])


# The error range of a prediction.

@dataclass(frozen=True, kw_only=True)
class Spread:
    """Measured / predicted seconds were between `low` and `high` in nine of ten runs of a kind."""

    low: float
    high: float
    words: str

    def around(self, value: float) -> tuple[float, float]:
        return self.low * value, self.high * value


GIVEN = Spread(low=1.0, high=1.0, words="at the given MFU")
HOST_BOUND = 0.1        # share of a step that waits for the host, above which the run is host-bound
# share of seconds: smaller differences do not separate two layouts (docs/plan.md)
TELLS = 0.08
KINDS = ("consumer and workstation GPUs", "bound by the host", "adapters",
         "below 1 billion weights", "MI300X and after", "8 bits or fewer",
         "A100, H100 and after in 16 bits")
SMALL = 1e9             # weights
UNSEEN = "no published run is of this kind"


def kind_of(machine: Machine, precision: str, *, weights: float = SMALL, adapted: bool = False,
            host_share: float = 0.0) -> str:
    """Return the kind of a run for fit.json: the first of KINDS that applies. `host_share` is the
    share of the step in which the device waits for the host."""
    name = generation_of(machine)
    if name is None:
        return UNSEEN
    of = (name.startswith("sm_"), host_share > HOST_BOUND, adapted, weights < SMALL,
          name.startswith("mi"), PRECISIONS[precision].low is not None, True)
    return next(kind for kind, is_of in zip(KINDS, of, strict=True) if is_of)


def shape_of(layout: Layout) -> str:
    """Return what splits the model, in words: "tensor + pipeline", "ZeRO 3", "one device"."""
    split = [axis for axis in ("tensor", "pipeline", "context") if getattr(layout, axis) > 1]
    alone = "replicas" if layout.data > 1 else "one device"
    return " + ".join(split) or (f"ZeRO {layout.zero}" if layout.shard > 1 else alone)


def spread(kind: str, layout: Layout, stack: str = DEFAULT, *, calibrated: float = 0.0) -> Spread:
    """Return the range of a step's seconds. A measured step removes the bias of its kind, by the
    weight `calibrated`: 1 for the shapes that were measured, less for others. The range never
    becomes narrower than for measured shapes."""
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
    """Return the kind and its `low` and `high`: for this stack if known, else for all stacks. If no
    run of the kind was published, return "" and the widest range of all kinds."""
    for name in (f"{kind}, {stack}", kind):
        if name in kinds:
            return name, kinds[name]
    return "", {side: choose(limits[side] for limits in kinds.values())
                for side, choose in (("low", min), ("high", max))}
