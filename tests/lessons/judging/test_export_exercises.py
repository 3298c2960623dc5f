"""nbgrader's and otter's notebooks of the exercises: by the real tools where they are, and
without.

Only these tests catch: an exercise that is not handed out, with a test or solution of its own, or
with other points than its stars.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest

from hosting import notebooks
from lessons.judging import export_exercises as e
from tests import NOTEBOOKS, processors
from tests.lessons.judging.course import EXERCISES

RIGHT = ("    sign = 1\n    field, fraction = code >> mantissa_bits, code % 2**mantissa_bits / "
         "2**mantissa_bits\n" \
        "    bias = 2 ** (exponent_bits - 1) - 1\n    return sign * ((1 + fraction) * 2.0 ** "
        "(field - bias) if field else fraction * 2.0 ** (1 - bias))")


def answered(book):
    """A learner's copy: value_of right, stochastic wrong, the rest as it was handed out."""
    for cell in book.cells:
        if (cell.cell_type == "code" and (match := re.match(r"def (value_of|stochastic)\(",
                cell.source))):
            body = RIGHT if match[1] == "value_of" else "    return x"
            cell.source = cell.source.split("\n")[0] + "\n" + body
    return book


def environment() -> dict:
    root = Path(NOTEBOOKS).parent
    return os.environ | {"PYTHONPATH": os.pathsep.join([processors.AT_START, str(root),
        NOTEBOOKS]), "OMP_NUM_THREADS": "1"}


def output_of(*command, cwd) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True,
                          timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_every_exercise_goes_out_and_its_solution_is_right():
    seen = []
    for path in notebooks.course():
        book = notebooks.read(path)
        for asked in e.asked(book):
            compile(asked.solved("# BEGIN SOLUTION", "# END SOLUTION"), "cell", "exec")
            seen.append(asked.exercise.name)
    assert sorted(seen) == sorted(EXERCISES)


def test_the_test_of_an_exercise_is_the_kit_s_judge():
    e.graded("03.value_of", EXERCISES["03.value_of"].spec)

    def value_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
        return 0.5

    def empty(code: int, exponent_bits: int, mantissa_bits: int) -> float:
        # YOUR CODE HERE
        raise NotImplementedError()

    with pytest.raises(AssertionError, match=r"wrong: for code=0.*got 0\.5"):
        e.graded("03.value_of", value_of)
    with pytest.raises(AssertionError, match="to do: replace"):
        e.graded("03.value_of", empty)


def test_points_are_stars_and_cells_are_marked(tmp_path):
    ours, otters = e.export("03", tmp_path)
    stars = {name.replace(".", "_"): exercise.stars for name, exercise in EXERCISES.items()
             if name.startswith("03.")}
    marks = [cell.metadata.nbgrader for cell in nbformat.read(ours, 4).cells
             if "nbgrader" in cell.metadata]
    assert ({mark.grade_id: mark.points for mark in marks if mark.grade}
            == {f"test_{name}": n for name, n in stars.items()})
    assert ({mark.grade_id for mark in marks if mark.solution}
            == {f"answer_{name}" for name in stars})
    raw = [cell.source for cell in nbformat.read(otters, 4).cells if cell.cell_type == "raw"]
    assert (raw[0].startswith("# ASSIGNMENT CONFIG")
            and raw.count("# BEGIN TESTS") == raw.count("# END QUESTION") == len(stars))


@pytest.mark.slow
def test_nbgrader_grades(tmp_path):
    if not shutil.which("nbgrader"):
        pytest.skip("nbgrader is not installed here; pip install nbgrader, in an environment of "
                    "its own")
    e.export("03", tmp_path)
    course = tmp_path / "nbgrader"
    (course / "nbgrader_config.py").write_text("c = get_config()\nc.CourseDirectory.course_id = "
                                               "'lpkit'\n")
    output_of("nbgrader", "generate_assignment", "03", "--create", cwd=course)
    released = nbformat.read(course / "release" / "03" / "03.ipynb", 4)
    assert "exercise(\"" not in "".join(cell.source for cell in released.cells)
    for who, book in {"empty": released,
                      "some": answered(nbformat.read(course / "release" / "03" / "03.ipynb", 4)),
                      "all": nbformat.read(course / "source" / "03" / "03.ipynb", 4)}.items():
        folder = course / "submitted" / who / "03"
        folder.mkdir(parents=True)
        nbformat.write(book, folder / "03.ipynb")
    output_of("nbgrader", "autograde", "03", cwd=course)
    output_of("nbgrader", "export", cwd=course)
    rows = [line.split(",") for line in (course / "grades.csv").read_text().splitlines()]
    at, who = rows[0].index("score"), rows[0].index("student_id")
    whole = sum(exercise.stars for name, exercise in EXERCISES.items() if name.startswith("03."))
    assert {row[who]: float(row[at]) for row in rows[1:]} == {
        "empty": 0, "some": EXERCISES["03.value_of"].stars, "all": whole}
    graded = (course / "autograded" / "some" / "03" / "03.ipynb").read_text()
    assert "wrong: for x=" in graded and "to do: replace" in graded


@pytest.mark.slow
def test_otter_grades(tmp_path):
    if not shutil.which("otter"):
        pytest.skip("otter is not installed here; pip install otter-grader, in an environment of "
                    "its own")
    e.export("03", tmp_path)
    # runs the solutions against the tests
    output_of("otter", "assign", "otter/03.ipynb", "made", cwd=tmp_path)
    student = tmp_path / "made" / "student" / "03.ipynb"
    assert "exercise(\\\"" not in student.read_text()
    archive = next((tmp_path / "made" / "autograder").glob("*.zip"))
    whole = sum(exercise.stars for name, exercise in EXERCISES.items() if name.startswith("03."))
    wanted = {"empty": 0, "some": EXERCISES["03.value_of"].stars, "all": whole}
    books = {"empty": nbformat.read(student, 4), "some": answered(nbformat.read(student, 4)),
             "all": nbformat.read(tmp_path / "made" / "autograder" / "03.ipynb", 4)}
    for who, book in books.items():
        nbformat.write(book, tmp_path / f"{who}.ipynb")
        (tmp_path / who).mkdir()
        output_of("otter", "run", f"{who}.ipynb", "-a", str(archive), "-o", who, cwd=tmp_path)
        results = (tmp_path / who / "results.json").read_text()
        score = sum(test.get("score") or 0 for test in json.loads(results)["tests"])
        assert score == wanted[who], results[:3000]
        assert who != "some" or ("wrong: for x=" in results and "to do: replace" in results)
