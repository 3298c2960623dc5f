"""Everything that decides the numbers of one training run, as frozen settings without device state.

A Config comes from a preset, a YAML file, a dict, papermill parameters or `--set a.b=c`, and goes
back to each of them. A field that names a technique is tagged: `memory.recompute: {name: block,
every: 2}`, or the name alone; the row in `lpkit.techniques` says which settings there are, and
every name and value is checked when a Config is made. Sizes carry the letters of docs/notation.md
as properties, so that formulas read like the notation. Standard library only (PyYAML is imported
when YAML is asked for): `lpkit.predict` stands on this module.
"""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lpkit.errors import ConfigError, at_least_zero, nearest, pick, positive
from lpkit.techniques import blocks, layouts, memory
from lpkit.techniques.changes import GOVERNORS, MODEL_TRANSFORMS
from lpkit.techniques.data import POLICIES
from lpkit.techniques.inits import INITS
from lpkit.techniques.layouts import Layout
from lpkit.techniques.optimizers import MOMENT_FORMATS, OPTIMIZERS
from lpkit.techniques.recipes import ASKABLE
from lpkit.techniques.row import Settings, many_of, one_of
from lpkit.techniques.schedules import SCHEDULES

VERSION = 2


class Group:
    """Fields that name a row may be given as a name or as a mapping; they become the row's own
    settings."""

    where = ""      # the prefix of its keys

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, kind = getattr(self, f.name), _kinds(type(self))[f.name]
            if "table" in f.metadata:
                object.__setattr__(self, f.name, tagged(f, value, f"{self.where}{f.name}"))
            elif dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
                object.__setattr__(self, f.name, _build(kind, value, f"{self.where}{f.name}."))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Group):
    """A decoder-only transformer by its sizes and its choices. GPT-2 style by default."""

    where = "model."

    layers: int = 4
    width: int = 256                    # the residual stream
    heads: int = 4                      # query heads
    kv_heads: int | None = None         # key/value heads; None: as many as heads
    # numbers of a head; None: width / heads. Gemma and Qwen3 have others
    head_dim: int | None = None
    mlp_width: int | None = None        # None: 4 * width
    vocab: int = 256
    context: int = 256                  # tokens per sequence
    block: str = "pre-norm"             # this and the next rows: names of lpkit.techniques.blocks
    norm: str = "layernorm"             # layernorm, rmsnorm
    norm_eps: float = 1e-5
    position: str = "learned"           # learned, rope
    rope_theta: float = 10_000.0
    mlp: str = "gelu"                   # gelu, swiglu
    bias: bool = True
    qkv_bias: bool | None = None        # of q, k and v alone, as in Qwen2; None: as bias
    qk_norm: bool = False  # an RMSNorm of each head's q and k before rotation, as in Qwen3
    tied: bool = True                   # the head is the token embedding
    init: Settings = one_of(INITS, "gpt2")
    attention: str = "auto"             # auto, plain, sdpa, blocked

    def __post_init__(self):
        super().__post_init__()
        positive(self.where, layers=self.layers, width=self.width, heads=self.heads,
                 kv_heads=self.G, mlp_width=self.F, vocab=self.vocab, context=self.context,
                 norm_eps=self.norm_eps, rope_theta=self.rope_theta,
                 head_dim=1 if self.head_dim is None else self.head_dim)
        for key, table in (("block", blocks.BLOCKS), ("norm", blocks.NORMS),
                           ("position", blocks.POSITIONS), ("mlp", blocks.MLPS),
                           ("attention", {"auto", *blocks.ATTENTION})):
            pick(dict.fromkeys(table), getattr(self, key), f"model.{key}")
        if self.head_dim is None and self.width % self.heads:
            below, above = (self.width // self.heads * self.heads,
                            -(-self.width // self.heads) * self.heads)
            raise ConfigError(f"model.width={self.width} is not a multiple of "
                              f"model.heads={self.heads}; nearest widths: {below or above} or "
                              f"{above}; or set model.head_dim")
        if self.heads % self.G:
            fits = [g for g in range(1, self.heads + 1) if self.heads % g == 0]
            raise ConfigError(f"model.heads={self.heads} is not a multiple of "
                              f"model.kv_heads={self.G}; kv_heads may be "
                              f"{', '.join(map(str, fits))}")
        if blocks.POSITIONS[self.position].turns and self.E % 2:
            raise ConfigError(f"rotary positions turn pairs, but a head has {self.E} numbers; "
                              f"make model.head_dim, or width/heads, even")

    @property
    def L(self) -> int:
        return self.layers

    @property
    def D(self) -> int:
        return self.width

    @property
    def H(self) -> int:
        return self.heads

    @property
    def G(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def E(self) -> int:
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def F(self) -> int:
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def V(self) -> int:
        return self.vocab

    @property
    def T(self) -> int:
        return self.context

    @property
    def biased_qkv(self) -> bool:
        return self.bias if self.qkv_bias is None else self.qkv_bias


@dataclass(frozen=True, kw_only=True)
class DataConfig(Group):
    where = "data."

    # or a file, a folder, a glob, hf:owner/name, the path of a prepared folder
    source: str = "python-stdlib"
    tokenizer: str = "bytes"  # bytes, bpe (trained on the source, model.vocab entries), gpt2
    policy: Settings = one_of(POLICIES, "random-windows")
    val_fraction: float = 0.1  # share of the files, or of the documents, kept for validation

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"data.val_fraction must be between 0 and 1, got {self.val_fraction}")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Group):
    """How the numbers of a product are cast, and by whom it is run."""

    where = "precision."

    recipe: Settings = one_of(ASKABLE, "auto")
    backend: str = "auto"  # auto: the fastest that runs this recipe here; the Run records why
    # cast once an update and keep, for memory, instead of in each micro-batch
    cache_weight_casts: bool = False
    telemetry_every: int = 0            # steps; 0: off. Writes telemetry.jsonl into the run folder

    def __post_init__(self):
        super().__post_init__()
        at_least_zero(self.where, telemetry_every=self.telemetry_every)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Group):
    """What a step keeps, where and in how many bits. The first row of each family is PyTorch's own
    way."""

    where = "memory."

    recompute: Settings = one_of(memory.RECOMPUTE, "none")
    activation_offload: Settings = one_of(memory.ACTIVATION_OFFLOAD, "device")
    cross_entropy: Settings = one_of(memory.CROSS_ENTROPY, "full")
    param_dtype: Settings = one_of(memory.PARAM_DTYPE, "fp32")
    optimizer_state: Settings = one_of(memory.OPTIMIZER_STATE, "device")
    moment_format: Settings = one_of(MOMENT_FORMATS, "float32")
    optimizer_step: Settings = one_of(memory.OPTIMIZER_STEP, "after")


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    device: str = "auto"                # auto, cpu, cuda, cuda:1
    compile: bool | Literal["auto"] = "auto"   # auto: on GPUs
    threads: int | None = None          # None: PyTorch's own choice


