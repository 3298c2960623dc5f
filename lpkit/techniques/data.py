"""Data policies: which tokens of a text a run sees, and in which order. The implementation is a
class of contracts.DataPolicy. Its keyword arguments are tokens, batch (number of sequences),
context (tokens of each), seed, and the settings of its row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpkit.techniques.attention import KINDS
from lpkit.techniques.row import Settings, TechniqueRow, chosen


@dataclass(frozen=True, kw_only=True)
class Policy(TechniqueRow):
    """A row of POLICIES.

    gives_ids:  a batch has the id of each token's document
    hides:      a batch's targets are not among its tokens, so that attention that is not causal
                can be trained
    evaluation: the row that reads the validation data of the run
    seeded:     the batches depend on the seed
    """

    gives_ids: bool = False
    hides: bool = False
    evaluation: str = "spread-windows"
    seeded: bool = True


POLICIES: dict[str, Policy] = {
    "random-windows": Policy(why="windows drawn uniformly, with replacement",
                             implementation="lpkit.datasets.policies:RandomWindows"),
    "spread-windows": Policy(why="every window once; the first windows are spread over the text",
                             implementation="lpkit.datasets.policies:SpreadWindows", seeded=False),
    "random-documents": Policy(why="random windows with the document id of each token; the first "
                               "token of a document is not a target",
                               implementation="lpkit.datasets.policies:RandomDocuments",
                               gives_ids=True, evaluation="spread-documents"),
    "spread-documents": Policy(why="spread windows with the document id of each token",
                               implementation="lpkit.datasets.policies:SpreadDocuments",
                               gives_ids=True, evaluation="spread-documents", seeded=False),
}


@dataclass(frozen=True, kw_only=True)
class Sizes(TechniqueRow):
    """A row of SIZES: the size of each update.

    `at(step, settings, sequences, context)` returns (sequences, tokens of each) of the update after
    `step` updates: at most `sequences` (the config's global_batch) and `context` (model.context).
    None: every update has these sizes.
    """

    at: Callable[[int, Settings, int, int], tuple[int, int]] | None = None


SIZES: dict[str, Sizes] = {
    "constant": Sizes(why="every update has global_batch sequences of model.context tokens"),
}


def evaluating(policy: Settings) -> Settings:
    """Return the settings of the policy that reads the validation data, if `policy` reads the
    training data."""
    other = POLICIES[policy.name].evaluation
    return policy if other == policy.name else chosen(POLICIES, other)


def cannot_train(model: Any, policy: Settings) -> str:
    """Return why `policy` cannot train a model (a ModelConfig), and the way out; "": it can."""
    kind, row = model.attention.name, POLICIES[policy.name]
    rule = model.attention.rule(model.T)
    if not (row.hides or rule is None or rule.causal):
        return (f"model.attention={kind} sees tokens to come, and with data.policy={policy.name} "
                f"these are what it is asked for; name a policy that hides its targets, or a "
                f"causal kind")
    if KINDS[kind].reads_ids and not row.gives_ids:
        others = [name for name, other in POLICIES.items() if other.gives_ids]
        return (f"model.attention={kind} reads which document a token is of, and "
                f"data.policy={policy.name} does not say; set data.policy={others[0]}")
    return policy.problem(model)
