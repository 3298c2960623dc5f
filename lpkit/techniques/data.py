"""Data policies: which tokens are seen, and in what order. The implementation is a
contracts.DataPolicy, made of (tokens, batch, context, seed) and of its row's settings, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lpkit.techniques.attention import KINDS
from lpkit.techniques.row import Row, Settings, chosen


@dataclass(frozen=True, kw_only=True)
class Policy(Row):
    """`gives_ids`: batches contain the document of each token. `hides`: no target is among the
    tokens, so attention that is not causal can be trained. `evaluation`: the row that reads the
    run's validation data. `seeded`: another seed gives other batches."""

    gives_ids: bool = False
    hides: bool = False
    evaluation: str = "spread-windows"
    seeded: bool = True


POLICIES: dict[str, Policy] = {
    "random-windows": Policy(why="windows drawn uniformly, with replacement",
                             implementation="lpkit.datasets.policies:RandomWindows"),
    "spread-windows": Policy(why="every window once, any few of them a fair sample of the corpus",
                             implementation="lpkit.datasets.policies:SpreadWindows", seeded=False),
    "random-documents": Policy(why="random windows that say which document a token is of; the "
                               "first token of the next is nobody's target",
                               implementation="lpkit.datasets.policies:RandomDocuments",
                               gives_ids=True, evaluation="spread-documents"),
    "spread-documents": Policy(why="spread windows that say the same",
                               implementation="lpkit.datasets.policies:SpreadDocuments",
                               gives_ids=True, evaluation="spread-documents", seeded=False),
}


@dataclass(frozen=True, kw_only=True)
class Sizes(Row):
    """`at(step, settings, sequences, context)`: (sequences, tokens of each) in an update, with step
    from 0, up to the config's `sequences` and `context`; None: always the config's."""

    at: Callable[[int, Settings, int, int], tuple[int, int]] | None = None


SIZES: dict[str, Sizes] = {
    "constant": Sizes(why="every update has global_batch sequences of model.context tokens"),
}


def evaluating(policy: Settings) -> Settings:
    """Return the policy that reads the validation data of a run."""
    other = POLICIES[policy.name].evaluation
    return policy if other == policy.name else chosen(POLICIES, other)


def cannot_train(model: Any, policy: Settings) -> str:
    """Return why a policy cannot train a model, and the way out; "": it can."""
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
