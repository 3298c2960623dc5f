"""Train a preset or a config file.

  lpkit train cpu-3m
  lpkit train cpu-3m --set steps=600 --set model.layers=6 --out runs/six
  lpkit train --out runs/six --resume
  lpkit train --out runs/six --resume --set steps=900

Ctrl-C and SIGTERM stop after the step at hand and keep a checkpoint; --resume goes on from the
newest good one. Of a run that goes on, steps may be raised; the learning rate then follows the
longer schedule.
"""

import sys
from argparse import ArgumentParser, Namespace
from contextlib import ExitStack
from pathlib import Path

from lpkit.config import parse_settings
from lpkit.errors import ConfigError
from lpkit.tables import text_table

EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="PRESET|config.yaml",
                        help="what to train; may be left out with --resume")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
                        help="change one setting, as often as needed")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default: a new one under "
                        "runs/)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")


def run(args: Namespace) -> dict:
    from tqdm import tqdm

    from lpkit.presets import resolve
    from lpkit.training.background import default_folder, train
    from lpkit.training.runs import Run

    if args.resume and not args.out:
        raise ConfigError("--resume needs --out DIR, the folder of the run to go on with")
    if args.target is None and not args.resume:
        raise ConfigError("what should be trained? Name a preset (cpu-3m) or a config file, or go "
                          "on with --resume --out DIR")
    config = (resolve(args.target, args.settings) if args.target is not None
              else Run.open(args.out).config.replace(parse_settings(args.settings)))
    out = args.out or default_folder(Path(args.target).stem)
    bars = []   # one, from the first step on: what is refused before it should not show a bar
    with ExitStack() as stack:

        def show(record):
            if not bars:
                bars.append(stack.enter_context(tqdm(total=config.steps, initial=record.step - 1,
                                                     unit="step", file=sys.stderr,
                                                     dynamic_ncols=True)))
            bar = bars[0]
            bar.set_postfix_str(f"loss {record.loss:.3f}, "
                                f"{config.tokens_per_step / record.step_seconds:,.0f} tokens/s",
                                refresh=False)
            bar.update(record.step - bar.n)

        summary = train(config, out=out, resume=args.resume, observers=[show]).summary
    for problem in summary["damaged_checkpoints"]:
        print(f"lpkit: passed over a damaged checkpoint: {problem}", file=sys.stderr)
    return summary | ({"exit_code": EXIT_CODES[by]} if (by := summary["stopped_by"]) in EXIT_CODES
                      else {})


def text(summary: dict) -> str:
    from lpkit.training.runs import described

    rows = [*described(summary), *((key, f"{choice['used']} (asked: {choice['asked']}; "
                                    f"{choice['why']})")
                                   for key, choice in summary["chosen"].items())]
    return text_table(rows)
