"""Make docs/tour.md: every technique of a survey and of the kit with its notebook, its row or
command, a prediction, a measurement and a verdict.

data/published/tour.toml lists the techniques and the origin of their numbers. Predictions are
computed here. Measurements are read from claims, verdict files, records of data/measured and the
claims of executed notebooks (docs/executed.zip). `python -m tests.pages tour` makes the page.
"""

import functools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zipfile import ZipFile

from lessons.catalogue import kit_rows
from lpkit.commands.claims import line
from lpkit.config import Config
from lpkit.files import resource
from lpkit.predict.ledger import memory
from lpkit.predict.time import step_time
from lpkit.presets import preset
from lpkit.techniques.outside import TABLES
from lpkit.values import Checked, Text
from tests.bench import protocol
from tests.pages import markdown_table
from tests.pages.claims import NOT_TESTABLE, Claim, claims

MACHINE = "h100"
BASE = preset("gpt2-124m").replace({"global_batch": 32, "grad_accum_steps": 1,
                                    "precision.recipe": "bf16", "model.context": 1024})
HEADS = ("technique", "notebook", "row or command", "prediction", "measured", "verdict")


@dataclass(frozen=True, kw_only=True)
class Technique(Checked):
    """A line of tour.toml; the comment at the top of that file explains the fields."""

    name: Text
    notebook: Text
    own: bool = False
    rows: tuple[Text, ...] = ()
    settings: str = ""
    command: str = ""
    claim: str = ""
    protocol: str = ""
    record: str = ""
    missing: str = ""


def techniques() -> dict[str, list[Technique]]:
    """Returns the techniques by area. Raises ConfigError for an invalid line."""
    text = (resource("data/published") / "tour.toml").read_text(encoding="utf-8")
    return {area: [Technique(**{**row, "rows": tuple(row.get("rows", ()))}) for row in rows]
            for area, rows in tomllib.loads(text).items()}


def page() -> str:
    rows_by_area = {area: [cells(technique) for technique in rows]
                    for area, rows in techniques().items()}
    every = [technique for rows in techniques().values() for technique in rows]
    counts = Counter(row[-1] for rows in rows_by_area.values() for row in rows)
    parts = [f"""# A tour of all techniques

All techniques of [A Survey on Efficient Training of
Transformers](https://arxiv.org/abs/2302.01107) and of this kit: {len(every)} rows. A + marks
{sum(technique.own for technique in every)} techniques that are not in the survey.
`python -m tests.pages tour` makes this page from `data/published/tour.toml`, the claims and the
records.

- **Row or command**: write `FIELD=NAME` behind `--set`. The row of a lesson needs an `--import`,
  which [Techniques](techniques.md) names; the row of an experiment needs the `--import` of its
  file.
- **Prediction**: for a claim, see [Claims of others](claims.md). For other rows, the seconds of an
  update and the peak memory, relative to gpt2-124m without the row (H100, 32 sequences of 1,024
  tokens, bf16).
- **Measured**: a record of `data/measured`, a verdict by protocol, or a claim that asserts in the
  notebook check.
- **Verdict**: claims have [a rule](claims.md). *Holds* and *cannot tell* are results of the
  notebook's claim when this documentation was built. *Met* and *short by* are results of a
  benchmark with a target. For *not testable here*, the column Measured names the missing condition.

| verdict | rows |
|---|---|
{chr(10).join(f"| {verdict} | {count} |" for verdict, count in counts.most_common())}
"""]
    for area, rows in rows_by_area.items():
        parts += [f"## {area}", "", markdown_table(HEADS, rows), ""]
    return "\n".join(parts)


def cells(technique: Technique) -> tuple[str, ...]:
    """Returns a row of the table. Raises KeyError for a name that does not exist."""
    claim = claims_by_name()[technique.claim] if technique.claim else None
    shown = [f"`{row}`" for row in technique.rows]
    shown += [f"`{technique.command}`"] * bool(technique.command)
    name = f"[{technique.name}](claims.md#{technique.claim})" if claim else technique.name
    row = (name + " +" * technique.own, linked(technique.notebook), ", ".join(shown) or "none",
           prediction(technique, claim), measurement(technique, claim), verdict(technique, claim))
    return tuple(cell.replace("|", "\\|") for cell in row)


def linked(notebook: str) -> str:
    path = notebook_path(notebook)
    return f"[{path.rpartition('/')[2].rpartition('.')[0]}](../notebooks/{path})"


def notebook_path(notebook: str) -> str:
    """Returns the file below notebooks/. Raises KeyError."""
    folder = resource("notebooks")
    if "/" in notebook:
        if not (folder / notebook).is_file():
            raise KeyError(f"there is no notebooks/{notebook}")
        return notebook
    paths = sorted(folder.glob(f"{notebook}_*.ipynb"))
    if len(paths) != 1:
        raise KeyError(f"there is no notebook {notebook}")
    return paths[0].name


# Predictions.

