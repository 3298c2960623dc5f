"""Exercises whose answer runs on several processes, which exchange real tensors.

Only the attempt's text is sent to the processes (`lessons.ranks.rank_exercises`). If a rank raises,
the other ranks are killed; ranks that wait for one another forever are killed after some seconds.
In both cases the learner reads a message.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lessons.judging import index, judge
from lessons.judging.attempts import SECONDS, Answer, Attempt, limit_memory
from lessons.judging.judge import ENDED, Exercise, Verdict, answer, difference, short
from lessons.judging.puzzles import as_text
from lessons.ranks import rank_exercises
from lessons.ranks.rank_exercises import called, meet_as, on_ranks
from lpkit.errors import ConfigError
from lpkit.parallel.processes import Place
from lpkit.parallel.ranks import all_gather, reduce_scatter
from lpkit.training.runs import RunFailedError

WORLD = 2
DRAWN = 20


@dataclass(frozen=True, kw_only=True)
class OnRanks(Exercise):
    """`spec`, `mistakes` and an attempt are functions that each rank calls. Rank r gets x[r] of each
    tensor x of a case, the other values of the case, then `rank`, `ranks`, and the COLLECTIVES that
    the spec names as arguments."""

    drawn: int = DRAWN
    most_sent: int | None = None    # limit on the numbers that a rank gives to collectives

    def judged(self, attempt: Callable[..., Any]) -> Verdict:
        source = as_text(self, attempt)
        if isinstance(source, Verdict):
            return source
        try:
            results = on_ranks(judge_on_rank, WORLD, name=self.name, source=source,
                               seconds=rank_exercises.PROGRESS_SECONDS + SECONDS)
        except (RunFailedError, ConfigError, OSError) as error:
            return Verdict("wrong", str(error).partition("\n")[0], self.solution)
        whys = [result["why"] for result in results if result["why"]]
        if not whys:
            return Verdict("right", "", self.solution)
        _, why = min(whys)
        hints = [hint for hint in self.mistakes
                 if all(hint in result["hints"] for result in results)]
        return Verdict("wrong", "; ".join((why, *hints[:1])), self.solution)


# Code that runs in a rank.

def judge_on_rank(place: Place, job: dict[str, Any]) -> dict[str, Any]:
    """Return `why`, the number of the first wrong case and a message (empty if all cases are
    right), and `hints`, the hints of the mistakes that agree with the attempt in every case.

    The attempt runs in a fork of this rank, which communicates with the forks of the other ranks.
    Afterwards the definition and the mistakes run in this rank."""
    exercise, answers = index.exercise(job["name"]), []
    cases = list(exercise.all_cases())
    with Attempt(partial(_attempt, place, exercise, job["source"]), job["seconds"]) as attempt:
        given = iter(attempt)
        for number in range(len(cases)):
            place.at(number, "your function")
            answers.append(answer := next(given, ENDED))
            if answer.why or answer.to_do:
                raise RunFailedError(f"{answer.why or 'it is still to do'}{answer.line}"
                                     f"{attempt.printed}")
    meet_as(place, "definition")
    why: list[Any] = []
    hints = dict(exercise.mistakes)
    for number, (case, answer) in enumerate(zip(cases, answers)):
        place.at(number, "the definition")
        given = partial(given_to, exercise, case, place.rank, place.world)
        want, others = judge.expected(exercise, given), judge.disturbed(exercise, given)
        if not why and (unlike := difference(answer.value, want, exercise.tolerance, others)):
            named = zip(exercise.arguments, given())
            arguments = ", ".join(f"{name}={short(value)}" for name, value in named
                             if name not in COLLECTIVES)
            why = [number, f"on rank {place.rank}, for {arguments}: {unlike}"]
        for hint, mistake in exercise.mistakes.items():     # on all ranks, since they communicate
            with judge.Unsaturated():
                theirs = mistake(*given())
            if difference(answer.value, theirs, exercise.tolerance):
                hints.pop(hint, None)
    return {"why": why, "hints": list(hints)}


def _attempt(place: Place, exercise: Exercise, source: str) -> Iterator[Answer]:
    """Yield the attempt's answers, in the fork."""
    place.page.close()          # the ranks report progress there; the fork must not
    meet_as(place, "attempt")
    limit_memory()
    attempt = called(source)
    for case in exercise.all_cases():
        yield answer_on_rank(exercise, attempt, case, place.rank, place.world)


def answer_on_rank(exercise: OnRanks, attempt: Callable[..., Any], case: tuple, rank: int,
                   ranks: int, collectives: Mapping[str, Callable] | None = None) -> Answer:
    """Return the attempt's answer on one rank, or that this rank gave more numbers to collectives
    than the exercise allows."""
    sent: list[int] = []
    result = answer(exercise, attempt, given_to(exercise, case, rank, ranks, collectives, sent))
    most = exercise.most_sent
    if result.why or result.to_do or most is None or sum(sent) <= most:
        return result
    return replace(result, why=f"a rank sends {sum(sent)} numbers; the limit is {most}")


def given_to(exercise: OnRanks, case: tuple, rank: int, ranks: int,
             collectives: Mapping[str, Callable] | None = None,
             sent: list[int] | None = None) -> tuple:
    """Return the arguments of a rank. Each call of a collective appends the number of elements of
    its input to `sent`."""
    def counting(collective: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            received = collective(x)
            if sent is not None:
                sent.append(x.numel())
            return received

        return call

    collectives = collectives or COLLECTIVES
    lines = (value[rank].clone() if isinstance(value, Tensor) else value for value in case)
    named = [counting(collectives[name]) for name in exercise.arguments if name in collectives]
    return *lines, rank, ranks, *named


def _scattered(x: Tensor) -> Tensor:
    """Return this rank's part of the sum of x (numbers,) over all ranks."""
    if len(x) % dist.get_world_size():
        raise ValueError(f"reduce_scatter needs a number of elements that is a multiple of the "
                         f"{dist.get_world_size()} ranks, got {len(x)}")
    part = x.new_empty(len(x) // dist.get_world_size())
    reduce_scatter(part, x.contiguous())
    return part


def _gathered(part: Tensor) -> Tensor:
    """Return the parts (numbers,) of all ranks, concatenated."""
    whole = part.new_empty(len(part) * dist.get_world_size())
    all_gather(whole, part.contiguous())
    return whole


def _gathered_bytes(part: Tensor) -> Tensor:
    """Return the parts of all ranks, concatenated, as bytes."""
    if part.dtype != torch.uint8:
        raise ValueError(f"all_gather_bytes sends uint8, got {part.dtype}; get the bytes of 8-bit "
                         f"numbers by .view(torch.uint8)")
    return _gathered(part)


def _largest(x: Tensor) -> Tensor:
    """Return the maximum over all ranks, element by element."""
    x = x.clone()
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


COLLECTIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "reduce_scatter": _scattered, "all_gather": _gathered, "all_gather_bytes": _gathered_bytes,
    "all_reduce_max": _largest}
