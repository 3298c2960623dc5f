"""Config: all settings of one training run. A Config is immutable and contains no tensors and no
modules.

A Config can be made from a preset, a YAML file, a dict, papermill parameters or `--set a.b=c`, and
can be converted to a dict or YAML again. A field that chooses a technique contains the name of a
row of `lpkit.techniques` and the settings of this row: `memory.recompute: {name: block, every: 2}`,
or only the name. Every name and value is checked when a Config is made.

Sizes can also be read by the letters of docs/notation.md (`config.model.L`, `.D`, `.T`), so that
code looks like the formulas. This module uses the standard library only, because `lpkit.predict`
imports it; PyYAML is imported when YAML is read or written.
"""

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, Literal

from lpkit import values as rules
from lpkit.errors import ConfigError, nearest, shown
from lpkit.techniques import FAMILIES, blocks, changes, layouts, memory, outside
from lpkit.techniques.attention import KINDS
from lpkit.techniques.attention_backends import ATTENTION
from lpkit.techniques.changes import GOVERNORS, GROWTH, MODEL_TRANSFORMS
from lpkit.techniques.data import POLICIES, SIZES, cannot_train
from lpkit.techniques.inits import INITS
from lpkit.techniques.kernels import check_asked
from lpkit.techniques.layouts import Layout
from lpkit.techniques.objectives import OBJECTIVES
from lpkit.techniques.operation import POSITIONS
from lpkit.techniques.optimizers import MOMENT_FORMATS, OPTIMIZERS
from lpkit.techniques.recipes import ASKABLE, BACKENDS
from lpkit.techniques.row import Settings, many_of, one_of, pick_row
from lpkit.techniques.schedules import SCHEDULES
from lpkit.values import Checked, Count, CountOrZero, InnerShare, Positive, Seed, Text, between

VERSION = 3
# removed settings -> the only value that old files may give; they are then ignored
GONE = {"parallel.tensor_messages": "apart"}


