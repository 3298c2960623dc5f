"""Corpora, tokenizers, token files, and the order in which a run reads tokens.

    files = prepare(DataConfig(), vocab=256)                # text -> token files, once
    policy = RandomWindows(tokens=files.train, batch=16, context=256, seed=0)
    x, y = policy.batch(step)                               # (B, T) int64; depends only on the step

A name is imported on first use: a run with prepared tokens needs no module that reads text, and
only the policies need torch.
"""

from pkgutil import resolve_name

_WHERE = {"RandomWindows": "policies", "byte_unigram_entropy": "prepared",
          "open_tokens": "prepared", "prepare": "prepared", "prepare_into": "tokens"}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'lpkit.datasets' has no attribute {name!r}")
    return resolve_name(f"lpkit.datasets.{_WHERE[name]}:{name}")
