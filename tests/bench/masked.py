"""Masked pre-training: an encoder of the visible tokens beside one of all, in seconds and in nats.

    lpkit bench masked --out data/measured      12 minutes, beside nothing else

First whole updates in turns, of the same model, data and share hidden (75%): layers that see a
quarter beside layers that see all, with what FLOPs say.
Then runs on the standard library, each for the same seconds of updates on a clock of its own: the
autoencoder (75% hidden), BERT-like with 15% hidden and with 75%. They are evaluated alike, at 15%
hidden and at 75%: nats of a hidden token depend on how many others are hidden. Each has its best
rate of a grid that was tried for a third of the seconds; schedules are constant, as an end in
seconds is not known in steps. `rounds`: seeds, three at least.
"""

from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter

import torch

from lessons.rows.masked_torch import encoded
from lpkit.config import Config
from lpkit.measure.updates import Bench, take_turns
from lpkit.predict.flops import training_flops
from lpkit.training.data import corpus
from lpkit.training.training import Training
from tests.bench.harness import Result, paired

BASE = Config().replace({
    "imports": "lessons.rows.masked",
    "model.attention": "bidirectional", "model.vocab": 257, "data.policy": "masked",
    "model.layers": 8, "model.width": 128, "model.heads": 4,
    "model.context": 128, "global_batch": 16, "schedule": "constant", "schedule.warmup_steps": 20,
    "precision.recipe": "fp32", "eval_batches": 16,
    "steps": 1_000_000, "system.device": "cpu"})
ENCODER, HIDDEN, SECONDS = 6, (0.15, 0.75), 60.0
CHANGE = f"masked-autoencoder:encoder_layers={ENCODER}"
CONFIGS = {
    "autoencoder": BASE.replace({"data.policy.share": 0.75, "model.changes": CHANGE}),
    "bert, 15%": BASE.replace({"data.policy.share": 0.15}),
    "bert, 75%": BASE.replace({"data.policy.share": 0.75})}
RATES = (1e-3, 3e-3)
TARGET = 2.0        # times less a step: 3 of 8 layers' work are left in 8, and the pairs of fewer


def run(rounds: int) -> list[Result]:
    return [*steps(rounds), *losses(max(3, rounds // 3))]


def steps(rounds: int) -> list[Result]:
    configs = {name: CONFIGS[name] for name in ("autoencoder", "bert, 75%")}
    benches = [Bench(config.replace({"steps": rounds + 2}), "cpu") for config in configs.values()]
    for bench in benches:
        bench.seconds()
    (ours, peer), others = take_turns([bench.train for bench in benches], rounds, iter)
    flops = [training_flops(config.model) for config in configs.values()]
    return [paired("masked", case="seconds of an update, 6 of 8 layers see a quarter", ours=ours,
                   peer=peer, peer_name="all layers see all",
                   target=TARGET, facts={"by_flops": flops[1] / flops[0], "others_share": others})]


def losses(seeds: int, seconds: float = SECONDS) -> list[Result]:
    """Nats of a hidden token after equal seconds, at both shares; `updates` say what they
    bought."""
    rates = {name: min(RATES, key=lambda lr, config=config: after(config, lr, 0,
        seconds / 3)[0][config.data.policy.share]) for name, config in CONFIGS.items()}
    runs = {name: [after(config, rates[name], 1 + seed, seconds) for seed in range(seeds)]
            for name, config in CONFIGS.items()}
    return [paired("masked", case=f"nats after {seconds:g} s, {share:.0%} hidden, {name}",
                   better="lower", unit="nats", peer_name="bert, 15%",
                   ours=[nats[share] for nats, _ in runs[name]],
                   peer=[nats[share] for nats, _ in runs["bert, 15%"]],
                   facts={"lr": rates[name], "updates": [median(count for _, count in runs[arm])
                       for arm in (name, "bert, 15%")]})
            for share in HIDDEN for name in ("autoencoder", "bert, 75%")]


def after(config: Config, lr: float, seed: int, seconds: float) -> tuple[dict[float, float], int]:
    """Nats by share hidden, and updates, after so many seconds of updates."""
    training, count = Training.build(config.replace({"optimizer.lr": lr, "seed": seed})), 0
    training.update(count)      # the first one allocates
    start = perf_counter()
    while perf_counter() - start < seconds:
        training.update(count := count + 1)
    return {share: evaluated(training, share) for share in HIDDEN}, count + 1


def evaluated(training: Training, share: float) -> float:
    """Nats of hidden tokens where another share is hidden: the encoder sees all that are not, the
    same ones for every model."""
    asked = training.config.replace({"model.changes": [], "data.policy.share": share, "seed": 0})
    model, before = training.model, training.model.encoder
    if before is not None:
        settings, mask = before.args
        model.encoder = partial(encoded, replace(settings, hidden=share), mask)
    try:
        return replace(training, val=corpus(asked, training.ranks,
            torch.device("cpu")).val).evaluate()
    finally:
        model.encoder = before
