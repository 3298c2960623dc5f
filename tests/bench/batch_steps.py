"""Updates to a loss over batch sizes and learning rates, beside what the gradients' noise predicts.

    lpkit bench batch-steps --out data/measured     # 12 minutes of CPU time
    lpkit bench width-rates --out data/measured
    lpkit bench tpe-random --out data/measured      # three minutes of two cores

A model of 35 thousand weights learns from 4 to 128 sequences at a time until it has reached two
losses, at each rate of a grid, by AdamW and by SGD. At the best rate of the largest batch the noise
of its gradients is measured on the way. Notebooks 21, 27 and 28 show the three records, and their
lessons have the studies. Nothing is timed; runs share the cores, one thread each.
"""

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from lessons import l21_noise_scale_and_schedules as lesson
from lessons import l27_width_and_mup as width
from lpkit.claims.sweep import SAMPLERS
from lpkit.machine_facts import cores
from tests.bench.harness import Result, paired

SEARCHES, TRIALS = 20, 20
SPACE = {"optimizer.lr": (1e-4, 1e-1, True), "optimizer.beta1": (0.5, 0.99, False),
         "schedule.warmup_steps": (0, 30, False)}       # low, high, on a log scale
COMPARED = ("tpe", "random")


def run(rounds: int = lesson.SEEDS) -> list[Result]:
    """One Result for each optimizer, batch and target: the updates of its best rate by seed, beside
    the prediction. `rounds`: at most as many seeds."""
    seeds = range(min(rounds, lesson.SEEDS))
    cases = [(optimizer, batch, lr, seed) for optimizer, rates in lesson.RATES.items()
             for batch in (lesson.ANCHOR, *reversed(lesson.BATCHES))
             for lr in rates for seed in seeds]
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        reached = list(pool.map(_reached, *zip(*cases)))
        runs = [dict(zip(("optimizer", "batch", "lr", "seed", "steps"), (*case, steps)))
                for case, steps in zip(cases, reached)]
        record = lesson.Record({"runs": runs, "noise": {}})
        best = [record.best(name, lesson.ANCHOR, min(lesson.TARGETS)).lr for name in lesson.RATES]
        rates = [min(grid, key=lambda lr, near=near: abs(lr - near))
                 for grid, near in zip(lesson.RATES.values(), best)]
        noise = dict(zip(lesson.RATES, pool.map(_noise, lesson.RATES, rates)))
    facts = {"runs": runs, "noise": noise, "base": lesson.BASE}
    record = lesson.Record(facts)
    return [paired("batch-steps", ours=[record.predicted(name, batch, target).value],
                   peer=[record.best(name, batch, target).steps], peer_name="measured",
                   case=f"{name}, {batch} sequences, to {target} nats", better="lower",
                   unit="updates", facts=facts)
            for name in lesson.RATES for target in lesson.TARGETS for batch in lesson.BATCHES]


def _reached(optimizer: str, batch: int, lr: float, seed: int) -> list[float | None]:
    training = lesson.Training.build(lesson.config(optimizer, batch, lr, seed))
    points = list(lesson.curve(training, lesson.held_out(), min(lesson.TARGETS)))
    return [steps and round(steps, 2) for steps in (
        lesson.steps_to(points, target) for target in lesson.TARGETS)]


def _noise(optimizer: str, lr: float) -> dict:
    return lesson.noise_on_the_way(optimizer, lesson.ANCHOR, lr, lesson.held_out(),
                                   min(lesson.TARGETS))


def widths(rounds: int = 2) -> list[Result]:
    """One Result for each parametrisation: the loss of the widest model at the rate that is best
    for the narrowest, over the loss at its own best. `rounds`: at most as many seeds of the two."""
    seeds = range(min(rounds, 2))
    cases = [(how, wide, lr, seed) for wide in reversed(width.WIDTHS)
             for how in width.PARAMETRISATIONS for lr in width.WIDTH_RATES for seed in seeds]
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        losses = list(pool.map(width.loss_of_width, *zip(*cases)))
    runs = [dict(zip(("how", "width", "lr", "seed", "loss"), (*case, loss)))
            for case, loss in zip(cases, losses)]
    results = []
    for how in width.PARAMETRISATIONS:
        transfer = width.transfer(runs, how)
        results.append(paired(
            "width-rates", ours=[transfer.moved], peer=[transfer.own],
            peer_name="its own best rate",
            case=f"{how}: width {width.WIDTHS[-1]} at the best rate of width {width.WIDTHS[0]}",
            better="lower", unit="nats per token", facts={"runs": runs}))
    return results


def searches(rounds: int = SEARCHES) -> list[Result]:
    """One Result for each number of trials: the best loss of a search by TPE over that of one at
    random. Each search has a sampler's seed of its own; whatever `rounds` are, all run."""
    seeds = range(SEARCHES)
    cases = [(sampler, seed) for sampler in COMPARED for seed in seeds]
    with ProcessPoolExecutor(cores(), multiprocessing.get_context("spawn")) as pool:
        losses = dict(zip(cases, pool.map(_search, *zip(*cases))))
    by_sampler = {sampler: [losses[sampler, seed] for seed in seeds] for sampler in COMPARED}
    return [paired("tpe-random", ours=[min(search[:n]) for search in by_sampler["tpe"]],
                   peer=[min(search[:n]) for search in by_sampler["random"]], peer_name="at random",
                   better="lower", case=f"the best of {n} trials", unit="nats per token",
                   packages=("torch", "optuna"), facts={"losses": by_sampler})
            for n in (10, 15, 20)]


def _search(sampler: str, seed: int) -> list[float]:
    """Returns the loss of each of TRIALS runs of 40 updates, whose settings optuna suggests. All
    have one seed: they differ by their settings alone."""
    import optuna  # only the extra `sweep` has it

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed))
    losses = []
    for _ in range(TRIALS):
        trial = study.ask()
        chosen = {key: trial.suggest_int(key, low, high) if isinstance(low, int) else
                  trial.suggest_float(key, low, high, log=log)
                  for key, (low, high, log) in SPACE.items()}
        training = lesson.Training.build(lesson.config("adamw", 8, 0.001).replace(
            chosen | {"steps": 40, "eval_batches": 16}))
        for step in range(40):
            training.update(step)
        loss = training.evaluate()
        study.tell(trial, loss if math.isfinite(loss) else math.inf)
        losses.append(round(min(loss, 10.0) if math.isfinite(loss) else 10.0, 4))
    return losses