@dataclass(frozen=True, kw_only=True)
class Config(Group):
    """One training run. `global_batch` is sequences per update; `grad_accum_steps` splits it into
    micro-batches."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: Settings = one_of(OPTIMIZERS, "adamw")
    schedule: Settings = one_of(SCHEDULES, "cosine")
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    parallel: Layout = field(default_factory=Layout)
    transforms: tuple[Settings, ...] = many_of(MODEL_TRANSFORMS)
    governors: tuple[Settings, ...] = many_of(GOVERNORS)
    system: SystemConfig = field(default_factory=SystemConfig)
    steps: int = 300
    global_batch: int = 16
    grad_accum_steps: int = 1
    seed: int = 0
    eval_every: int = 100               # steps; 0: only at the end
    eval_batches: int = 8
    checkpoint_every: int = 100         # steps; 0: only at the end
    keep_checkpoints: int = 2
    version: int = VERSION

    def __post_init__(self):
        super().__post_init__()
        if self.version > VERSION:
            raise ConfigError(f"this config has version {self.version}, newer than this lpkit "
                              f"understands ({VERSION}); upgrade lpkit, or write the config again "
                              f"with this one")
        positive("", steps=self.steps, global_batch=self.global_batch,
                 grad_accum_steps=self.grad_accum_steps, eval_batches=self.eval_batches,
                 keep_checkpoints=self.keep_checkpoints, version=self.version)
        at_least_zero("", seed=self.seed, eval_every=self.eval_every,
                      checkpoint_every=self.checkpoint_every)
        if self.global_batch % self.grad_accum_steps:
            fits = [a for a in range(1, self.global_batch + 1) if self.global_batch % a == 0]
            raise ConfigError(f"global_batch={self.global_batch} does not split into "
                              f"grad_accum_steps={self.grad_accum_steps} equal micro-batches; "
                              f"grad_accum_steps may be {', '.join(map(str, fits))}")
        layouts.check_sizes(self.parallel)
        if self.parallel.devices > 1:
            layouts.check(self, self.parallel)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.model.context

    @property
    def micro_batch(self) -> int:
        """Sequences that are forwarded at a time, on one device."""
        return self.global_batch // self.grad_accum_steps

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, JSON-ready. A row that has no settings is its name alone."""
        return dataclasses.asdict(self, dict_factory=_plain)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """The inverse of `to_dict`. Missing keys keep their defaults; unknown ones are refused by
        name.

        Keys of version 1 are read, and named on standard error.
        """
        version = values.get("version", VERSION) if isinstance(values, Mapping) else VERSION
        if isinstance(version, int) and version > VERSION:  # before its new keys are called unknown
            cls(version=version)
        if version == 1:
            values, renamed = _from_version_1(values)
            if renamed:
                print(f"lpkit: read from an older version: {', '.join(renamed)}", file=sys.stderr)
        return _build(cls, values, "")

    def to_yaml(self) -> str:
        import yaml

        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    @classmethod
    def from_yaml(cls, text: str) -> "Config":
        import yaml

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
        return cls.from_dict(values or {})

    def replace(self, changes: Mapping[str, Any]) -> "Config":
        """A copy with dotted keys changed: `config.replace({"model.layers": 6, "steps": "1_000"})`.

        Strings are converted by the field's annotation, so the command line and papermill need no
        parsing of their own. Another row's name starts from that row's settings, and keeps those of
        the old row that were changed and that both have.
        """
        values = self.to_dict()
        # a name before its settings
        for key, value in sorted(changes.items(), key=lambda change: change[0].count(".")):
            _set(Config, values, key.split("."), value, key, self)
        return Config.from_dict(values)


