"""What notebook 24's model forgets when it goes on with another text: adapters of each rank beside
all weights, in nats.

    lpkit bench forgetting --out data/measured      five minutes

A case is a rank at a learning rate; `ours` is the loss of the first text after training minus the
loss before, by seed of the base. `peer` is the same of all weights at the rate at which they learn
most. `points` has each case by seed, `learned` by how much the loss of the new text fell. `rounds`:
a third of them, and at least three, seeds.
"""

import tempfile
from pathlib import Path

import lpkit
from lessons import l24_start_from_a_run as lesson
from tests.bench.harness import Result, paired

RANKS, BASE_UPDATES, UPDATES = (1, 2, 4, 8, 16), 300, 80      # those of the notebook at tier cpu
PEER = "all weights at their best rate"


def run(rounds: int, updates: tuple[int, int] = (BASE_UPDATES, UPDATES),
        ranks: tuple[int, ...] = RANKS) -> list[Result]:
    studies = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(max(3, rounds // 3)):
            base = lpkit.train(lesson.base(updates[0]).replace({"seed": seed}),
                               out=Path(folder) / str(seed))
            studies.append(lesson.go_on(base, ranks, updates[1]))
    peer = [study.best(0) for study in studies]
    at = {f"{point.name} at {point.lr:g}": [study.at(point.rank, point.lr) for study in studies]
          for point in studies[0].went}
    points = {case: {"forgotten": [study.forgot(point) for study, point in zip(studies, ones)],
                     "learned": [study.manual - point.learned
                                 for study, point in zip(studies, ones)]}
        for case, ones in at.items()}
    return [paired("forgetting", case=case, better="lower", unit="nats", peer_name=PEER,
                   ours=points[case]["forgotten"],
                   peer=[study.forgot(best) for study, best in zip(studies, peer)],
                   facts={"points": points}) for case in at]
