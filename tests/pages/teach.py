"""The pages for teachers: docs/teach/, the syllabus and one page for each notebook.

    python -m tests.pages teach     # writes the parts between the marks again

The prose is written by hand. Everything that can change with a notebook is between
`<!-- made: NAME -->` and `<!-- /made -->`: minutes, exercises, parameters, and the tables of
routes.
Each notebook states its minutes below its title, and tests/course/test_notebooks.py compares them
with its words and exercises. Each exercise states its own minutes. A notebook without its exercises
takes the difference, and each of its sections takes the section's share of the words of it. A step
of a route adds the minutes of its sections and of its exercises.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import nbformat

from hosting.parameters import Parameter, parameters
from lessons.judging.judge import Exercise
from lpkit.errors import ConfigError
from tests.lessons.judging.course import EXERCISES
from tests.pages import markdown_table

ROOT = Path(__file__).parents[2]
TEACH = ROOT / "docs/teach"
MADE = re.compile(r"(<!-- made: (.+?) -->\n).*?(<!-- /made -->)", re.DOTALL)
LATER = "## More, for another day"


@dataclass(frozen=True, kw_only=True)
class Book:
    """Facts of a notebook, and its exercises; `later` has the exercises for another day."""

    path: Path
    title: str
    minutes: int
    exercises: Mapping[str, Exercise]
    later: Mapping[str, Exercise]
    guesses: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    # number of words by heading of a section; "" is the part above the first heading
    words: Mapping[str, int]

    @property
    def number(self) -> str:
        return self.path.stem[:2]

    @property
    def of_exercises(self) -> int:
        return sum(exercise.minutes for exercise in self.exercises.values())

    def minutes_with(self, names: str, sections: tuple[str, ...] = ()) -> int:
        """Returns the minutes of these exercises and of these sections; (): of all sections. Raises
        ConfigError for an exercise or a section that the notebook does not have."""
        for kind, asked, known in (("exercise", names.split(), self.exercises),
                                   ("section", sections, self.words)):
            if missing := set(asked) - known.keys():
                raise ConfigError(f"notebook {self.number} has no {kind} {min(missing)!r}; it has "
                                  f"{', '.join(filter(None, known)) or 'none'}")
        share = sum(self.words[name] for name in sections or self.words) / sum(self.words.values())
        rest = round((self.minutes - self.of_exercises) * share)
        return rest + sum(self.exercises[name].minutes for name in names.split())


def read(path: Path) -> Book:
    book = nbformat.read(path, as_version=4)
    source = "\n".join(cell.source for cell in book.cells)
    first = book.cells[0].source
    own = {name.partition(".")[2]: exercise for name, exercise in EXERCISES.items()
           if name.startswith(path.stem[:2] + ".")}
    later = {name for name in own if f'"{path.stem[:2]}.{name}"' in source.partition(LATER)[2]}
    return Book(
        path=path, title=first.partition("\n")[0].lstrip("# ").strip(),
        minutes=int(re.search(r"About (\d+) minutes", first)[1]),
        exercises={name: exercise for name, exercise in own.items() if name not in later},
        later={name: exercise for name, exercise in own.items() if name in later},
        words=words_of(book),
        guesses=tuple(re.findall(r'= keep\("\d\d\.(\w+)"', source)),
        parameters=parameters(book))


def words_of(book: nbformat.NotebookNode) -> dict[str, int]:
    """Returns the number of words of text by section, in order."""
    words, section = {"": 0}, ""
    for cell in book.cells:
        if cell.cell_type == "markdown":
            if heading := re.match(r"## (.+)", cell.source):
                section = heading[1].strip()
            words[section] = words.get(section, 0) + len(cell.source.split())
    return words


@functools.cache
def books() -> Mapping[str, Book]:
    return {path.stem[:2]: read(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


# The notebooks that a notebook uses, and for which knowledge.
NEEDS = {
    "01": {"00": "how a notebook works"},
    "02": {"00": "how a notebook works"},
    "03": {"00": "how a notebook works"},
    "04": {"03": "the noise of a cast, and subnormals"},
    "05": {"03": "range and precision of bf16 and float16"},
    "06": {"03": "the SQNR of E4M3 and E5M2", "04": "recipes, and which numbers share a scale"},
    "07": {"03": "SQNR", "04": "delayed scaling"},
    "08": {"01": "the moment of a step's peak"},
    "09": {"01": "the bytes of a step", "02": "the roofline"},
    "10": {"02": "the roofline"},
    "11": {"04": "the layouts of scales", "10": "how to write a kernel, and how it is judged"},
    "12": {"01": "the activations that backward needs"},
    "13": {"12": "how attention skips tiles"},
    "14": {"01": "the 16 bytes of a parameter"},
    "15": {"04": "scales and amax", "14": "shards, all-gather and reduce-scatter"},
    "16": {"12": "log-sum-exp", "14": "reduce-scatter and all-gather"},
    "17": {"14": "ranks, and micro-batches"},
    "18": {"14": "ranks, and the bytes of an all-reduce"},
    "19": {"00": "how a notebook works"},
    "20": {"01": "the rows of a step's memory"},
    "21": {"00": "how a notebook works"},
    "22": {"00": "how a notebook works"},
    "23": {"00": "how a notebook works"},
    "24": {"01": "the rows of a step's memory"},
    "25": {"01": "the rows of a step's memory", "03": "the noise of a cast"},
    "26": {"20": "optimizer states, and alternating timings of two optimizers"},
    "27": {"00": "how a notebook works"},
    "28": {"00": "how a notebook works"},
    "29": {"03": "the noise of a cast"},
    "30": {"02": "the matmuls of a step, and the roofline"},
    "31": {"23": "stacked layers, and the cost of a schedule", "26": "the FLOPs of Muon"},
    "99": {"01": "bytes of a step", "02": "FLOPs", "03": "the noise of an operand",
           "06": "the noise of a matmul", "08": "recomputation", "09": "seconds",
           "10": "bytes of a cast", "12": "the KV cache", "14": "bytes that ranks send"}}

# Routes.


@dataclass(frozen=True)
class Step:
    """A notebook with the exercises and sections that the room does; () means all sections."""

    number: str
    exercises: str = ""
    sections: tuple[str, ...] = ()

    @property
    def minutes(self) -> int:
        return books()[self.number].minutes_with(self.exercises, self.sections)


@dataclass(frozen=True)
class Aside:
    what: str
    minutes: int


@dataclass(frozen=True)
class Day:
    hours: float
    parts: tuple[Step | Aside, ...]

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts)

    @property
    def steps(self) -> list[Step]:
        return [part for part in self.parts if isinstance(part, Step)]


WELCOME = Aside("Welcome; everybody's lab is open", 10)
BREAK = Aside("Break", 15)
LUNCH = Aside("Lunch (not counted)", 0)
MAIN = ("Predict", "Run", "Reconcile")
ROUTES = {
    "90 minutes": (Day(1.5, (
        WELCOME,
        Step("00", "uniform_loss", ("How a notebook works", *MAIN)),
        Step("03", "value_of stochastic", MAIN),
        Step("04", "shared_by", MAIN),
        Step("07", "saturated bisect", MAIN),
        Aside("Which intervals held; what to read next", 10))),),
    "3 hours": (Day(3, (
        WELCOME,
        Step("00", "uniform_loss step_seconds clip"),
        Step("01", "state_bytes loss_bytes peak_bytes"),
        BREAK,
        Step("03", "value_of stochastic mx_exponent"),
        Step("04", "shared_by int8_db delayed_scale"),
        Step("07", "saturated margin bisect"),
        Aside("Which intervals held; what to read next", 10))),),
    "1 day": (Day(7, (
        WELCOME,
        Step("00", "uniform_loss step_seconds cross_entropy clip"),
        Step("01", "state_bytes loss_bytes saved_bytes peak_bytes"),
        BREAK,
        Step("02", "intensity smallest_square roofline_seconds"),
        Step("09", "micro_batches tokens tensor_ranks"),
        LUNCH,
        Step("03", "value_of stochastic mx_exponent mx_cast"),
        Step("04", "shared_by int8_db delayed_scale block_scales"),
        BREAK,
        Step("05", "is_lost scale_for"),
        Step("06", "product_db keep fp8_forward"),
        Aside("Short break", 10),
        Step("07", "sqnr_db saturated margin worst_row bisect"),
        Step("19", "false_share seeds"),
        Aside("Which intervals held; certificates; what to read next", 20))),),
    "2 days": (Day(7, (
        WELCOME,
        Step("00", "uniform_loss bits_per_byte step_seconds cross_entropy clip"),
        Step("01", "state_bytes loss_bytes score_bytes saved_bytes peak_bytes"),
        BREAK,
        Step("02", "intensity smallest_square attention_share flops roofline_seconds"),
        Step("03", "value_of stochastic mx_exponent cast mx_cast"),
        LUNCH,
        Step("04", "shared_by int8_db delayed_scale block_scales delayed"),
        Step("05", "is_lost scale_for state_bytes loss_scaler with_masters"),
        BREAK,
        Step("06", "product_db keep fp8_forward fp8_backward"),
        Step("07", "sqnr_db saturated margin worst_row bisect"),
        Aside("Results of the first day's guesses", 10))),
        Day(7, (
        Aside("Questions from the first day", 10),
        Step("08", "moment_bytes segment recomputed"),
        Step("09", "micro_batches tokens tensor_ranks reduce_scatter micro_batch"),
        BREAK,
        Step("10", "copy amax"),
        Step("12", "kept_bytes tiles step merge"),
        LUNCH,
        Step("14", "sent_bytes rows clip zero_one"),
        BREAK,
        Step("19", "false_share seeds sign_flip"),
        Step("99"),
        Aside("Which intervals held; certificates; what to read next", 20)))),
}


# What is made.

def exercise(name: str, task: Exercise) -> str:
    return f"`{name}` {'★' * task.stars} {task.minutes}"


MOST_LOAD = 1.0     # load of a quiet machine at the start of a record


def recorded(folder: Path = ROOT / "data/measured") -> dict[str, tuple[float, dict]]:
    """Returns the seconds of each case of `lpkit bench course`, with the newest record of a quiet
    machine that has the case."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("course*.json")]
    return {case["case"]: (case["ours_median"], record)
            for record in sorted(records, key=lambda record: record["date"])
            if record.get("load", 0) <= MOST_LOAD
            for case in record["cases"]}