# Names of rows, and their settings.

@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """The annotation of each field; reading them takes longer than building a Config."""
    return typing.get_type_hints(cls)


def _plain(pairs: list[tuple[str, Any]]) -> Any:
    values = dict(pairs)
    return values["name"] if list(values) == ["name"] else values



def tagged(f: dataclasses.Field, value: Any, where: str) -> Any:
    """The settings of the row that `value` names, or of the rows: settings, a name, or a mapping
    (without a name: of the field's own default).

    Raises ConfigError for an unknown name, and for what its row cannot be told.
    """
    if "many" not in f.metadata:
        return _settings(f.metadata["table"], value, where, f.metadata["default"])
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} must be a list of {', '.join(f.metadata['table']) or 'rows'}, "
                          f"got {value!r}")
    return tuple(_settings(f.metadata["table"], one, where, None) for one in value)


def _settings(table: Mapping[str, Any], value: Any, where: str, default: str | None) -> Settings:
    if isinstance(value, Settings):
        pick(table, value.name, where)
        return value
    given = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = given.pop("name", default)
    if not isinstance(name, str):
        raise ConfigError(f"{where} must name one of {', '.join(table)}, got {value!r}")
    defaults = pick(table, name, where).settings
    kinds = _kinds(type(defaults))
    for key in given:
        if key not in kinds:
            raise ConfigError(f"{where}={name} has no setting {str(key)!r}; "
                              f"{_who_has(table, str(key), kinds)}")
    made = {key: convert(one, kinds[key], f"{where}.{key}") for key, one in given.items()}
    return dataclasses.replace(defaults, name=name, **made)


def _who_has(table: Mapping[str, Any], key: str, kinds: Mapping[str, Any]) -> str:
    others = [name for name, row in table.items() if key in _kinds(type(row.settings))]
    known = [kind for kind in kinds if kind != "name"]
    if others:
        return f"{', '.join(others)} {'has' if len(others) == 1 else 'have'} it"
    return nearest(key, known) if known else "it has none"


