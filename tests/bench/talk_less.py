"""Losses and bytes of ten ways to average replicas, compared with an all-reduce of gradients.

    lpkit bench talk-less --out data/measured

Four ranks train a model of 130 thousand weights for 300 updates by each method of notebook 18, with
three seeds. Nothing is timed; ranks share the cores, one thread each.
"""

from lessons import l18_talk_less as lesson
from lpkit.parallel.processes import Processes
from tests.bench.harness import Result, paired


def run(rounds: int = lesson.SEEDS) -> list[Result]:
    """One Result for each method: its loss over that of an all-reduce, by seed. `rounds`: at most
    as many seeds."""
    seeds = range(min(rounds, lesson.SEEDS))
    cases = [(method, seed) for seed in seeds for method in lesson.METHODS]
    given = {"runs": cases, "updates": lesson.STEPS, "evaluate": True}
    with Processes(f"{lesson.__name__}:train", given, world=lesson.WORLD) as running:
        runs, *_ = running.wait()
    facts = {"runs": [{key: [round(x, 6) for x in value] if isinstance(value, list)
                       else round(value, 6) if isinstance(value, float) else value
                       for key, value in run.items()} for run in runs], "base": lesson.BASE}
    record = lesson.Record(facts["runs"])
    losses = {method: [run["val_loss"] for run in of] for method, of in record.by_method.items()}
    return [paired("talk-less", ours=losses[method], peer=losses[lesson.PLAIN],
                   peer_name="an all-reduce of gradients", better="lower", unit="nats per token",
                   case=f"{method}: {record.bytes_of(method):,.0f} bytes an update from each rank",
                   facts=facts)
            for method in lesson.METHODS[1:]]
