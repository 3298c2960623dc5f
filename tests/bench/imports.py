"""`import lpkit` beside `import torch`: the wall time of a fresh interpreter that does nothing
else.

Interpreter start is in both, so the claim is about what a person waits for at a prompt or with
`lpkit --help`.
"""

import subprocess
import sys
from functools import partial

from lpkit.timing import interleaved_seconds
from tests.bench.harness import ROUNDS, Result, paired

TARGET = 0.15       # at most this share of the peer's time


def run(rounds: int = ROUNDS) -> list[Result]:
    # and warm the disk
    _python("import lpkit, sys; assert lpkit.__version__ and 'torch' not in sys.modules")
    _python("import torch; assert torch.ones(2).sum() == 2")
    runners = [partial(_python, f"import {module}") for module in ("lpkit", "torch")]
    ours, torch = interleaved_seconds(runners, rounds=rounds, warm_up=0, shuffle=True)
    return [paired("import", ours=ours, peer=torch, peer_name="import torch", case="import lpkit",
                   target=TARGET, better="lower")]


def _python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)
