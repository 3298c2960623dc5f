"""The typed front door to nbclient, tried on throwaway notebooks that import nothing heavy.

Only these tests catch: a value or a code that is taken for a parameter, a claim that is recorded
otherwise than its cell ended, a record that lies after a kill or on a full disk, and an output that
is overwritten.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from click.testing import CliRunner
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from papermill.__main__ import papermill

from hosting import notebooks, parameters, runner
from hosting.commands import notebook as command
from lessons.judging import learner
from lpkit import processes
from lpkit.errors import ConfigError
from tests import NOTEBOOKS, smoke_copies
from tests.attack import patience

PARAMETERS = '''\
from typing import Literal

tier: Literal["smoke", "cpu", "gpu"] = "cpu"  # how large
steps: int = 3  # updates
lr: float = 1e-3  # largest learning rate
compiled: bool = False  # torch.compile
name: str = "a"  # any text
widths: tuple[int, ...] = (64, 128)  # of the model
threads: int | None = None  # None: all'''
TAKEN = parameters.declared(PARAMETERS)


HOLDS = """\
from lessons.claims import claim
with claim("Few steps are enough"):
    {}
"""


@pytest.fixture(autouse=True)
def kernels_find_the_lessons(monkeypatch):
    """These notebooks call no `begin`, which would make the lessons importable."""
    places = [os.environ.get("PYTHONPATH", ""), NOTEBOOKS]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, places)))


def write(path: Path, *cells: str, parameters: str = PARAMETERS,
          claim: str = HOLDS.format("assert steps < 100")) -> Path:
    book = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3",
        "language": "python"}})
    book.cells = [new_markdown_cell("# A title"),
                  new_code_cell(parameters, metadata={"tags": ["parameters"]}),
                  *map(new_code_cell, cells),
                  new_code_cell(claim, metadata={"tags": ["claim"]})]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(book, path)
    return path


def go(path: Path, *settings: str, out: Path, tier: str | None = None) -> dict:
    (job,) = runner.plan(path, settings, tier=tier, out=out)
    with tempfile.TemporaryDirectory() as folder:
        return runner.Attempt(job, Path(folder), lambda line: None).run()


def printed(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "".join(output.get("text", "") for cell in cells for output in cell.get("outputs", []))


# --- declarations and conversion, without a kernel

def test_declarations_are_read_with_their_comments():
    assert list(TAKEN) == ["tier", "steps", "lr", "compiled", "name", "widths", "threads"]
    steps = TAKEN["steps"]
    assert (steps.kind, steps.annotation, steps.default, steps.comment) == (int, "int", 3,
        "updates")
    assert TAKEN["threads"].kind == int | None and TAKEN["widths"].kind == tuple[int, ...]
    same = parameters.declared('tier = "cpu"  # type: Literal["smoke","cpu","gpu"] how large')
    assert same["tier"] == TAKEN["tier"], "a type comment is an annotation"


@pytest.mark.parametrize("source, message", [
    ("steps = 3", "holds only"),
    ("steps: int = 3\nprint(steps)", "holds only"),
    ("import os", "holds only"),
    ("steps: int = len('abc')", "must be a literal"),
    ("steps: __import__('os').system('true') = 3", "is none of"),
    ("steps: list[int] = 3", "is none of"),
    ("steps: int = 'x'", "whole number"),
    ("steps: int =", "does not parse"),
    ("steps = 3  # updates", "holds only"),
    ("steps = 3  # type: list[int] updates", "is none of"),
    ("steps = 3  # type: int( updates", "is not an annotation"),
    ("steps = 'x'  # type: int updates", "whole number"),
    ("a, b = 1, 2  # type: int two", "holds only"),
])
def test_a_parameters_cell_that_is_more_than_declarations_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        parameters.parameters(new_notebook(cells=[new_code_cell(source,
            metadata={"tags": ["parameters"]})]))


@pytest.mark.parametrize("name, text, value", [
    ("steps", "1_000", 1000), ("lr", "1e-3", 0.001), ("compiled", "false", False),
    ("compiled", "yes", True),
    ("name", "x'\"\\\n$(id)", "x'\"\\\n$(id)"), ("widths", "8,16", (8, 16)),
    ("threads", "none", None),
    ("threads", "2", 2), ("tier", "smoke", "smoke"),
])
def test_conversion_by_annotation(name, text, value):
    got = parameters.choose(TAKEN, {name: text})[name]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("asked, message", [
    ({"setps": "3"}, "did you mean 'steps'"),
    ({"steps = 3; import os; os.system('id') #": "1"}, "no parameter"),
    ({"steps": "3; import os"}, "whole number"),
    ({"steps": "2.5"}, "whole number"),
    ({"compiled": "maybe"}, "true or false"),
    ({"tier": "cpus"}, "did you mean 'cpu'"),
    ({"lr": "nan"}, "finite"),
    ({"lr": "inf"}, "finite"),
])
def test_what_was_not_declared_is_refused(asked, message):
    with pytest.raises(ConfigError, match=message):
        parameters.choose(TAKEN, asked)


def test_tier_twice():
    assert parameters.choose(TAKEN, {"tier": "smoke"}, "smoke")["tier"] == "smoke"
    with pytest.raises(ConfigError, match="contradict"):
        parameters.choose(TAKEN, {"tier": "smoke"}, "cpu")
    with pytest.raises(ConfigError, match="declares no parameter `tier`"):
        parameters.choose({}, {}, "cpu")


def test_a_grid_is_commas_or_a_repeated_key():
    points = parameters.grid(TAKEN, ["lr=1e-3, 3e-4", "steps=1", "steps=2", "name=a,b",
                                    "widths=8,16"])
    assert [(p["lr"], p["steps"]) for p in points] == [("1e-3", "1"), ("1e-3", "2"), ("3e-4", "1"),
        ("3e-4", "2")]
    assert {p["name"] for p in points} == {"a,b"} and {p["widths"] for p in points} == {"8,16"}
    assert parameters.grid(TAKEN, []) == [{}]


def test_injected_values_are_literals_that_read_back(tmp_path):
    values = {"name": '"); import os; os.abort() #', "lr": 0.1, "widths": (8, 16)}
    book = parameters.with_parameters(notebooks.read(write(tmp_path / "a.ipynb")), values)
    (cell,) = notebooks.tagged(book, "injected-parameters")
    scope = {}
    exec(cell.source, scope)
    assert {name: scope[name] for name in values} == values
    assert book.cells.index(cell) == 2 and "steps" not in cell.source


def test_names_of_notebooks(tmp_path, monkeypatch):
    book = write(tmp_path / "notebooks" / "00_start_here.ipynb")
    write(tmp_path / "notebooks" / "01_memory_math.ipynb")
    monkeypatch.chdir(tmp_path)
    for name in ("00_start_here", "00", "start_here", "notebooks/00_start_here.ipynb", str(book)):
        assert notebooks.find(name).samefile(book)
    with pytest.raises(ConfigError, match="did you mean '01_memory_math'"):
        notebooks.find("01_memory_maths")
    with pytest.raises(ConfigError, match="`lpkit notebook --list` shows"):
        notebooks.find("../00_start_here.ipynb")


def test_only_the_python_kernel_is_started(tmp_path):
    book = nbformat.read(write(tmp_path / "a.ipynb"), as_version=4)
    book.metadata.kernelspec.name = "bash"
    nbformat.write(book, tmp_path / "a.ipynb")
    with pytest.raises(ConfigError, match="'bash'"):
        notebooks.read(tmp_path / "a.ipynb")
    (tmp_path / "b.ipynb").write_text("{")
    with pytest.raises(ConfigError, match=r"b\.ipynb is not a notebook"):
        notebooks.read(tmp_path / "b.ipynb")


# --- runs

def test_a_run_and_its_record(tmp_path):
    """While cells run the record is there: it says `running`, and which cell."""
    there = str(tmp_path / "{out}" / "05_small.json")
    book = write(tmp_path / "05_small.ipynb",
                 f"import json\nnow = json.load(open({there!r}))\n"
                 f"print(*map(now.get, ('status', 'cell', 'end')))\n"
                 f"print(steps * 2, compiled, widths, tier)",
                 "import os, sys\nprint(os.getcwd())\nheld = bytearray(150_000_000)")
    record = go(book, "steps=20", "compiled=yes", "widths=1,2", out=tmp_path / "{out}",
                tier="smoke")
    on_disk = json.loads((tmp_path / "{out}" / "05_small.json").read_text())
    assert on_disk == json.loads(json.dumps(record))
    assert (record["status"], record["error"]) == ("done", None)
    assert (record["claim"], record["result"]) == ("Few steps are enough", "holds")
    assert (record["tier"], record["cell"], record["ran"], record["cells"]) == ("smoke", 4, 4, 4)
    assert record["asked"] == {"steps": "20", "compiled": "yes", "widths": "1,2"}
    assert record["parameters"]["steps"] == 20 and record["parameters"]["lr"] == 1e-3
    assert record["start"] <= record["end"] and record["seconds"] > 0
    assert 150e6 < record["peak_rss_bytes"] < 1.2e9
    text = printed(record["output"])
    assert text.startswith("running 2 None\n40 True (1, 2) smoke\n") and str(tmp_path) in text
    assert "without encryption" not in printed(record["output"])
    assert sorted(p.name for p in (tmp_path / "{out}").iterdir()) == ["05_small.ipynb",
        "05_small.json"]
    assert "widgets" not in nbformat.read(record["output"], as_version=4).metadata


def test_what_a_person_guessed_is_neither_seen_nor_changed_by_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert learner.update(lambda mine: mine.with_attempt("00.uniform_loss", right=False)) == ""
    before = learner.file().read_bytes()
    path = write(tmp_path / "a.ipynb",
                "from lessons.judging import learner\nprint(len(learner.read().exercises))",
                "print(learner.update(lambda mine: mine.with_attempt('00.clip', right=True)), "
                "len(learner.read().exercises))")
    assert (printed(Path(go(path, out=tmp_path / "out")["output"])) == "0\n 1\n"
            and learner.file().read_bytes() == before)


CLAIM = """\
from lessons.claims import claim
with claim("Few steps <are> enough"):
    assert steps < 3, f"{steps} are too many"
    assert steps == 0
