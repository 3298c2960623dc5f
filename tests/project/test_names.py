"""Nobody is told to install a stranger's package, or to clone from an address that is not the
project's.

Only these tests catch: a page or a notebook that names a package of somebody else, and an address
of the repository that is not the project's.
"""

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = PROJECT.get("urls", {}).get("Repository")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
# pip itself, what the documentation and the tests name besides our dependencies, and the words that
# examples stand for
OTHERS = {"pip", "uv", "nbclient", "nbgrader", "otter-grader", "lightning", "jupyterhub"}
INSTALL = re.compile(r"\b(?:pip3?|uv pip) install ((?:[^`\n|]|`(?=\w))*)")
TAKES_A_VALUE = {"-c", "-r", "--constraint", "--requirement", "--find-links", "--index-url",
                 "--target", "-e", "--wheel-dir"}
CLONE = re.compile(r"git clone[^\n`]*")
HOSTED = re.compile(
    r"(?:https?://)?(?:github\.com|gitlab\.com|colab\.research\.google\.com/github"
    r"|mybinder\.org/v2/gh|nbviewer\.org/github)/[\w.-]+/[\w.-]*lpkit[\w.-]*[^\s)\"'`]*"
    r"|\w+\.github\.io/lpkit\S*", re.I)


@cache
def _texts():
    """[(name, text)] of every file under version control that a person may read; Python's broken
    strings are joined."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True,
                           check=True).stdout.split("\0")
    texts = []
    for name in filter(None, names):
        path = ROOT / name
        if (path.suffix in (".md", ".py", ".ipynb", ".yml", ".yaml", ".toml", ".html", ".js",
                            ".cff", ".Dockerfile", ".json", ".txt", "") and \
                path.is_file() and path.name not in (Path(__file__).name, "test_evidence.py")
                and not name.startswith("data/")):
            text = path.read_text(errors="replace")
            joined = re.sub(r'"\s*\n\s*f?"', "", text) if path.suffix == ".py" else text
            texts.append((name, joined))
    return texts


def _known():
    wanted = [*PROJECT["dependencies"],
              *(requirement for extra in PROJECT["optional-dependencies"].values()
                for requirement in extra)]
    names = {NAME.match(requirement)[0].lower() for requirement in wanted}
    return names - {PROJECT["name"]} | OTHERS


def installed(words: str) -> list[str]:
    """The package names of `pip install WORDS`, without options, paths, versions, extras and braces
    of Python."""
    names, skip = [], False
    for word in re.split(r"\s+", re.split(r" #|;(?: |$)", words)[0].strip()):
        word = word.strip("'\",;:)(")
        if skip or word.startswith("-") or not word:
            skip = not skip and word in TAKES_A_VALUE
            continue
        if re.match(r"[./~$<{&]|.*\.whl", word) or word in ("&&", "\\"):
            if word == "&&":
                break
            continue
        names.append(word)
    return names


def strangers(text: str, known: set[str]) -> list[str]:
    """The first words after `pip install` that name neither a dependency nor a path. Words of a
    sentence may follow them."""
    return [names[0] for match in INSTALL.finditer(text) if (names := installed(match[1]))
            and re.match(r"[A-Za-z0-9._-]*", names[0])[0].lower() not in known]


def test_the_project_has_not_the_name_of_a_strangers_package():
    assert PROJECT["name"] != "lpkit", "the package index has another project of this name"
    assert PROJECT["scripts"] == {"lpkit": "lpkit.cli:main"}, "the command stays"


@pytest.mark.parametrize("text, expected", [
    ("`pip install 'lpkit[sweep]'`", ["lpkit[sweep]"]), ("pip install lpkit", ["lpkit"]),
    ("pip install -U low-precision-kit", ["low-precision-kit"]),
    ("`pip install -e '.[dev]'`", []), ("pip install --quiet -c constraints.txt -e .", []),
    ("pip install optuna cmaes", []),
    ("%pip install --quiet /content/low_precision_kit-0.1.0-py3-none-any.whl", []),
    ("pip install 'triton>=3.6'", [])])
def test_a_stranger_is_found(text, expected):
    assert strangers(text, _known()) == expected


def test_nothing_tells_anybody_to_install_a_strangers_package():
    known = _known()
    problems = [f"{name}: {stranger}" for name, text in _texts()
                for stranger in strangers(text, known)]
    assert not problems
    quoted = [f"{name}: {extra}" for name, text in _texts()
              for extra in re.findall(r"['`]lpkit\[\w[\w,]*\]", text)]
    assert not quoted, "an extra of a name that the index has from somebody else"


def test_the_address_of_the_repository_stands_in_one_place():
    """[project.urls] in pyproject.toml. While it has none, no link, no badge and no clone names
    one."""
    addresses = [f"{name}: {address}" for name, text in _texts() for pattern in (HOSTED, CLONE)
                 for address in pattern.findall(text)
                 if ADDRESS is None or (
                     pattern is HOSTED and not address.endswith(ADDRESS)
                     and ADDRESS.removeprefix("https://github.com/") not in address)]
    assert not addresses
