"""Job files for the places where a run can be started: this machine, Slurm, Kubernetes, SkyPilot.

Every job starts torchrun on each node, with `lpkit train ... --resume`. This command starts the run
if its folder does not exist, and otherwise continues from its newest good checkpoint. So after a
preemption the place only has to start the same job again. All values are quoted by `shlex.join` or
`yaml.safe_dump`.

Sources: https://slurm.schedmd.com/sbatch.html; https://github.com/kubeflow/trainer (v2, TrainJob);
https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import yaml

from lpkit.values import Checked, Count, check

NAME = check(lambda name: re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name) is not None,
             "at most 40 small letters, digits and dashes, and begin with a letter")
GPU = check(lambda kind: re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9./_-]{0,62}", kind) is not None,
            "what the place calls a GPU: letters, digits, dots, slashes and dashes")
PYTHON = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
API = "trainer.kubeflow.org"


@dataclass(frozen=True, kw_only=True)
class Job(Checked):
    """One run as a job.

    train: the words after `lpkit train`
    nodes: number of machines
    gpu:   the GPU of each process, by the name that the place uses; None: processes use CPUs
    """

    name: Annotated[str, NAME]
    train: tuple[str, ...]
    nodes: Count
    processes: Count        # on each node
    gpu: Annotated[str, GPU] | None

    def torchrun(self, start: str, where: str) -> str:
        """Return the command line of torchrun. `start`: the program. `where`: the arguments with
        which the nodes find each other."""
        return (f"{start} --nnodes {self.nodes} --nproc-per-node {self.processes} {where} -m lpkit "
                f"train {shlex.join(self.train)}")


def here(job: Job) -> str:
    """Return a shell script that starts the job on this machine."""
    return f"#!/bin/bash\nexec {job.torchrun(PYTHON, '--standalone')}\n"


def slurm(job: Job) -> str:
    """Return a script for sbatch."""
    gpus = f"#SBATCH --gpus-per-node={job.gpu}:{job.processes}\n" if job.gpu else ""
    meet = ('--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint '
            '"$first:$((20000 + SLURM_JOB_ID % 20000))"')
    return f"""#!/bin/bash
#SBATCH --job-name={job.name} --output={job.name}-%j.log --open-mode=append
#SBATCH --nodes={job.nodes} --ntasks-per-node=1 --cpus-per-task={job.processes}
{gpus}#SBATCH --requeue --signal=B:USR1@120
# Slurm sends USR1 120 s before the time limit. Requeueing sends SIGTERM to the ranks, as a
# preemption does, and they save a checkpoint.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={job.processes} --kill-on-bad-exit=1 {job.torchrun(PYTHON, meet)} &
wait $! || wait $!      # a signal ends the first wait
"""


def kubernetes(job: Job) -> str:
    """Return a TrainJob of Kubeflow Trainer. binder/kubeflow-runtime.yaml has the rest of the pod.
    torchrun reads its node's number from environment variables PET_*."""
    # "$$" is a literal "$": Kubernetes would replace $(NAME) by a variable
    command = [word.replace("$", "$$") for word in ("torchrun", "-m", "lpkit", "train", *job.train)]
    return yaml.safe_dump({
        "apiVersion": f"{API}/v1alpha1", "kind": "TrainJob", "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"apiGroup": API, "kind": "TrainingRuntime", "name": "lpkit"},
            "trainer": {"command": command, "numNodes": job.nodes, "numProcPerNode": job.processes,
                        "resourcesPerNode": {"limits": {job.gpu or "cpu": job.processes}}}}})


def sky(job: Job) -> str:
    """Return a task of SkyPilot, on spot machines, with a bucket for the run folders."""
    asked = ({"accelerators": f"{job.gpu}:{job.processes}"} if job.gpu else
             {"cpus": f"{job.processes}+"})
    where = ('--node-rank "$SKYPILOT_NODE_RANK" --master-port 29500 --master-addr '
             '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"')
    return yaml.safe_dump({
        "name": job.name, "workdir": ".", "num_nodes": job.nodes,
        "resources": {"use_spot": True, **asked},
        "file_mounts": {"/lpkit-runs": {"name": f"lpkit-runs-{job.name}", "mode": "MOUNT"}},
        "setup": "pip install uv && uv venv --seed --python 3.12 ~/lpkit-venv && "
                 "~/lpkit-venv/bin/python -m pip install -c constraints.txt .",
        "run": job.torchrun("~/lpkit-venv/bin/torchrun", where)})


class Scheduler(NamedTuple):
    """A place where a job can be started."""

    text: Callable[[Job], str]      # returns the text of the job's file
    suffix: str                     # of the job's file
    submit: tuple[str, ...]         # the command that submits the file, without the file's name
    runs: str = "/lpkit-runs"       # the folder of run folders, as the nodes of the place see it
    sees: bool = False      # True: the nodes see the files of the machine that submits the job


PLACES = {
    "here": Scheduler(here, "sh", ("bash",), "runs", sees=True),
    "slurm": Scheduler(slurm, "sbatch", ("sbatch",), "runs", sees=True),
    "k8s": Scheduler(kubernetes, "k8s.yaml", ("kubectl", "apply", "-f")),
    "sky": Scheduler(sky, "sky.yaml", ("sky", "jobs", "launch", "--yes")),
}
