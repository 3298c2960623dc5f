"""What a teacher reads holds what it says: routes add up, what a notebook needs comes before it,
and each mistake is one of the judge's.

Only these tests catch: a route that does not fit its hours, a notebook before what it needs, and
minutes, mistakes or answers of a teacher's page that the notebook does not have.
"""

import json
import re
from dataclasses import replace

import nbformat
import pytest

from lessons import l99_predict_the_unseen as capstone
from lpkit.errors import ConfigError
from tests.pages import teach
from tests.pages.teach import NEEDS, ROUTES, TEACH, Aside, Day, Step, books

PAGES = {number: (TEACH / f"{number}.md").read_text(encoding="utf-8") for number in books()}
DAYS = [(name, number, day) for name, days in ROUTES.items() for number, day in enumerate(days, 1)]
PARTS = ["Ask before the run", "Usual mistakes", "Short of time", "On a GPU"]


def test_the_pages_are_up_to_date():
    """`python -m tests.pages teach`"""
    for place, text in teach.files().items():
        assert ((TEACH.parent / place).read_text(encoding="utf-8")
                == text), f"docs/{place}: run python -m tests.pages teach"
    kept = {f"teach/{path.name}" for path in TEACH.iterdir()}
    assert kept == teach.files().keys() | {"teach/index.md"}
    assert re.findall(r"^(\d\d|syllabus)$", (TEACH / "index.md").read_text(),
                      re.MULTILINE) == ["syllabus", *books()]


# --- routes

@pytest.mark.parametrize("name, number, day", DAYS,
                         ids=[f"{name}-{number}" for name, number, _ in DAYS])
def test_a_day_fills_its_hours_and_has_breaks(name, number, day):
    assert (0.95 * 60 * day.hours <= day.minutes <= 60
            * day.hours), f"{name}: {day.minutes} of {60 * day.hours} minutes"
    length = 0
    for part in day.parts:      # nobody sits for longer than two hours and a quarter
        length = (0 if isinstance(part, Aside) and re.search("[Bb]reak|Lunch", part.what)
                  else length + part.minutes)
        assert length <= 135, f"{name}, day {number}: {length} minutes without a break, at {part}"


@pytest.mark.parametrize("name", ROUTES)
def test_what_a_notebook_needs_comes_before_it(name):
    taken = [step.number for day in ROUTES[name] for step in day.steps]
    assert len(set(taken)) == len(taken) and set(taken) <= books().keys()
    for place, number in enumerate(taken):
        assert NEEDS.get(number, {}).keys() <= set(taken[:place]), (
            f"{name}: {number} needs {set(NEEDS[number]) - set(taken[:place])}")


def test_every_notebook_has_needs_that_exist():
    assert NEEDS.keys() | {"00"} == books().keys()
    assert all(need < number for number, needs in NEEDS.items()
               for need in needs), "needs would go round in a circle"
    page = next(cell.source for cell in nbformat.read(books()["99"].path, as_version=4).cells
                if cell.source.startswith("And what is asked"))
    assert NEEDS["99"].keys() == set(re.findall(r"\((\d\d)_\w+\.ipynb\)", page)), (
        "where its own cell says to look")
    with pytest.raises(ConfigError,
                       match="notebook 00 has no exercise 'clips'; it has uniform_loss"):
        books()["00"].minutes_with("uniform_loss clips")


def test_minutes_are_the_notebooks_own():
    """Held against what stands below the title: without exercises, and with all of them."""
    for number, book in books().items():
        minutes = re.search(r"\*About (\d+) minutes(?:, (\d+) of them for the exercises)?\.\*",
                            nbformat.read(book.path, as_version=4).cells[0].source)
        assert Step(number, " ".join(book.exercises)).minutes == int(minutes[1])
        assert Step(number).minutes == int(minutes[1]) - int(minutes[2] or 0) > 10
    short = Day(1, (Step("00"), Aside("a talk", 5), Step("01", "peak_bytes")))
    assert short.minutes == 15 + 5 + 19 + 6


def test_minutes_of_sections_are_their_share_of_the_words():
    book = replace(books()["00"], minutes=50,
                   exercises={"clip": replace(books()["00"].exercises["clip"], minutes=6)},
                   words={"": 100, "Predict": 250, "Run": 90})
    assert (book.minutes_with("", ("Predict",)) == 25
            and book.minutes_with("clip", ("Predict", "Run")) == 40
            and book.minutes_with("clip") == 50)
    with pytest.raises(ConfigError, match="notebook 00 has no section 'Runs'; it has Predict, Run"):
        book.minutes_with("", ("Runs",))
    cells = [nbformat.v4.new_markdown_cell(text) for text in ("# 00 A title\n\n*About*",
        "## Predict\n\none two", "### Deeper\n\nthree")]
    assert teach.words_of(nbformat.v4.new_notebook(cells=[*cells,
        nbformat.v4.new_code_cell("## Run\nx = 1")])) == {"": 5, "Predict": 9 - 2}
    for name, _, day in DAYS:       # a route for little time says where to stop
        assert any(step.sections for step in day.steps) == (name == "90 minutes")


