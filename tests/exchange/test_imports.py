"""Modules that bring rows: those of lessons (`lessons.rows`) and one's own, in every process.

Only these tests catch: a row whose import is not named, a Config, rank, job, trial or arm that
lacks the module of its row, and a stranger's `lessons` that is imported in the place of the kit's.
"""

import ast
import importlib.util
import json
import os
import pkgutil
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lpkit
from lpkit import cli, presets, techniques
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.techniques import lessons, outside
from tests import NOTEBOOKS, processors

ROWS = Path(NOTEBOOKS) / "lessons" / "rows"
ROOT = Path(NOTEBOOKS).parent
IMPORT = 'add --import lessons.rows.toy, in Python imports=("lessons.rows.toy",)'
TOY = '''
from dataclasses import dataclass
from lpkit.techniques import blocks
from lpkit.techniques.operation import Kind
from lpkit.techniques.optimizers import OPTIMIZERS, Optimizer, OptimizerSettings
from lpkit.techniques.row import Settings

@dataclass(frozen=True, kw_only=True)
class Rate(Settings):
    rate: float = 0.5

def rule(w, g, slots, settings, update):
    w.sub_(g, alpha=settings.lr)

def same(ops, s, settings):
    return ops

def change(model, settings):
    pass

OPTIMIZERS["NAME_sgd"] = Optimizer(why="a gradient times lr", source="Robbins and Monro 1951",
                                   slots=(), settings=OptimizerSettings(lr=0.01),
                                   implementation="MODULE:rule")
blocks.MODEL_CHANGES |= {
    "NAME_change": Kind(operations=same, implementation="MODULE:change", settings=Rate())}
'''


def module(folder: Path, package: str = "", name: str = "toy") -> Path:
    path = folder / f"{name}.py"
    path.write_text(TOY.replace("NAME", name).replace("MODULE", f"{package}{name}"))
    return path


def python(*words: object, cwd: Path, kit: Path = ROOT, path: str = "", fails: bool = False) -> str:
    """Returns what a process printed with the package of `kit`; of one that fails, its errors."""
    env = {key: value for key, value in os.environ.items() if key != lessons.COPIES}
    places = str(kit), *filter(None, [path])
    env |= {"PYTHONPATH": os.pathsep.join([processors.AT_START, *places]), "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cwd / "cache")}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, text=True,
                          capture_output=True)
    assert done.returncode == (2 if fails else 0), done.stderr
    return done.stderr if fails else done.stdout


@pytest.fixture
def alone(monkeypatch):
    """This process as if it had imported no row from outside; as it was afterwards."""
    before = {field: dict(rows) for field, rows in outside.TABLES.items()}
    for name in list(sys.modules):
        if f"{name}.".startswith(f"{lessons.PACKAGE}."):
            monkeypatch.delitem(sys.modules, name)
    for field, rows in outside.TABLES.items():
        for name in rows.keys() - outside.OWN[field]:
            del rows[name]
    yield
    for field, rows in before.items():
        outside.TABLES[field].clear()
        outside.TABLES[field].update(rows)
    for name in list(sys.modules):
        if name == "mine" or f"{name}.".startswith(f"{lessons.PACKAGE}."):
            del sys.modules[name]


@pytest.fixture
def toy(alone, tmp_path, monkeypatch):
    """The folder of the lessons' rows is another, with a module `toy`."""
    folder = tmp_path / "lessons" / "rows"
    folder.mkdir(parents=True)
    shutil.copy(ROWS / "__init__.py", folder)
    module(folder, "lessons.rows.")
    monkeypatch.setenv(lessons.COPIES, str(folder.parent))
    return folder


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """A package in another place, laid out as a wheel installs it, whose lessons have `toy`."""
    folder = tmp_path_factory.mktemp("site packages")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lpkit", folder / "lpkit", ignore=ignore)
    shutil.copytree(ROOT / "data", folder / "lpkit" / "data", ignore=ignore)
    shutil.copytree(ROWS, folder / "lpkit/notebooks/lessons/rows", ignore=ignore)
    module(folder / "lpkit/notebooks/lessons/rows", "lessons.rows.")
    return folder


# ---- which module has a row

