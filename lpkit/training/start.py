"""A run that starts from another run's weights: an adapter, a longer context, a deeper model.

    start: {run: runs/base}                                  parameters of the same names
    start: {run: runs/base, map: [blocks.2:blocks.0]}        names with this prefix come from there
    start: {run: runs/base, grow: stack}                     by a row of lessons.rows.growth

The weights are copied before changes of the model. Their hash is part of the run's identity
(run.json). Frozen parameters are in no checkpoint: they are read from the base run again, which
must still exist.
"""

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lpkit import records
from lpkit.config import Config
from lpkit.errors import ConfigError
from lpkit.parallel.ranks import by_first
from lpkit.techniques.changes import GROWTH
from lpkit.training import checkpoint
from lpkit.training.runs import Run


@dataclass(kw_only=True)
class Start:
    where: str = ""                 # path of the checkpoint
    # hash of the weights, independent of how they are cut into files
    sha256: str = ""
    # mapped from the files: they take no memory
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # prefix of a new name: prefix in the base run
    places: dict[str, str] = field(default_factory=dict)
    grown: partial | None = None    # returns larger tensors, from the base run's
    frozen: set[str] = field(default_factory=set)               # parameters that are not trained

    def copy_into(self, model: nn.Module) -> list[nn.Parameter]:
        """Fills parameters, and returns the filled ones. Raises ConfigError."""
        if not self.sha256:
            return []
        due, filled = dict(model.named_parameters()), []
        candidates = (self.grown(self.tensors) if self.grown else
                      ((name, self.tensors.get(self._there(name))) for name in due))
        with torch.no_grad():
            # `grown` is a generator, so only one grown tensor is in memory at a time
            for name, source in candidates:
                if (p := due.get(name)) is None:        # a buffer
                    continue
                if source is None or source.shape != p.shape:
                    has = "is not there" if source is None else f"is {tuple(source.shape)} there"
                    raise ConfigError(f"start.run: {name} is {tuple(p.shape)} here, and "
                                      f"{self._there(name)} {has} ({self.where}); give start.map="
                                      f"NEW:OLD the name of what it begins from, or the model the "
                                      f"sizes of that run, or grow that by start.grow")
                p.copy_(source)
                filled.append(p)
        return filled

    def keep(self, model: nn.Module, filled: Iterable[nn.Parameter]) -> None:
        """Records, after the model was changed, which of the `filled` parameters are not trained.
        """
        ours = set(filled)
        self.frozen = {f"model/{name}" for name, p in model.named_parameters()
                       if p in ours and not p.requires_grad}
        self.frozen |= {f"model/{name}.{part}" for name, module in model.named_modules() if ours
                        for part in getattr(module, "from_base", ())}
        self.tensors = {}

    def _there(self, name: str) -> str:
        return next((old + name.removeprefix(new) for new, old in self.places.items()
                     if name.startswith(f"{new}.")), name)

    def refuse_other(self, run: Run) -> None:
        """Raises ConfigError if `run` started from other weights."""
        if (due := run.identity["start"]) != self.sha256:
            raise ConfigError(f"{str(run.path)!r} was begun from weights with the SHA-256 "
                              f"{due or 'none'}, and {self.where or 'start.run'} has "
                              f"{self.sha256 or 'none'}; give back the run that it was begun from "
                              f"(start.run names it where it has moved), or start a new run with "
                              f"another --out")


def refuse_growth(config: Config) -> None:
    """Raises ConfigError if no run's model can grow into this model."""
    asked, why = config.start, "set start.run to a run's folder, and leave start.map out"
    row = GROWTH[asked.grow.name]
    # with fake tensors only bytes are counted
    if not row.implementation or isinstance(torch.empty(0), FakeTensor):
        return
    if asked.run and not asked.map:
        why = row.problem(asked.grow, Run.open(Path(asked.run)).config.model, config.model)
    if why:
        raise ConfigError(f"start.grow={asked.grow} from {asked.run or 'no run'}: {why}")


def read(config: Config, tokenizer: str = "") -> Start:
    """Reads the weights that a config starts from. `tokenizer`: the digest of this run's tokenizer;
    empty if it does not matter. Raises ConfigError."""
    asked = config.start
    # with fake tensors only bytes are counted
    if not asked.run or isinstance(torch.empty(0), FakeTensor):
        return Start()
    run = Run.open(Path(asked.run))
    if tokenizer and run.identity["tokenizer"] != tokenizer:
        raise ConfigError(f"start.run={asked.run} has another tokenizer, so that the same tokens "
                          f"mean something else; set data.tokenizer={asked.run}, which is that run's")
    lack = f"start.run={asked.run} has no checkpoint to begin from"
    saved, _ = checkpoint.load_latest(run.checkpoints, run=run.identity["run"], lack=lack,
                                      only=checkpoint.WEIGHTS)
    by_first(lambda: [print(f"lpkit: {problem}", file=sys.stderr) for problem in run.problems])
    base = run.summary
    if base["status"] not in ("running", "killed") and base["last_checkpoint"] != saved.path.name:
        raise ConfigError(
            f"start.run={asked.run}: its summary vouches for {base['last_checkpoint']}, and the "
            f"newest weights that are whole are of step {saved.step}; make newer ones by "
            f"lpkit train {asked.run}/config.yaml --out {asked.run} --resume")
    # the weights that gave the base run's val_loss
    weights = checkpoint.evaluated_weights(saved.tensors)
    tensors = {name.removeprefix("model/"): t for name, t in sorted(weights.items())}
    digest = hashlib.sha256(records.digest({name: [str(t.dtype), list(t.shape)]
                                            for name, t in tensors.items()}).encode())
    for t in tensors.values():
        digest.update(t.contiguous().flatten().view(torch.uint8).numpy())
    places = dict(pair.partition(":")[::2] for pair in asked.map)
    row, both = GROWTH[asked.grow.name], {"small": run.config.model, "large": config.model}
    grown = partial(row.load(), settings=asked.grow, **both) if row.implementation else None
    return Start(where=str(saved.path), sha256=digest.hexdigest(), tensors=tensors, places=places,
                 grown=grown)
