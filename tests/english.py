"""Sentences that are likely to need a rewrite, as an aid for editors; no test depends on it.

    python -m tests.english                 # how many sentences of each kind match a pattern
    python -m tests.english docs lpkit/nn   # the sentences of these places, with their patterns
    python -m tests.english --sample 30 --seed 7    # 30 random sentences of each kind, to be judged
    python -m tests.english --names         # names that do not say what they hold, by folder

The kinds are documentation, notebooks, teacher pages, command help, error messages, docstrings and
comments. The patterns are the rules of plain English that a regular expression can see: a sentence
that begins with a pronoun in place of a noun, or that has words which mostly stand for a clearer
word.
"""

import argparse
import ast
import io
import json
import random
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
WHERE = ("README.md", "docs", "notebooks", "lpkit")
LEAST_WORDS = 4
# of sentences, in any case
PATTERNS = {
    "begins with a pronoun": r"^(what|who|whose|that of|one|those|of|by|whoever|whatever) ",
    "a clause without its noun": r"[,;:] (what|who|whose|that of|those of|whoever) ",
    "a word for a clearer one": r"\b(beside|goes on|said|told|anew|met|apart|foretell\w*|as far as|"
                                r"says nothing of|is to be|are to be|that is there|of so many)\b",
    "a pronoun for a noun": r"\b(that of|those of|those that|one of those|the others'|as it is|"
                            r"such as are|whichever)\b",
}
NAMES = {"told", "said", "found", "made", "one"}
SKIPPED = re.compile(r"^(\||```|!\[|    |#+ |<|\$\$|- https?:)")


def sentences(text: str) -> Iterator[str]:
    """Yields the sentences of running text, without code, links and formulas."""
    text = re.sub(r"`[^`]*`|\$[^$]*\$", "CODE", re.sub(r"\]\([^)]*\)", "]", text))
    for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z*\[])", " ".join(text.split())):
        if len(sentence.split()) >= LEAST_WORDS:
            yield sentence.strip("-* ")


def paragraphs(page: str) -> Iterator[str]:
    """Yields the paragraphs and the items of lists of a page in Markdown."""
    fenced, lines = False, []
    for line in [*page.splitlines(), ""]:
        fenced ^= line.startswith("```")
        if not line.strip() or fenced or SKIPPED.match(line) or line.lstrip().startswith("- "):
            yield " ".join(lines)
            lines = []
        if line.strip() and not fenced and not SKIPPED.match(line):
            lines.append(line.strip())


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the kind of each text of a file, and the text."""
    if path.suffix == ".md":
        kind = "teacher pages" if "teach" in path.parts else "documentation"
        yield from ((kind, each) for each in paragraphs(path.read_text(encoding="utf-8")))
    elif path.suffix == ".ipynb":
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield from (("notebooks", each) for each in paragraphs("".join(cell["source"])))
    else:
        yield from of_module(path.read_text(encoding="utf-8"))


def of_module(code: str) -> Iterator[tuple[str, str]]:
    """Yields docstrings, messages of errors and comments."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (("docstrings", each) for each in paragraphs(ast.get_docstring(node) or ""))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in node.exc.args[:1]:
                yield "error messages", "".join(
                    piece.value if isinstance(piece, ast.Constant) else "VALUE"
                    for piece in getattr(part, "values", [part]) if isinstance(
                        piece, ast.FormattedValue) or isinstance(getattr(piece, "value", 0), str))
    comment, last = [], -1
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield "comments", " ".join(comment)
                comment = []
            comment.append(token.string.lstrip("# "))
            last = token.start[0]
    yield "comments", " ".join(comment)


def every(places: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields file, kind and sentence."""
    for place in places:
        top = ROOT / place
        files = [top] if top.is_file() else sorted(
            path for path in top.rglob("*") if path.suffix in (".md", ".ipynb", ".py")
            and not {"_build", "executed", "runs", "__pycache__"} & {*path.parts})
        for path in files:
            for kind, text in texts(path):
                for sentence in sentences(text):
                    yield str(path.relative_to(ROOT)), kind, sentence


def command_help() -> Iterator[tuple[str, str, str]]:
    """Yields "lpkit COMMAND --help", the kind and each sentence of the help, once."""
    from lpkit import cli
    known: set[str] = set()
    for command in cli.COMMANDS:
        with redirect_stdout(io.StringIO()) as page, suppress(SystemExit):
            cli.main([command, "--help"])
        # each option begins a paragraph
        blocks = re.sub(r"\n  +(?=\S+( \S+)*  +)", "\n\n", page.getvalue()).split("\n\n")
        for text in blocks:
            if text.startswith(("usage:", "  lpkit", "lpkit ")):
                continue
            text = text if re.match(r"\w", text) else re.sub(r"^ *\S+( \S+)*  +", "", text)
            for sentence in sentences(text):
                if sentence not in known:
                    known.add(sentence)
                    yield f"lpkit {command} --help", "command help", sentence


def names(tree: ast.AST) -> Iterator[str]:
    """Yields each name of a variable, parameter, function, class, field or keyword."""
    for node in ast.walk(tree):
        for attribute in ("id", "arg", "attr", "name", "asname"):
            if isinstance(name := getattr(node, attribute, None), str):
                yield name


def print_names(places: list[str]) -> None:
    for place in places:
        count = Counter(name for path in sorted((ROOT / place).rglob("*.py"))
                        for name in names(ast.parse(path.read_bytes())) if name in NAMES)
        print(f"{place}: {count.total()}; "
              + ", ".join(f"{name} {number}" for name, number in count.most_common()))


def matches(sentence: str) -> list[str]:
    return [name for name, pattern in PATTERNS.items() if re.search(pattern, sentence, re.I)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("places", nargs="*")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", action="store_true")
    args = parser.parse_args()
    if args.names:
        return print_names(args.places or ["lpkit", "notebooks", "tests"])
    by_kind = defaultdict(list)
    for place, kind, sentence in () if args.places else command_help():
        by_kind[kind].append((place, sentence))
    for path, kind, sentence in every(args.places or [*WHERE]):
        by_kind[kind].append((path, sentence))
    for kind, each in by_kind.items():
        if args.sample:
            drawn = random.Random(args.seed).sample(each, min(args.sample, len(each)))
            print(f"\n{kind}: {len(drawn)} of {len(each)}")
            for path, sentence in drawn:
                print(f"- {path}: {sentence}")
            continue
        why = Counter(name for _, sentence in each for name in matches(sentence))
        count = sum(bool(matches(sentence)) for _, sentence in each)
        print(f"{kind}: {count} of {len(each)} sentences; "
              + ", ".join(f"{name} {number}" for name, number in why.most_common()))
        for path, sentence in each if args.places else ():
            if matches(sentence):
                print(f"  {path}: {sentence} [{', '.join(matches(sentence))}]")


if __name__ == "__main__":
    main()
