"""The backends of `system.attention`, which compute attention. No torch.

A backend says why it cannot do a task, and names what it saves, moves and computes for a
micro-batch (`lpkit.predict.attention`). `attention.KINDS` has the kinds.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from lpkit.errors import ConfigError, pick
from lpkit.techniques.adapters import drops_probabilities
from lpkit.techniques.attention import EVERY_KEY, KINDS, OPERATIONS, Rule
from lpkit.techniques.operation import Kind

BLOCKED_CONTEXT = 1024      # most tokens, for full attention in 16 bits on a CPU
QUERY_BLOCK = 128           # queries that blocked attention takes at a time
TILE = 128                  # queries, and keys, that tiled attention takes at a time
# scores of one step of blocked attention, so that a core's cache holds them
SCORES = 2**18
FLASH_WIDTH = 256           # widest head that a program of the kit's flash attention holds
FLASH_TILE = 128, 64        # queries and keys that the kit's flash attention takes at a time


@dataclass(frozen=True, kw_only=True)
class Attending:
    """A task for a backend. `model` is a ModelConfig, whose heads are E numbers wide and share G
    keys and values. `here`: the task is for this machine, so packages must be installed.
    `capability`: compute capability of its GPU, if known."""

    model: Any
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "gpu"] = "cpu"
    here: bool = False
    capability: tuple[int, int] | None = None
    interpreter: bool = False       # Triton's interpreter replaces a GPU; too slow for auto

    @property
    def rule(self) -> Rule | None:
        """The rule; None for a kind without softmax, which `why_not` handles."""
        return self.model.attention.rule(self.model.T)


@dataclass(frozen=True, kw_only=True)
class Backend(Kind):
    """A backend. `why_not` returns why it cannot do a softmax task, in one clause, and the nearest
    backend that can, or "". A kind without softmax names its own backends.

    assumed:  predictions may choose it for `auto`; others must be verified and timed first.
    partial:  a `contracts.Partial`, which combines results over parts of the keys; "": none.
    drops:    takes `dropout`, the share of probabilities that are set to 0.
    """

    why_not: Callable[[Attending], str] = lambda asked: ""
    assumed: bool = True
    partial: str = ""
    drops: bool = False


HALF = ("bfloat16", "float16")
DTYPES = ("float64", "float32", *HALF)
WORDS = {"causal": "attention to later keys", "window": "windows",
         "global_tokens": "global tokens", "blocks": "sparse blocks", "documents": "documents",
         "soft_cap": "cap on scores", "sinks": "sinks", "query_start": "queries that begin later",
         "key_start": "keys that begin later"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A backend's `why_not`, from what its library takes. For softmax kinds only."""

    rule: tuple[str, ...] = ()          # names from WORDS that it computes besides full attention
    gpu_alone: str = "needs a GPU"      # "": also runs on a CPU
    interpreted: bool = False           # runs on a CPU by Triton's interpreter
    dtypes: tuple[str, ...] = HALF
    widest: int = 0                     # widest head; 0: any. Heads are multiples of `multiple`
    multiple: int = 1
    capability: tuple[int, int] = (0, 0)
    package: str = ""                   # must be installed
    instead: str = ""                   # the backend that can; "": the nearest

    def __call__(self, asked: Attending) -> str:
        problem = next(self._problems(asked), "")
        return f"{problem}; {self.instead or nearest(asked)} can" if problem else ""

    def lacks(self, rule: Rule | None) -> str:
        """Return the first field of a rule that it does not compute, or ""."""
        return next((name for name in WORDS if name not in self.rule
                     and getattr(rule, name) != getattr(FULL, name)), "")

    def _problems(self, asked: Attending) -> Iterator[str]:
        m = asked.model
        elsewhere = not self.gpu_alone or (self.interpreted and asked.interpreter)
        if asked.device != "gpu" and not elsewhere:
            yield self.gpu_alone
        if asked.here and self.package and not _installed(self.package):
            yield f"needs the package {self.package}, which is not installed here"
        if asked.capability is not None and asked.capability < self.capability:
            yield "needs compute capability {}.{}, and here is {}.{}".format(*self.capability,
                                                                             *asked.capability)
        if asked.dtype not in self.dtypes:
            yield f"takes {' or '.join(self.dtypes)}, not {asked.dtype}"
        if lacks := self.lacks(asked.rule):
            yield f"has no {WORDS[lacks]}"
        if (self.widest and m.E > self.widest) or m.E % self.multiple:
            room = f"up to {self.widest}" if self.widest else "wide"
            kind = f" that are multiples of {self.multiple}" if self.multiple > 1 else ""
            yield f"takes heads {room}{kind}, not {m.E}"


