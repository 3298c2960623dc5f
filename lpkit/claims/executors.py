"""Executors that make the runs of a file in place of workers: jobs of submitit or tasks of Ray.
They must see the same folder under the same path.

Each is a function `executor(out, job, stack)`. It returns a `runs.Submit`, and a function that is
true for an exception of a job which is no error of the run itself. Such a run is started again.
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
    """Makes the run as `runs.make` does, once. If a job of an earlier command still makes this run,
    waits for that job."""
    with locked(lock := Path(f"{where}.lock")):
        if not Path(f"{where}.json").is_file():
            runs.make(where, *arguments)
        lock.unlink(missing_ok=True)


def submitit(out: Path, job: Mapping[str, Any], stack: ExitStack) -> Jobs:
    """`job`: arguments of AutoExecutor.update_parameters,
    https://github.com/facebookincubator/submitit."""
    from submitit import AutoExecutor
    from submitit.core.utils import UncompletedJobError

    executor = AutoExecutor(folder=out / "submitit")
    try:
        executor.update_parameters(**{"timeout_min": 24 * 60, **job})      # submitit's default is 5
    except Exception as error:
        raise ConfigError(f"job is none of submitit's: {in_one_line(str(error))}") from None

    def submit(*arguments: Any) -> Any:
        future = executor.submit(alone, *arguments)
        stack.callback(lambda: Path(f"{arguments[0]}.json").is_file() or future.done()
                       or future.cancel(check=False))
        return future

    # a run's error has a derived class
    return submit, lambda error: type(error) is UncompletedJobError


def ray(out: Path, job: Mapping[str, Any], stack: ExitStack) -> Jobs:
    """`job`: arguments of `ray.remote`, https://docs.ray.io."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        task = ray.remote(**{"max_retries": 0, **job})(alone)
    except Exception as error:
        raise ConfigError(f"job is none of Ray's: {in_one_line(str(error))}") from None
    ray.init(log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    stack.callback(ray.shutdown)
    return (lambda *arguments: task.remote(*arguments).future(),
            lambda error: isinstance(error, RayError) and not isinstance(error, RayTaskError))


EXECUTORS = {"workers": None, "submitit": submitit, "ray": ray}
