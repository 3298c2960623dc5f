"""What a wheel holds: the package, and inside it the notebooks, and the measured and published
figures, that are beside it here.

Everything else is in pyproject.toml. `lpkit.files.resource` finds either place, so the folders of
figures travel whole.
"""

from setuptools import find_packages, setup

ROOMS = ("lessons", "lessons/figures", "lessons/judging", "lessons/ranks", "lessons/rows",
         "hosting", "hosting/commands", "experiments")
FOLDERS = ("notebooks", *(f"notebooks/{room}" for room in ROOMS), "data/measured", "data/published")
BESIDE = {f"lpkit.{folder}".replace("/", "."): folder for folder in FOLDERS}

setup(
    packages=[*find_packages(include=["lpkit*"]), *BESIDE],
    package_dir=BESIDE,
    package_data={
        "lpkit": ["kernels/*.c"],
        "lpkit.notebooks": ["*.ipynb", "pictures/*"],
        "lpkit.notebooks.lessons": ["*.cu", "*.h"],
        "lpkit.notebooks.lessons.figures": ["*.js", "*.css"],
        "lpkit.notebooks.hosting": ["*.html"],
        "lpkit.notebooks.experiments": ["*"],
        "lpkit.data.measured": ["*"],
        "lpkit.data.published": ["*"],
    },
    include_package_data=False,
)
