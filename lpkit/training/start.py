"""Start a run from the weights of another run (the base run), for example to train adapters, a
longer context or a deeper model.

    start: {run: runs/base}                              copy parameters of the same names
    start: {run: runs/base, map: [blocks.2:blocks.0]}    blocks.2.* gets the weights of blocks.0.*
    start: {run: runs/base, grow: stack}                 grow a smaller model, by a row of
                                                         lessons.rows.growth

The weights are copied after the initialisation, and before `model.changes` are applied. Their hash
is part of the run's identity (run.json). Parameters that stay frozen are not in the checkpoints of
the new run: they are read from the base run, which must still exist.
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
    """The weights that a run starts from. `Start()`: the run starts from no other run."""

    where: str = ""                 # path of the base run's checkpoint
    # hash of the weights, the same for any number of files; "": the run starts from no other run
    sha256: str = ""
    # the base run's weights by name, mapped from the files, so that they take no memory
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # {prefix of a name in this model: prefix of the name in the base run}, from start.map
    places: dict[str, str] = field(default_factory=dict)
    # f(tensors): yields pairs of a name and a tensor of this larger model; None: no growth
    grown: partial | None = None
    # names in checkpoints of the parameters and buffers that are read from the base run
    frozen: set[str] = field(default_factory=set)

    def copy_into(self, model: nn.Module) -> list[nn.Parameter]:
        """Copy the weights into `model`, and return the parameters that were filled. Raises
        ConfigError if the base run lacks a parameter, or has it in another shape."""
        if not self.sha256:
            return []
        due, filled = dict(model.named_parameters()), []
        candidates = (self.grown(self.tensors) if self.grown else
                      ((name, self.tensors.get(self._there(name))) for name in due))
        with torch.no_grad():
            # the growth yields one tensor at a time, so only one grown tensor is in memory
            for name, source in candidates:
                if (p := due.get(name)) is None:        # not a parameter, but a buffer
                    continue
                if source is None or source.shape != p.shape:
                    has = "is not there" if source is None else f"is {tuple(source.shape)} there"
                    raise ConfigError(f"start.run: {name} is {tuple(p.shape)} here, and "
                                      f"{self._there(name)} {has} ({self.where}); give start.map="
                                      f"NEW:OLD the name of the weight to copy, or give this model "
                                      f"the sizes of that run's model, or set start.grow")
                p.copy_(source)
                filled.append(p)
        return filled

    def keep(self, model: nn.Module, filled: Iterable[nn.Parameter]) -> None:
        """Record in `frozen` which of the `filled` parameters are not trained. Call it after
        `model.changes` have been applied, which freeze parameters. Drop the mapped tensors."""
        ours = set(filled)
        self.frozen = {f"model/{name}" for name, p in model.named_parameters()
                       if p in ours and not p.requires_grad}
        self.frozen |= {f"model/{name}.{part}" for name, module in model.named_modules() if ours
                        for part in getattr(module, "from_base", ())}
        self.tensors = {}

    def _there(self, name: str) -> str:
        """Return the name in the base run of the weight that parameter `name` starts from."""
        return next((old + name.removeprefix(new) for new, old in self.places.items()
                     if name.startswith(f"{new}.")), name)

    def refuse_other(self, run: Run) -> None:
        """Raise ConfigError if `run`, which is resumed or sampled, started from other weights."""
        if (due := run.identity["start"]) != self.sha256:
            raise ConfigError(f"{str(run.path)!r} was begun from weights with the SHA-256 "
                              f"{due or 'none'}, and {self.where or 'start.run'} has "
                              f"{self.sha256 or 'none'}; give back the run that it was begun from "
                              f"(set start.run if its folder has moved), or start a new run with "
                              f"another --out")


def refuse_growth(config: Config) -> None:
    """Raise ConfigError if `start.grow` cannot grow the model of `start.run` into this model."""
    asked, why = config.start, "set start.run to a run's folder, and leave start.map out"
    row = GROWTH[asked.grow.name]
    # With fake tensors, the caller only counts bytes, and no base run is needed.
    if not row.implementation or isinstance(torch.empty(0), FakeTensor):
        return
    if asked.run and not asked.map:
        why = row.problem(asked.grow, Run.open(Path(asked.run)).config.model, config.model)
    if why:
        raise ConfigError(f"start.grow={asked.grow} from {asked.run or 'no run'}: {why}")


def read(config: Config, tokenizer: str = "") -> Start:
    """Return the weights that `config` starts from.

    tokenizer: the digest of this run's tokenizer, which must be the base run's; "": do not check
    Raises ConfigError if the base run has no good checkpoint, or another tokenizer.
    """
    asked = config.start
    # With fake tensors, the caller only counts bytes, and no base run is needed.
    if not asked.run or isinstance(torch.empty(0), FakeTensor):
        return Start()
    run = Run.open(Path(asked.run))
    if tokenizer and run.identity["tokenizer"] != tokenizer:
        raise ConfigError(f"start.run={asked.run} has another tokenizer, so that its tokens mean "
                          f"something else; set data.tokenizer={asked.run}, which is that run's")
    lack = f"start.run={asked.run} has no checkpoint to begin from"
    saved, _ = checkpoint.load_latest(run.checkpoints, run=run.identity["run"], lack=lack,
                                      only=checkpoint.WEIGHTS)
    by_first(lambda: [print(f"lpkit: {problem}", file=sys.stderr) for problem in run.problems])
    base = run.summary
    if base["status"] not in ("running", "killed") and base["last_checkpoint"] != saved.path.name:
        raise ConfigError(
            f"start.run={asked.run}: its summary vouches for {base['last_checkpoint']}, and the "
            f"newest undamaged weights are those of step {saved.step}; train newer weights with "
            f"lpkit train {asked.run}/config.yaml --out {asked.run} --resume")
    # the weights with which the base run's val_loss was computed
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
