"""Who makes the runs of a sweep, if not workers beside it: jobs of submitit (on Slurm where there is
one, else here) or tasks of Ray. Whoever makes them sees the same folder under the same path.

An executor is `submit(where, imports, values)`, which returns a future (`runs.Job`).
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpkit.claims import runs
from lpkit.errors import ConfigError, in_one_line
from lpkit.files import locked

MINUTES = 24 * 60       # that submitit lets a job have; its own default is 5


def alone(where: str, imports: Sequence[str], values: Mapping[str, Any]) -> None:
    """Does as `runs.make`. A job that outlived its sweep is waited for, and its record holds."""
    lock = Path(f"{where}.lock")
    with locked(lock):
        if not Path(f"{where}.json").is_file():
            runs.make(where, imports, values)
        lock.unlink(missing_ok=True)


def submitit(out: Path, job: Mapping[str, Any], stack: ExitStack) -> runs.Submit:
    """`job`: as of https://github.com/facebookincubator/submitit, `update_parameters`."""
    from submitit import AutoExecutor

    executor = AutoExecutor(folder=out / "submitit")
    try:
        executor.update_parameters(**{"name": "lpkit", "timeout_min": MINUTES, **job})
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"job is none of submitit's: {in_one_line(str(error))}") from None

    def submit(*told: Any) -> runs.Job:
        future = executor.submit(alone, *told)
        stack.callback(lambda: future.done() or future.cancel(check=False))
        return future

    return submit


def ray(out: Path, job: Mapping[str, Any], stack: ExitStack) -> runs.Submit:
    """`job`: as of https://docs.ray.io, `ray.remote`: num_cpus, num_gpus and others."""
    import ray

    try:
        task = ray.remote(**{"max_retries": 0, **job})(alone)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"job is none of Ray's: {in_one_line(str(error))}") from None
    ray.init(log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    stack.callback(ray.shutdown)
    return lambda *told: task.remote(*told).future()


EXECUTORS = {"workers": None, "submitit": submitit, "ray": ray}
