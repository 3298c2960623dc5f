"""The backends of `system.attention`, which compute attention. This module does not import torch.

The row of a backend says which tasks it cannot do, and names the function that predicts what it
saves, moves and computes for a micro-batch (`lpkit.predict.attention`). The kinds of attention are
in `attention.KINDS`.
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

# longest context for which auto chooses `blocked`, for full attention in 16 bits on a CPU
BLOCKED_CONTEXT = 1024
QUERY_BLOCK = 128           # queries that blocked attention computes at a time
TILE = 128                  # queries, and keys, that tiled attention computes at a time
SCORES = 2**18              # most scores in one step of blocked attention, to fit a core's cache
FLASH_WIDTH = 256           # most dimensions of a head for the kit's Triton kernel
FLASH_TILE = 128, 64        # queries and keys that the kit's Triton kernel computes at a time


@dataclass(frozen=True, kw_only=True)
class Attending:
    """A task for a backend: attention of a model, in a dtype, on a device.

    model:      a ModelConfig
    here:       the task is for this machine, so the backend's package must be installed
    capability: compute capability of the GPU; None: not known
    """

    model: Any
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    device: Literal["cpu", "gpu"] = "cpu"
    here: bool = False
    capability: tuple[int, int] | None = None
    interpreter: bool = False       # Triton kernels are interpreted on the CPU, which is slow

    @property
    def rule(self) -> Rule | None:
        """The Rule of the model's attention; None for a kind without softmax."""
        return self.model.attention.rule(self.model.T)


@dataclass(frozen=True, kw_only=True)
class AttentionBackend(Kind):
    """A row of ATTENTION.

    why_not: f(Attending) -> why it cannot do a task of a softmax kind, in one clause, with a
             backend that can; "": it can do the task
    assumed: `auto` may choose it without timing it. Otherwise its numbers are verified, and it is
             timed against the others, on the machine of the run
    partial: "package.module:name" of a `contracts.Partial`, which attends to a part of the keys and
             also returns the log-sum of exponentials; "": there is none
    drops:   takes the argument `dropout`, the share of probabilities that are set to 0
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
    """The tasks that a backend can do. An instance is the `why_not` of the backend's row."""

    rule: tuple[str, ...] = ()          # fields of a Rule that it computes, by their names in WORDS
    gpu_alone: str = "needs a GPU"      # why it cannot run on a CPU; "": it can
    interpreted: bool = False           # also runs on a CPU, in Triton's interpreter
    dtypes: tuple[str, ...] = HALF
    widest: int = 0                     # most dimensions of a head; 0: no limit
    multiple: int = 1                   # the dimensions of a head must be a multiple of this
    capability: tuple[int, int] = (0, 0)    # lowest compute capability
    package: str = ""                   # package that must be installed
    instead: str = ""                   # backend that an error suggests; "": `nearest`

    def __call__(self, asked: Attending) -> str:
        problem = next(self._problems(asked), "")
        return f"{problem}; {self.instead or nearest(asked)} can" if problem else ""

    def lacks(self, rule: Rule | None) -> str:
        """Return the first field of `rule` that the backend does not compute; "": it computes all.
        """
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
    """Decorate the function of backend `name` with checks of its arguments. A call then raises
    ConfigError if the backend cannot compute the rule, or if the shapes of q and k, the document
    ids, the sinks or the blocks do not fit the rule."""
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
            problem = f"needs blocks for {end} tokens, and its table has blocks for {there}"
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
    """Return the backends that can do the task and that `auto` may choose without timing them."""
    return [name for name, row in ATTENTION.items() if row.assumed and not why_not(name, asked)]


def nearest(asked: Attending) -> str:
    """Return a backend that can do the task and needs no other package: sdpa if it can."""
    names = able(asked)
    return "sdpa" if "sdpa" in names else names[-1]


