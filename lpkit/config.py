"""Everything that decides the numbers of one training run, as frozen settings without device state.

A Config comes from a preset, a YAML file, a dict, papermill parameters or `--set a.b=c`, and goes back to
each of them. Sizes carry the letters of docs/notation.md as properties, so that formulas read like the notation.
Standard library only (PyYAML is imported when YAML is asked for): `lpkit.predict` stands on this module.
"""

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lpkit.errors import ConfigError, at_least_zero, nearest, positive, share
from lpkit.techniques import blocks, layouts
from lpkit.techniques.layouts import Layout

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer by its sizes and its choices. GPT-2 style by default."""

    layers: int = 4
    width: int = 256                    # the residual stream
    heads: int = 4                      # query heads
    kv_heads: int | None = None         # key/value heads; None: as many as heads
    head_dim: int | None = None         # numbers of a head; None: width / heads. Gemma and Qwen3 have others
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
    qk_norm: bool = False               # an RMSNorm of each head's q and k before rotation, as in Qwen3
    tied: bool = True                   # the head is the token embedding
    init: str = "gpt2"
    attention: str = "auto"             # auto, plain, sdpa, blocked

    def __post_init__(self):
        positive("model.", layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.G, mlp_width=self.F,
                 vocab=self.vocab, context=self.context, norm_eps=self.norm_eps, rope_theta=self.rope_theta,
                 head_dim=1 if self.head_dim is None else self.head_dim)
        for key, table in (("block", blocks.BLOCKS), ("norm", blocks.NORMS), ("position", blocks.POSITIONS),
                           ("mlp", blocks.MLPS), ("attention", {"auto", *blocks.ATTENTION})):
            name = getattr(self, key)
            if name not in table:
                raise ConfigError(f"there is no model.{key}={name!r}; {nearest(str(name), table)}")
        if self.head_dim is None and self.width % self.heads:
            below, above = (self.width // self.heads * self.heads, -(-self.width // self.heads) * self.heads)
            raise ConfigError(f"model.width={self.width} is not a multiple of model.heads={self.heads}; "
                              f"nearest widths: {below or above} or {above}; or set model.head_dim")
        if self.heads % self.G:
            fits = [g for g in range(1, self.heads + 1) if self.heads % g == 0]
            raise ConfigError(f"model.heads={self.heads} is not a multiple of model.kv_heads={self.G}; "
                              f"kv_heads may be {', '.join(map(str, fits))}")
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
class DataConfig:
    source: str = "python-stdlib"       # or a file, a folder, a glob, hf:owner/name, the path of a prepared folder
    tokenizer: str = "bytes"            # bytes, bpe (trained on the source, model.vocab entries), gpt2
    policy: str = "random-windows"
    val_fraction: float = 0.1           # share of the files, or of the documents, kept for validation

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise ConfigError(f"data.val_fraction must be between 0 and 1, got {self.val_fraction}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1           # on matrices only
    clip: float = 1.0                   # largest global gradient norm; 0: no clipping
    schedule: str = "cosine"            # cosine, wsd, linear, constant
    warmup_steps: int = 20
    decay_fraction: float = 0.2         # of the steps; only wsd has a separate decay
    final_lr_ratio: float = 0.1

    def __post_init__(self):
        positive("optimizer.", lr=self.lr, eps=self.eps)
        at_least_zero("optimizer.", weight_decay=self.weight_decay, clip=self.clip, warmup_steps=self.warmup_steps)
        share("optimizer.", decay_fraction=self.decay_fraction, final_lr_ratio=self.final_lr_ratio)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name} must be 0 or more and below 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """A recipe is a row of `lpkit.precision.recipes`; a setting of None leaves the row as it is."""

    recipe: str = "auto"                # auto: bf16 where this machine does it fast, else fp32; the Run records why
    backend: str = "auto"               # auto: the fastest that runs this recipe here; the Run records why
    keep: tuple[str, ...] | None = None     # Linears left in 16 bits: first, last, head, patterns of names; ",": none
    pad: bool | None = None             # with zeros, where a shape does not tile; otherwise it is refused
    forward_format: Literal["e4m3fn", "e5m2"] | None = None      # of activations and weights
    gradient_format: Literal["e4m3fn", "e5m2"] | None = None
    scale: Literal["float32", "power-of-two", "power-of-two-floor"] | None = None
    gradient_rounding: Literal["nearest-even", "stochastic"] | None = None
    transform: Literal["none", "hadamard"] | None = None         # of the operands of the weight gradient
    history: int | None = None          # fp8-delayed: micro-batches whose amax is remembered
    history_rule: Literal["max", "most-recent"] | None = None
    margin: int | None = None           # fp8-delayed: the scale leaves 2^margin of room
    loss_scale: float | None = None     # fp16: the first one
    weights: Literal["cast", "cached"] = "cast"     # in each micro-batch, or once an update and kept, for memory
    telemetry_every: int = 0            # steps; 0: off. Writes telemetry.jsonl into the run folder

    def __post_init__(self):
        at_least_zero("precision.", telemetry_every=self.telemetry_every)
        positive("precision.", **{key: value for key in ("history", "loss_scale")
                                   if (value := getattr(self, key)) is not None})


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What a step keeps, where and in how many bits. Each is the name of a row; the first one is PyTorch's own way."""

    recompute: str = "none"             # none, block, selective, budget: activations that backward makes again
    recompute_every: int = 1            # block: every n-th block
    recompute_budget: float = 0.5       # budget: the share of the activations that torch.compile may keep
    saved: str = "device"               # activations until backward: device, cpu, disk, int8, int4, int2
    loss: str = "whole"                 # whole, chunked: never all logits at once
    loss_chunk: int = 1024              # chunked: tokens at a time
    parameters: str = "fp32"            # fp32, bf16: stored, and updated with stochastic rounding
    optimizer_state: str = "device"     # device, cpu, disk
    moment_format: str = "float32"      # float32, int8: how the optimizer's state is stored
    update: str = "after"               # after, in-backward: each parameter as soon as it has its gradient

    def __post_init__(self):
        positive("memory.", recompute_every=self.recompute_every, loss_chunk=self.loss_chunk)
        if not 0 <= self.recompute_budget <= 1:
            raise ConfigError(f"memory.recompute_budget is a share from 0 to 1, got {self.recompute_budget}")


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    device: str = "auto"                # auto, cpu, cuda, cuda:1
    compile: bool | Literal["auto"] = "auto"   # auto: on GPUs
    threads: int | None = None          # None: PyTorch's own choice


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. `batch` is sequences per update; `accumulate` splits it into that many micro-batches."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    parallel: Layout = field(default_factory=Layout)    # that predictions read; training takes one device
    system: SystemConfig = field(default_factory=SystemConfig)
    steps: int = 300
    batch: int = 16
    accumulate: int = 1
    seed: int = 0
    eval_every: int = 100               # steps; 0: only at the end
    eval_batches: int = 8
    checkpoint_every: int = 100         # steps; 0: only at the end
    keep_checkpoints: int = 2
    version: int = VERSION

    def __post_init__(self):
        if self.version > VERSION:
            raise ConfigError(f"this config has version {self.version}, newer than this lpkit understands ({VERSION}); "
                              f"upgrade lpkit, or write the config again with this one")
        positive("", steps=self.steps, batch=self.batch, accumulate=self.accumulate, eval_batches=self.eval_batches,
                 keep_checkpoints=self.keep_checkpoints, version=self.version)
        at_least_zero("", seed=self.seed, eval_every=self.eval_every, checkpoint_every=self.checkpoint_every)
        if self.batch % self.accumulate:
            fits = [a for a in range(1, self.batch + 1) if self.batch % a == 0]
            raise ConfigError(f"batch={self.batch} does not split into accumulate={self.accumulate} equal "
                              f"micro-batches; accumulate may be {', '.join(map(str, fits))}")
        layouts.check_sizes(self.parallel)
        if self.parallel.devices > 1:
            layouts.check(self, self.parallel)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.model.context

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, JSON-ready."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """The inverse of `to_dict`. Missing keys keep their defaults; unknown ones are refused by name."""
        version = values.get("version", VERSION) if isinstance(values, Mapping) else VERSION
        if isinstance(version, int) and version > VERSION:  # before its new keys are called unknown
            cls(version=version)
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

        Strings are converted by the field's annotation, so the command line and papermill need no parsing of their own.
        """
        values = self.to_dict()
        for key, value in changes.items():
            node, *path = values, *key.split(".")
            for i, part in enumerate(path):
                if not isinstance(node, dict) or part not in node:
                    raise ConfigError(f"there is no setting {key!r}; {nearest(key, flat(self))}")
                if i < len(path) - 1:
                    node = node[part]
            if isinstance(node[path[-1]], dict) and not isinstance(value, Mapping):
                group = [name for name in flat(self) if name.startswith(key + ".")]
                raise ConfigError(f"{key!r} is a group of settings, set one of {', '.join(group)}")
            node[path[-1]] = value
        return Config.from_dict(values)


