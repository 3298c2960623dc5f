"""The parameters of a notebook: read the declarations in the cell tagged `parameters`, and set
requested values.

papermill would execute the *names* of parameters as code, and treat the text "false" as true. This
module reads the declarations from the syntax tree instead, accepts only declared names, and
converts texts by their annotations.
"""

import ast
import contextlib
import copy
import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from hosting.notebooks import tagged
from lpkit.config import key_and_value
from lpkit.errors import ConfigError, nearest, shown
from lpkit.values import convert

if TYPE_CHECKING:
    from nbformat import NotebookNode

INJECTED = "injected-parameters"
SET = "# Parameters"        # first line of the cell that sets parameters, as in papermill
TYPE_COMMENT = re.compile(r"type:\s*(\S+)\s*(.*)")       # as in papermill: no space in the type
KINDS = {"int": int, "float": float, "bool": bool, "str": str}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One line of a parameters cell: `steps: int = 200  # updates`. The form `name = "a"  # type:
    Literal["a","b"] a name` also exists, because papermill cannot read quotes in an annotation."""

    kind: Any  # int, float, bool, str, None, Literal[...], tuple[int, ...] or a union of these
    annotation: str         # text of the annotation
    default: Any
    comment: str


def parameters(book: "NotebookNode") -> dict[str, Parameter]:
    """Return the parameters that a notebook's parameters cell declares, by name. Executes nothing.
    Raises ConfigError for a second such cell, because it would overwrite the requested values."""
    cells = tagged(book, "parameters")
    if len(cells) > 1:
        raise ConfigError(f"{len(cells)} cells are tagged `parameters`; declare all parameters in "
                          f"one cell")
    by_name = declared("".join(cell.source for cell in cells))
    choose(by_name, {name: parameter.default for name, parameter in by_name.items()})
    return by_name


def declared(source: str) -> dict[str, Parameter]:
    """Return the parameters that a cell's source declares, by name. Raises ConfigError, which shows
    the line, for anything but a declaration. `choose` checks whether a default has its type."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(
            f"the parameters cell does not parse: line {error.lineno}: {error.msg}") from None
    comments = {token.start[0]: token.string.lstrip("#").strip()
                for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT}
    by_name = {}
    for node in tree.body:
        if ast.unparse(node) == "from typing import Literal":    # annotations need this import
            continue
        comment = comments.get(node.end_lineno, "")
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=ast.expr()):
                pass
            case ast.Assign(targets=[ast.Name(id=name)]) if typed := TYPE_COMMENT.match(comment):
                annotation, comment = _annotation(typed[1]), typed[2]
            case _:
                raise ConfigError(f"a parameters cell holds only `name: type = literal  # comment` "
                                  f"and `name = literal  # type: ... comment`, not "
                                  f"`{ast.unparse(node)}`")
        kind = _kind(annotation)
        try:
            default = ast.literal_eval(node.value)      # reads a literal, runs nothing
        except ValueError:
            raise ConfigError(f"the default of {name} must be a literal, not "
                              f"`{ast.unparse(node.value)}`") from None
        by_name[name] = Parameter(kind=kind, annotation=ast.unparse(annotation), default=default,
                                comment=comment)
    return by_name


