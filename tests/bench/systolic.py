"""Cycles of systolic arrays compared with SCALE-Sim 3.0.0, and products with zeros on this CPU.

    SCALESIM_PYTHON=.../bin/python lpkit bench systolic --out data/measured
    lpkit bench zeros --out data/measured

SCALE-Sim fails on numpy 2.4, so it runs in an environment of its own: scalesim==3.0.0, numpy<2.3.
Its column "Total Cycles" is the clock's value in the last cycle without the first fetch. The
memories are large enough that nothing stalls. Notebook 30 shows both records.
"""

import csv
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lessons import l30_silicon as lesson
from lpkit.errors import ConfigError
from tests.bench.harness import Result, paired

CODES = {"output": "os", "weight": "ws", "input": "is"}
DENSITIES = (0.5, 0.2, 0.1, 0.05)
SETTINGS = {
    "general": {"run_name": "run"},
    "architecture_presets": {
        "IfmapSramSzkB": 1024, "FilterSramSzkB": 1024, "OfmapSramSzkB": 1024, "IfmapOffset": 0,
        "FilterOffset": 10_000_000, "OfmapOffset": 20_000_000, "Bandwidth": 100, "MemoryBanks": 1,
        "ReadRequestBuffer": 32, "WriteRequestBuffer": 32},
    "layout": {f"{name}{what}": value for name in ("Ifmap", "Filter") for what, value in (
        ("CustomLayout", False), ("SRAMBankBandwidth", 10), ("SRAMBankNum", 10),
        ("SRAMBankPort", 2))},
    "sparsity": {"SparsitySupport": "false", "SparseRep": "ellpack_block",
                 "OptimizedMapping": "false", "BlockSize": 8, "RandomNumberGeneratorSeed": 40},
    "run_presets": {"InterfaceBandwidth": "CALC", "UseRamulatorTrace": False}}


def run(rounds: int = 1) -> list[Result]:
    """One Result for each array and dataflow. Whatever `rounds` are, each product runs once."""
    simulated, recorded = lesson.checked(), []
    for sides in lesson.ARRAYS:
        for dataflow in lesson.DATAFLOWS:
            recorded += [[dataflow, *sides, list(shape), cycles] for shape, cycles in zip(
                lesson.SHAPES, _scale_sim(lesson.Array(*sides, dataflow)), strict=True)]
    results = []
    for dataflow in lesson.DATAFLOWS:
        mine = [row for row in recorded if row[0] == dataflow]
        results.append(paired(
            "systolic", case=f"{dataflow}-stationary: {len(mine)} products", unit="cycles",
            ours=[simulated[lesson.Array(R, C, dataflow), tuple(shape)].cycles
                  for _, R, C, shape, _ in mine],
            peer=[cycles for *_, cycles in mine], peer_name="SCALE-Sim 3.0.0", target=1.0,
            facts={"cycles": recorded}))
    return results


def zeros(rounds: int = 9) -> list[Result]:
    """One Result for each density of the weights: a product by PyTorch's CSR kernel over the same
    product by the dense kernel, whose weights have no zeros."""
    results = []
    for density in DENSITIES:
        here = lesson.on_this_machine(density, rounds=rounds)
        results.append(paired(
            "zeros", ours=[here.sparse], peer=[1.0], peer_name="dense, without zeros",
            better="lower", unit="times", case=f"{1 - density:.0%} zeros, (1024, 1024) x (1024, "
            "512)", facts={"dense_with_zeros": here.dense, "others": here.others}))
    return results


def _scale_sim(array: lesson.Array) -> list[int]:
    """Return SCALE-Sim's cycles of each of the lesson's shapes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        sections = SETTINGS | {"architecture_presets": {
            "ArrayHeight": array.rows, "ArrayWidth": array.columns,
            "Dataflow": CODES[array.dataflow], **SETTINGS["architecture_presets"]}}
        (folder / "run.cfg").write_text("\n".join(
            f"[{section}]\n" + "\n".join(f"{key}: {value}" for key, value in entries.items())
            for section, entries in sections.items()) + "\n")
        layers = [f"g{i},{M},{N},{K}," for i, (M, N, K) in enumerate(lesson.SHAPES)]
        (folder / "gemm.csv").write_text("\n".join(["Layer,M,N,K,", *layers]) + "\n")
        layouts = [f"g{i}," + "1," * 20 for i in range(len(layers))]
        (folder / "layout.csv").write_text("\n".join(["Layer name," + "x," * 20, *layouts]) + "\n")
        done = subprocess.run(
            [os.environ.get("SCALESIM_PYTHON", sys.executable), "-m", "scalesim.scale",
             "-c", "run.cfg", "-t", "gemm.csv", "-i", "gemm", "-p", "out", "-l", "layout.csv"],
            cwd=folder, capture_output=True, text=True)
        report = folder / "out/run/COMPUTE_REPORT.csv"
        if not report.exists():
            raise ConfigError("SCALE-Sim wrote no report; set SCALESIM_PYTHON to a Python with "
                              "scalesim 3.0.0 and numpy below 2.3. It printed: "
                              f"{done.stderr[-200:]}")
        heads, *rows = csv.reader(report.open())
        at = [head.strip() for head in heads].index("Total Cycles")
        return [int(float(row[at])) for row in rows]