class Group(Checked):
    """A group of settings, such as `model`. A field that chooses a row takes the row's name, or a
    mapping with `name` and settings; it is converted to the row's Settings."""

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), _kinds(type(self))[f.name]
            if "table" in f.metadata:
                object.__setattr__(self, f.name, _named(f, value, f"{self.where}{f.name}"))
            elif dataclasses.is_dataclass(kind) and not isinstance(value, kind):
                object.__setattr__(self, f.name, _build(kind, value, f"{self.where}{f.name}."))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """The sizes and techniques of a decoder-only transformer. The defaults are those of GPT-2."""

    where = "model."

    layers: Annotated[int, between(1, 10_000)] = 4      # bounded: predictions visit each layer
    width: Count = 256                  # width of the residual stream
    heads: Count = 4                    # number of query heads
    kv_heads: Count | None = None       # number of key/value heads; None: as many as `heads`
    head_dim: Count | None = None       # None: width / heads (not so in Gemma and Qwen3)
    mlp_width: Count | None = None      # width of the MLP; None: 4 * width
    vocab: Count = 256
    context: Annotated[int, between(1, 2**24)] = 256    # tokens per sequence
    block: str = "pre-norm"             # the name of a row of BLOCKS
    norm: str = "layernorm"             # layernorm, rmsnorm
    norm_eps: Positive = 1e-5
    position: str = "learned"           # learned, rope
    rope_theta: Positive = 10_000.0
    rope_factor: Positive = 1.0         # divides the frequencies of slow pairs, as in Llama 3.1
    mlp: str = "gelu"                   # gelu, swiglu
    bias: bool = True
    qkv_bias: bool | None = None        # bias of q, k and v, as in Qwen2; None: as `bias`
    qk_norm: bool = False               # an RMSNorm of each head's q and k, as in Qwen3
    tied: bool = True                   # the head shares the weight of the token embedding
    init: Settings = one_of(INITS, "gpt2")
    attention: Settings = one_of(KINDS, "full")     # the keys that a query sees
    changes: tuple[Settings, ...] = many_of(blocks.MODEL_CHANGES)   # such as adapters

    # the shares of the tokens, and of the layers, that updates see: here all of them. The subclass
    # `lpkit.predict.governed.Seen` has smaller shares.
    shares, running = (), 1

    # lambdas, because torch.compile can trace properties that are lambdas
    L = property(lambda self: self.layers)
    D = property(lambda self: self.width)
    H = property(lambda self: self.heads)
    V = property(lambda self: self.vocab)
    T = property(lambda self: self.context)

    @property
    def G(self) -> int:
        """Key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def E(self) -> int:
        """Dimensions of one head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def F(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def biased_qkv(self) -> bool:
        """True if the Linear of q, k and v has a bias."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    def __post_init__(self):
        super().__post_init__()
        for key in ("block", "norm", "position", "mlp"):
            _pick(outside.TABLES[f"model.{key}"], getattr(self, key), f"model.{key}")
        refuses = getattr(blocks.BLOCKS[self.block], "refuses", lambda model: "")
        if problem := refuses(self):
            raise ConfigError(f"model.block={self.block} {problem}")
        for row in (self.attention, *self.changes):
            if problem := row.problem(self):
                raise ConfigError(problem)
        if self.head_dim is None and self.width % self.heads:
            below = self.width // self.heads * self.heads
            above = below + self.heads
            raise ConfigError(f"model.width={self.width} is not a multiple of "
                              f"model.heads={self.heads}; nearest widths: {below or above} or "
                              f"{above}; or set model.head_dim")
        if self.heads % self.G:
            raise ConfigError(f"model.heads={self.heads} is not a multiple of "
                              f"model.kv_heads={self.G}; kv_heads may be {_divisors(self.heads)}")
        if POSITIONS[self.position].turns and self.E % 2:
            raise ConfigError(f"rotary positions turn pairs of numbers, but a head has {self.E} "
                              f"numbers; set model.head_dim, or width/heads, to an even number")


def _divisors(count: int) -> str:
    return ", ".join(map(str, layouts.divisors(count)))


@dataclass(frozen=True, kw_only=True)
class DataConfig(Group):
    """The text, its tokenizer, and which tokens each update reads."""

    where = "data."

    # python-stdlib, a file, a folder, a glob, hf:owner/name, or a folder of token files
    source: Text = "python-stdlib"
    # bytes, bpe (trained on the source), gpt2, or the folder of a tokenizer
    tokenizer: str = "bytes"
    policy: Settings = one_of(POLICIES, "random-windows")
    # path of an .npy file with one float for each training token. Batches then contain the floats
    # of their tokens. "": no file
    scores: str = ""
    val_fraction: InnerShare = 0.1      # share of the files or documents for validation
    special_tokens: bool = False        # True: the text <|endoftext|> becomes the special token


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Group):
    """How the operands of matmuls are cast, and which backend multiplies them."""

    where = "precision."

    recipe: Settings = one_of(ASKABLE, "auto")
    backend: str = "auto"               # auto: the fastest backend for this recipe and device
    # cast weights once per update, not once per micro-batch, and keep the cast weights in memory
    cache_weight_casts: bool = False
    telemetry_every: CountOrZero = 0    # steps; 0: off. Writes telemetry.jsonl into the run folder

    def __post_init__(self):
        super().__post_init__()
        _pick({"auto": None, **BACKENDS}, self.backend, "precision.backend")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Group):
    """Which tensors a step keeps in memory, on which device, and in which format. The defaults are
    PyTorch's behaviour."""

    where = "memory."

    recompute: Settings = one_of(memory.RECOMPUTE, "none")
    activation_offload: Settings = one_of(memory.ACTIVATION_OFFLOAD, "device")
    cross_entropy: Settings = one_of(memory.CROSS_ENTROPY, "full")
    param_dtype: Settings = one_of(memory.PARAM_DTYPE, "fp32")
    optimizer_state: Settings = one_of(memory.OPTIMIZER_STATE, "device")
    moment_format: Settings = one_of(MOMENT_FORMATS, "float32")
    optimizer_step: Settings = one_of(memory.OPTIMIZER_STEP, "after")


_device = rules.check(lambda value: re.fullmatch("auto|cpu|cuda(:[0-9]{1,3})?", value),
                      "auto, cpu, cuda or cuda:N")


@dataclass(frozen=True, kw_only=True)
class SystemConfig(Group):
    """The device of the run, and how its steps are compiled and computed."""

    where = "system."

    device: Annotated[str, _device] = "auto"    # auto, cpu, cuda, cuda:1
    # auto: on GPUs only; true: the same as "blocks"
    compile: bool | Literal["auto", "blocks", "model"] = "auto"
    cuda_graphs: bool | Literal["auto"] = "auto"    # start all kernels of an update by one call
    # versions of the kernels that layers call, for all or by name: triton, or
    # rms-norm:triton,swiglu:auto; auto: on GPUs, the fastest version that passes verification
    kernels: Annotated[str, check_asked] = "auto"
    products: Literal["auto", "bf16", "float32"] = "auto"   # a CPU multiplies bf16 in this dtype
    attention: str = "auto"         # the backend of attention: a row of ATTENTION
    threads: Annotated[int, between(1, 1024)] | None = None     # None: by matmul size and load
    # for predictions: the software whose speed is assumed, a row of predict.stacks.STACKS
    stack: str = "auto"

    def __post_init__(self):
        if isinstance(self.kernels, Mapping):
            each = ",".join(f"{name}:{version}" for name, version in self.kernels.items())
            object.__setattr__(self, "kernels", each or "auto")
        super().__post_init__()
        _pick({"auto": None, **ATTENTION}, self.attention, "system.attention")


_mapping = rules.check(lambda value: all(re.fullmatch("[^:]+:[^:]+", pair) for pair in value)
                       and len({pair.partition(":")[0] for pair in value}) == len(value),
                       "a list of NEW:OLD with each NEW once, as blocks.2:blocks.0")


@dataclass(frozen=True, kw_only=True)
class StartConfig(Group):
    """The weights that a run starts from (`lpkit.training.start`)."""

    where = "start."

    run: str = ""       # the folder of a run; "": start from initialised weights
    # NEW:OLD for parameters whose names differ: name in this model, name in the run
    map: Annotated[tuple[str, ...], _mapping] = ()
    grow: Settings = one_of(GROWTH, "none")     # how the run's smaller model becomes this model


@dataclass(frozen=True, kw_only=True)
class Config(Group):
    """The settings of one training run."""

    # modules that add rows: your own modules, and lessons.rows.NAME
    imports: tuple[str, ...] = ()
    model: ModelConfig = field(default_factory=ModelConfig)
    start: StartConfig = field(default_factory=StartConfig)
    data: DataConfig = field(default_factory=DataConfig)
    # the loss that updates minimise; evaluations always report the loss of the next token
    objective: Settings = one_of(OBJECTIVES, "next-token")
    optimizer: Settings = one_of(OPTIMIZERS, "adamw")
    schedule: Settings = one_of(SCHEDULES, "cosine")
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    parallel: Layout = field(default_factory=Layout)
    transforms: tuple[Settings, ...] = many_of(MODEL_TRANSFORMS)
    governors: tuple[Settings, ...] = many_of(GOVERNORS)
    system: SystemConfig = field(default_factory=SystemConfig)
    sizes: Settings = one_of(SIZES, "constant")     # size of an update, as a function of the step
    steps: Count = 300
    global_batch: Count = 16            # sequences per update
    grad_accum_steps: Count = 1         # micro-batches per update
    seed: Seed = 0
    eval_every: CountOrZero = 100       # steps; 0: only at the end
    eval_batches: Count = 8
    checkpoint_every: CountOrZero = 100     # steps; 0: only at the end
    keep_checkpoints: Count = 2
    version: Count = VERSION

    def __post_init__(self):
        outside.load(self.imports)      # first, because fields may name rows of these modules
        super().__post_init__()
        object.__setattr__(self, "imports", outside.needed(self))
        if self.version != VERSION:
            raise ConfigError(f"this config has version {self.version}, and this lpkit understands "
                              f"version {VERSION} only; use the lpkit that wrote the config, or "
                              f"write the config again with this lpkit")
        if self.global_batch % self.grad_accum_steps:
            raise ConfigError(f"global_batch={self.global_batch} does not split into "
                              f"grad_accum_steps={self.grad_accum_steps} equal micro-batches; "
                              f"grad_accum_steps may be {_divisors(self.global_batch)}")
        if why := cannot_train(self.model, self.data.policy) or changes.why_not(self):
            raise ConfigError(why)
        if self.parallel.devices > 1 or layouts.REDUCTIONS[self.parallel.reduction].sent:
            layouts.check(self, self.parallel)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one update, over all ranks, at the full batch size and context."""
        return self.global_batch * self.model.context

    def sizes_at(self, step: int) -> tuple[int, int]:
        """Returns the sequences, and the tokens per sequence, of update `step` (from 0)."""
        at, most = SIZES[self.sizes.name].at, (self.global_batch, self.model.context)
        return at(step, self.sizes, *most) if at else most

    def tokens_after(self, steps: int) -> int:
        """Returns the number of tokens of the first `steps` updates."""
        if SIZES[self.sizes.name].at is None:
            return steps * self.tokens_per_step
        return _token_sums(self)[steps]

    @property
    def micro_batch(self) -> int:
        """Number of sequences in one micro-batch of one rank."""
        return self._of_rank[0]

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of one rank per update."""
        return self._of_rank[1]

    @functools.cached_property
    def _of_rank(self) -> tuple[int, int]:
        """(sequences in a micro-batch of one rank, micro-batches of one rank per update)"""
        return layouts.micro_batch(self.global_batch, self.grad_accum_steps,
                                   self.parallel.batch_ranks)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values, JSON-ready. A row without settings becomes its name."""
        return dataclasses.asdict(self, dict_factory=_plain)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Makes a Config from nested values: the inverse of `to_dict`. Missing keys get their
        defaults. Raises ConfigError for unknown keys. `values` may come from a stranger's file, so
        its `imports` may name only modules of the kit (`lpkit.techniques.outside`)."""
        version = values.get("version", VERSION) if isinstance(values, Mapping) else VERSION
        # checked first, because otherwise the keys of another version are reported as unknown
        if isinstance(version, int) and version != VERSION:
            cls(version=version)
        if isinstance(values, Mapping):
            outside.refuse_unknown(values.get("imports", ()))
        return _build(cls, values, "")

    def to_yaml(self) -> str:
        """Return the Config as YAML text."""
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Config":
        """Make a Config from YAML text: the inverse of `to_yaml`. Raises ConfigError."""
        from lpkit.plain_yaml import parse_yaml

        return cls.from_dict(parse_yaml(text))

    def replace(self, changes: Mapping[str, Any]) -> "Config":
        """Returns a copy with changes: `config.replace({"model.layers": 6, "steps": "1_000"})`.

        Keys are dotted. Strings are converted by the field's annotation, so the command line and
        papermill need no parsing. If the name of a row changes, the new row has its default
        settings, except for settings of the old row that were changed and that both rows have.
        """
        if not isinstance(changes, Mapping):
            raise ConfigError(f"changes must be a mapping of dotted keys, got {shown(changes)}")
        values = dataclasses.asdict(self)
        known = dict(_leaves(values))
        outside.load(changes.get("imports", ()))
        changes = {str(key).removesuffix(".name"): changes[key] for key in changes}
        for key in sorted(changes):     # sorted: the name of a row comes before its settings
            _change(values, key, changes[key], known)
        return Config.from_dict(values)


@functools.lru_cache(maxsize=8)
def _token_sums(config: Config) -> list[int]:
    """Returns the total tokens after 0, 1, ... updates. Cached, because a run needs it at every
    step."""
    return [0, *accumulate(math.prod(config.sizes_at(step)) for step in range(config.steps))]


# Fields that name rows, and the settings of rows.

_pick = functools.partial(pick_row, families=FAMILIES)

# class -> the annotation of each field; cached, since reading them is slower than making a Config
_kinds = functools.cache(typing.get_type_hints)


@functools.cache
def _tables(cls: type, prefix: str = "") -> dict[str, Mapping[str, Any]]:
    """Returns the tables of rows (families), by the dotted name of the field that chooses a row:
    `memory.recompute`. Leaves out fields that take several rows."""
    tables = {}
    for f in dataclasses.fields(cls):
        kind = _kinds(cls)[f.name]
        if "default" in f.metadata:
            tables[prefix + f.name] = f.metadata["table"]
        elif dataclasses.is_dataclass(kind):
            tables |= _tables(kind, f"{prefix}{f.name}.")
    return tables


def _named(f: dataclasses.Field, value: Any, key: str) -> Any:
    """Returns the Settings of the row, or of the rows, that `value` names. `value` is Settings, a
    name, or a mapping (without a name, it means the field's default row). Raises ConfigError."""
    table = f.metadata["table"]
    if "default" in f.metadata:
        return _settings(table, value, key, f.metadata["default"])
    if isinstance(value, str):
        value = [_row_and_settings(text) for text in map(str.strip, value.split(",")) if text]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key} must be a list of {', '.join(table) or 'rows'}, got "
                          f"{shown(value)}")
    return tuple(_settings(table, row, key, None) for row in value)


