"""A run that was stopped on its way and goes on, for tests that hold it to one that was not."""

from pathlib import Path

import lpkit
from lpkit.config import Config
from lpkit.training.runs import Run


def in_parts(config: Config, out: Path, step: int) -> Run:
    """Stops after an update from `step` on, and resumes from what lies in `out`."""
    handle = lpkit.start(config, out=out)
    handle.subscribe(lambda record: handle.stop() if record.step >= step else None)
    handle.result()
    return lpkit.train(config, out=out, resume=True)
