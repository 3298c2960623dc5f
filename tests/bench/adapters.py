"""A training step with adapters beside one of the whole model, in turns on the same batches.

    lpkit bench adapter-step --rounds 15 --out data/measured       3 minutes, beside nothing else

The check: an adapter that begins as the model that it adapts has the same loss at the first step
(beside a base in codes nearly), and trains the numbers that its description says. FLOPs are those
of the formula, and torch's counter has them too (tests/lessons/rows/test_adapters.py).
"""

import torch

from lessons.rows import adapters as adapters
from lpkit.config import Config
from lpkit.predict.flops import training_flops
from lpkit.training.training import RandomTokens, Training
from tests.bench.harness import Result, paired, steps_in_turns

ON_A_CPU = Config().replace({"model.layers": 6, "model.width": 384, "model.heads": 6,
                             "model.context": 256, "global_batch": 4,
                             "system.device": "cpu", "optimizer.lr": 1e-4})
ON_A_GPU = ON_A_CPU.replace({"model.layers": 12, "model.width": 768, "model.heads": 12,
                             "model.context": 1024, "model.vocab": 50_304,
                             "global_batch": 8, "system.device": "cuda",
                             "precision.recipe": "bf16"})
KINDS = {"lora": "lora:rank=8", "lora, one A": [{"name": "lora", "rank": 8, "shared": True}],
         "dora": "dora:rank=8",
         "lora, base in NF4": "lora:rank=8,quantised-base",
         "lora, base in INT8": "lora:rank=8,quantised-base:format=int8",
         "ia3": "ia3", "bottleneck": "bottleneck:width=64"}
TARGETS = {"lora": 0.75}        # at most, of a step of the whole model
MOST_SECONDS = 150
FIRST_LOSS_TOLERANCE = 1e-3     # relative: sums of bf16 products in another order


WARM_UP = 3     # updates: on a GPU the third is captured


def run(rounds: int) -> list[Result]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    base = ON_A_GPU if gpu else ON_A_CPU
    data = RandomTokens(base, base.system.device) if gpu else None
    configs = {"whole": base} | {name: base.replace({"model.changes": row})
                                 for name, row in KINDS.items()}
    configs = {name: config.replace({"steps": rounds + WARM_UP})
               for name, config in configs.items()}
    runs = {name: Training.build(config, data=data) for name, config in configs.items()}
    seconds, losses = steps_in_turns(runs, rounds, warm_up=WARM_UP, within_seconds=MOST_SECONDS)
    for name in KINDS:
        assert abs(losses[name][0] / losses["whole"][0] - 1) < FIRST_LOSS_TOLERANCE, (name,
            losses[name][0], losses["whole"][0])
    whole = training_flops(base.model)
    size = f"{base.model.layers} x {base.model.width}, {base.tokens_per_step:,} tokens"
    return [paired("adapter-step", ours=seconds[name], peer=seconds["whole"],
                   peer_name="the whole model", better="lower",
                   target=TARGETS.get(name), case=f"{name}, {size}", device=gpu,
                   facts={"flops_share": training_flops(configs[name].model) / whole,
                          "trained": sum(p.numel() for p in runs[name].model.parameters()
                                         if p.requires_grad)}) for name in KINDS]
