"""Where the kit can run beyond this checkout (docs/anywhere.md): images, jobs and the file for a
room without a network.

What a tool can parse is parsed by it: Dockerfiles by dockerfile-parse (and by hadolint where it
is), jobs by bash, by Kubernetes' and JupyterHub's own schemas (tests/schemas), and by SkyPilot and
Slurm where they are.

Only these tests catch: an image that lacks a file of its command, a value that breaks out of a
job's shell, a job that its place does not read, and a file for a room without a network that
installs what was not packed.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import time
from pathlib import Path

import jsonschema
import pytest
import yaml

from hosting.lab import PORT
from lpkit import cli
from lpkit.parallel import places

ROOT = Path(__file__).parents[2]
BINDER = ROOT / "binder"
DOCKERFILES = sorted(BINDER.glob("*.Dockerfile"))
BASE = r"[a-z/]+:\d+\.\d+\.\d+[\w.-]*"       # a whole version, and no `latest`


def schema(name):
    return json.loads((ROOT / "tests" / "schemas" / f"{name}.json").read_text())


# ---- images

@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_is_pinned_and_runs_as_nobody_special(path, tmp_path):
    from dockerfile_parse import DockerfileParser

    parser = DockerfileParser(path=str(tmp_path / "Dockerfile"))
    parser.content = path.read_text()
    steps = [(step["instruction"], step["value"]) for step in parser.structure]
    assert re.fullmatch(BASE, parser.baseimage) and len(parser.parent_images) == 1
    assert int([value for what, value in steps if what == "USER"][-1]) >= 1000
    health = next(json.loads(value[value.index("["):]) for what, value in steps
                  if what == "HEALTHCHECK")
    assert f"127.0.0.1:{PORT}/api" in health[-1]
    compile(health[-1], path.name, "exec")
    assert [json.loads(value) for what, value in steps if what == "CMD"][-1] == ["lpkit", "lab",
        "--no-browser"]
    for what, value in steps:
        if what in ("COPY", "ADD"):     # nothing but what is named: no .git, no keys
            sources = [word for word in value.split()[:-1] if not word.startswith("--")]
            assert what == "COPY" and all((ROOT / source).exists() and source != "."
                                          for source in sources)
    runs = " ".join(value for what, value in steps if what == "RUN")
    assert "constraints.txt" in runs or ("binder/postBuild" in runs
        and "constraints.txt" in (BINDER / "postBuild").read_text())
    assert not re.search(r"(?i)token|password|secret|index-url",
                         parser.content.replace("which has its token", ""))


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_is_enough_for_its_command(path, tmp_path):
    """No image is built here: the files that it would have start its last command, and its
    HEALTHCHECK passes."""
    from dockerfile_parse import DockerfileParser

    parser = DockerfileParser(path=str(tmp_path / "Dockerfile"))
    parser.content = path.read_text()
    steps = [(step["instruction"], step["value"]) for step in parser.structure]
    (image := tmp_path / "image").mkdir()
    (home := tmp_path / "home").mkdir()
    for value in (value for what, value in steps if what == "COPY"):
        *sources, target = [word for word in value.split() if not word.startswith("--")]
        for source in sources:
            if (ROOT / source).is_dir():       # as Docker does: a folder's content
                shutil.copytree(ROOT / source, image / target,
                                ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, image / target)
    command = next(json.loads(value) for what, value in steps if what == "CMD")
    health = next(json.loads(value[value.index("["):]) for what, value in steps
                  if what == "HEALTHCHECK")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(image), "HOME": str(home), "XDG_DATA_HOME": "",
                        "XDG_CACHE_HOME": ""}
    where = subprocess.run([sys.executable, "-P", "-c", "import lpkit; print(lpkit.__file__)"],
                           env=env, cwd=home, capture_output=True, text=True, check=True)
    assert Path(where.stdout.strip()).is_relative_to(image)     # and not this checkout
    begin = [sys.executable, "-P", "-m", command[0], *command[1:], "--port", str(port)]
    with (tmp_path / "log").open("w+") as log, subprocess.Popen(begin, cwd=home, env=env,
            stdout=log, stderr=log) as lab:
        try:
            ask = [sys.executable, "-c", health[-1].replace(str(PORT), str(port))]
            while subprocess.run(ask, capture_output=True, check=False).returncode:
                assert lab.poll() is None, Path(log.name).read_text()
                time.sleep(0.5)
        finally:
            lab.terminate()


def test_hadolint_has_nothing_to_say():
    hadolint = shutil.which("hadolint") or pytest.skip("hadolint is not here")
    subprocess.run([hadolint, *DOCKERFILES], check=True)


def test_binder_still_reads_its_environment():
    """A file of exactly this name would take over:
    https://repo2docker.readthedocs.io/en/latest/configuration/"""
    assert ((BINDER / "environment.yml").is_file() and not (BINDER / "Dockerfile").exists()
            and not (ROOT / "Dockerfile").exists())