def _row_and_settings(text: str) -> dict[str, str]:
    """Returns the name and settings of a text such as lora:rank=8:shared=true."""
    name, *settings = text.split(":")
    return rules.unique([("name", name), *(setting.partition("=")[::2] for setting in settings)])


def _settings(table: Mapping[str, Any], value: Any, key: str, default: str | None) -> Settings:
    """Return the Settings of the row that `value` names, with the settings that it contains.
    `default`: the name of the row if `value` is a mapping without a name. Raises ConfigError."""
    if isinstance(value, Settings):
        _pick(table, value.name, key)
        return value
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = given.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{key} must name one of {', '.join(table)}, got {shown(name)}")
    defaults = _pick(table, name, key).settings
    kinds = _kinds(type(defaults))
    for setting in given:
        if setting not in kinds:
            raise ConfigError(f"{key}={name} has no setting {shown(setting)}; "
                              f"{_who_has(table, str(setting), kinds)}")
    given = rules.read(type(defaults), given, f"{key}.")
    return dataclasses.replace(defaults, name=name, **given)


def _who_has(table: Mapping[str, Any], setting: str, kinds: Mapping[str, Any]) -> str:
    """Return the end of the message for an unknown setting of a row: the rows that have the
    setting, or else the nearest setting of this row. `kinds`: the settings of this row."""
    others = [name for name, row in table.items() if setting in _kinds(type(row.settings))]
    known = [kind for kind in kinds if kind != "name"]
    if others:
        return f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} it"
    return nearest(setting, known) if known else "it has none"


