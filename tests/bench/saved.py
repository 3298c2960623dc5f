"""What `lpkit measure` is worth: a row of this machine is taken with one config, and says how long
updates of others take.

The error of a prediction with the row stands beside that without it: by the same ceilings alone
(`--machine this`), and by the same file without what was measured, as a person would write it. The
updates of all configs take turns, the row's own among them, and each config's best counts: a slow
moment meets all.
"""

import statistics

from lpkit.config import Config
from lpkit.measure import Bench, row
from lpkit.measure.updates import take_turns
from lpkit.predict.roofline import REACHED
from lpkit.predict.time import step_time, with_step
from lpkit.presets import preset
from lpkit.techniques.machines import from_dict
from tests.bench.harness import ROUNDS, Result, paired

NAME, TARGET = "saved-row", 0.5     # at most, times the error without it
OTHERS = {"2 sequences": {"global_batch": 2},
          "64 sequences of 64": {"global_batch": 64, "model.context": 64},
          "width 128": {"model.width": 128, "model.heads": 2},
          "width 512": {"model.width": 512, "model.heads": 8, "global_batch": 4},
          "8 layers": {"model.layers": 8, "global_batch": 4},
          "4 x 512 tokens": {"model.context": 512, "global_batch": 4},
          "Llama's block": {"model.mlp": "swiglu", "model.norm": "rmsnorm",
                            "model.position": "rope", "model.bias": False}}


def run(rounds: int = ROUNDS) -> list[Result]:
    base = preset("cpu-3m")
    return compare(base, {name: base.replace(changes) for name, changes in OTHERS.items()}, rounds)


def compare(base: Config, others: dict[str, Config], rounds: int) -> list[Result]:
    """Errors in %, by config, and their medians last."""
    values = row(base, f"lpkit bench {NAME}")
    by_hand = from_dict({key: value for key, value in values.items() if key != "measured"})
    benches = {name: Bench(config) for name, config in {"": base, **others}.items()}
    (own, *seconds), cpu_share = take_turns([bench.seconds for bench in benches.values()], rounds,
        iter)
    on = with_step(from_dict({**values, "measured": {**values["measured"], "seconds": min(own)}}))
    facts = {"seconds": min(own), "factor": on.measured["factor"], "others_cpu_share": cpu_share}
    ways = {"with the row": (on, None), "its ceilings alone": (by_hand, REACHED),
            "the file without what was measured": (by_hand, None)}
    errors: dict[str, list[float]] = {way: [] for way in ways}
    for (name, config), times in zip(others.items(), seconds):
        recipe = benches[name].precision.used
        for way, (machine, efficiency) in ways.items():
            predicted = step_time(config, machine, precision=recipe,
                                  efficiency=efficiency).step_seconds
            errors[way].append(100 * abs(predicted / min(times) - 1))
    ours, *peers = errors.items()
    results = []
    for peer, theirs in peers:
        rows = [*zip(others, ours[1], theirs),
                ("median", *map(statistics.median, (ours[1], theirs)))]
        results += [paired(NAME, ours=[mine], peer=[other], better="lower", peer_name=peer,
                           case=case, unit="% off", facts=facts,
                           target=TARGET if case == "median" else None)
            for case, mine, other in rows]
    return results
