"""A step of each block beside pre-norm's, in turns, with what FLOPs say.

    lpkit bench blocks --rounds 15 --out data/measured      3 minutes, beside nothing else

The same model of 6 x 384 with another block: whole updates of AdamW. `target` is that of sas-p,
which leaves out two of six matrices.
"""

import torch

from lessons.rows import blocks as blocks
from lpkit.config import Config
from lpkit.measure.updates import Bench, take_turns
from lpkit.predict.flops import training_flops
from lpkit.predict.params import parameter_count
from lpkit.techniques.blocks import BLOCKS
from tests.bench.harness import Result, paired

BASE = "pre-norm"
SIZES = {"6 x 384": {"model.layers": 6, "model.width": 384, "model.heads": 6, "model.context": 256,
                     "global_batch": 4}}
ON_A_GPU = {"12 x 768": {"model.layers": 12, "model.width": 768, "model.heads": 12,
                         "model.context": 1024, "model.vocab": 50_304,
                         "global_batch": 8}}
TARGETS = {("sas-p", "6 x 384"): 1.08}


def run(rounds: int) -> list[Result]:
    gpu = torch.cuda.is_available()
    return [result for size, changes in (ON_A_GPU if gpu else SIZES).items()
            for recipe in ("fp32", "bf16")
            for result in _of(size, changes, recipe, rounds, "cuda" if gpu else "cpu")]


def _of(size: str, changes: dict, recipe: str, rounds: int, device: str) -> list[Result]:
    base = Config().replace({**changes, "precision.recipe": recipe, "steps": rounds + 2})
    configs = {name: base.replace({"model.block": name}) for name in BLOCKS}
    configs["pre-norm without norms"] = base.replace({"model.norm": "none"})
    benches = {name: Bench(config, device) for name, config in configs.items()}
    for bench in benches.values():
        bench.seconds()
    times, others = take_turns([bench.train if device == "cpu" else bench.seconds
                                for bench in benches.values()], rounds, iter)
    seconds = dict(zip(benches, times))

    def over(name: str, of: object) -> float:
        return of(configs[BASE].model) / of(configs[name].model)

    return [paired("blocks", case=f"{name}, {size}, {recipe}", ours=seconds[name],
                   peer=seconds[BASE], peer_name=BASE,
                   target=TARGETS.get((name, size)) if recipe == "fp32" else None,
                   device=torch.cuda.get_device_name() if device == "cuda" else None,
                   facts={"by_flops": over(name, training_flops),
                          "by_parameters": over(name, parameter_count), "others_share": others,
                          "attention": benches[name].attention.used})
            for name in configs if name != BASE]
