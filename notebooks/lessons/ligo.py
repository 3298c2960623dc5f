"""Fits the linear maps by which a small model becomes a large one, on text: `start.grow=ligo`
(Wang et al. 2023, https://arxiv.org/abs/2303.00980).

    cd notebooks
    python -m lessons.ligo ../runs/small maps.safetensors model.width=512 model.heads=8
    lpkit train ../runs/small/config.yaml model.width=512 model.heads=8 start.run=../runs/small \
          start.grow=ligo start.grow.file=maps.safetensors

The small model's weights stay as they are: what is trained are matrices, of which an update makes
the large model's weights anew. They begin as uneven copies, with new layers that add nothing, so
that the loss begins where the small model's ended. An update takes the large model's FLOPs, and
those of the products with the maps.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from lpkit.config import Config, parse_settings
from lpkit.errors import ConfigError
from lpkit.techniques.growth import AXES, Maps
from lpkit.techniques.row import Settings
from lpkit.training import growth
from lpkit.training.runs import Run
from lpkit.training.sampling import trained
from lpkit.training.training import Training

UPDATES, LR = 100, 3e-4     # the paper's number of updates; Adam's first rate, which falls to 0


def fit(run: Run, config: Config, updates: int = UPDATES, lr: float = LR) -> dict[str, Tensor]:
    """`config`: of the large model, and of the text on which it is to be trained."""
    config = config.replace({"start.run": "", "start.grow": "none", "steps": updates})
    small, large = run.config.model, config.model
    training = Training.build(config)
    tensors = {name: p.detach() for name, p in trained(run).model.named_parameters()}
    maps, layers = growth.copying(small, large, uneven=0.5), torch.arange(large.L)
    for module in AXES:
        depth = torch.eye(small.L)[layers % small.L]
        depth[small.L:] *= module not in ("out", "down")
        maps[f"depth.{module}"] = depth
    maps = {name: t.requires_grad_() for name, t in maps.items()}
    optimizer = torch.optim.Adam(maps.values(), lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    for step in range(updates):
        optimizer.zero_grad()
        batch = training.batch(step)
        made = dict(growth.linear(tensors, small, large, Maps(), maps=maps))
        logits = functional_call(training.model, made, (batch.tokens,))
        cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten()).backward()
        optimizer.step()
        schedule.step()
    return {name: t.detach() for name, t in maps.items() if t.grad is not None}     # that it has


def main() -> int:
    parser = argparse.ArgumentParser(prog="lessons.ligo", description=__doc__.partition(":")[0])
    parser.add_argument("run", help="the small model's folder")
    parser.add_argument("file", help="where the maps go")
    parser.add_argument("settings", nargs="*", help="of the large model, as model.width=512")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--lr", type=float, default=LR)
    asked = parser.parse_args()
    try:
        run = Run.open(Path(asked.run))
        config = run.config.replace(parse_settings(asked.settings))
        if why := growth.refusal(Settings(name="ligo"), run.config.model, config.model):
            raise ConfigError(why)      # but for the file, which is not there yet
        save_file(fit(run, config, asked.updates, asked.lr), asked.file)
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    print(f"{asked.file}: start.grow=ligo start.grow.file={asked.file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
