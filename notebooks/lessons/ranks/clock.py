"""A clock for pipelines: the start and the end of each action of a schedule.

A rank computes its actions in order. An action starts as soon as its rank is free and its inputs
have arrived; an input from another rank arrives `message_seconds` after it is computed, and sending
does not delay computation. So a schedule is a graph without cycles, and its longest path is the
update (Narayanan et al. 2021, figures 3 and 4, https://arxiv.org/abs/2104.04473). The clock ignores
shared links, concurrent kernels and the optimizer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lpkit.errors import ConfigError
from lpkit.techniques.pipelines import Order

Seconds = float | Sequence[float]                   # equal for all stages, or one per stage
KEEPS = {"F": 1, "I": 0, "W": -1, "B": -1}          # change in the micro-batches that a stage holds


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The times of a schedule, in seconds.

    begins, ends    times at which each rank's actions begin and end, in the order of the actions
    peaks           by stage: the most micro-batches that it holds at once; a stage holds a
                    micro-batch from its F to its B or W
    rank_peaks      by rank: the most micro-batches that its stages hold together
    how             the method that found the times
    """

    begins: dict[int, list[float]]
    ends: dict[int, list[float]]
    peaks: list[int]
    rank_peaks: dict[int, int]
    how: str = "by the clock"

    @property
    def step_seconds(self) -> float:
        return max(ends[-1] for ends in self.ends.values())

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        busy = sum(map(sum, self.ends.values())) - sum(map(sum, self.begins.values()))
        return 1 - busy / (len(self.ends) * self.step_seconds)


def of_stages(order: Order, *seconds: Seconds) -> list[Sequence[float]]:
    """Return, for each of `seconds`, a sequence with one number per stage."""
    stages = len({stage for actions in order.values() for stage, _, _ in actions})
    return [[each] * stages if isinstance(each, (int, float)) else each for each in seconds]


def clock(order: Order, *, forward: Seconds, dx: Seconds, dw: Seconds,
          message_seconds: float = 0.0) -> Timed:
    """Step through an order and return the times of its actions.

    Runs each rank until its next action waits for an action that has not run; running that action
    makes the rank able to continue. Raises ConfigError for an order in which an action is missing,
    is repeated, or waits forever.
    """
    rank_of = {stage: rank for rank, actions in order.items() for stage, _, _ in actions}
    stages, m = len(rank_of), 1 + max(action[2] for actions in order.values() for action in actions)
    f, i, w = of_stages(order, forward, dx, dw)
    seconds = {"F": f, "I": i, "W": w, "B": [a + b for a, b in zip(i, w)]}
    # time of a message to the next stage; 0 if both stages are on one rank, as at the turn of a V
    hop = [message_seconds * (rank_of[s] != rank_of[s + 1]) for s in range(stages - 1)]
    # an action's index: stage * m + micro for F, then `each` more for I or B, 2 * `each` more for W
    each = stages * m
    # `done`: the end of each action, by index
    done: list[float | None] = [None] * (3 * each)
    waiting: dict[int, int] = {}        # by index of an action: the rank that waits for it
    begins, ends = {rank: [] for rank in order}, {rank: [] for rank in order}
    free, able = dict.fromkeys(order, 0.0), list(order)
    held, peaks = [0] * stages, [0] * stages
    load, rank_peaks = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    while able:
        rank = able.pop()
        now, began, ended = free[rank], begins[rank], ends[rank]
        for stage, kind, micro in order[rank][len(ended):]:
            # `need`: index of the action whose result this action needs; `late`: its message's time
            index, need, late = stage * m + micro, None, 0.0
            if kind == "W":
                index, need = index + 2 * each, index + each
            elif kind != "F":
                index, need = index + each, index          # the last stage needs only its own F
                if stage < stages - 1:
                    need, late = index + m, hop[stage]   # the I or B of the next stage
            elif stage:
                need, late = index - m, hop[stage - 1]
            if need is not None:
                if done[need] is None:
                    waiting[need] = rank
                    break
                now = max(now, done[need] + late)
            began.append(now)
            now += seconds[kind][stage]
            ended.append(now)
            done[index] = now
            held[stage] += KEEPS[kind]
            peaks[stage] = max(peaks[stage], held[stage])
            load[rank] += KEEPS[kind]
            rank_peaks[rank] = max(rank_peaks[rank], load[rank])
            if index in waiting:
                able.append(waiting.pop(index))
        free[rank] = now
    stuck = {rank: actions[len(ends[rank])] for rank, actions in order.items()
             if len(ends[rank]) < len(actions)}
    for rank, (stage, kind, micro) in stuck.items():
        raise ConfigError(f"rank {rank} waits forever for the input of {kind} of micro-batch "
                          f"{micro} in stage {stage}; put the action that computes this input "
                          f"first")
    has = Counter(kind for actions in order.values() for _, kind, _ in actions)
    if not has["F"] == has["I"] + has["B"] == has["W"] + has["B"] == each:
        raise ConfigError(f"the order has {dict(has)} actions for {m} micro-batches in {stages} "
                          f"stages; each micro-batch needs in each stage F once, and either B once "
                          f"or I and W once")
    return Timed(begins=begins, ends=ends, peaks=peaks, rank_peaks=rank_peaks)