def test_every_table_is_known_by_its_name():
    fields = lessons.package().FIELDS
    for module in pkgutil.iter_modules(techniques.__path__, "lpkit.techniques."):
        importlib.import_module(module.name)
    rooms = [vars(module)
             for name, module in sys.modules.items() if name.startswith("lpkit.techniques.")]
    assert sorted(fields.values()) == sorted(outside.TABLES)
    for table, field in fields.items():
        assert any(room.get(table) is outside.TABLES[field] for room in rooms), (table, field)


BROUGHT = """
import json, sys
path = list(sys.path)
from lpkit.techniques import lessons, outside
outside.load(lessons.package().modules())
rows = {field: {name: outside.module_of(field, name) for name in table.keys() - outside.OWN[field]}
        for field, table in outside.TABLES.items()}
print(json.dumps([rows, lessons.package().where(), sys.path == path,
                  [name for name in ("lessons", "torch", "numpy") if name in sys.modules]]))
"""


def test_syntax_trees_say_what_the_modules_of_lessons_add(tmp_path):
    """Also: they need the standard library alone, and change no path."""
    rows, where, same_path, more = json.loads(python("-c", BROUGHT, cwd=tmp_path))
    assert rows == where, "write each row down: TABLE['name'] = ..., or TABLE |= {'name': ...}"
    assert same_path and not more


@pytest.mark.parametrize("path", sorted(ROWS.glob("*.py")), ids=lambda path: path.name)
def test_modules_of_rows_import_the_package_and_one_another(path):
    """`import lessons.rows.x` needs a package `lessons`, which may be anybody's."""
    free = sys.stdlib_module_names | {"lpkit", "torch", "numpy", "psutil", "safetensors"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.partition(".")[0] in free for alias in node.names), node.lineno
        elif isinstance(node, ast.ImportFrom):
            inner = node.module.startswith("lessons.rows.")
            assert inner or node.module.partition(".")[0] in free, node.lineno


# ---- the message

@pytest.mark.parametrize("changes, message", [
    ({"optimizer": "toy_sgd"}, f"optimizer 'toy_sgd' is in lessons.rows.toy: {IMPORT}"),
    ({"optimizer": {"name": "toy_sgd", "lr": 1}}, f"optimizer 'toy_sgd' is in lessons.rows.toy: "
     f"{IMPORT}"),
    ({"optimizer": "toy_sdg"}, f"there is no optimizer 'toy_sdg'; did you mean 'toy_sgd'? "
     f"optimizer 'toy_sgd' is in lessons.rows.toy: {IMPORT}"),
    ({"optimizer.groups": "head*:optimizer=toy_sgd"}, "optimizer of optimizer.groups 'toy_sgd' is "
     f"in lessons.rows.toy: {IMPORT}"),
    ({"model.changes": "lora:rank=4,toy_change:rate=0.1"}, "model.changes 'toy_change' is in "
     f"lessons.rows.toy: {IMPORT}"),
    ({"objective": "toy_sgd"}, "there is no objective 'toy_sgd'; set optimizer=toy_sgd, or choose "
     "one of next-token"),
    ({"optimizer": "nothing-like-it"}, "there is no optimizer 'nothing-like-it'; choose one of "),
], ids=lambda value: next(iter(value)) if isinstance(value, dict) else "")
def test_a_row_of_a_lesson_is_named_with_its_import(changes, message, toy, capsys):
    for _ in range(2):      # looking for a row brings none
        with pytest.raises(ConfigError) as raised:
            Config().replace(changes)
        assert str(raised.value).startswith(message)
    assert "lessons.rows.toy" not in sys.modules
    with pytest.raises(ConfigError, match=r"^optimizer 'toy_sgd' is in lessons\.rows\.toy"):
        techniques.optimizers.find("toy_sgd")


@pytest.mark.parametrize("field", outside.TABLES)
def test_every_family_says_which_import_has_a_row(field, toy):
    fields = {of: table for table, of in lessons.package().FIELDS.items()}
    (toy / "toy.py").write_text(f"from nowhere import *\n{fields[field]}['here'] = 1\n")
    lessons.package().where.cache_clear()
    with pytest.raises(ConfigError) as raised:
        Config().replace({field: "here"})
    assert str(raised.value) == f"{field} 'here' is in lessons.rows.toy: {IMPORT}"


