"""Build the site: run the notebooks at tier cpu, draw their figures, and write HTML that loads nothing from other hosts.

    python docs/build.py            build docs/_build/html from the recorded copies; run only the notebooks that changed
    python docs/build.py --record   run the whole course and record the copies in docs/executed.zip; use a quiet machine
    python docs/build.py --no-run   build from the copies in docs/executed, and run nothing
    python docs/make_planner.py X   the planner alone, into the folder X

An executed copy stores each figure as plotly's JSON. The site shows it in a <div> with a short script that calls plotly.js. The
site contains this file of the plotly package, so figures are interactive without a network.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import partial
from importlib.resources import files
from pathlib import Path

import nbformat
import ziamath
from nbformat.v4 import new_output

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = DOCS.parent / "notebooks"
sys.path.insert(0, str(NOTEBOOKS))

from hosting import notebooks, runner  # beside the notebooks  # noqa: E402
from hosting.commands.notebook import text as table  # noqa: E402
from hosting.parameters import INJECTED  # noqa: E402
from lessons.figures import PLOTLY_MIME as PLOTLY  # noqa: E402
from lessons.figures import WIDGET_MIME as WIDGET  # noqa: E402
from lessons.judging.index import exercises  # noqa: E402
from lpkit.cli import COMMANDS, module_of  # noqa: E402
from lpkit.errors import ConfigError  # noqa: E402

FIGURE = """\
<div class="lpkit-room"><div class="lpkit-title">{title}</div>
<div class="lpkit-box"><div class="lpkit-figure" id="{name}" style="min-height:{height}px"></div></div></div>
<script type="application/json" id="{name}-spec">{spec}</script>
<script>
window.addEventListener("load", () => {{
  const place = document.getElementById("{name}"), box = place.parentElement;
  const spec = JSON.parse(document.getElementById("{name}-spec").textContent);
  const {{data, layout}} = box.clientWidth < 600 ? lpkitStacked(spec) : spec;     // and fit: as figure.js does in the lab
  const phone = matchMedia("(max-width: 720px)").matches;
  if (phone) layout.dragmode = false;     // a finger scrolls, and does not zoom
  const config = {{displaylogo: false, responsive: true, displayModeBar: phone ? false : "hover"}};
  const fit = () => {{
    const scale = Math.min(1, box.clientWidth / 520);
    place.style.width = scale < 1 ? "520px" : "";
    place.style.transform = scale < 1 ? `scale(${{scale}})` : "";
    box.style.height = scale < 1 ? `${{Math.ceil(place.offsetHeight * scale)}}px` : "";
  }};
  fit();
  Plotly.newPlot(place, data, layout, config).then(() => new ResizeObserver(fit).observe(box));
}});
</script>"""
FORMULA = re.compile(r"^\$\$\n(.+?)\n\$\$$", re.MULTILINE | re.DOTALL)     # formulas of a Markdown cell that JupyterLab draws
PLANNER = '<p><a class="lpkit-first" href="planner/index.html">Open the planner</a></p>\n\n'
BELOW = {"claim": "claims", "architecture": "log"}      # pages that the navigation shows below another page
DOWNLOAD = """\
{text}

