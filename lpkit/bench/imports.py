"""`import lpkit` beside `import torch`: the wall time of a fresh interpreter that does nothing else.

Interpreter start is in both, so the claim is about what a person waits for at a prompt or with `lpkit --help`.
"""

import random
import subprocess
import sys
import time

from lpkit.bench.harness import ROUNDS, Result, paired, provenance

TARGET = 0.15       # at most this share of the peer's time


def run(rounds: int = ROUNDS) -> list[Result]:
    _python("import lpkit, sys; assert lpkit.__version__ and 'torch' not in sys.modules")      # and warm the disk
    _python("import torch; assert torch.ones(2).sum() == 2")
    samples = {"lpkit": [], "torch": []}
    order, shuffle = list(samples), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for module in order:
            start = time.perf_counter()
            _python(f"import {module}")
            samples[module].append(time.perf_counter() - start)
    return [paired("import", ours=samples["lpkit"], peer=samples["torch"], peer_name="import torch", case="import lpkit",
                   target=TARGET, better="lower", facts=provenance(["torch"]))]


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
