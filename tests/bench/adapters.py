"""A training step with adapters beside one of the whole model, in turns on the same batches.

    lpkit bench adapter-step --rounds 15 --out data/measured       3 minutes, beside nothing else

The check: an adapter that begins as the model that it adapts has the same loss at the first step, and
trains the numbers that its description says. FLOPs are those of the formula, and torch's counter
has them too (tests/test_adapters.py).
"""

from lpkit.config import Config
from lpkit.predict.flops import training_flops
from lpkit.training.training import Training
from tests.bench.harness import Result, paired, steps_in_turns

BASE = Config().replace({"model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256, "global_batch": 4,
                         "system.device": "cpu", "optimizer.lr": 1e-4})
KINDS = {"lora": {"name": "lora", "rank": 8}, "lora, one A": {"name": "lora", "rank": 8, "shared": True},
         "ia3": {"name": "ia3"}, "bottleneck": {"name": "bottleneck", "width": 64}}
TARGETS = {"lora": 0.75}        # at most, of a step of the whole model
MOST_SECONDS = 150
FIRST_LOSS_TOLERANCE = 1e-3     # relative: sums of bf16 products in another order


def run(rounds: int) -> list[Result]:
    runs = {"whole": Training.build(BASE.replace({"steps": rounds + 1}))}
    configs = {name: BASE.replace({"steps": rounds + 1, "model.changes": [row]}) for name, row in KINDS.items()}
    runs |= {name: Training.build(config) for name, config in configs.items()}
    seconds, losses = steps_in_turns(runs, rounds, within_seconds=MOST_SECONDS)
    for name in KINDS:
        assert abs(losses[name][0] / losses["whole"][0] - 1) < FIRST_LOSS_TOLERANCE, (name, losses[name][0], losses["whole"][0])
    whole = training_flops(BASE.model)
    return [paired("adapter-step", ours=seconds[name], peer=seconds["whole"], peer_name="the whole model", better="lower",
                   target=TARGETS.get(name), case=f"{name}, 6 x 384, 1,024 tokens",
                   facts={"flops_share": training_flops(configs[name].model) / whole,
                          "trained": sum(p.numel() for p in runs[name].model.parameters() if p.requires_grad)}) for name in KINDS]
