"""Turns a Config into a Run: decide what this machine uses, refuse what cannot fit, build, train.

    run = train_here(config, path, resume, observers, control)      trains in this process
    training = built(config, path, resume, ranks)                   only decides and builds

The parts, in the order in which to read them: `build` decides and builds the model, `training` has
the update, `loop` repeats it, and `formulas` has the predictions. `rank` builds in the same way.
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
    with raise_out_of_memory_as_run_failure(config, "this run"), here(config) as ranks:
        # all ranks use the first rank's path: a default contains the time
        path = Path(ranks.agreed(path))
        training = built(config, path, resume, ranks)
        # from here on there is something to save; before, a signal ends the process
        with signals_stop(control.signalled):
            return fit(training, path, resume=resume, observers=observers, control=control,
                       account=Account(training))


def built(config: Config, path: Path, resume: bool, ranks: Ranks) -> Training:
    """Builds the training that will write the run folder `path`, with its telemetry."""
    before = Run.at(path).environment if resume else None
    decisions = decide(config, before=before, ranks=ranks)
    refuse_what_cannot_fit(config, decisions, ranks.local_world)
    training = Training.build(config, decisions=decisions, ranks=ranks)
    if config.precision.telemetry_every and ranks.first:
        TELEMETRY.load()(training, path, every=config.precision.telemetry_every)
    return training
