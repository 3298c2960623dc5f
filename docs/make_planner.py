"""Make the planner: a static page that runs lpkit.predict in the browser, with Pyodide. `make docs` adds it to the site.

    python docs/make_planner.py FOLDER      only the page; to see it: python3 -m http.server -d FOLDER

FOLDER gets docs/planner, Pyodide (Python for the browser), and a zip of the modules and data that the planner's answers open. npm
fetches Pyodide once, at a fixed version and checksum, into the cache.
"""

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import lpkit
from lpkit.errors import ConfigError
from lpkit.files import cache_dir, whole_file

PAGE = Path(__file__).resolve().parent / "planner"
ROOT = Path(lpkit.__file__).resolve().parents[1]
VERSION, SHA512 = "314.0.7", "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
RUNTIME = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
# A program that computes an answer for every option, with the standard library alone. It prints the files that this opened, and the
# controls of the page.
SEEN = """\
import json, sys
opened = set()
sys.addaudithook(lambda event, args: event == "open" and opened.add(str(args[0])))
sys.path[:0] = sys.argv[1:]
import answer
groups = answer.choices()
controls = [one for group in groups for one in group["controls"]]
usual = {one["name"]: one["value"] for one in controls}
for one in controls:
    for value in [option[0] for option in one.get("options", [])] or one.get("steps", []):
        answer.answer(json.dumps(usual | {one["name"]: value}))
opened |= {module.__file__ for name, module in sys.modules.items() if name.split(".")[0] in ("lpkit", "lessons")}
print(json.dumps({"opened": sorted(opened), "groups": groups}))
"""


def tarball() -> Path:
    """Return the path of Pyodide's npm package, fetched if it is not in the cache. Errors: ConfigError, which names what to install."""
    path = cache_dir("pyodide") / f"pyodide-{VERSION}.tgz"
    if path.exists() and _sound(path):
        return path
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError("the planner's Python comes from npm, which is not on PATH; install it (on Debian and Ubuntu: apt-get "
                          "install npm) and try again")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, whole_file(path) as whole:
        done = subprocess.run([npm, "pack", "--silent", f"pyodide@{VERSION}"], cwd=folder, capture_output=True, text=True)
        got = Path(folder) / path.name
        if done.returncode or not got.exists():
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing more"]
            raise ConfigError(f"npm could not fetch pyodide {VERSION}, which the planner needs once: {said[-1]}; try again with "
                              f"a network")
        if not _sound(got):
            raise ConfigError(f"the package pyodide {VERSION} from npm is not what was pinned (SHA-512); check npm's settings")
        shutil.copy(got, whole)
    return path


def _sound(path: Path) -> bool:
    with path.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode() == SHA512


def make(folder: Path) -> None:
    """Write the page and its files into the folder. Errors: ConfigError, before any file is written."""
    sys.path.append(str(PAGE.parents[1] / "notebooks"))      # for the colours of the lessons' figures
    from lessons.figures.opened import KIND_OF, KINDS
    from lessons.figures.step_bytes import ROW_COLOURS

    packed = tarball()
    asked = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", SEEN, str(PAGE), str(ROOT)], stdout=subprocess.PIPE, text=True)
    if asked.returncode:
        raise ConfigError("lpkit.predict does not answer with the standard library alone (above)")
    seen = json.loads(asked.stdout)
    shutil.copytree(PAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "answer.py"), dirs_exist_ok=True)
    with zipfile.ZipFile(folder / "lpkit.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        file.write(PAGE / "answer.py", "answer.py")
        for path in map(Path, seen["opened"]):
            if path.is_relative_to(ROOT) and path.is_file() and path.suffix != ".pyc" and not path.is_relative_to(PAGE):
                file.write(path, path.relative_to(ROOT))
    bytes_, kinds = ROW_COLOURS | {"": "#9a9a9a"}, {name: KINDS[kind] for name, kind in KIND_OF.items()}
    colours = {"bytes": bytes_, "seconds": kinds | {":": KINDS["communication"], "": KINDS["products"]}}
    (folder / "choices.json").write_text(json.dumps({"groups": seen["groups"], "colours": colours}), encoding="utf-8")
    (folder / "pyodide").mkdir(exist_ok=True)
    with tarfile.open(packed) as tar:
        for name in RUNTIME:
            with tar.extractfile(f"package/{name}") as source, (folder / "pyodide" / name).open("wb") as out:
                shutil.copyfileobj(source, out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    try:
        make(parser.parse_args(argv).folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