def _annotation(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise ConfigError(f"the type comment `{text}` is not an annotation") from None


def _kind(node: ast.expr) -> Any:
    """Return the type that an annotation's syntax tree means, by a table of names. Evaluates
    nothing."""
    match node:
        case ast.Name(id=name) if name in KINDS:
            return KINDS[name]
        case ast.Constant(value=None):
            return type(None)
        case ast.BinOp(op=ast.BitOr()):
            return _kind(node.left) | _kind(node.right)
        case ast.Subscript(value=ast.Name(id="Literal")):
            choices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if all(isinstance(choice, ast.Constant) for choice in choices):
                return Literal[tuple(choice.value for choice in choices)]
        case ast.Subscript(value=ast.Name(id="tuple"),
                           slice=ast.Tuple(elts=[kind, ast.Constant(value=last)])):
            if last is Ellipsis:
                return tuple[_kind(kind), ...]
    raise ConfigError(f"the annotation `{ast.unparse(node)}` is none of {', '.join(KINDS)}, None, "
                      f"Literal[...], tuple[..., ...] or a union of these")


def choose(known: Mapping[str, Parameter], asked: Mapping[str, Any],
           tier: str | None = None) -> dict[str, Any]:
    """Return the value of every declared parameter: the requested value (`asked`), converted by its
    annotation, or the default. `tier`: the value of the option --tier. Raises ConfigError for a
    name that is not declared, and for a value that does not fit."""
    if tier is not None:
        if "tier" not in known:
            raise ConfigError("this notebook declares no parameter `tier`, so --tier cannot choose "
                              "its size")
        if asked.get("tier", tier) != tier:
            raise ConfigError(f"--tier {tier} and tier={asked['tier']} contradict each other; give "
                              f"one")
        asked = {**asked, "tier": tier}
    values = {name: parameter.default for name, parameter in known.items()}
    for name, value in asked.items():
        if name not in known:
            raise ConfigError(f"this notebook has no parameter {shown(name)}; "
                              + (nearest(name, known) if known else "it declares none"))
        values[name] = convert(value, known[name].kind, name)
        try:
            ast.literal_eval(repr(values[name]))        # reads a literal, runs nothing
        except ValueError:
            raise ConfigError(f"{name} cannot be {shown(values[name])}: a parameter is a finite "
                              f"number, text, true/false, none or a list") from None
    return values


def check() -> None:
    """Check and convert the parameters of the notebook whose kernel this is.

    papermill or a person can set any name to any value. This function therefore reads which names
    are declared and which names are set from the cells that ran. Raises ConfigError for an
    undeclared name or a value that does not fit."""
    from IPython import get_ipython

    shell, known, names = get_ipython(), {}, []
    for source in shell.history_manager.input_hist_raw:
        if source.startswith(SET):
            names += [node.id for node in ast.walk(ast.parse(source))
                      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        else:
            with contextlib.suppress(ConfigError):      # not a cell of parameters
                known |= declared(source)
    asked = {name: shell.user_ns[name] for name in (*names, *known) if name in shell.user_ns}
    shell.user_ns.update(choose(known, asked))


def grid(known: Mapping[str, Parameter], settings: Iterable[str]) -> list[dict[str, str]]:
    """Return all combinations of settings: ['lr=1e-3,3e-4', 'steps=10', 'steps=20'] gives four. A
    repeated key makes a grid. Commas make a grid, too, unless the parameter is a text or a
    tuple."""
    axes: dict[str, list[str]] = {}
    for setting in settings:
        key, value = key_and_value(setting)
        kinds = (kind := known[key].kind if key in known else str, *get_args(kind))
        whole = str in kinds or tuple in map(get_origin, kinds)
        parts = [value] if whole else value.split(",")
        axes.setdefault(key, []).extend(part.strip() for part in parts)
    return [dict(zip(axes, point)) for point in itertools.product(*axes.values())]


def with_parameters(book: "NotebookNode", asked: Mapping[str, Any]) -> "NotebookNode":
    """Return a copy of `book` with a new cell after its parameters cell, which sets the requested
    values. If `book` is the output of an earlier run, that run's cell is removed. papermill is not
    used for this, because it turns a tuple into text and warns about annotations that it cannot
    parse."""
    from nbformat.v4 import new_code_cell

    known = parameters(book)
    values = choose(known, asked)
    lines = [f"{name} = {values[name]!r}" for name in known if values[name] != known[name].default]
    book, earlier = copy.deepcopy(book), tagged(book, INJECTED)
    book.cells = [cell for cell in book.cells if cell not in earlier]
    if lines:
        at = book.cells.index(tagged(book, "parameters")[0]) + 1
        book.cells.insert(at, new_code_cell("\n".join([SET, *lines]),
                                            id=INJECTED, metadata={"tags": [INJECTED]}))
    return book
