#!/usr/bin/env python3
"""Install lpkit where there is no network, from the folder that this file lies in (`lpkit pack` made it).

  python3 install [VENV]      a new environment, ./lpkit-venv by default

Nothing is installed before every file has the SHA-256 that the manifest says: that finds damage. Who could have changed
the manifest, too, is found by the SHA-256 of the whole file, which `lpkit pack` prints.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
MANIFEST = "manifest.json"


def refuse(sentence):
    sys.exit(f"install: {sentence}")


def checked():
    """The manifest, when all files are as it says, and there are no others."""
    try:
        manifest = json.loads((HERE / MANIFEST).read_text(encoding="utf-8"))
        listed = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        refuse(f"{MANIFEST} is damaged or not there; unpack the file again, or copy it again")
    there = {path.relative_to(HERE).as_posix(): path for path in HERE.rglob("*") if not path.is_dir()}
    there.pop(MANIFEST)
    for name in sorted(listed.keys() | there.keys()):
        if name not in there:
            refuse(f"{name} is not there; unpack the file again, or copy it again")
        if name not in listed:
            refuse(f"{name} is not in {MANIFEST}; remove it: only what was packed is installed")
        if hashlib.sha256(there[name].read_bytes()).hexdigest() != listed[name]:
            refuse(f"{name} is damaged (its SHA-256 is not the manifest's); unpack the file again, or copy it again")
    return manifest


def main():
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "lpkit-venv").absolute()
    if os.path.lexists(target):
        refuse(f"{target} is there already; name a new folder: python3 {sys.argv[0]} FOLDER")
    manifest = checked()
    for what, packed, here in (("Python", manifest["python"], sysconfig.get_python_version()),
                               ("platform", manifest["platform"], sysconfig.get_platform())):
        if packed != here:
            refuse(f"these wheels are for {what} {packed}, and this is {here}; use that one, or pack on a machine like this one")
    try:
        venv.create(target, with_pip=True)
        subprocess.run([target / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--find-links", HERE / "wheels",
                        "-c", HERE / "constraints.txt", f"lpkit[{manifest['extras']}]=={manifest['lpkit']}"],
                       env={**os.environ, "PIP_CONFIG_FILE": os.devnull}, check=True)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, (OSError, subprocess.CalledProcessError)):
            refuse(f"the environment could not be made ({error}); on Debian and Ubuntu it needs python3-venv")
        raise
    print(f"{target}/bin/lpkit lab      opens the course\n{target}/bin/lpkit doctor   says what works here")


if __name__ == "__main__":
    main()
