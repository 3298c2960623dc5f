"""Executors that train the runs of a claim or sweep in other places than worker processes: as jobs
of submitit (Slurm), or as tasks of Ray. All machines must see the folder of the runs under the same
path.

An executor is a function `executor(out, job, stack)` of the folder of the runs, the file's
arguments for each job, and an ExitStack for its clean-up. It returns a `runs.Submit`, and a
function that is true for an exception that means that the job was lost (killed, preempted), not
that the run failed. A run whose job was lost is started again.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpkit.claims import runs
from lpkit.errors import ConfigError, in_one_line
from lpkit.files import locked

Jobs = tuple[runs.Submit, Callable[[Any], bool]]


def alone(where: str, *arguments: Any) -> None:
    """Makes a run as `runs.make` does, if its record does not exist yet. If a job of an earlier
    command is still making the run, first waits for that job (by a lock)."""
    with locked(lock := Path(f"{where}.lock")):
        if not Path(f"{where}.json").is_file():
            runs.make(where, *arguments)
        lock.unlink(missing_ok=True)


def submitit(out: Path, job: Mapping[str, Any], stack: ExitStack) -> Jobs:
    """Submit runs as jobs of submitit. `job`: arguments of AutoExecutor.update_parameters,
    https://github.com/facebookincubator/submitit."""
    from submitit import AutoExecutor
    from submitit.core.utils import UncompletedJobError

    executor = AutoExecutor(folder=out / "submitit")
    try:
        # submitit's own default is 5 minutes
        executor.update_parameters(**{"timeout_min": 24 * 60, **job})
    except Exception as error:
        raise ConfigError(f"submitit refuses this job: {in_one_line(str(error))}") from None

    def submit(*arguments: Any) -> Any:
        """Submit `alone(*arguments)` as a job. Return submitit's Job, which is a future."""
        future = executor.submit(alone, *arguments)
        # at the end, cancel the job if its run has no record
        stack.callback(lambda: Path(f"{arguments[0]}.json").is_file() or future.done()
                       or future.cancel(check=False))
        return future

    # lost: exactly this class; an error that the run itself raised has a derived class
    return submit, lambda error: type(error) is UncompletedJobError


def ray(out: Path, job: Mapping[str, Any], stack: ExitStack) -> Jobs:
    """Submit runs as tasks of Ray. `job`: arguments of `ray.remote`, https://docs.ray.io."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        task = ray.remote(**{"max_retries": 0, **job})(alone)
    except Exception as error:
        raise ConfigError(f"Ray refuses this job: {in_one_line(str(error))}") from None
    ray.init(log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    stack.callback(ray.shutdown)
    return (lambda *arguments: task.remote(*arguments).future(),
            lambda error: isinstance(error, RayError) and not isinstance(error, RayTaskError))


# name in a file -> executor; None: worker processes (`runs.Workers`)
EXECUTORS = {"workers": None, "submitit": submitit, "ray": ray}