def test_the_devcontainer_names_what_there_is():
    config = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    dockerfile = ROOT / ".devcontainer" / config["build"]["dockerfile"]
    assert (dockerfile.is_file() and (ROOT / ".devcontainer" / config["build"]["context"]).resolve()
            == ROOT)
    assert f"--owner={config['remoteUser']}" in dockerfile.read_text()
    assert (config["forwardPorts"] == [PORT]
            and (ROOT / config["postCreateCommand"].split()[1]).is_file())


# ---- jobs

HOSTILE = ["cpu-3m", "a=; touch HACKED #", "b=$(touch HACKED)", "c=`touch HACKED`",
           "d='\" || touch HACKED", "e=\n#SBATCH --wrap=touch", "f=$$(HOME) ${HOME} $(HOME)",
           "g=- x: {y}\n...\n---\nkind: Pod", "h=é\\", "--out=/x y/z", "--resume"]
STUB = '#!/bin/bash\n[ "$1" = --cpus-per-task=2 ] && exec "${@:3}"\nprintf "%s\\0" "$@" > "$SAID"\n'


def job(**other):
    return places.Job(**{"name": "six", "train": tuple(HOSTILE), "nodes": 3, "processes": 2,
                         "gpu": "h100", **other})


def started(script, tmp_path):
    """What torchrun is given when bash runs the script among stubs."""
    for name in ("python", "srun", "scontrol", "home/lpkit-venv/bin/torchrun"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/bash\necho first\n" if name == "scontrol" else STUB)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "job"], check=True)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(tmp_path / "said"),
           "HOME": str(tmp_path / "home"), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]",
           "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    subprocess.run(["bash", tmp_path / "job"], check=True, cwd=tmp_path, env=env)
    assert not (tmp_path / "HACKED").exists()
    return (tmp_path / "said").read_bytes().decode().split("\0")[:-1]


@pytest.mark.parametrize("name", ["here", "slurm", "sky"])
def test_no_value_breaks_out_of_a_shell(name, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "PYTHON",
                        f"{shlex.quote(str(tmp_path / 'python'))} -m torch.distributed.run")
    text = places.PLACES[name].text(job())
    words = started(yaml.safe_load(text)["run"] if name == "sky" else text, tmp_path)
    at = words.index("lpkit")
    assert words[at - 1:] == ["-m", "lpkit", "train", *HOSTILE]
    options = words[words.index("--nnodes"):at - 1]
    assert options[:4] == ["--nnodes", "3", "--nproc-per-node", "2"]
    assert options[4:] == {"here": ["--standalone"],
                           "slurm": ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint",
                                     "first:20007"],
                          "sky": ["--node-rank", "1", "--master-port", "29500", "--master-addr",
                                  "10.0.0.1"]}[name]


def kubernetes(word):
    """Expands as
    https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container/ has
    it: $(NAME) is a variable, $$ a dollar."""
    return re.sub(r"\$(\$|\(\w+\))", lambda match: "$" if match[1] == "$" else "EXPANDED", word)


def test_a_trainjob_is_one_for_kubernetes():
    manifest = yaml.safe_load(places.PLACES["k8s"].text(job(gpu="nvidia.com/gpu")))
    jsonschema.validate(manifest, schema("TrainJob"))
    with pytest.raises(jsonschema.ValidationError):     # the schema can say no
        jsonschema.validate({**manifest, "spec": {**manifest["spec"], "nodes": 3}},
                            schema("TrainJob"))
    trainer = manifest["spec"]["trainer"]
    assert [kubernetes(word) for word in trainer["command"]] == ["torchrun", "-m", "lpkit",
        "train", *HOSTILE]
    assert ((trainer["numNodes"], trainer["numProcPerNode"], trainer["resourcesPerNode"]["limits"])
            == (3, 2, {"nvidia.com/gpu": 2}))