def prediction(technique: Technique, claim: Claim | None) -> str:
    if claim and claim.numbers.kit:
        return line(claim.to_dict())[2]
    rows_by_ratio: dict[str, list[str]] = {}
    for row in technique.rows:
        if ratios := predicted(row, technique.settings):
            rows_by_ratio.setdefault(ratios, []).append(f"`{row}`")
    if rows_by_ratio:
        return "; ".join(f"{', '.join(rows)}: {ratios}" if len(rows_by_ratio) > 1 else ratios
                         for ratios, rows in rows_by_ratio.items())
    if technique.missing or (claim and claim.missing):
        return "none"
    return "in the notebook, section Predict"


@functools.cache
def predicted(row: str, settings: str) -> str:
    """Returns seconds and peak relative to a step without the row; "" for a row outside the
    catalogue."""
    if named(row) not in imports():
        return ""
    base = with_settings(BASE, settings)
    (seconds, peak), (before, peak_before) = costs(with_settings(base, row)), costs(base)
    return f"{seconds / before:.2f} of the seconds, {peak / peak_before:.2f} of the peak"


def named(row: str) -> tuple[str, str]:
    """
    >>> named("parallel.schedule=zbv parallel.interleave=2")
    ('parallel.schedule', 'zbv')
    >>> named("model.changes=dropout:residual=0.1")
    ('model.changes', 'dropout')
    """
    field, _, name = row.partition(" ")[0].partition("=")
    return field, name.partition(":")[0]


def with_settings(config: Config, settings: str) -> Config:
    """Returns the Config with these FIELD=NAME pairs and the imports of their rows. A pair for
    `model.changes` is added to the list."""
    new: dict[str, Any] = {"imports": list(config.imports)}
    for pair in settings.split():
        field, _, value = pair.partition("=")
        if module := imports().get(named(pair), ""):
            new["imports"].append(module)
        if field == "model.changes" and config.model.changes:
            value = f"{config.model.changes[0].name},{value}"
        new[field] = value
    return config.replace(new)


def costs(config: Config) -> tuple[float, float]:
    return (step_time(config, MACHINE, config.parallel).step_seconds,
            memory(config, MACHINE, layout=config.parallel).peak_bytes)


@functools.cache
def imports() -> Mapping[tuple[str, str], str]:
    """Returns the import of each row of the catalogue, by field and name."""
    return {(field, row["name"]): row["import"] for field in TABLES for row in kit_rows(field)}


# Measurements.

def measurement(technique: Technique, claim: Claim | None) -> str:
    if claim and claim.numbers.measured:
        return line(claim.to_dict())[3]
    if technique.missing or (claim and claim.missing):
        return "missing: " + (technique.missing or claim.missing)
    if technique.protocol:
        [claim_verdict] = settled()[technique.protocol]["verdicts"]
        low, high = claim_verdict["interval"]
        return (f"gain of {claim_verdict['arm']} over {claim_verdict['against']} "
                f"{claim_verdict['gain']:+.1%} ({low:+.1%} to {high:+.1%}, "
                f"{claim_verdict['seeds']} seeds)")
    if technique.record:
        case = recorded(technique.record)
        return (f"{case['ratio']:.3g} times, {case['better']} is better: {case['case']}, "
                f"compared with {case['peer']} (`{case['name']}`)")
    if claim:
        return "nothing: the verdict is by formula"
    return f"\"{run_of(technique.notebook)['claim']}\""


def verdict(technique: Technique, claim: Claim | None) -> str:
    if technique.missing:
        return NOT_TESTABLE
    if claim:
        return claim.verdict
    if technique.protocol:
        claim_result = settled()[technique.protocol]
        return protocol.word(protocol.published()[technique.protocol]["expects"],
                             claim_result["verdicts"][0], claim_result["effect"])
    if technique.record and (word := recorded(technique.record)["verdict"]) != "no target":
        return re.sub(r" \(.*", "", word)
    return run_of(technique.notebook)["result"]


@functools.cache
def claims_by_name() -> Mapping[str, Claim]:
    return claims()


@functools.cache
def settled() -> Mapping[str, Any]:
    return protocol.recorded()[1]


def recorded(record: str) -> Mapping[str, Any]:
    """Returns the case of the newest record of this name. Raises KeyError."""
    name, _, case = record.partition(": ")
    records = [json.loads(path.read_text())
             for path in resource("data/measured").glob(f"{name}-*.json")]
    for newest in sorted(records, key=lambda record: record["date"], reverse=True):
        for row in newest.get("cases", ()):
            if row["case"] == case and row["name"] == name:
                return row
    raise KeyError(f"data/measured has no case {record!r}")


@functools.cache
def run_of(notebook: str) -> Mapping[str, Any]:
    """Returns the record of the executed notebook. Raises KeyError."""
    name = notebook_path(notebook).removesuffix(".ipynb")
    with ZipFile(resource("docs") / "executed.zip") as pages:
        return json.loads(pages.read(f"{name}.json"))
