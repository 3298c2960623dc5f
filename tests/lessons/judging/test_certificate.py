"""The page that a learner prints: it counts what the learner's file has, obeys nothing that a name
or a file says, and is whole or absent.

Only these tests catch: a count that the learner's file does not have, HTML or a script of a name or
a file that runs, and a page that others can read or that a failure leaves half written.
"""

import json
import stat
from html.parser import HTMLParser

import nbformat
import pytest

from lessons.judging import learner
from lessons.judging.certificate import FILE, certificate, page
from lessons.judging.index import exercises
from lessons.judging.learner import Answered, Learner, Tried
from lessons.judging.your_progress import progress
from tests import NOTEBOOKS
from tests.lessons.judging.course import EXERCISES

HOSTILE = '</title><script>alert(1)</script>"><img src=x onerror=alert(2)>'


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    (tmp_path / "course").mkdir()
    monkeypatch.chdir(tmp_path / "course")
    return tmp_path / "course" / FILE


def solved(day: str, attempts: int = 1, right: bool = True) -> Tried:
    return Tried(right=right, attempts=attempts, first_right=day)


def guess(name: str, held: bool | None, factor: float | None = 2.0) -> Answered:
    return Answered(name=name, question="?", value=1.0 if factor else "a", factor=factor,
                    date="2026-11-22", held=held,
                    measured=None if held is None else 1.5 if factor else "b")


ADA = Learner(
    guesses=(guess("01.peak", True), guess("05.lost", False), guess("05.zero", True),
             guess("09.days", None), guess("06.worst", True, None),
             guess("08.time", False, None)),
    exercises={"03.cast": solved("2026-11-21", 4), "03.value_of": solved("2026-11-20"),
               "00.clip": solved("2026-11-25", 2, right=False),
               "01.peak_bytes": Tried(right=False, attempts=7), "03.no_more": solved("2026-11-23"),
               "77.gone": solved("2026-11-19")})