# Nested and flat settings.

def flat(config: Config) -> dict[str, Any]:
    """Returns every setting by its dotted name. The field of a row has the row's name."""
    return dict(_leaves(config.to_dict()))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each plain value in nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}".removesuffix(".name"), value


def _plain(pairs: list[tuple[str, Any]]) -> Any:
    """Return a dataclass's fields as a dict; Settings that have only a name become this name."""
    values = dict(pairs)
    return values["name"] if list(values) == ["name"] else values


def _change(values: dict[str, Any], key: str, value: Any, known: Collection[str]) -> None:
    """Changes one setting in the dict of a Config. Raises ConfigError for an unknown key."""
    group, _, last = key.rpartition(".")
    node, rows = values, _tables(Config)
    for name in filter(None, group.split(".")):
        inner = node.setdefault(name, {})
        # a name becomes a mapping; a mapping is copied, so that the caller's does not change
        if isinstance(inner, str | dict):
            inner = node[name] = {"name": inner} if isinstance(inner, str) else dict(inner)
        node = inner if isinstance(inner, dict) else {}
    now = node.get(last)
    if key not in known and group not in rows and not isinstance(now, dict):
        raise _unknown(key, key, known)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        node[last] = dict(value)
    elif key in rows and isinstance(now, dict) and "name" in now:
        _change_row(now, rows[key], value)
    elif key not in rows and isinstance(now, dict):
        below = dict(_leaves(now, f"{key}."))
        raise ConfigError(f"{shown(key)} is a group of settings, set one of {', '.join(below)}")
    else:
        node[last] = value