def test_the_runtime_is_what_jobs_name_and_mounts_where_they_write():
    runtime = yaml.safe_load((BINDER / "kubeflow-runtime.yaml").read_text())
    jsonschema.validate(runtime, schema("TrainingRuntime"))
    named = yaml.safe_load(places.PLACES["k8s"].text(job()))["spec"]["runtimeRef"]
    assert (named["kind"], named["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"]
    assert places.PLACES["k8s"].runs in [mount["mountPath"]
        for mount in pod["containers"][0]["volumeMounts"]]
    assert (f"--uid {pod['securityContext']['runAsUser']} "
            in (BINDER / "cuda.Dockerfile").read_text())


def test_the_rooms_values_are_the_charts():
    values = yaml.safe_load((BINDER / "jupyterhub-values.yaml").read_text())
    jsonschema.validate(values, schema("jupyterhub-values"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, "singleuser": {**values["singleuser"], "memroy": 1}},
                            schema("jupyterhub-values"))
    assert f"USER {values['singleuser']['uid']}\n" in (BINDER / "cpu.Dockerfile").read_text()


@pytest.mark.parametrize("gpu", [None, "H100"])
def test_a_task_is_one_for_skypilot(gpu):
    text = places.PLACES["sky"].text(job(gpu=gpu))
    jsonschema.validate(yaml.safe_load(text), schema("sky-task"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**yaml.safe_load(text), "nodes": 3}, schema("sky-task"))


@pytest.mark.parametrize("gpu", [None, "H100"])
def test_skypilot_itself_reads_a_task(gpu, tmp_path):
    sky = pytest.importorskip("sky", reason="SkyPilot is not here")
    text = places.PLACES["sky"].text(job(gpu=gpu))
    (tmp_path / "task.yaml").write_text(text)
    task = sky.Task.from_yaml(str(tmp_path / "task.yaml"))
    assert task.num_nodes == 3 and shlex.split(task.run)[-len(HOSTILE):] == HOSTILE


def launch(capsys, *words):
    code = cli.main(["launch", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_what_is_asked_is_in_the_job(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = launch(capsys, "cpu-3m", "steps=7", "--on", "slurm", "--nodes", "2",
                          "--processes", "2", "--gpu", "h100", "--name", "six")
    text = (tmp_path / "six.sbatch").read_text()
    assert (code == 0 and text == out["job"] and out["command"] == ["sbatch", "six.sbatch"]
            and out["answer"] is None)
    assert f"train cpu-3m steps=7 parallel.data=4 --out={tmp_path}/runs/six --resume" in text
    options = dict(word[2:].split("=") for line in text.splitlines() if line.startswith("#SBATCH")
                   for word in line.split()[1:] if "=" in word)
    assert options == {"job-name": "six", "output": "six-%j.log", "open-mode": "append",
                       "nodes": "2", "ntasks-per-node": "1", "cpus-per-task": "2",
                       "gpus-per-node": "h100:2",
                      "signal": "B:USR1@120"} and "--requeue" in text
    assert launch(capsys, "gpt2-124m", "parallel.shard=4", "--on", "k8s", "--nodes", "2",
                  "--processes", "2")[1]["job"].count("parallel") == 1


@pytest.mark.parametrize("words, message", [
    ("cpu-3m --on slrm", "there is no place 'slrm'; did you mean 'slurm'?"),
    ("cpu-3m --on here --nodes 0", "nodes must be positive, got 0"),
    ("cpu-3m --processes -1", "processes must be positive, got -1"),
    ("cpu-3m --name ../six", "name must be at most 40 small letters, digits and dashes, and begin "
                             "with a letter, got '../six'"),
    ("cpu-3m --gpu h100\n#SBATCH", "gpu must be what the place calls a GPU"),
    ("cpu-3m --on sky parallel.shard=2 --nodes 3", "is 2 devices, not 3; use 2 devices"),
    ("mine.yaml --on k8s", "Give a preset (cpu-3m) and settings; k8s reads no files here"),
    ("--on slurm", "what should lpkit train? Give a preset (cpu-3m) or a config file"),
    ("cpu-3m --on sky --submit", "cpu-3m.sky.yaml was written, but `sky` is not installed on this "
                                 "machine; on a machine that has it, run: sky jobs launch --yes "
                                 "cpu-3m.sky.yaml"),
])
def test_what_is_wrong_is_one_sentence(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    code, out, err = launch(capsys, *words.split(" "))
    assert (code, out) == (2, None) and message in err and err.count("\n") == 1, err
    assert ([path.name for path in tmp_path.iterdir()]
            == (["cpu-3m.sky.yaml"] if "was written" in message else []))


def test_a_place_that_refuses_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho 'error: the server has no TrainJob' >&2; "
                                      "exit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    code, _, err = launch(capsys, "cpu-3m", "--on", "k8s", "--submit")
    assert (code == 2 and "`kubectl` refused it (error: the server has no TrainJob); change "
                          "the file, then run: kubectl apply -f cpu-3m.k8s.yaml" in err
            and err.count("\n") == 1)
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho \"$@\"\n")
    assert (launch(capsys, "cpu-3m", "--on", "k8s", "--submit")[1]["answer"]
            == "apply -f cpu-3m.k8s.yaml")


def shell(*words, **kwargs):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True,
                          **kwargs).stdout


def lines(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_slurm_starts_a_requeued_job_again_and_it_goes_on(tmp_path):
    """Sent back into the queue halfway, a job of 2 ranks ends with the losses of an unbroken run,
    all of them."""
    if not shutil.which("sinfo") or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("no Slurm answers here")
    lpkit = [sys.executable, "-m", "lpkit"]
    run = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    words = ["cpu-3m", "steps=60", "checkpoint_every=20"]
    number = json.loads(shell(*lpkit, "launch", *words, "--on", "slurm", "--processes", 2, "--name",
                              "again", "--submit", "--json", **run))["answer"].split()[-1]
    while len(lines(tmp_path / "runs" / "again")) < 30:
        time.sleep(0.1)
    shell("scontrol", "requeue", number)
    while "JobState=COMPLETED" not in (job := shell("scontrol", "show", "job", number)):
        assert "FAILED" not in job
        time.sleep(1)
    shell(*lpkit, "train", *words, "--processes", 2, "--out", "runs/unbroken", **run)
    again, unbroken = (lines(tmp_path / "runs" / name) for name in ("again", "unbroken"))
    assert "Restarts=1" in job and [line["step"] for line in again] == list(range(1, 61))
    assert [line["loss"] for line in again] == [line["loss"] for line in unbroken]


# ---- a room without a network

def packed(folder, **other):
    """What `install` finds: a file, its manifest, itself."""
    (folder / "wheels").mkdir()
    (folder / "wheels" / "a.whl").write_text("a wheel")
    shutil.copyfile(BINDER / "offline.py", folder / "install")
    files = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
             for name in ("install", "wheels/a.whl")}
    manifest = {"lpkit": "0", "extras": "", "python": sysconfig.get_python_version(),
                "platform": sysconfig.get_platform(), "files": files, **other}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def damage(folder):
    (folder / "wheels" / "a.whl").write_text("a wheeL")


def plant(folder):
    (folder / "wheels" / "b.whl").write_text("another")


def lose(folder):
    (folder / "wheels" / "a.whl").unlink()


def cut(folder):
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:-5])


def other_python(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "python": "3.1"}))