<p><a href="../download/{name}" download>Download this notebook</a> and run it in your clone: <code>make lab</code>.</p>
"""
CARD = """\
<a class="lpkit-card" href="notebooks/{stem}.html"><img src="_static/pictures/{picture}" alt="" loading="lazy">
<span>{number}</span> {question}</a>"""
ASLEEP = '<p class="lpkit-control"><em>Controls work in JupyterLab: start it with <code>make lab</code>.</em></p>'


def drawn(output: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode | None:
    """Return the output for a static page: a figure as HTML, or a note instead of a widget that needs a kernel. Errors: ConfigError."""
    data = output.get("data", {})
    if PLOTLY in data:
        if " static picture" in data.get("text/plain", ""):
            raise ConfigError(f"{name}: {data['text/plain']}")
        spec = {key: data[PLOTLY].get(key, {}) for key in ("data", "layout")}
        title = re.sub("<[^>]*>", " ", (spec["layout"].get("title") or {}).get("text") or "")
        shown = FIGURE.format(name=html.escape(name), title=html.escape(html.unescape(title)),
                              height=int(spec["layout"].get("height") or 400),
                              spec=json.dumps(spec, separators=(",", ":")).replace("<", "\\u003c"))
        awake = not data.get("text/plain", "").startswith("Explorer:")
        return new_output("display_data", {"text/html": shown if awake else f"{ASLEEP}\n{shown}"})
    if WIDGET in data:
        if re.search(r"\bFigure(Widget)?\(", data.get("text/plain", "")):
            raise ConfigError(f"{name} is inside a widget that stores no picture of it; show it with Figure of " f"lessons.figures.figure or with Explorer, which store a picture")
        rest = {mime: value for mime, value in data.items() if mime not in (WIDGET, "text/plain")}
        return new_output("display_data", rest or {"text/html": ASLEEP})
    return output


def typeset(latex: str) -> str:
    """Return the formula as SVG in HTML, which needs no script and no font, in the colour of the surrounding text."""
    ziamath.config.math.color, ziamath.config.svg2 = "currentColor", False
    drawing = ziamath.Latex(" ".join(latex.split()), size=19).svg()
    style = "overflow-x:auto;margin:1em 0;text-align:center"
    return f'<div class="lpkit-formula" role="img" aria-label="{html.escape(latex)}" style="{style}">{drawing}</div>'


def page(book: nbformat.NotebookNode, stem: str) -> nbformat.NotebookNode:
    """Return the executed notebook for the site, with drawn formulas and figures, and one note for consecutive controls."""
    book.metadata.pop("widgets", None)
    book.cells[0].source = DOWNLOAD.format(name=f"{stem}.ipynb", text=book.cells[0].source)
    for number, cell in enumerate(book.cells):
        if cell.cell_type != "code":
            cell.source = FORMULA.sub(lambda found: typeset(found[1]), cell.source)
            continue
        outputs = [drawn(output, f"figure-{stem}-{number}-{i}") for i, output in enumerate(cell.outputs)]
        cell.outputs = [output for i, output in enumerate(outputs)
                        if not (i and output == outputs[i - 1] and "lpkit-control" in str(output))]
    return book


def execute(paths: list[Path], executed: Path) -> None:
    """Run the notebooks at tier cpu. Errors: ConfigError if a cell or a claim failed."""
    if not paths:
        return
    jobs = [job for path in paths for job in runner.plan(path, tier="cpu", out=executed)]
    records = runner.run_all(jobs, say=lambda line: print(line, file=sys.stderr))
    print(table({"runs": records}), file=sys.stderr)
    bad = [f"{record['label']}, cell {record['cell']}: {(record['error'] or {}).get('message', record['status'])}"
           for record in records if record["status"] != "done"]
    if bad:
        raise ConfigError(f"the site shows only notebooks without a failure; these failed: {'; '.join(bad)}")


def record(executed: Path, archive: Path) -> None:
    """Write the executed copies and their records into one zip file, without static pictures, because the site draws the figures."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        for path in sorted(executed.glob("*.ipynb")):
            book = nbformat.read(path, as_version=4)
            book.metadata.pop("widgets", None)
            for data in (output.get("data", {}) for cell in book.cells for output in cell.get("outputs", ())):
                if PLOTLY in data:
                    [data.pop(mime) for mime in [*data] if mime.startswith("image/")]
            for name, text in ((path.name, nbformat.writes(book)), (f"{path.stem}.json", path.with_suffix(".json").read_text("utf-8"))):
                file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)     # a constant date, so that equal copies give equal bytes


def unpack(archive: Path, executed: Path) -> None:
    """Unpack the recorded copies into the folder `executed`, except where its copy already equals the current notebook."""
    executed.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            if Path(name).name == name and name.endswith(".ipynb") and changed(NOTEBOOKS / name, executed / name):
                for one in (name, f"{Path(name).stem}.json"):
                    (executed / one).write_bytes(file.read(one))


