"""Prepare the first run of a config: verify and time its kernels, and compile its update. The
command trains nothing and writes only to the cache.

  lpkit warm gpt2-124m
  lpkit warm gpt2-124m precision.recipe=fp8-tensorwise

All later runs of this user use the cache. Each user has a separate cache, because
lpkit executes the files in the cache, and another user could replace the files of a shared cache.
"""

from argparse import Namespace
from time import perf_counter

from lpkit.commands import asked, options, settings
from lpkit.files import own_cache
from lpkit.predict.units import duration

arguments = options({"target PRESET|config.yaml|RUN": "preset, config or run that you will train"},
                    settings)


def run(args: Namespace) -> dict:
    """Make one update on random tokens, which verifies, times and compiles all kernels. Return the
    seconds, the cache, and the choices of kernels."""
    from lpkit.parallel.processes import ranks_from_environment
    from lpkit.presets import resolve

    config, begun = resolve(args.target, asked(args)), perf_counter()
    ranks_from_environment(config)
    from lpkit.parallel.meeting import here  # imports torch
    from lpkit.training.build import decide
    from lpkit.training.formulas import raise_out_of_memory_as_run_failure, refuse_what_cannot_fit
    from lpkit.training.training import RandomTokens, Training

    with here(config) as ranks, raise_out_of_memory_as_run_failure(config, "an update"):
        decisions = decide(config, ranks=ranks)
        refuse_what_cannot_fit(config, decisions, ranks.local_world)
        training = Training.build(config, data=RandomTokens(config, decisions.device),
                                  decisions=decisions, ranks=ranks)
        float(training.update(0).loss)      # `float` waits until the device has finished
    return {"target": args.target, "seconds": perf_counter() - begun, "cache": f"{own_cache()}*",
            "chosen": training.decisions.record}


def text(result: dict) -> str:
    chosen = [f"  {key}: {choice['used']} ({choice['why']})"
              for key, choice in result["chosen"].items()]
    return "\n".join([f"prepared {result['target']} in {duration(result['seconds'])}; your runs "
                      f"use the cache {result['cache']}", *chosen])