@pytest.mark.parametrize("what, message", [(damage, "wheels/a.whl is damaged"),
    (plant, "wheels/b.whl is not in manifest.json"), (lose, "wheels/a.whl is not there"),
                                        (cut, "manifest.json is damaged"),
    (other_python, "these wheels are for python 3.1")])
def test_nothing_is_installed_of_what_is_not_as_it_was_packed(what, message, tmp_path):
    packed(tmp_path)
    what(tmp_path)
    done = subprocess.run([sys.executable, tmp_path / "install", tmp_path / "venv"],
                          capture_output=True, text=True)
    assert (done.returncode == 1 and done.stderr.startswith(f"install: {message}")
            and done.stderr.count("\n") == 1 and not (tmp_path / "venv").exists())


def test_a_file_that_cannot_be_packed_is_not_there(capsys, monkeypatch, tmp_path):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull,
                        "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["pack", str(tmp_path / "room.tar")]) == 2
    assert ("lpkit: pip could not bring the wheels (ERROR: " in capsys.readouterr().err
            and not list(tmp_path.iterdir()))
    assert (cli.main(["pack", str(tmp_path / "room.zip")]) == 2
            and "must be NAME.tar" in capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_room_without_a_network(tmp_path):
    """Packed here, installed in a network namespace with nothing but loopback, where a notebook
    then runs to its end and its claim holds."""
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        pytest.skip("this user may make no network namespace")
    shell(sys.executable, "-m", "lpkit", "pack", tmp_path / "room.tar",
          env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    with tarfile.open(tmp_path / "room.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lpkit-offline", "room.tar"]
    (tmp_path / "room").write_text(f"set -e; ip link set lo up; ! ip route | grep "
                                  f".\n{shlex.quote(sys.executable)} lpkit-offline/install venv\n"
                                  "venv/bin/lpkit notebook 00 --tier smoke --json > "
                                  "notebook.json\n")
    clean = {key: value for key, value in os.environ.items()
             if not key.startswith(("PIP_", "PYTHONPATH"))}
    shell("unshare", "-n", "bash", "room", cwd=tmp_path,
          env={**clean, "XDG_CACHE_HOME": str(tmp_path / "cache"),
               "XDG_DATA_HOME": str(tmp_path / "data")})
    assert json.loads((tmp_path / "notebook.json").read_text())["result"] == "holds"