def changed(path: Path, copy: Path) -> bool:
    """Return whether `copy` is missing, or was executed from other cells than the notebook has now."""
    def sources(book: Path) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source) for cell in nbformat.read(book, as_version=4).cells
                if INJECTED not in cell.metadata.get("tags", ())]

    return not (copy.exists() and copy.with_suffix(".json").exists() and path.exists() and sources(path) == sources(copy))


def assemble(pages: Path, executed: list[Path], source: Path) -> None:
    """Write Sphinx's source folder: the pages, the drawn notebooks, plotly.js."""
    shutil.rmtree(source, ignore_errors=True)
    (source / "_static").mkdir(parents=True)
    (source / "notebooks").mkdir()
    (source / "extra" / "download").mkdir(parents=True)
    for folder in (pages, pages / "recipes", pages / "teach", pages / "films"):
        (source / folder.relative_to(pages)).mkdir(exist_ok=True)
        for file in folder.iterdir():
            if file.suffix in (".md", ".svg", ".png", ".gif", ".json") or file.name == "conf.py":
                shutil.copy(file, source / folder.relative_to(pages))
    shutil.copy(pages / "site.css", source / "_static")
    with (source / "index.md").open("a", encoding="utf-8") as file:
        file.write(way(executed))
    with (source / "notebooks.md").open("a", encoding="utf-8") as file:
        file.write(claims(executed))
    with (source / "commands.md").open("a", encoding="utf-8") as file:
        file.write(options())
    beside_notebooks = (source / f"{name}.md" for name in ("claims", "index", "tour"))
    for beside in (*beside_notebooks, *(source / "teach").glob("*.md")):
        beside.write_text(linked(beside.read_text(encoding="utf-8"), executed), encoding="utf-8")
    for above, below in BELOW.items():
        with (source / f"{above}.md").open("a", encoding="utf-8") as file:
            file.write(f"\n```{{toctree}}\n:hidden:\n\n{below}\n```\n")
    for path in executed:
        nbformat.write(page(nbformat.read(path, as_version=4), path.stem), source / "notebooks" / path.name)
        if (original := NOTEBOOKS / path.name).exists():
            shutil.copy(original, source / "extra" / "download")
    for folder in (source / "notebooks" / "pictures", source / "_static" / "pictures"):
        folder.mkdir()
        for picture in (NOTEBOOKS / "pictures").glob("*.*"):
            shutil.copy(picture, folder)
    shutil.copy(pages / "films" / "07.png", source / "_static" / "preview.png")
    script = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    (source / "_static" / "plotly.min.js").write_bytes(script)
    for shared in ("figure.css", "panels.js"):
        shutil.copy(NOTEBOOKS / "lessons" / "figures" / shared, source / "_static")


def linked(text: str, executed: list[Path]) -> str:
    """Return the text with links to notebooks/ replaced by links inside the site; a notebook that the site lacks loses its link."""
    there = {path.name for path in executed}
    return re.sub(r"\[([^]]+)\]\(\.\./((?:\.\./)*)notebooks/([^)]+)\)",
                  lambda link: f"[{link[1]}]({link[2]}notebooks/{link[3]})" if link[3] in there else f"`{link[1]}`", text)


def planner(source: Path) -> str:
    """Add the planner to the files that Sphinx copies unchanged, and its link to the first page. Return the error if the planner
    could not be made, because the site can be built without it; otherwise an empty string."""
    done = subprocess.run([sys.executable, str(DOCS / "make_planner.py"), str(source / "extra" / "planner")],
                          stderr=subprocess.PIPE, text=True)
    if done.returncode:
        return done.stderr.strip()
    first, rest = (source / "index.md").read_text(encoding="utf-8").split("```bash", 1)
    (source / "index.md").write_text(f"{first}{PLANNER}```bash{rest}", encoding="utf-8")
    return ""