class Read(HTMLParser):
    """The elements of a page, and the text of each kind of them."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.text, self.open = set(), [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        for tag in {*self.open} - {"style"}:
            self.text[tag][-1] += data


def test_it_counts_what_the_file_has():
    parsed = Read(page("Ada", ADA, EXERCISES))
    numbers = [parsed.text["b"][i] for i in range(5)]
    # twice of 03 and once of 00; neither what was never right, nor what the course has no more
    assert numbers == [f"3 of {len(EXERCISES)}", "3", "6", "2 of 3", "1 of 2"]
    rows = [parsed.text["td"][i:i + 3] for i in range(0, len(parsed.text["td"]), 3)]
    assert rows == [["clip", "2026-11-25", "2 attempts"], ["value_of", "2026-11-20", "1 attempt"],
                    ["cast", "2026-11-21", "4 attempts"],
                   ["no_more", "2026-11-23", "1 attempt"], ["gone", "2026-11-19", "1 attempt"]]
    heads = parsed.text["h2"]
    assert (heads[2] == f"03 Number formats2 of {sum(name.startswith('03.') for name in EXERCISES)}"
            and heads[-1] == "770 of 0")
    assert [head[:2] for head in heads] == ["00", "01", "03", "05", "06", "08", "09", "77"]
    [of_05] = [text for text in parsed.text["section"] if text.startswith("05")]
    assert of_05.endswith("guesses: 2; 90% intervals held: 1 of 2")
    assert "from 2026-11-19 to 2026-11-25" in parsed.text["header"][0]
    assert ("not signed" in parsed.text["header"][0]
            and "the learner's file on" in " ".join(parsed.text["footer"][0].split()))
    assert "Nothing was solved" in Read(page("Ada", Learner(), EXERCISES)).text["main"][0]


def test_a_name_and_a_file_are_text_and_nothing_else():
    file = Learner(guesses=(guess(f"06.{HOSTILE}", True),), exercises={
        f"03.{HOSTILE}": solved(HOSTILE), f"{HOSTILE}.a": solved("2026-11-20"),
        "../../x.y": solved("2026-11-20")})
    parsed, plain = Read(page(HOSTILE, file, EXERCISES)), Read(page("Ada", ADA, EXERCISES))
    assert (parsed.tags == plain.tags and parsed.text["h1"] == [HOSTILE]
            and parsed.text["title"] == [f"lpkit: {HOSTILE}"])
    assert HOSTILE in parsed.text["td"]
    assert ({key for key, _ in parsed.attributes} == {key for key, _ in plain.attributes}
            <= {"class", "style", "lang", "charset", "content", "http-equiv", "name"})
    assert not parsed.open, "what a name closes"


def test_it_is_written_beside_the_notebook_for_its_owner(elsewhere, capsys):
    learner.update(lambda _: ADA)
    notice = certificate("  Ada \n Lovelace ")
    assert (stat.S_IMODE(elsewhere.stat().st_mode) == 0o600 and FILE in notice.data
            and not capsys.readouterr().out)
    assert Read(elsewhere.read_text(encoding="utf-8")).text["h1"] == ["Ada Lovelace"]
    assert list(elsewhere.parent.iterdir()) == [elsewhere]
    # a name that is spelled with a joiner
    certificate("\u0646\u0627\u0632\u200c\u0646\u06cc\u0646")
    assert "\u200c" in elsewhere.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["", "\u200d", "a\x1b[31m", "\u202eadA", "x" * 81, 5], ids=repr)
def test_what_is_no_name_makes_no_page(name, elsewhere, capsys):
    assert certificate(name) is None
    printed = capsys.readouterr().out
    assert not elsewhere.exists() and printed.count("\n") == 1 and printed.strip().isprintable()


def test_where_it_cannot_be_written_one_sentence_says_why(elsewhere, capsys):
    certificate("Ada")
    before = elsewhere.read_bytes()
    capsys.readouterr()
    learner.file().parent.mkdir(parents=True, exist_ok=True)
    learner.file().write_text(json.dumps({"format": "other"}))
    assert certificate("Eve") is None and "holds no learner's guesses" in capsys.readouterr().out
    assert elsewhere.read_bytes() == before, "the old page stays"
    learner.file().unlink()
    elsewhere.unlink()
    elsewhere.mkdir()
    assert certificate("Ada") is None and "folder" in capsys.readouterr().out
    assert (certificate("Ada", elsewhere.parent / "nowhere") is None
            and "was not written: No such file" in capsys.readouterr().out)


def test_the_start_page_draws_all_notebooks_and_makes_no_page_by_itself(elsewhere, capsys):
    cells = {cell.id: cell.source for cell in nbformat.read(f"{NOTEBOOKS}/00_start_here.ipynb",
        as_version=4).cells}
    known = {"exercises": exercises, "progress": progress, "certificate": certificate}
    drawn = eval(cells["start-progress"], known)
    assert {name[:2] for name in EXERCISES} == {name for trace in drawn.spec["data"]
        if trace["type"] == "bar" for name in trace["y"]}
    assert eval(cells["start-certificate"], known) is None and not elsewhere.exists()


@pytest.mark.slow
@pytest.mark.browser
def test_a_browser_runs_nothing_of_it_and_prints_it_on_a4(elsewhere, context):
    learner.update(lambda _: Learner(exercises={name: solved("2026-11-20") for name in EXERCISES}))
    certificate(HOSTILE)
    shown, events = context.new_page(), []
    shown.on("dialog", lambda dialog: (events.append("dialog"), dialog.dismiss()))
    shown.on("console", lambda message: events.append(message.text))
    shown.on("request", lambda request: events.append(request.url)
             if not request.url.startswith("file:") else None)
    shown.goto(elsewhere.as_uri())
    assert (shown.title() == f"lpkit: {HOSTILE}" and shown.evaluate("document.scripts.length") == 0
            and not events)
    printed = shown.pdf(prefer_css_page_size=True)
    assert (printed.count(b"/Type /Page\n") == 3
            and b"/MediaBox [0 0 841.91998 594.95996]" in printed)
