"""Train a preset or a config file.

  lpkit train cpu-3m
  lpkit train cpu-3m steps=600 model.layers=6 --out runs/six
  lpkit train --out runs/six --resume
  lpkit train --out runs/six --resume steps=900
  lpkit train cpu-3m --processes 2

Ctrl-C, SIGTERM and SIGHUP (SSH closed) stop the run at the next micro-batch and write a checkpoint
of the last whole step. --resume continues from the newest undamaged checkpoint. When you resume,
you may raise `steps`; the learning rate then follows the longer schedule.
"""

import os
import shutil
import sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from lpkit.commands import a_folder, options, settings, target_and_asked
from lpkit.config import parse_settings
from lpkit.errors import ConfigError, in_one_line
from lpkit.tables import beside

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}


arguments = options({
    "target? PRESET|config.yaml": "preset or config file to train; not needed with --resume",
}, settings, {
    "--out DIR": (a_folder, "run folder (default: a new folder in runs/)"),
    "--resume": "continue the run in --out",
    "--processes N": (int, "train with N processes on this machine; each has a whole copy of the "
                           "model, unless parallel.* sets another layout")})


def run(args: Namespace) -> dict:
    """Train or resume, and return the summary of the run. Under torchrun, only rank 0 returns; the
    other ranks train and exit."""
    from tqdm import tqdm

    from lpkit.files import of_transformers
    from lpkit.presets import is_preset, resolve
    from lpkit.training.background import default_folder, train
    from lpkit.training.launch import launch
    from lpkit.training.runs import Run

    if args.resume and not args.out:
        raise ConfigError("--resume needs --out DIR, the folder of the run to continue")
    target, changes = target_and_asked(args)
    if target is None and not args.resume:
        raise ConfigError("what should lpkit train? Give a preset (cpu-3m) or a config file, or "
                          "continue a run with --resume --out DIR")
    if (target is not None and not is_preset(target) and Path(target).is_dir()
            and not of_transformers(Path(target))):
        raise ConfigError(f"{target} is a folder: continue its run by --resume --out {target}, "
                          f"or start from its weights with a preset and start.run={target}")
    config = (resolve(target, changes) if target is not None
              else Run.open(args.out).config.replace(parse_settings(changes)))
    out = args.out or default_folder(Path(target).stem)
    world = os.environ.get("WORLD_SIZE", "1")       # set by torchrun
    if world != "1" and args.processes is not None:
        raise ConfigError(f"--processes={args.processes} starts processes, but torchrun started "
                          f"{world} already; leave it out")
    if world != "1" and os.environ.get("RANK", "0") != "0":     # only rank 0 prints
        train(config, out=out, resume=args.resume)
        sys.exit(0)
    bar = None      # made at the first step, so that an error before this step shows no bar

    def show(record):
        """Show a StepRecord in the progress bar."""
        nonlocal bar
        if bar is None:
            bar = tqdm(total=config.steps, initial=record.step - 1, unit="step", file=sys.stderr,
                       dynamic_ncols=True)
        bar.set_postfix_str(f"loss {record.loss:.3f}, "
                            f"{config.tokens_per_step / record.step_seconds:,.0f} tokens/s",
                            refresh=False)
        bar.update(record.step - bar.n)

    try:
        more = {"out": out, "resume": args.resume, "observers": [show]}
        summary = (train(config, **more) if args.processes is None else
                   launch(config, processes=args.processes, **more).result()).summary
    finally:
        if bar is not None:
            with suppress(OSError):     # the terminal is closed
                bar.close()
    for problem in summary["damaged"]:
        print(f"lpkit: skipped a damaged file: {in_one_line(problem)}", file=sys.stderr)
    stopped_by = summary["stopped_by"]
    return summary | ({"exit_code": EXIT_CODES[stopped_by]} if stopped_by in EXIT_CODES else {})


def text(summary: dict) -> str:
    from lpkit.training.runs import described

    chosen = [(key, f"{choice['used']} (requested: {choice['asked']}; {choice['why']})")
              for key, choice in summary["chosen"].items()]
    rows = [*described(summary), *chosen]
    at, width = max(len(name) for name, _ in rows) + 2, shutil.get_terminal_size().columns
    return "\n".join(beside(name, value, at, width) for name, value in rows)
