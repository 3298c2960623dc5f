"""Write a job file that trains on one or several machines. With --submit, also start the job.

  lpkit launch cpu-3m --processes 2                         a torchrun command for this machine
  lpkit launch gpt2-124m --on slurm --nodes 2 --processes 8 --gpu h100 --submit
  lpkit launch gpt2-124m --on k8s --nodes 2 --processes 8 --gpu nvidia.com/gpu
  lpkit launch gpt2-124m --on sky --nodes 2 --processes 8 --gpu H100
"""

import os
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

from lpkit.commands import options, settings, target_and_asked
from lpkit.errors import ConfigError, in_one_line, pick
from lpkit.files import expanded, write_atomically

arguments = options({"target? PRESET|config.yaml": "what to train"}, settings, {
    "--on PLACE=here": "place of the job: here, slurm, k8s or sky (default here)",
    "--nodes N=1": (int, "number of machines (default 1)"),
    "--processes P=1": (int, "number of processes per machine (default 1)"),
    "--gpu KIND": "request one GPU per process; KIND is its name in PLACE (default: no GPU)",
    "--name NAME": "name of the job (default: the name of the target)",
    "--out DIR": "run folder, which all machines must be able to write",
    "--submit": "also start the job"})


def run(args: Namespace) -> dict:
    """Write the job file, and with --submit start the job. Return the file's name and text, the
    command that starts the job, and its answer."""
    from lpkit.parallel.places import PLACES, Job
    from lpkit.presets import is_preset, resolve
    from lpkit.techniques import layouts

    place, (target, changes) = pick(PLACES, args.on, "place"), target_and_asked(args)
    if target is None or not (place.sees or is_preset(target)):
        more = "or a config file" if place.sees else f"and settings; {args.on} reads no files here"
        raise ConfigError(f"what should lpkit train? Give a preset (cpu-3m) {more}")
    config, name = resolve(target, changes), args.name or Path(target).stem.lower()
    job = Job(name=name, train=(), nodes=args.nodes, processes=args.processes, gpu=args.gpu)
    out, world = args.out or f"{place.runs}/{name}", job.nodes * job.processes
    # the job may start in another folder, so give it absolute paths
    if place.sees:
        out = os.path.abspath(expanded(out))
        target = target if is_preset(target) else os.path.abspath(expanded(target))
    # several processes without a layout: each process is a replica
    if config.parallel.devices == 1 < world:
        config = config.replace({"parallel.data": world})
        changes = [*changes, f"parallel.data={world}"]
    layouts.check(config, config.parallel, world)
    layouts.refuse_untrainable(config)
    words = [target, *changes, *(f"--import={module}" for module in args.imports), f"--out={out}"]
    job, file = Job(**{**vars(job), "train": (*words, "--resume")}), Path(f"{name}.{place.suffix}")
    command, script = [*place.submit, str(file)], place.text(job)
    write_atomically(file, script)
    answer = _handed_on(command, f"{file} was written, but ") if args.submit else None
    return {"on": args.on, "file": str(file), "job": script, "command": command, "run_dir": out,
            "answer": answer}


def _handed_on(command: list[str], written: str) -> str:
    """Start the job by `command`, and return what the command prints. `written`: the beginning of
    error messages."""
    tool, by_hand = shutil.which(command[0]), " ".join(command)
    if tool is None:
        raise ConfigError(f"{written}`{command[0]}` is not installed on this machine; on a machine "
                          f"that has it, run: {by_hand}")
    if command[0] == "bash":
        os.execv(tool, command)     # replaces this process, so that the run gets its signals
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = in_one_line((done.stderr or done.stdout).strip()[-300:])
        raise ConfigError(f"{written}`{command[0]}` refused it ({reason}); change the "
                          f"file, then run: {by_hand}")
    return done.stdout.strip()


def text(result: dict) -> str:
    how = result["answer"] or f"To start the job: {' '.join(result['command'])}"
    return f"Wrote the job to {result['file']}. Its run folder is {result['run_dir']}. {how}"