def flat(config: Config) -> dict[str, Any]:
    """Every setting under its dotted name."""

    def walk(values: dict, prefix: str):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield prefix + key, value

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
        raise ConfigError(f"{prefix.rstrip('.') or 'a config'} must be a mapping of settings, got {values!r}")
    kinds = typing.get_type_hints(cls)
    made = {}
    for key, value in values.items():
        if key not in kinds:
            raise ConfigError(f"there is no setting {prefix + str(key)!r}; {nearest(str(key), kinds)}")
        kind = kinds[key]
        made[key] = (_build(kind, value, f"{prefix}{key}.") if dataclasses.is_dataclass(kind)
                     else convert(value, kind, f"{prefix}{key}"))
    return cls(**made)


def convert(value: Any, kind: Any, name: str) -> Any:
    """`value` as the annotated `kind`; strings are read the way a person types them. Raises ConfigError.

    >>> convert("1e-3", float, "lr"), convert("no", bool, "compile"), convert("none", int | None, "threads")
    (0.001, False, None)
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
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)):
            return tuple(convert(part.strip() if isinstance(part, str) else part, args[0], name)
                         for part in parts if part != "")
    elif kind is type(None):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "")):
            return None
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
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
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "none"}
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if typing.get_args(kind):
        return " or ".join(_words(option) for option in typing.get_args(kind) if option is not Ellipsis)
    return names.get(kind, str(kind))
