"""What a wheel holds: the package, and inside it the notebooks, and the measured and published figures, that lie beside it here.

Everything else is in pyproject.toml. `lpkit.files.resource` finds either place, so the folders of figures travel whole.
"""

from setuptools import find_packages, setup

BESIDE = {"lpkit.notebooks": "notebooks", "lpkit.notebooks.lessons": "notebooks/lessons", "lpkit.notebooks.lessons.rows": "notebooks/lessons/rows", "lpkit.notebooks.experiments": "notebooks/experiments", "lpkit.data.measured": "data/measured", "lpkit.data.published": "data/published"}

setup(
    packages=[*find_packages(include=["lpkit*"]), *BESIDE],
    package_dir=BESIDE,
    package_data={
        "lpkit": ["kernels/*.c", "kernels/*.cu", "kernels/*.h"],
        "lpkit.notebooks": ["*.ipynb", "pictures/*"],
        "lpkit.notebooks.lessons": ["*.py", "*.js", "*.css", "*.html"],
        "lpkit.notebooks.experiments": ["*"],
        "lpkit.data.measured": ["*"],
        "lpkit.data.published": ["*"],
    },
    include_package_data=False,
)