def _change_row(values: dict[str, Any], table: Mapping[str, Any], name: Any) -> None:
    """Replaces the row in `values` by the row `name`. Keeps those settings of the old row that
    differ from its defaults and that the new row has, too."""
    old, new = table[values["name"]].settings, None
    # an unknown name raises an error when the Config is built
    if isinstance(name, str) and name in table:
        new = table[name].settings
    for setting, default in vars(old).items():
        if not hasattr(new, setting) or values.get(setting) == default:
            values.pop(setting, None)
    values["name"] = name


def parse_settings(settings: Iterable[str]) -> dict[str, str]:
    """Returns settings as a dict: ['model.layers=6'] -> {'model.layers': '6'}."""
    return rules.unique(map(key_and_value, settings))


def key_and_value(setting: str) -> tuple[str, str]:
    """Return ('model.layers', '6') for 'model.layers=6'. Raises ConfigError without key or `=`."""
    key, equals, value = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"expected key=value, got {shown(setting)}")
    return key.strip().removesuffix(".name"), value.strip()


def _build(cls: type, values: Any, prefix: str) -> Any:
    """Makes the group `cls` from a mapping. `prefix`: the start of its keys in messages. The
    group's own `__post_init__` converts rows and inner groups. Raises ConfigError for unknown
    keys."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'a config'} must be a mapping of settings, got "
                          f"{shown(values)}")
    known = [f.name for f in dataclasses.fields(cls)]
    values = {key: value for key, value in values.items()
              if GONE.get(f"{prefix}{key}", GONE) != value}
    for key in values:
        if key not in known:
            raise _unknown(f"{prefix}{key}", str(key), known)
    return cls(**values)


def _unknown(key: str, near: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"there is no setting {shown(key)}; {nearest(near, known)}")
