"""Places where a run's processes can be started: a row each, and the file of a job, made from it.

Every job starts torchrun on each node, and that `lpkit train ... --resume`, which begins a run that
is not there and goes on with one that is, from its newest good checkpoint. So recovery from a
preemption is the place's own affair: it starts the same job again. Values reach a file through
`shlex.join` or `yaml.safe_dump`.

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
API = "trainer.kubeflow.org"


@dataclass(frozen=True, kw_only=True)
class Job(Checked):
    """words: of `lpkit train`; gpu: what the place calls it, one a process; None: none is asked for"""

    name: Annotated[str, NAME]
    words: tuple[str, ...]
    nodes: Count
    processes: Count        # on each node
    gpu: Annotated[str, GPU] | None

    def torchrun(self, start: str, where: str) -> str:
        """The command for a shell. `start` and `where` are the place's, in its shell's words."""
        return (f"{start} --nnodes {self.nodes} --nproc-per-node {self.processes} {where} -m lpkit "
                f"train {shlex.join(self.words)}")


HERE = f"{shlex.quote(sys.executable)} -m torch.distributed.run"


def here(job: Job) -> str:
    return f"#!/bin/bash\nexec {job.torchrun(HERE, '--standalone')}\n"


def slurm(job: Job) -> str:
    gpus = f"#SBATCH --gpus-per-node={job.gpu}:{job.processes}\n" if job.gpu else ""
    meet = ('--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint '
            '"$first:$((20000 + SLURM_JOB_ID % 20000))"')
    return f"""#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={job.processes}
{gpus}#SBATCH --output={job.name}-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
# 120 s before its time is up the job goes back into the queue. Its ranks then hear SIGTERM and save,
# as they do when it is preempted; KillWait of slurm.conf says how long they may take.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task={job.processes} --kill-on-bad-exit=1 {job.torchrun(HERE, meet)} &
step=$!
wait "$step" || wait "$step"    # a signal ends the first wait
"""


def kubernetes(job: Job) -> str:
    """The runtime of this name has the image, the volume and what happens after a preemption; it
    says to torchrun by PET_* how many there are, and which one this is."""
    # Kubernetes would put variables in the place of $(NAME)
    command = [word.replace("$", "$$") for word in ("torchrun", "-m", "lpkit", "train", *job.words)]
    trainer = {"command": command, "numNodes": job.nodes, "numProcPerNode": job.processes,
               "resourcesPerNode": {"limits": {job.gpu or "cpu": job.processes}}}
    return yaml.safe_dump({
        "apiVersion": f"{API}/v1alpha1", "kind": "TrainJob", "metadata": {"name": job.name}, "spec": {
            "runtimeRef": {"apiGroup": API, "kind": "TrainingRuntime", "name": "lpkit"},
            "trainer": trainer}}, sort_keys=False)


def sky(job: Job) -> str:
    asked = ({"accelerators": f"{job.gpu}:{job.processes}"} if job.gpu else
             {"cpus": f"{job.processes}+"})
    where = ('--node-rank "$SKYPILOT_NODE_RANK" --master-port 29500 --master-addr '
             '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"')
    return yaml.safe_dump({
        "name": job.name, "workdir": ".", "num_nodes": job.nodes,
        "resources": {"use_spot": True, **asked},
        "file_mounts": {"/lpkit-runs": {"name": f"lpkit-runs-{job.name}", "mode": "MOUNT"}},
        "setup": "uv venv --seed --python 3.12 ~/lpkit-venv\n"
                 "~/lpkit-venv/bin/python -m pip install -c constraints.txt .\n",
        "run": job.torchrun("~/lpkit-venv/bin/torchrun", where) + "\n"}, sort_keys=False)


class Place(NamedTuple):
    text: Callable[[Job], str]
    suffix: str
    submit: tuple[str, ...]
    runs: str = "/lpkit-runs"       # where its nodes see run folders
    sees: bool = False              # nodes see the files of the machine that asks


PLACES = {
    "here": Place(here, "sh", ("bash",), "runs", sees=True),
    "slurm": Place(slurm, "sbatch", ("sbatch",), "runs", sees=True),
    "k8s": Place(kubernetes, "k8s.yaml", ("kubectl", "apply", "-f")),
    "sky": Place(sky, "sky.yaml", ("sky", "jobs", "launch", "--yes")),
}