def test_commands_take_the_import_that_they_name(toy, capsys):
    for words in (["optimizer=toy_sgd"], ["--optimizer", "toy_sgd"]):
        assert cli.main(["predict", "cpu-3m", *words]) == 2
        assert "add --import lessons.rows.toy" in capsys.readouterr().err
    assert cli.main(["predict", "cpu-3m", "optimizer=toy_sgd", "--import", "lessons.rows.toy",
                     "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumptions"]["optimizer"] == "toy_sgd"
    with pytest.raises(ConfigError, match="there is a row optimizer=toy_sgd already"):
        cli._main(["new", "experiment", "toy_sgd"])


def test_python_predicts_the_words_of_the_command(toy):
    with pytest.raises(ConfigError, match=r"add --import lessons\.rows\.toy, in Python"):
        lpkit.predict("cpu-3m optimizer=toy_sgd")
    predicted = lpkit.predict("cpu-3m optimizer=toy_sgd steps=7", "a100-80",
                          imports=("lessons.rows.toy",))
    same = lpkit.predict(presets.preset("cpu-3m").replace({"optimizer": "toy_sgd", "steps": 7}),
                         "a100-80")
    assert predicted == same and predicted.config.imports == ("lessons.rows.toy",)
    plain = lpkit.predict("cpu-3m optimizer=adamw")
    assert predicted.memory.peak_bytes < plain.memory.peak_bytes and plain.config.imports == ()


# ---- a Config has the modules of its rows

def test_a_config_has_the_imports_of_its_rows(toy, tmp_path, monkeypatch):
    module(tmp_path, name="mine")
    monkeypatch.syspath_prepend(tmp_path)
    Config(imports=("mine", "lessons.rows.toy"))        # as --import does
    assert Config().imports == () and Config(optimizer="lion").imports == ()
    assert Config(optimizer="mine_sgd").imports == ("mine",)
    assert Config(optimizer="toy_sgd").imports == ("lessons.rows.toy",)
    both = Config().replace({"model.changes": "mine_change,toy_change:rate=0.1", "imports": "json"})
    assert both.imports == ("json", "mine", "lessons.rows.toy")
    groups = Config().replace({"optimizer.groups": "head*:optimizer=mine_sgd:lr_scale=0.1"})
    assert groups.imports == ("mine",)
    assert Config.from_yaml(both.to_yaml()) == both
    del sys.modules["mine"]         # the row's module is not known any more
    assert Config(optimizer="mine_sgd").imports == ()


def test_a_row_that_a_plain_import_brought_names_its_module(kit, tmp_path):
    code = ("from lessons.rows import toy\nfrom lpkit.config import Config\n"
            "print(Config(optimizer='toy_sgd').imports)")
    path = kit / "lpkit/notebooks"
    (path / "lessons/__init__.py").touch()
    printed = python("-c", code, cwd=tmp_path, kit=kit, path=str(path))
    (path / "lessons/__init__.py").unlink()
    assert printed == "('lessons.rows.toy',)\n"


def test_the_planner_offers_a_row_and_its_command_imports_it(toy, capsys):
    spec = importlib.util.spec_from_file_location("planner", ROOT / "docs/planner/answer.py")
    planner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planner)
    controls = {control["name"]: control for group in planner.choices()
                for control in group["controls"]}
    usual = {name: control["value"] for name, control in controls.items()}
    for _ in range(2):
        assert controls["optimizer"]["options"].count(("toy_sgd", "toy_sgd")) == 1
        answer = json.loads(planner.answer(json.dumps(usual | {"optimizer": "toy_sgd"})))
        controls["optimizer"] = planner.choices()[-1]["controls"][-1]
    assert answer["command"].endswith(" --optimizer toy_sgd --import lessons.rows.toy")
    assert cli.main([*shlex.split(answer["command"])[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == answer["prediction"]["peak_bytes"]


# ---- files, and folders of strangers

def test_a_file_names_the_kits_own_rows_and_no_others(toy, tmp_path, capsys):
    file = tmp_path / "config.yaml"
    file.write_text("imports: [lessons.rows.toy]\noptimizer: toy_sgd\n")
    assert cli.main(["predict", str(file)]) == 0
    for name in ("lessons.rows.nothing", "lessons.rows.toy.x", "lessons.toy", "rows.toy",
                 "lessons.rows.../toy"):
        file.write_text(json.dumps({"imports": [name]}))
        assert cli.main(["predict", str(file)]) == 2, name
        assert "a file imports nothing by itself" in capsys.readouterr().err, name


def test_a_strangers_folder_is_not_taken_for_the_lessons(kit, tmp_path):
    """Files and callers mean the kit's own rows, also where Python's path has others first."""
    (tmp_path / "lessons" / "rows").mkdir(parents=True)
    for name in ("lessons/__init__", "lessons/rows/__init__", "lessons/rows/toy", "lessons/rows/x"):
        (tmp_path / f"{name}.py").write_text("import os\nos.mkdir('ran')\n")
    shown = "    except Exception as error:\n        print(type(error).__name__, error)"
    code = f"""
from lpkit.config import Config

for text in ("imports: [lessons.rows.x]", "optimizer: toy_sgd",
             "imports: [lessons.rows.toy]\\noptimizer: toy_sgd", "optimizer: toy_sgd"):
    try:
        print(Config.from_yaml(text).imports)
{shown}
"""
    printed = python("-c", code, cwd=tmp_path, kit=kit).splitlines()
    assert ("imports nothing by itself" in printed[0]
            and f"is in lessons.rows.toy: {IMPORT}" in printed[1])
    assert printed[2:] == ["('lessons.rows.toy',)"] * 2 and not (tmp_path / "ran").exists()
    printed = python("-m", "lpkit", "predict", "cpu-3m", "optimizer=toy_sgd",
                  "--import=lessons.rows.toy", cwd=tmp_path, kit=kit)
    assert "cpu-3m on 1 x" in printed and not (tmp_path / "ran").exists()
    for name in ("lessons/__init__", "lessons/rows/__init__", "lessons/rows/toy"):
        (tmp_path / f"{name}.py").write_text("")
    code = f"""
import lessons.rows.toy
from lpkit.config import Config

for name in ("lessons.rows.toy",):
    try:
        Config(imports=(name,))
{shown}
"""
    printed = python("-c", code, cwd=tmp_path, kit=kit)
    assert (printed.startswith("ConfigError lessons.rows is ")
            and "start Python in another f" in printed)


def test_the_rows_of_a_learners_copies_are_those_of_its_processes(tmp_path):
    """A learner who changes a row sees the change in ranks, too."""
    shutil.copytree(ROWS.parent, tmp_path / "lessons", ignore=shutil.ignore_patterns("__pycache__"))
    module(tmp_path / "lessons" / "rows", "lessons.rows.")
    child = ("from lpkit.config import Config\n"
             "print(Config(imports='lessons.rows.toy', optimizer='toy_sgd').imports)")
    code = (f"import sys, subprocess\nfrom lessons.rows import toy\n{child}\nsys.stdout.flush()\n"
            f"subprocess.run([sys.executable, '-c', {child!r}], check=True, cwd='/')")
    assert python("-c", code, cwd=tmp_path) == "('lessons.rows.toy',)\n" * 2


def test_a_package_without_its_lessons_says_so(alone, tmp_path, monkeypatch):
    monkeypatch.setenv(lessons.COPIES, str(tmp_path / "gone"))
    assert Config(optimizer="lion").imports == ()
    for names in ({"optimizer": "toy_sgd"}, {"imports": ("lessons.rows.toy",)}):
        with pytest.raises(ConfigError, match=r"install lpkit again|no module of"):
            Config(**names)


# ---- processes

def test_a_launch_tells_its_ranks_the_modules_and_so_does_a_job(toy, tmp_path, monkeypatch):
    heard = {}
    monkeypatch.setattr("lpkit.training.launch.Processes",
                        lambda function, arguments, **how: heard.update(arguments))
    monkeypatch.setattr("lpkit.training.launch.Launched.begin", lambda self: self)
    monkeypatch.setattr("lpkit.training.launch.cores", lambda: 2)
    Config(imports=("lessons.rows.toy",))
    lpkit.launch(Config().replace({"optimizer": "toy_sgd", "system.device": "cpu"}), processes=2,
                 out=tmp_path / "run")
    assert heard["config"]["imports"] == ("lessons.rows.toy",)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "cpu-3m", "optimizer=toy_sgd", "--import", "lessons.rows.toy",
                     "--on", "k8s", "--processes", "2"]) == 0
    assert "--import=lessons.rows.toy" in next(tmp_path.glob("cpu-3m.*")).read_text()


SMALL = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=16", "global_batch=4",
         "eval_batches=1", "steps=2", "system.device=cpu"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name, package", [("mine", ""), ("toy", "lessons.rows.")])
def test_two_ranks_and_all_that_follows_know_a_row(name, package, kit, tmp_path):
    """A module of one's own needs `--import` for the run's folder; a lesson's needs it once."""
    run = {"cwd": tmp_path, "kit": kit}
    again = [f"--import={name}"] if name == "mine" else []
    if name == "mine":
        run["path"] = str(module(tmp_path, name=name).parent)
    train = ["train", "cpu-3m", *SMALL, f"optimizer={name}_sgd", f"--import={package}{name}",
             "--json"]
    printed = python("-m", "lpkit", *train, "--processes=2", "--out=run", **run)
    assert json.loads(printed)["status"] == "complete"
    assert f"{package}{name}" in (tmp_path / "run" / "config.yaml").read_text()
    if again:
        printed = python("-m", "lpkit", "sample", "run", "--tokens=2", **run, fails=True)
        assert "imports='mine': a file imports nothing by itself" in printed
        python("-m", "lpkit", "sample", "run", "--tokens=2", *again, **run)
        return
    python("-m", "lpkit", "train", "--resume", "--out=run", "steps=3", "parallel.data=1", **run)
    answer = python("-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lpkit", *train,
                  "parallel.data=2", "--out=torchrun", **run)
    assert json.loads(answer)["final_loss"] == json.loads(printed)["final_loss"]


CLAIM = {"arms": {"adamw": {}, "other": {"optimizer": "toy_sgd"}}, "differ": ["optimizer"],
         "target": "val_loss", "effect": 0.5, "budget": {"steps": 2}, "seeds": 3, "sigma": 0.01,
         "tuning": {"optimizer.lr": [1e-3], "optimizer.weight_decay": [0.0]},
         "settings": dict(setting.split("=") for setting in SMALL if "steps" not in setting)}
SWEEP = {"trials": 1, "target": "val_loss", "search": {"optimizer.lr": {"low": 1e-4, "high": 1e-2}},
         "settings": dict(setting.split("=") for setting in SMALL) | {"optimizer": "toy_sgd"}}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command, content, how",
                         [("claim", CLAIM, "flag"), ("sweep", SWEEP, "file")])
