"""Callbacks that run `lpkit.watch` in the trainers of other libraries. After training, the field
`seen` of the callback is the Watch.

    trainer = transformers.Trainer(..., callbacks=[watching := callbacks.transformers()])
    trainer.train()
    print(watching.seen.reconcile(predicted))
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lpkit.modules.watch import Watch, watch


class _Watching:
    """The part that both callbacks share. `how`: arguments of `watch`."""

    seen: Watch | None = None

    def __init__(self, how: dict[str, Any]):
        self.how = how

    def begin(self, model: Any, optimizer: Any) -> None:
        self.seen = watch(model, optimizer, **self.how).__enter__()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.seen.__exit__()


def transformers(**how: Any) -> Any:
    """Return a `transformers.TrainerCallback`. how: arguments of `watch`."""
    class Watching(_Watching, import_module("transformers").TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any = None, optimizer: Any = None,
                           **__: Any) -> None:
            self.begin(model, optimizer)

    return Watching(how)


def lightning(**how: Any) -> Any:
    """Return a `lightning.Callback`. how: arguments of `watch`."""
    class Watching(_Watching, import_module("lightning").Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.begin(module, trainer.optimizers[0])

    return Watching(how)