"""


def write_claim(path: Path, source: str = CLAIM) -> Path:
    book = nbformat.read(write(path), as_version=4)
    book.cells[-1:] = [new_code_cell(source, metadata={"tags": ["claim", "raises-exception"]}),
                       new_code_cell("print('went on')")]
    nbformat.write(book, path)
    return path


def test_a_claim_that_fails_fails_the_notebook_and_the_rest_of_it_runs(tmp_path):
    path = write_claim(tmp_path / "a.ipynb")
    assert notebooks.claim(notebooks.read(path)) == "Few steps <are> enough"
    record = go(path, out=tmp_path / "out")
    assert (record["status"], record["ran"], record["cells"]) == ("failed", 2, 3)
    assert record["error"] == {"cell": 2, "line": "from lessons.claims import claim",
                               "kind": "AssertionError",
                              "message": "3 are too many"}
    *_, cell, after = nbformat.read(record["output"], as_version=4).cells
    card, error = cell.outputs
    assert ("fails</b>: Few steps &lt;are&gt; enough" in card.data["text/html"]
            and "3 are too many" in card.data["text/html"])
    assert (error.traceback == ["AssertionError: 3 are too many"]
            and after.outputs[0].text == "went on\n")
    # an assert that says nothing is shown itself
    silent, held = (go(path, f"steps={steps}", out=tmp_path / "out")
                    | {"cell": nbformat.read(record["output"], as_version=4).cells[-2]}
                    for steps in (1, 0))
    assert "Because: assert steps == 0" in str(silent["cell"].outputs)
    assert held["status"] == "done" and "holds</b>: Few" in str(held["cell"].outputs)


UNDECIDED = """\
from lessons.claims import cannot_tell, claim
with claim("Few steps are enough"):
    assert steps < 5, "too many"
    cannot_tell(steps == 3, "others took 40% of the cores")
    assert steps == 2, "not two"