def run_times(book: Book) -> list[tuple[float, dict]] | None:
    """Returns the seconds of a run alone and beside busy processes, each with its record."""
    both = [recorded().get(f"{book.path.stem}{how}") for how in ("", " beside 4 busy processes")]
    return None if None in both else both


def runs_in(book: Book) -> str:
    if not (both := run_times(book)):
        return "not recorded"
    (alone, record), (beside, _) = both
    return (f"{alone:.0f} s on {record['cores']} quiet cores, {beside:.0f} s while four busy "
            f"processes "
            f"run ({record['date'][:10]})")


def link(number: str) -> str:
    book = books()[number]
    return f"[{book.title}]({number}.md)"


def head(book: Book) -> str:
    """Returns the table of facts at the top of a notebook's page."""
    main = ", ".join(exercise(*task) for task in book.exercises.items())
    later = ", ".join(exercise(*task) for task in book.later.items())
    needs = "; ".join(f"[{number}]({number}.md) ({what})"
                      for number, what in NEEDS.get(book.number, {}).items())
    of = f", {book.of_exercises} of them for the exercises" if book.exercises else ""
    rows = [
        ("notebook", f"[{book.path.stem}](../../notebooks/{book.path.name})"),
        ("minutes", f"{book.minutes}{of}"),
        ("runs in", runs_in(book)),
        ("needs", needs or "nothing"),
        ("exercises, in minutes", (main or "in the notebook itself")
         + f"; another day {later}" * bool(later)),
        ("guesses", ", ".join(f"`{name}`" for name in book.guesses) or "in the notebook itself"),
        ("parameters", ", ".join(f"`{name}={parameter.default!r}`"
                                 for name, parameter in book.parameters.items()))]
    return markdown_table(rows[0], rows[1:])