def way(executed: list[Path]) -> str:
    """Return the table of notebooks in order, with the README's questions, the seconds of a run and the minutes of the exercises."""
    EXERCISES = exercises()
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    questions = dict(re.findall(r"^\| \[(\w+)\]\(notebooks/.+?\) \| (.+?) \|$", readme, re.MULTILINE))
    cards = [CARD.format(stem=path.stem, number=path.stem[:2], picture=picture.name, question=html.escape(questions.get(path.stem, path.stem)))
             for path in executed for picture in sorted((NOTEBOOKS / "pictures").glob(f"{path.stem[:2]}.*"))]
    rows, sums = ["", f'<div class="lpkit-cards">{"".join(cards)}</div>', "", "|  | notebook | runs in | exercises |", "|---|---|---|---|"], [0.0, 0]
    for path in executed:
        record = json.loads(path.with_suffix(".json").read_text())
        minutes = sum(exercise.minutes for key, exercise in EXERCISES.items() if key.startswith(path.stem[:2] + "."))
        question = questions.get(path.stem, path.stem)
        rows.append(f"| {path.stem[:2]} | [{question}](notebooks/{path.name}) | {record['seconds']:.0f}\u00a0s | {minutes}\u00a0min |")
        sums = [sums[0] + record["seconds"], sums[1] + minutes]
    return "\n".join([*rows, "", f"All of them ran in {sums[0] / 60:.0f} minutes on the machine that made this site; the exercises "
                      f"take about {sums[1] / 60:.0f} hours.", ""])


def claims(executed: list[Path]) -> str:
    """Return the table of claims with their results, seconds and peak memory, from the records next to the executed copies."""
    rows = ["", "| notebook | claim, asserted in it | on this machine | seconds | peak MB |", "|---|---|---|---|---|"]
    for path in executed:
        record = json.loads(path.with_suffix(".json").read_text())
        state = ": ".join(filter(None, (record["result"], record["why"])))
        rows.append(f"| [{path.stem}](notebooks/{path.name}) | {record['claim'].replace('|', '/')} | {state.replace('|', '/')} | "
                    f"{record['seconds']:.0f} | {record['peak_rss_bytes'] / 1e6:,.0f} |")
    return "\n".join([*rows, "", "Seconds and peak resident memory are from the run that made this site.", ""])


def options() -> str:
    """Return the help text of every command, from its parser."""
    parts = []
    for name, what in COMMANDS.items():
        command = module_of(name)
        parser = argparse.ArgumentParser(prog=f"lpkit {name}", description=command.__doc__,
                                         formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=110))
        command.arguments(parser)
        parts.append(f"### {name}\n\n{what[0].upper()}{what[1:]}.\n\n```text\n{parser.format_help()}```\n")
    return "\n" + "\n".join(parts)


def address() -> str:
    """Returns the site's address from pyproject.toml, empty while the project has none."""
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Documentation", "")


def sphinx(source: Path, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-D", f"html_baseurl={address()}", str(source), str(out)]
    if subprocess.run(command).returncode:
        raise ConfigError("Sphinx printed warnings (above); correct the page, because the site is built without warnings only")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--no-run", action="store_true", help="use the executed copies in docs/executed, even if notebooks have changed")
    how.add_argument("--record", action="store_true", help="run the whole course, and keep its copies in docs/executed.zip")
    args = parser.parse_args(argv)
    paths = notebooks.course()
    executed, build = DOCS / "executed", DOCS / "_build"
    try:
        if args.record:
            execute(paths, executed)
            record(executed, DOCS / "executed.zip")
        elif not args.no_run:
            unpack(DOCS / "executed.zip", executed)
            execute([path for path in paths if changed(path, executed / path.name)], executed)
        missing = [path.stem for path in paths if not (executed / path.name).exists()]
        if missing:
            raise ConfigError(f"docs/executed lacks {', '.join(missing)}; leave out --no-run")
        assemble(DOCS, [executed / path.name for path in paths], build / "source")
        if why := planner(build / "source"):
            print(f"docs: built without the planner: {why}", file=sys.stderr)
        sphinx(build / "source", build / "html")
    except ConfigError as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    print("docs/_build/html/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