@functools.lru_cache(maxsize=64)
def query_blocks(rule: Rule, T: int) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return (first, last, spans) for each block of QUERY_BLOCK queries of a sequence of T tokens:
    the queries first to last - 1 see only keys in `spans`, as `Rule.spans` returns them."""
    blocks = [(i, min(i + QUERY_BLOCK, T)) for i in range(0, T, QUERY_BLOCK)]
    return [(first, last, rule.spans(first, last, T)) for first, last in blocks]


def masked(rule: Rule, first: int, last: int, spans: list[tuple[int, int]],
           hides: Callable[[int, int], bool] = lambda begin, end: False) -> list[tuple[int, int]]:
    """Return the part of `spans` for which the queries first to last - 1 need a mask. Keys before
    this part are seen by all of these queries.

    hides: f(begin, end) -> whether something other than the rule, for example documents, hides one
           of these keys from one of the queries
    """
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
    """Return the largest number of scores (query, key) in one head for one block of queries."""
    return max((last - first) * keys_in(spans) for first, last, spans in query_blocks(rule, T))


def at_once(rule: Rule, T: int, sequences: int, groups: int, repeats: int) -> tuple[int, int]:
    """Return (sequences, groups of heads) that blocked attention computes in one step, so that a
    step has at most SCORES scores. A group is the `repeats` query heads that share a key head."""
    most_groups = max(1, SCORES // (repeats * max(1, most_scores(rule, T))))
    if most_groups < groups or rule.documents:
        return 1, min(most_groups, groups)
    return min(most_groups // groups, sequences), groups


MASKS = ("window", "global_tokens", "blocks", "documents")
FLASH_2 = "Dao 2023, https://arxiv.org/abs/2307.08691"
ATTENTION: dict[str, AttentionBackend] = {
    "plain": AttentionBackend(why="the definition", operations=OPERATIONS + "plain", drops=True,
                              implementation="lpkit.nn.attention:plain",
                              partial="lpkit.nn.attention:plain_partial"),
    "tiled": AttentionBackend(why="FlashAttention's tiles of queries and keys, in readable PyTorch",
                              operations=OPERATIONS + "tiled",
                              implementation="lpkit.kernels.tiled_attention:tiled",
                              partial="lpkit.kernels.tiled_attention:tiled_partial",
                              source="Dao et al. 2022, https://arxiv.org/abs/2205.14135"),
    "blocked": AttentionBackend(why="blocks of queries, in the dtype of q, k and v",
                                operations=OPERATIONS + "blocked",
                                implementation="lpkit.kernels.blocked_attention:blocked"),
    "blocked-wide": AttentionBackend(why="blocks of queries, always multiplied in float32",
                                     operations=OPERATIONS + "blocked_wide", assumed=False,
                                     implementation="lpkit.kernels.blocked_attention:blocked_wide"),
    "sdpa": AttentionBackend(why="PyTorch's fused kernels", operations=OPERATIONS + "sdpa",
                             implementation="lpkit.nn.attention:sdpa",
                             why_not=Limits(rule=("causal", *MASKS, "query_start", "key_start"),
                                            gpu_alone="", dtypes=DTYPES, instead="plain"),
                             source="Dao et al. 2022, https://arxiv.org/abs/2205.14135"),
    # it needs 96 KB of shared memory; before compute capability 8.0, a program has only 64 KB
    "triton": AttentionBackend(why="the kit's own FlashAttention kernel, for every softmax kind",
                               operations=OPERATIONS + "flash",
                               implementation="lpkit.kernels.flash_attention:flash_attention",
                               why_not=Limits(rule=(*MASKS, "soft_cap", "sinks"), dtypes=DTYPES,
                                              gpu_alone="needs a GPU, or TRITON_INTERPRET=1",
                                              interpreted=True, widest=FLASH_WIDTH,
                                              capability=(8, 0), instead="plain"),
                               source=FLASH_2),
}
# kernels that scaled_dot_product_attention does not choose by itself
ATTENTION |= {name: AttentionBackend(
    why=why, why_not=limits, source=source, operations=OPERATIONS + "sdpa", assumed=False,
    implementation=f"lpkit.nn.library_attention:{name.replace('-', '_')}")
    for name, why, source, limits in (
        ("sdpa-cudnn", "cuDNN's kernel through PyTorch, or an error if it cannot run",
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
    """Return why backend `name` cannot do the task, in one clause with a backend that can; "": it
    can do the task."""
    computes = KINDS[asked.model.attention.name].operations
    if drops_probabilities(asked.model) and not ATTENTION[name].drops:
        return "drops no probabilities of attention; plain can"
    if not computes:
        return ATTENTION[name].why_not(asked)
    others = f"computes only softmax attention; {' and '.join(computes)} can"
    return others * (name not in computes)


def interpreted(asked: str) -> bool:
    """Return whether the requested backend may run in Triton's interpreter; never for "auto"."""
    return asked != "auto" and os.environ.get("TRITON_INTERPRET") == "1"


def choose_attention(asked: str, *, device: str, low_precision: bool, model: Any,
                     tiles: bool = False) -> tuple[str, str]:
    """Return (backend, why) for `system.attention`, without timing any backend.

    asked:  a backend, or "auto"
    device: "cpu" or "cuda"
    tiles:  this CPU has matrix units for bf16 (AMX), with which PyTorch's own kernel is faster: see
            `lpkit bench attention-cpu`

    Raises ConfigError for a requested backend that cannot do the task.
    """
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
        return "blocked", ("without AMX, blocks of low-precision products are faster than "
                           "PyTorch's CPU flash kernel")
    return "sdpa", "PyTorch picks the fastest fused kernel for this device and dtype"
