"""Notebook 29's model of 2 x 128 with fewer bits and weights, over seeds.

    lpkit bench fewer-bits --out data/measured      # three minutes of CPU time
    lpkit bench fewer-trained --out data/measured   # three minutes of CPU time

`fewer-bits` rounds and prunes trained models: one Result for each method, the nats that it adds,
compared with magnitude pruning or rounding to nearest. `fewer-trained` trains with fewer bits and
weights: QAT, distillation, lottery tickets. Nothing is timed.
"""

import tempfile
from pathlib import Path

from lessons import l29_fewer_bits as lesson
from tests.bench.harness import Result, paired

BASELINES = {"RTN": "RTN", "GPTQ": "RTN", "magnitude": "magnitude", "Wanda": "magnitude",
             "SparseGPT": "magnitude"}
ARMS = {"QAT int3": lambda row: (row["rounding"]["int3"]["QAT"],
                                 row["rounding"]["int3"]["trained on, rounded"]),
        "QAT int2": lambda row: (row["rounding"]["int2"]["QAT"],
                                 row["rounding"]["int2"]["trained on, rounded"]),
        "distillation": lambda row: (row["distillation"]["distilled"],
                                     row["distillation"]["alone"]),
        "lottery ticket": lambda row: (row["lottery"]["ticket"], row["lottery"]["reshuffled"])}


def run(rounds: int = lesson.SEEDS) -> list[Result]:
    """`rounds`: at most as many seeds."""
    seeds = [lesson.record(seed) for seed in range(min(rounds, lesson.SEEDS))]
    results = []
    for name in lesson.METHODS:
        kind, how = name.split()
        ours, peer = ([seed["effects"][f"{by} {how}"]["added"] for seed in seeds]
                      for by in (kind, BASELINES[kind]))
        results.append(paired("fewer-bits", ours=ours, peer=peer, peer_name=BASELINES[kind],
                              case=name, better="lower", unit="nats added",
                              facts={"seeds": seeds, "base": lesson.BASE}))
    return results


def training(rounds: int = lesson.TRAINED_SEEDS) -> list[Result]:
    """`rounds`: at most as many seeds."""
    with tempfile.TemporaryDirectory() as folder:
        seeds = [lesson.record_of_training(Path(folder) / str(seed), seed)
                 for seed in range(min(rounds, lesson.TRAINED_SEEDS))]
    return [paired("fewer-trained", ours=[pair(seed)[0] for seed in seeds],
                   peer=[pair(seed)[1] for seed in seeds], peer_name="without", case=name,
                   better="lower", unit="nats", facts={"seeds": seeds, "base": lesson.BASE})
            for name, pair in ARMS.items()]