def _set(cls: type, node: Any, path: list[str], value: Any, key: str, config: Config) -> None:
    """Change one leaf of the nested dict of a Config. Raises ConfigError for an unknown key."""
    first, rest = path[0], path[1:]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    if first not in fields:
        raise ConfigError(f"there is no setting {key!r}; {_hint(key, config)}")
    table, kind = fields[first].metadata.get("table"), _kinds(cls)[first]
    if "many" in fields[first].metadata and not rest:
        node[first] = value
    elif table is not None:
        if isinstance(node[first], str):
            node[first] = {"name": node[first]}
        if not rest or rest == ["name"]:
            node[first] = _other_row(table, node[first], value, key)
        elif rest[1:]:
            raise ConfigError(f"there is no setting {key!r}; {_hint(key, config)}")
        else:
            node[first] = {**node[first], rest[0]: value}
    elif not rest:
        if dataclasses.is_dataclass(kind) and not isinstance(value, Mapping):
            group = [name for name in flat(config) if name.startswith(key + ".")]
            raise ConfigError(f"{key!r} is a group of settings, set one of {', '.join(group)}")
        node[first] = value
    elif dataclasses.is_dataclass(kind):
        _set(kind, node[first], rest, value, key, config)
    else:
        raise ConfigError(f"there is no setting {key!r}; {_hint(key, config)}")


def _other_row(table: Mapping[str, Any], old: Mapping[str, Any], value: Any, key: str) -> Any:
    """`value` names a row: with its settings, but what was changed in the old row stays where both
    have it."""
    if not isinstance(value, str):
        return value
    if value == old["name"]:
        return dict(old)
    if value not in table:
        return {"name": value}      # whoever builds the Config says what there is
    before, kinds = (dataclasses.asdict(table[old["name"]].settings),
                     _kinds(type(table[value].settings)))
    changed = {one: given for one, given in old.items() if one in kinds
               and given != before.get(one)}
    return {**changed, "name": value}


def _hint(key: str, config: Config) -> str:
    if key in RENAMED:
        return f"since version 2 it is {RENAMED[key]!r}"
    return nearest(key, flat(config))


def flat(config: Config) -> dict[str, Any]:
    """Every setting under its dotted name; of a row, its name under the field's."""

    def walk(values: dict, prefix: str):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield (prefix + key).removesuffix(".name"), value

    return dict(walk(config.to_dict(), ""))


def parse_settings(settings: Iterable[str]) -> dict[str, str]:
    """['model.layers=6'] -> {'model.layers': '6'}."""
    parsed = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"expected key=value, got {setting!r}")
        parsed[key.strip()] = value.strip()
    return parsed


def _build(cls: type, values: Any, prefix: str):
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'a config'} must be a mapping of settings, got "
                          f"{values!r}")
    kinds, fields = _kinds(cls), {f.name: f for f in dataclasses.fields(cls)}
    made = {}
    for key, value in values.items():
        if key not in fields:
            since = RENAMED.get(prefix + str(key))
            raise ConfigError(f"there is no setting {prefix + str(key)!r}; "
                              f"{f'since version 2 it is {since!r}' if since else nearest(str(key), fields)}")
        if "table" in fields[key].metadata:
            made[key] = tagged(fields[key], value, prefix + key)
        elif dataclasses.is_dataclass(kinds[key]):
            made[key] = _build(kinds[key], value, f"{prefix}{key}.")
        else:
            made[key] = convert(value, kinds[key], f"{prefix}{key}")
    return cls(**made)


# Version 1.