FULL = Rule()


def limited(name: str, attend: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Decorate the function of the backend `name`. A call raises ConfigError if the backend does
    not compute the rule, or if documents, sinks or lengths do not fit the rule."""
    if attend is None:
        return functools.partial(limited, name)

    @functools.wraps(attend)
    def checked(q: Any, k: Any, v: Any, documents: Any = None, sinks: Any = None,
                rule: Rule = FULL, **how: Any) -> Any:
        limits, T, keys, problem = ATTENTION[name].why_not, q.shape[2], k.shape[2], ""
        full_rule, end = rule if sinks is None else replace(rule, sinks=True), T + rule.query_start
        if isinstance(limits, Limits) and (field := limits.lacks(full_rule)):
            problem = f"has no {WORDS[field]} (its {field}={getattr(full_rule, field)}); plain can"
        elif T != keys:
            problem = f"takes as many queries as keys, not {T} and {keys}"
        elif rule.documents and documents is None:
            problem = "needs an id of each token's document; full attention needs none"
        elif rule.sinks and sinks is None:
            problem = "needs a score for each head, sinks (H,)"
        elif rule.blocks is not None and (there := len(rule.blocks) * rule.block) < end:
            problem = f"needs blocks for {end} tokens, and has them for {there}"
        if problem:
            raise ConfigError(f"system.attention={name} {problem}")
        return attend(q, k, v, documents, sinks, rule=rule, **how)

    return checked


@functools.cache
def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def able(asked: Attending) -> list[str]:
    """Return the backends that can do the task, of those that predictions may choose."""
    return [name for name, row in ATTENTION.items() if row.assumed and not why_not(name, asked)]


def nearest(asked: Attending) -> str:
    """Return a backend that can do the task without other packages, PyTorch's first."""
    names = able(asked)
    return "sdpa" if "sdpa" in names else names[-1]


@functools.lru_cache(maxsize=64)
def query_blocks(rule: Rule, T: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return blocks of queries (first to last - 1), each with the spans of keys that they see."""
    blocks = [(i, min(i + QUERY_BLOCK, T)) for i in range(0, T, QUERY_BLOCK)]
    return [(first, last, rule.spans(first, last, T)) for first, last in blocks]


def masked(rule: Rule, first: int, last: int, spans: list[tuple[int, int]],
           hides: Callable[[int, int], bool] = lambda begin, end: False) -> list[tuple[int, int]]:
    """Return the part of the spans that needs a mask: from the first span on that hides a key from
    one of the queries first to last - 1, by the rule (ignoring documents) or by `hides`."""
    parts = [part for a, b in spans for part in ((a, min(b, first)), (max(a, first), b))
             if part[0] < part[1]]
    while parts and not (rule.hides(first, last, *parts[0]) or hides(*parts[0])):
        parts.pop(0)
    return parts


def keys_in(spans: list[tuple[int, int]]) -> int:
    """Return the number of keys in spans."""
    return sum(end - begin for begin, end in spans)


@functools.lru_cache(maxsize=64)
def most_scores(rule: Rule, T: int) -> int:
    """Return the largest number of scores that a head has for one block of queries."""
    return max((last - first) * keys_in(spans) for first, last, spans in query_blocks(rule, T))


def at_once(rule: Rule, T: int, sequences: int, groups: int, repeats: int) -> tuple[int, int]:
    """Return how many sequences and groups of heads blocked attention takes at a time."""
    most_groups = max(1, SCORES // (repeats * max(1, most_scores(rule, T))))
    if most_groups < groups or rule.documents:
        return 1, min(most_groups, groups)
    return min(most_groups // groups, sequences), groups


MASKS = ("window", "global_tokens", "blocks", "documents")
FLASH_2 = "Dao 2023, https://arxiv.org/abs/2307.08691"
ATTENTION: dict[str, Backend] = {
    "plain": Backend(why="the definition", operations=OPERATIONS + "plain", drops=True,
                     implementation="lpkit.nn.attention:plain",
                     partial="lpkit.nn.attention:plain_partial"),
    "tiled": Backend(why="tiles of queries and keys, in PyTorch: FlashAttention, to be read",
                     operations=OPERATIONS + "tiled", implementation="lpkit.kernels.tiled_attention:tiled",
                     partial="lpkit.kernels.tiled_attention:tiled_partial",
                     source="Dao et al. 2022, https://arxiv.org/abs/2205.14135"),
    "blocked": Backend(why="blocks of queries, in 16 bits where they are", operations=OPERATIONS + "blocked",
                       implementation="lpkit.kernels.blocked_attention:blocked"),
    "blocked-wide": Backend(why="the same, multiplied in float32 whatever it is given",
                            operations=OPERATIONS + "blocked_wide", assumed=False,
                            implementation="lpkit.kernels.blocked_attention:blocked_wide"),
    "sdpa": Backend(why="PyTorch's fused kernels", operations=OPERATIONS + "sdpa",
                    implementation="lpkit.nn.attention:sdpa",
                    why_not=Limits(rule=("causal", *MASKS, "query_start", "key_start"),
                                   gpu_alone="", dtypes=DTYPES, instead="plain"),
                    source="Dao et al. 2022, https://arxiv.org/abs/2205.14135"),
    # before compute capability 8.0, a program has 64 KB of shared memory, and this one needs 96
    "triton": Backend(why="the kit's own flash kernel, of every kind", operations=OPERATIONS + "flash",
                      implementation="lpkit.kernels.flash_attention:flash_attention",
                      why_not=Limits(rule=(*MASKS, "soft_cap", "sinks"), dtypes=DTYPES,
                                     gpu_alone="needs a GPU, or TRITON_INTERPRET=1",
                                     interpreted=True, widest=FLASH_WIDTH, capability=(8, 0),
                                     instead="plain"), source=FLASH_2),
}
# kernels that PyTorch does not choose on its own
ATTENTION |= {name: Backend(
    why=why, why_not=limits, source=source, operations=OPERATIONS + "sdpa", assumed=False,
    implementation=f"lpkit.nn.library_attention:{name.replace('-', '_')}")
    for name, why, source, limits in (
        ("sdpa-cudnn", "cuDNN's kernel, or none",
         "https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html",
         Limits(rule=MASKS, widest=256, multiple=8, capability=(8, 0))),
        ("flex", "FlexAttention, compiled for the mask",
         "Dong et al. 2024, https://arxiv.org/abs/2412.05496",
         Limits(rule=("causal", *MASKS, "soft_cap", "sinks"), dtypes=("float32", *HALF),
                gpu_alone="has no backward on a CPU")),
        ("flash-attn", "the flash-attn package, version 2", FLASH_2,
         Limits(rule=("window", "documents", "soft_cap"), widest=256, capability=(8, 0),
                package="flash-attn")))}
def why_not(name: str, asked: Attending) -> str:
    """Return why a backend cannot do the task, in one clause, and one that can; "": it can."""
    computes = KINDS[asked.model.attention.name].operations
    if drops_probabilities(asked.model) and not ATTENTION[name].drops:
        return "drops no probabilities of attention; plain can"
    if not computes:
        return ATTENTION[name].why_not(asked)
    others = f"computes only softmax attention; {' and '.join(computes)} can"
    return others * (name not in computes)


def interpreted(asked: str) -> bool:
    return asked != "auto" and os.environ.get("TRITON_INTERPRET") == "1"


def choose_attention(asked: str, *, device: str, low_precision: bool, model: Any,
                     tiles: bool = False) -> tuple[str, str]:
    """Return the backend for a kind of device if nothing is timed, and why. `tiles`: this CPU has
    units that multiply tiles of bf16 (AMX). See `lpkit bench attention-cpu`. Raises ConfigError for
    a requested backend that cannot do the task."""
    given = Attending(model=model, dtype="bfloat16" if low_precision else "float32",
                      device="cpu" if device == "cpu" else "gpu",
                      interpreter=interpreted(asked))
    if asked != "auto":
        pick(ATTENTION, asked, "system.attention")
        if problem := why_not(asked, given):
            raise ConfigError(f"system.attention={asked} {problem}")
        return asked, "requested"
    if drops_probabilities(model):
        return able(given)[0], "the backend that drops attention probabilities"
    if device == "cpu" and given.rule not in (None, Rule(), EVERY_KEY):
        return "blocked", f"it skips what {model.attention.name} attention leaves out"
    if given.rule != Rule():
        names = able(given)
        return names[-1], f"of {', '.join(names)}, which compute {model.attention.name} attention"
    if device == "cpu" and low_precision and model.T <= BLOCKED_CONTEXT and not tiles:
        return "blocked", ("without AMX, blocks of low-precision products are faster than PyTorch's "
                           "CPU flash kernel")
    return "sdpa", "PyTorch picks the fastest fused kernel for this device and dtype"