def clock(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02}"


def route(name: str) -> str:
    """Returns a table for each day, with the time at which each part begins."""
    tables = []
    for number, day in enumerate(ROUTES[name], 1):
        rows, begun = [], 0
        for part in day.parts:
            what, more = (part.what, "") if isinstance(part, Aside) else (
                link(part.number),
                ", ".join([*part.sections, *map("`{}`".format, part.exercises.split())]))
            rows.append((clock(begun), what, part.minutes, more))
            begun += part.minutes
        rows.append((clock(begun), "End", "", f"{day.minutes} of {60 * day.hours:g} minutes"))
        heads = ("begins", f"day {number}" if len(ROUTES[name]) > 1 else "", "minutes",
                 "sections and exercises in the room" if any(step.sections for step in day.steps)
                 else "exercises in the room")
        tables.append(markdown_table(heads, rows))
        times = [run_times(books()[step.number]) for step in day.steps]
        if all(times):
            alone, beside = (sum(pair[how][0] for pair in times) / 60 for how in (0, 1))
            tables.append(f"Of these minutes, the computer needs {alone:.0f} for the runs on a "
                          f"quiet machine, "
                          f"and {beside:.0f} while four busy processes run.")
    return "\n\n".join(tables)


def minutes() -> str:
    rows = [(link(number), book.minutes, book.of_exercises or "", runs_in(book),
             ", ".join(NEEDS.get(number, {}))) for number, book in books().items()]
    rows.append(("together", sum(book.minutes for book in books().values()),
                 sum(book.of_exercises for book in books().values()), "", ""))
    heads = ("notebook", "minutes", "of exercises", "run time at tier cpu", "needs")
    used = [record for book in books().values() for _, record in run_times(book) or ()]
    sources = sorted({f"Measured {record['date'][:10]} at commit {record['commit']} on "
                      f"{record['cpu']}, {record['cores']} cores: `{record['command']}`."
                      for record in used})
    return "\n\n".join([markdown_table(heads, rows), *sources])


def section(name: str) -> str:
    """Returns the text between the marks with this name."""
    if name in ROUTES:
        return route(name)
    return minutes() if name == "minutes" else head(books()[name])


def renewed(text: str) -> str:
    return MADE.sub(lambda match: f"{match[1]}{section(match[2])}\n\n{match[3]}", text)


def files() -> dict[str, str]:
    """Returns the current texts of the pages by path below docs/. Raises ConfigError for a notebook
    without a page."""
    names = ["syllabus", *books()]
    for name in names:
        if not (TEACH / f"{name}.md").exists():
            raise ConfigError(f"docs/teach/{name}.md is missing; write it, with the line "
                              f"<!-- made: {name} --> and <!-- /made --> where its facts go")
    return {f"teach/{name}.md": renewed((TEACH / f"{name}.md").read_text(encoding="utf-8"))
            for name in names}