"""


@pytest.mark.parametrize(("steps", "state", "why"),
                         [(3, "cannot tell", "others took 40% of the cores"),
                          (4, "fails", "not two"), (5, "fails", "too many")])
def test_a_claim_that_cannot_be_decided_is_recorded_as_such(tmp_path, steps, state, why):
    """What is said before the doubt counts, and what stands below it does not. (07 said "nothing is
    claimed here" and recorded "holds".)"""
    record = go(write_claim(tmp_path / "a.ipynb", UNDECIDED), f"steps={steps}",
                out=tmp_path / "out")
    assert (record["result"], record["why"]) == (state, why)
    assert record["claims"] == [{"claim": "Few steps are enough", "state": state, "why": why}]
    assert json.loads(Path(record["record"]).read_text())["result"] == state
    assert record["status"] == ("failed" if state == "fails" else "done")
    card = nbformat.read(record["output"], as_version=4).cells[-2].outputs[0].data["text/html"]
    assert f"<b>{state}</b>" in card and why in card
    shown = command.text({"runs": [record]})
    assert f"claims: 1 {state}" in shown
    assert command._outcome(record).startswith({"fails": "failed in cell"}.get(state,
        f"{state}: {why}".rstrip(": ")))


def test_a_claim_without_its_card_is_not_said_to_hold(tmp_path):
    """Here somebody has taken the name of the thing that shows it."""
    record = go(write_claim(tmp_path / "a.ipynb",
                           "import contextlib\nclaim = contextlib.nullcontext\nwith "
                           "claim('said'):\n    assert True"),
               out=tmp_path / "out")
    assert ((record["status"], record["result"]) == ("done", "cannot tell")
            and "no card" in record["why"])


def test_papermill_and_nbval_fail_where_a_claim_fails(tmp_path, monkeypatch):
    """The tag `raises-exception`, with which JupyterLab goes on, hides a failure from nbval: its
    copies go without."""
    path = write_claim(tmp_path / "a.ipynb")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(papermill, ["a.ipynb", "out.ipynb", "--no-progress-bar"])
    assert done.exit_code == 1 and "AssertionError: 3 are too many" in str(done.exception)
    nbformat.write(smoke_copies.copy_of(path), tmp_path / "copy.ipynb")
    done = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--nbval-lax",
                           "--nbval-current-env", "copy.ipynb"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "3 are too many" in done.stdout, done.stdout


@pytest.mark.parametrize("options, message", [
    (["-p", "stepz", "1"], "this notebook has no parameter 'stepz'; did you mean 'steps'"),
    (["-p", "steps", "2.5"], "steps must be a whole number, got 2.5"),
    (["-r", "steps", "many"], "steps must be a whole number, got 'many'"),
    (["-r", "steps", "7", "-p", "compiled", "false", "-y", "widths: [8, 16]"], None),
])
def test_papermill_alone_says_what_is_wrong_with_parameters(tmp_path, monkeypatch, options,
                                                               message):
    """A notebook's second cell calls begin; papermill warns of an unknown name, and takes any
    value. Its command, in this process."""
    sets = "from lpkit import begin\n\nbegin()"
    write(tmp_path / "a.ipynb", sets, "print([steps, compiled, widths])")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(papermill, ["a.ipynb", "out.ipynb", "--no-progress-bar", *options])
    if message is None:
        assert (done.exit_code == 0 and printed(tmp_path / "out.ipynb")
                == "[7, False, (8, 16)]\n"), done.exception
    else:
        assert done.exit_code == 1, done.exception
        assert f"ConfigError: {message}" in str(done.exception), done.exception


@pytest.mark.parametrize("cell", ["import sys; sys.exit(0)", "exit"])
def test_a_notebook_that_leaves_before_its_claim_does_not_hold_it(tmp_path, cell):
    book = write(tmp_path / "a.ipynb", cell, "import time; time.sleep(1)",
                 claim=HOLDS.format("assert False"))
    record = go(book, out=tmp_path / "out")
    assert record["status"] == "failed" and record["ran"] < record["cells"] == 4
    assert command._outcome(record).startswith("failed in cell")


def test_skipped_and_unheard_asserts_do_not_hold_a_claim(tmp_path, monkeypatch):
    """nbclient skips a cell by its tag, and Python drops asserts when it is told to optimise."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    path = write(tmp_path / "a.ipynb", "print('asserts:', __debug__)")
    book = nbformat.read(path, as_version=4)
    book.cells[-1].metadata.tags.append("skip-execution")
    nbformat.write(book, path)
    record = go(path, out=tmp_path / "out")
    assert ((record["status"], record["ran"]) == ("failed", 2)
            and record["error"]["message"].endswith(": 3"))
    assert "asserts: True" in printed(record["output"])


@pytest.mark.parametrize("claim", ["", "print(steps)", "# said\nassert steps",
                                   "if steps < 100:\n    assert steps",
                                   "%%script true\nassert False",
                                   "def held():\n    assert steps < 100", "%time assert False",
                                   "with claim('said'):\n    steps",
                                   "with claim(title):\n    assert steps"])
def test_a_claim_that_nothing_holds_is_refused(tmp_path, claim):
    with pytest.raises(ConfigError, match="tests nothing"):
        runner.plan(write(tmp_path / "a.ipynb", claim=claim), out=tmp_path / "out")


def test_two_claims_are_both_said_and_both_held(tmp_path):
    path = write(tmp_path / "a.ipynb")
    book = nbformat.read(path, as_version=4)
    book.cells.append(new_code_cell("with claim('and more'):\n    assert True",
                                    metadata={"tags": ["claim"]}))
    assert notebooks.claim(book) == "Few steps are enough; and more"


def test_two_cells_of_parameters_are_refused(tmp_path):
    """The second would set what was asked back to its own."""
    path = write(tmp_path / "a.ipynb")
    book = nbformat.read(path, as_version=4)
    book.cells.append(new_code_cell("steps: int = 7", metadata={"tags": ["parameters"]}))
    nbformat.write(book, path)
    with pytest.raises(ConfigError, match="2 cells are tagged `parameters`"):
        runner.plan(path, ["steps=5"], out=tmp_path / "out")


def test_an_output_that_is_run_again_takes_what_is_asked_now(tmp_path):
    book = parameters.with_parameters(notebooks.read(write(tmp_path / "a.ipynb")),
                                     {"steps": 5, "lr": 0.1})
    again = parameters.with_parameters(book, {"steps": 7})
    assert ([cell.source for cell in notebooks.tagged(again, parameters.INJECTED)]
            == ["# Parameters\nsteps = 7"])
    assert notebooks.tagged(parameters.with_parameters(book, {}), parameters.INJECTED) == []


def test_a_killed_kernel(tmp_path):
    book = write(tmp_path / "a.ipynb", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    record = go(book, out=tmp_path / "out")
    assert (record["status"], record["error"]["cell"], record["error"]["kind"]) == ("failed", 2,
        "DeadKernelError")
    assert ("the kernel died while cell 2 ran (killed by SIGKILL, as the system does when memory "
            "runs out" in \
        record["error"]["message"])
    assert json.loads((tmp_path / "out" / "a.json").read_text())["status"] == "failed"


def test_what_lies_in_the_output_folder_is_kept(tmp_path):
    book, other = write(tmp_path / "a.ipynb"), write(tmp_path / "b" / "a.ipynb")
    with pytest.raises(ConfigError, match="not the output of a run"):
        runner.plan(book, out=tmp_path)
    with pytest.raises(ConfigError, match="not the output of a run"):
        runner.plan(book, out=other.parent)
    with pytest.raises(ConfigError, match="is a file"):
        runner.plan(book, out=book)
    out = tmp_path / "out"
    out.mkdir()
    record = {"format": runner.FORMAT, "notebook": "a", "status": "done", "pid": 1}
    for text, message in [("{", "not a record of a"),
                          (json.dumps(record | {"notebook": "c"}), "not a record of a"),
                          ("[]", "not a record of a"),
                          (json.dumps(record | {"status": "running"}), "still writing")]:
        (out / "a.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            runner.plan(book, out=out)
    (out / "a.json").write_text(json.dumps(record))
    assert len(runner.plan(book, out=out)) == 1


def test_an_output_folder_that_cannot_be(tmp_path):
    book = write(tmp_path / "a.ipynb")
    with pytest.raises(ConfigError, match=r"cannot write to .*another --out"):
        runner.run_all(runner.plan(book, out=book / "below"))


def test_what_is_killed_before_it_began_leaves_no_earlier_output(tmp_path, monkeypatch):
    """The record would say `killed` beside the figures of another run."""
    book, out = write(tmp_path / "a.ipynb"), tmp_path / "out"
    jobs = runner.plan(book, ["steps=1,2,3"], out=out)
    out.mkdir()
    for job in jobs:
        job.output.write_text("of an earlier run")
    children = processes.Children()
    monkeypatch.setattr(children, "start", lambda *args, **options: children.end()
                        or subprocess.Popen(["false"]))
    records = runner.run_all(jobs, children=children)
    assert [record["status"] for record in records] == ["killed", "asked", "asked"]
    assert [path.name for path in sorted(out.iterdir())] == ["a-001.json", "a-002.ipynb",
        "a-003.ipynb"]


def test_a_full_disk_while_it_runs_is_no_interrupt(tmp_path, monkeypatch):
    import nbclient

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nbclient.NotebookClient, "execute", full)
    with pytest.raises(OSError, match="No space"):
        go(write(tmp_path / "a.ipynb"), out=tmp_path / "out")
    record = json.loads((tmp_path / "out" / "a.json").read_text())
    assert (record["status"], record["error"]["kind"]) == ("failed", "OSError")


def test_a_full_disk_leaves_the_old_record_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        runner.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def cli(*words: str, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "lpkit", "notebook", *words], cwd=cwd,
                          capture_output=True, text=True,
                          timeout=120)


def test_a_grid_side_by_side(tmp_path):
    """Three points on two processes; one of them kills the worker that runs it, and the others do
    not notice."""
    write(tmp_path / "notebooks" / "00_grid.ipynb",
          "import os, signal\nif steps == 2:\n    os.kill(os.getppid(), signal.SIGKILL)",
          "print('threads', os.environ['OMP_NUM_THREADS'])")
    done = cli("00", "--on", "processes=2", "steps=1,2,3", "--out", "out", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [(run["label"], run["parameters"]["steps"], run["status"]) for run in runs] == [
        ("00_grid-001", 1, "done"), ("00_grid-002", 2, "killed"), ("00_grid-003", 3, "done")]
    assert "exit code 137" in runs[1]["error"]["message"]
    assert json.loads((tmp_path / "out" / "00_grid-002.json").read_text()) == runs[1]
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"threads {share}" in printed(tmp_path / "out" / "00_grid-001.ipynb")


@pytest.mark.parametrize("sent, code", [(signal.SIGHUP, 129), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_kernel_and_the_record_says_so(tmp_path, sent, code):
    """Even SIGKILL: the keeper has the notebook's process write its record first."""
    write(tmp_path / "a.ipynb", "import os, time\nprint('so far', flush=True)",
          "open('kernel.pid.part', 'w').write(str(os.getpid()))\n"
          "os.rename('kernel.pid.part', 'kernel.pid')\ntime.sleep(100)")
    door = subprocess.Popen([sys.executable, "-m", "lpkit", "notebook", "./a.ipynb", "--out",
                             "out"], cwd=tmp_path,
                            stderr=subprocess.DEVNULL)
    while not (tmp_path / "kernel.pid").exists():
        assert door.poll() is None
        time.sleep(0.02)
    kernel = psutil.Process(int((tmp_path / "kernel.pid").read_text()))
    begun = time.monotonic()
    door.send_signal(sent)
    assert door.wait(30) == code
    kernel.wait(30)
    assert time.monotonic() - begun < 2 * patience()
    record = json.loads((tmp_path / "out" / "a.json").read_text())
    assert (record["status"], record["cell"], record["ran"]) == ("killed", 3, 2)
    assert "so far" in printed(record["output"])


def test_the_command_line(tmp_path):
    write(tmp_path / "notebooks" / "00_start_here.ipynb")
    write(tmp_path / "notebooks" / "01_fails.ipynb", claim=HOLDS.format("assert False, 'no'"))
    done = cli("--all", "--json", cwd=tmp_path)
    assert done.returncode == 1 and len(json.loads(done.stdout)["runs"]) == 2
    assert (tmp_path / "runs" / "notebooks" / "01_fails.json").exists()
    wrong = cli("00", "stepz=3", cwd=tmp_path)
    assert wrong.returncode == 2 and "did you mean 'steps'" in wrong.stderr and not wrong.stdout


def run_here(capsys, monkeypatch, cwd: Path, *words: str) -> tuple[int, str, str]:
    from lpkit.cli import main

    monkeypatch.chdir(cwd)
    code = main(["notebook", *words])
    return code, *capsys.readouterr()


def test_list(tmp_path, capsys, monkeypatch):
    write(tmp_path / "notebooks" / "00_start_here.ipynb")
    code, text, _ = run_here(capsys, monkeypatch, tmp_path, "--list")
    assert code == 0 and "00_start_here  A title" in text and "claims: Few steps are enough" in text
    assert "  steps: int = 3" in text and "updates" in text
    _, text, _ = run_here(capsys, monkeypatch, tmp_path, "--list", "--json")
    listed = json.loads(text)["notebooks"][0]["parameters"]
    assert listed[1] == {"name": "steps", "annotation": "int", "default": 3, "comment": "updates"}


@pytest.mark.parametrize("words, message", [
    ((), "which notebook"), (("00", "--all"), "leave out '00'"),
    (("00", "--on", "hosts=3"), "--on takes processes=N"),
    (("00", "--on", "processes=0"), "processes must be positive, got 0"),
    (("00", "steps"), "expected key=value"), (("07",), "no notebook '07'"),
    (("00", "--set", "stepz=3"), "did you mean 'steps'"), (("--set", "steps=3"), "which notebook"),
    (("steps=3",), "which notebook"),
    (("--all", "steps=3"), "leave out 'steps=3'"),
    (("--all", "--set", "steps=3"), "leave out 'steps=3'"),
])
def test_bad_input_is_one_sentence(tmp_path, capsys, monkeypatch, words, message):
    write(tmp_path / "notebooks" / "00_start_here.ipynb")
    code, out, err = run_here(capsys, monkeypatch, tmp_path, *words)
    assert code == 2 and message in err and not out and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_without_nbclient_it_is_one_sentence(tmp_path, capsys, monkeypatch):
    write(tmp_path / "notebooks" / "00_start_here.ipynb")
    monkeypatch.setitem(sys.modules, "nbclient", None)
    code, out, err = run_here(capsys, monkeypatch, tmp_path, "00")
    assert code == 2 and "pip install nbclient" in err and not out and err.count("\n") == 1
    assert run_here(capsys, monkeypatch, tmp_path, "--list")[0] == 0


def test_the_table():
    run = {"label": "00_a", "seconds": 1.25, "peak_rss_bytes": 3e8, "claim": "it holds",
           "status": "done", "error": None, "result": "holds", "why": "",
           "output": str(Path.cwd() / "out/00_a.ipynb"), "record": "/elsewhere/00_a.json"}
    bad = run | {"status": "failed", "result": "fails",
                 "error": {"cell": 7, "kind": "AssertionError", "message": "2 >\n1"}}
    head, first, second, counts, _, *files = command.text({"runs": [run, bad]}).splitlines()
    assert head.split() == ["notebook", "seconds", "peak", "MB", "claim", "result"]
    assert first.split() == ["00_a", "1.2", "300", "it", "holds", "holds"]
    assert (second.endswith("failed in cell 7: AssertionError: 2 > 1")
            and counts == "claims: 1 holds, 1 fails")
    assert [line.split() for line in files[1:]] == [["out/00_a.ipynb", "/elsewhere/00_a.json"]] * 2


def test_a_corpus_is_prepared_without_a_red_line(tmp_path, monkeypatch):
    """What a kernel writes to standard error is red: in a notebook the bar of the first preparation
    is a widget."""
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(20_000)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cell = (f'from lpkit import config, '
            f'datasets\ndatasets.prepare(config.DataConfig(source="{tmp_path}/text.txt"), '
            f'vocab=256)')
    go(write(tmp_path / "first.ipynb", cell), out=tmp_path / "out")
    notebook = nbformat.read(tmp_path / "out" / "first.ipynb", as_version=4)
    shown = [output for code_cell in notebook.cells for output in code_cell.get("outputs", [])]
    assert not [output for output in shown if output.get("name") == "stderr"]
    assert any("tokens of text.txt" in output.get("data", {}).get("text/plain", "")
               for output in shown)