RENAMED = {
    "batch": "global_batch", "accumulate": "grad_accum_steps",
    "memory.recompute_every": "memory.recompute.every",
    "memory.recompute_budget": "memory.recompute.budget",
    "memory.saved": "memory.activation_offload", "memory.loss": "memory.cross_entropy",
    "memory.loss_chunk": "memory.cross_entropy.chunk_tokens",
    "memory.parameters": "memory.param_dtype",
    "memory.update": "memory.optimizer_step", "precision.weights": "precision.cache_weight_casts",
    "precision.keep": "precision.recipe.high_precision_layers",
    **{f"precision.{key}": f"precision.recipe.{key}" for key in (
        "pad", "forward_format", "gradient_format", "scale", "gradient_rounding", "transform",
        "history", "history_rule", "margin", "loss_scale")},
    "optimizer.schedule": "schedule", "optimizer.warmup_steps": "schedule.warmup_steps",
    "optimizer.decay_fraction": "schedule.decay_fraction",
    "optimizer.final_lr_ratio": "schedule.final_lr_ratio",
}
VALUES = {"memory.loss": {"whole": "full"}, "precision.weights": {"cast": False, "cached": True}}
# What version 1 wrote whether it was used or not: no loss where the row has no such setting.
UNUSED = {"memory.recompute_every": 1, "memory.recompute_budget": 0.5, "memory.loss_chunk": 1024,
          "optimizer.decay_fraction": 0.2}


def _from_version_1(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same settings in the names of today, and 'old -> new' of each that had another."""
    made: dict[str, Any] = {}
    renamed, later = [], []
    for key, value in _leaves(values):
        if key == "version" or UNUSED.get(key) == value:
            continue
        if key.startswith("precision.") and value is None:
            continue
        if key == "optimizer.name" and value == "adamw-8bit":
            later += [("optimizer", "adamw"), ("memory.moment_format", "int8")]
            renamed.append("optimizer.name=adamw-8bit -> memory.moment_format=int8")
        elif key in RENAMED:
            later.append((RENAMED[key], VALUES[key].get(value, value) if key in VALUES else value))
            renamed.append(f"{key} -> {RENAMED[key]}")
        else:
            later.append((key, value))
    names = _tags(Config)
    # a row's name before its settings
    for key, value in sorted(later, key=lambda one: one[0].count(".")):
        node, *path = made, *(key.split(".") if key not in names else [*key.split("."), "name"])
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return made, renamed


def _tags(cls: type, prefix: str = "") -> set[str]:
    """The dotted names of the fields that name rows."""
    kinds, found = _kinds(cls), set()
    for f in dataclasses.fields(cls):
        if "default" in f.metadata:
            found.add(prefix + f.name)
        elif dataclasses.is_dataclass(kinds[f.name]):
            found |= _tags(kinds[f.name], f"{prefix}{f.name}.")
    return found


def _leaves(values: Any, prefix: str = ""):
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def convert(value: Any, kind: Any, name: str) -> Any:
    """`value` as the annotated `kind`; strings are read the way a person types them. Raises
    ConfigError.

    >>> convert("1e-3", float, "lr"), convert("no", bool, "compile")
    (0.001, False)
    >>> convert("none", int | None, "threads") is None
    True
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        # "none" is none before anything else; str accepts anything, so it comes last
        for option in sorted(args, key=lambda option: (option is not type(None), option is str)):
            try:
                return convert(value, option, name)
            except ConfigError:
                continue
    elif origin is Literal:
        if value in args:
            return value
        close = nearest(str(value), map(str, args))
        raise ConfigError(f"{name} cannot be {value!r}; {close}")
    elif origin is tuple:
        parts = value
        if isinstance(value, str):
            parts = [] if value.lower() == "none" else value.split(",")
        if isinstance(parts, (list, tuple)):
            return tuple(convert(part.strip() if isinstance(part, str) else part, args[0], name)
                         for part in parts if part != "")
    elif kind is type(None):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "false", "no",
                                                        "off", "0"):
            return value.lower() in ("true", "yes", "on", "1")
    elif kind is str:
        if isinstance(value, str):
            return value
    elif kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(value.replace("_", "")) if isinstance(value, str) else float(value)
            if kind is float:
                return number
            if number.is_integer():
                return int(value) if isinstance(value, int) else int(number)
        except (ValueError, TypeError, AttributeError, OverflowError):
            pass
    raise ConfigError(f"{name} must be {_words(kind)}, got {value!r}")


def _words(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text",
             type(None): "none"}
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_args(kind):
        return " or ".join(_words(option) for option in typing.get_args(kind)
                           if option is not Ellipsis)
    return names.get(kind, str(kind))