def test_the_runs_of_a_claim_and_of_a_sweep_know_a_row(command, content, how, kit, tmp_path):
    flag = ["--import=lessons.rows.toy"] if how == "flag" else []
    if how == "file":
        imports = {"imports": ["lessons.rows.toy"]}
        content = content | {"settings": content["settings"] | imports}
    (tmp_path / "file.yaml").write_text(json.dumps(content))
    printed = python("-m", "lpkit", command, "file.yaml", *flag, "--json", cwd=tmp_path, kit=kit)
    assert json.loads(printed)["seconds"] > 0
    if how == "flag":
        printed = python("-m", "lpkit", command, "file.yaml", cwd=tmp_path, kit=kit, fails=True)
        assert "add --import lessons.rows.toy" in printed


# ---- lpkit techniques

def test_techniques_are_listed_under_their_import(toy, capsys):
    assert cli.main(["techniques"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{field}\n" in f"\n{printed}" for field in outside.TABLES)
    kit, _, theirs = printed.partition("model.change")[0].partition("  --import lessons.rows.toy\n")
    assert "  adamw  " in kit and "toy_sgd" not in kit and "  toy_sgd" in theirs.splitlines()[0]
    assert cli.main(["techniques", "optimizer", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["family"] == "optimizer" and list(answer["families"]) == ["optimizer"]
    [row] = [row for row in answer["families"]["optimizer"] if row["import"]]
    assert row == {"name": "toy_sgd", "import": "lessons.rows.toy", "why": "a gradient times lr",
                   "settings": {"lr": 0.01, "weight_decay": 0.1, "clip": 1.0, "groups": []},
                   "source": "Robbins and Monro 1951"}
    assert cli.main(["techniques", "optimizer"]) == 0
    assert "lr=0.01, weight_decay=0.1, clip=1.0, groups=" in capsys.readouterr().out


@pytest.mark.parametrize("name, near", [
    ("optimiser", "did you mean 'optimizer'?"), ("block", "did you mean 'model.block'?"),
    ("", "the nearest of")])
def test_a_family_that_there_is_not_is_one_sentence(name, near, capsys):
    assert cli.main(["techniques", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"lpkit: there is no family {name!r}; ") and near in err


def test_a_module_of_rows_that_the_kit_has_not_is_named_with_the_nearest():
    message = "no such module of rows; did you mean 'lessons.rows.optimizers'"
    with pytest.raises(ConfigError, match=message):
        Config(imports=("lessons.rows.optimizer",))
