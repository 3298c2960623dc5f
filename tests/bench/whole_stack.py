"""Updates, tokens, FLOPs and CPU seconds until a loss is reached, with each combination of five
techniques.

    lpkit bench whole-stack --out data/measured     # 3 minutes on two quiet cores

Updates are counted in runs that share the cores, with one thread each, and depend on no load. The
seconds of each kind of update are CPU seconds, measured in turns. Notebook 31 shows the record,
and its lesson has the study.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from lessons import l31_whole_stack as lesson
from lpkit import hardware
from lpkit.errors import RunFailedError
from lpkit.machine_facts import cores
from tests.bench.harness import Result, paired

TURNS = 7


def run(rounds: int = lesson.SEEDS) -> list[Result]:
    """Return one Result for each combination: the updates, compared with the baseline's, by seed.
    `rounds`: the number of seeds, 3 at least."""
    combinations = lesson.subsets(lesson.LEARNING)
    share = hardware.others()
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        tuning = dict(zip(combinations, pool.map(lesson.tuned, combinations)))
        rates = {arms: float(min((n, lr) for lr, n in by_rate.items() if n)[1])
                 for arms, by_rate in tuning.items()}
        cases = [(seed, arms) for seed in range(max(3, rounds)) for arms in combinations]
        counts = dict(zip(cases, pool.map(_updates, [arms for _, arms in cases],
                                          [rates[arms] for _, arms in cases],
                                          [seed for seed, _ in cases])))
    updates = {lesson.title(arms): [counts[case] for case in cases if case[1] == arms]
               for arms in combinations}
    if missing := [name for name, each in updates.items() if None in each]:
        raise RunFailedError(f"{', '.join(missing)} did not reach {lesson.TARGET} nats within "
                             f"{lesson.MOST_STEPS} updates")
    facts = {"updates": updates, "target": lesson.TARGET, "base": lesson.BASE,
             "rates": {lesson.title(arms): lr for arms, lr in rates.items()},
             "tuning": {lesson.title(arms): each for arms, each in tuning.items()},
             "seconds": lesson.seconds_by_kind(lesson.subsets(lesson.ARMS), TURNS),
             "other_cpu_share": share()}
    return [paired("whole-stack", ours=updates[lesson.title(arms)], peer=updates["baseline"],
                   peer_name="baseline", case=lesson.title(arms), unit="updates", facts=facts)
            for arms in combinations[1:]]


def _updates(arms: lesson.Arms, lr: float, seed: int) -> float | None:
    count = lesson.updates_to_target(lesson.learning(arms, lr, seed))
    return count and round(count, 2)