@pytest.mark.parametrize("name, number, day", DAYS,
                         ids=[f"{name}-{number}" for name, number, _ in DAYS])
def test_a_step_has_time_for_its_run_in_a_full_room(name, number, day):
    for step in day.steps:
        if times := teach.run_times(books()[step.number]):
            assert times[1][0] / 60 <= step.minutes / 2, f"{name}: {step}"
    if name == "90 minutes":
        # its minutes are recorded
        assert all(teach.run_times(books()[step.number]) for step in day.steps)
        assert "Of these minutes, the computer needs" in teach.route(name)


def test_seconds_are_those_of_the_newest_record_of_a_quiet_machine(tmp_path):
    for name, date, seconds, load in (("course-old", "2026-01-01", 9.0, None),
                                      ("course-20", "2026-02-01", 7.0, 0.2),
                                      ("course-new", "2026-03-01", 99.0, 5.0)):
        cases = [{"case": case, "ours_median": seconds} for case in ("20_optimizers", "21_search")
                 if not (name == "course-20" and case == "21_search")]
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"date": date, "cases": cases} | ({} if load is None else {"load": load})))
    assert ({case: seconds for case, (seconds, _) in teach.recorded(tmp_path).items()}
            == {"20_optimizers": 7.0, "21_search": 9.0})


def test_a_page_shows_another_notebook_at_once():
    book = books()["12"]
    assert ("| minutes | 80, 55 of them for the exercises |" in teach.head(book)
            and "`step` ★★ 12" in teach.head(book))
    assert "| minutes | 81, " in teach.head(replace(book, minutes=81))
    assert ("another day `softmax` ★★ 12" in teach.head(books()["10"])
            and "`softmax`" not in teach.route("2 days"))


# --- a page for each notebook

@pytest.mark.parametrize("number", PAGES)
def test_a_page_says_what_a_teacher_needs(number):
    text = PAGES[number]
    assert (text.startswith(f"# {books()[number].title}\n")
            and re.findall(r"^## (.+)$", text, re.MULTILINE) == PARTS)
    assert 20 <= sum(map(bool, map(str.strip, text.splitlines()))) <= 35
    questions = text.partition(f"## {PARTS[0]}")[2].partition("\n## ")[0]
    assert (len(re.findall(r"^- \*[^*]+\?\* \S", questions, re.MULTILINE))
            >= 2), "a question in italics, and its answer"
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert all((TEACH / link).exists() for link in links), links


@pytest.mark.parametrize("number", PAGES)
def test_mistakes_are_those_that_the_judge_knows(number):
    """`exercise`, *what the judge says*: how to help. Of most exercises that a room does."""
    part = PAGES[number].partition(f"## {PARTS[1]}")[2].partition("\n## ")[0]
    bullets = [re.match(r"`(\w+)`(.*)", " ".join(bullet.split()))
               for bullet in part.split("\n- ")[1:]]
    if number == "99":
        assert {bullet[1] for bullet in bullets} <= capstone.QUESTIONS.keys() and len(bullets) > 5
        return
    mine = books()[number].exercises
    hints = [(bullet[1], re.match(r", \*(.+?)\*: ", bullet[2])) for bullet in bullets]
    named = {name for name, _ in hints}
    assert all(hint for _, hint in hints) and named <= mine.keys(), hints
    assert (len(named) >= min(3, len(mine)) and len(named) >= 0.8
            * len(mine)), f"what of {mine.keys() - named}?"
    for name, hint in hints:
        assert hint[1] in mine[name].mistakes, f"{name}: the judge says nothing like {hint[1]!r}"


def test_answers_to_guesses_are_those_of_the_course():
    from tests.course.test_notebooks import RIGHT

    for key in ("00.loss", "02.mfu", "03.zero", "05.lost", "10.bytes", "11.won", "12.scores",
                "14.zero_one", "14.zero_two", "15.sent", "15.speed",
                "16.sent", "17.bubble_share", "19.coin", "19.fifty", "24.peak", "26.muon"):
        assert f"{RIGHT[key]:g}" in PAGES[key[:2]].partition(f"## {PARTS[0]}")[2], (
            f"{key} is {RIGHT[key]:g}")
