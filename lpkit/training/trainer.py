"""Turn a Config into a Run: choose what this machine uses, check that the run fits in memory, build
the model, and train it.

    run = train_here(config, path, resume, observers, control)      trains in this process
    training = built(config, path, resume, ranks)                   only builds

Read the modules of this package in this order: `build` makes the choices and builds the model,
`training` has the update, `loop` repeats the update, and `formulas` has the predictions. A rank of
a launched run (`rank`) uses `built`, too.
"""

from pathlib import Path

from lpkit.config import Config
from lpkit.parallel.meeting import here
from lpkit.parallel.ranks import Ranks
from lpkit.techniques.changes import TELEMETRY
from lpkit.training.build import decide
from lpkit.training.control import Control, signals_stop
from lpkit.training.formulas import (
    Account,
    raise_out_of_memory_as_run_failure,
    refuse_what_cannot_fit,
)
from lpkit.training.loop import fit
from lpkit.training.runs import Observers, Run
from lpkit.training.training import Training


def train_here(config: Config, path: Path, resume: bool, observers: Observers,
               control: Control) -> Run:
    """Train into the folder `path` in this process, and return the Run. torchrun may have started
    this process as one rank of several."""
    with raise_out_of_memory_as_run_failure(config, "this run"), here(config) as ranks:
        # all ranks use rank 0's path, because a default path contains the time
        path = Path(ranks.agreed(path))
        training = built(config, path, resume, ranks)
        # From here on, a signal stops the run and saves a checkpoint. Before this line, there is
        # nothing to save, and a signal ends the process.
        with signals_stop(control.signalled):
            return fit(training, path, resume=resume, observers=observers, control=control,
                       account=Account(training))


def built(config: Config, path: Path, resume: bool, ranks: Ranks) -> Training:
    """Return the Training of a run, ready for its first update. `path`: the run folder, from which
    a resumed run reads its choices, and into which telemetry writes."""
    before = Run.at(path).environment if resume else None
    decisions = decide(config, before=before, ranks=ranks)
    refuse_what_cannot_fit(config, decisions, ranks.local_world)
    training = Training.build(config, decisions=decisions, ranks=ranks)
    if config.precision.telemetry_every and ranks.first:
        TELEMETRY.load()(training, path, every=config.precision.telemetry_every)
    return training
