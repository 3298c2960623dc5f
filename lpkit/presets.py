"""Named configs (presets). Their model sizes are the published sizes; a comment marks each size
that is rounded.

Sources: GPT-2 (Radford et al. 2019, table 2); Llama 3.1 (https://arxiv.org/abs/2407.21783, table
3); Llama 3.2 1B (its model card and config.json).
"""

from collections.abc import Iterable
from pathlib import Path

from lpkit.config import Config, DataConfig, ModelConfig, parse_settings
from lpkit.errors import ConfigError, named, pick
from lpkit.files import of_transformers
from lpkit.values import checked


def _gpt2(layers: int, width: int, heads: int, lr: float) -> Config:
    return Config(
        # 50,257 entries, rounded up to a multiple of 64 for tensor cores
        model=ModelConfig(layers=layers, width=width, heads=heads, vocab=50_304, context=1024),
        data=DataConfig(tokenizer="bpe"),
        optimizer={"name": "adamw", "lr": lr}, schedule={"name": "cosine", "warmup_steps": 700},
        steps=19_000, global_batch=512, grad_accum_steps=32, eval_every=500, checkpoint_every=1000)


def _llama(layers: int, width: int, heads: int, mlp_width: int, lr: float, *,
           tied: bool = False) -> Config:
    return Config(
        model=ModelConfig(layers=layers, width=width, heads=heads, kv_heads=8, mlp_width=mlp_width,
                          vocab=128_256, context=8192, norm="rmsnorm", position="rope", bias=False,
                          rope_theta=500_000.0, mlp="swiglu", tied=tied, init="llama"),
        data=DataConfig(tokenizer="bpe"),
        optimizer={"name": "adamw", "lr": lr}, schedule={"name": "cosine", "warmup_steps": 2000},
        steps=100_000, global_batch=512, grad_accum_steps=512, eval_every=1000,
        checkpoint_every=1000)


PRESETS = {
    "cpu-3m": Config(),
    "gpt2-124m": _gpt2(12, 768, 12, 6e-4),
    "gpt2-350m": _gpt2(24, 1024, 16, 3e-4),
    "gpt2-1.5b": _gpt2(48, 1600, 25, 2e-4),
    "llama-1b": _llama(16, 2048, 32, 8192, 3e-4, tied=True),
    "llama-8b": _llama(32, 4096, 32, 14_336, 3e-4),
    "llama-70b": _llama(80, 8192, 64, 28_672, 1.5e-4),
    "llama-405b": _llama(126, 16_384, 128, 53_248, 8e-5),
    # not a published model: an example with 1.005T parameters
    "dense-1t": _llama(160, 24_576, 192, 67_584, 5e-5),
}


def preset(name: str) -> Config:
    """Returns the Config of a preset, by its name in upper or lower case. Raises ConfigError, whose
    message names the nearest preset."""
    return pick(PRESETS, name.lower() if is_preset(name) else name, "preset")


def is_preset(target: object) -> bool:
    """Returns True if `target` names a preset, in upper or lower case."""
    return isinstance(target, str) and target.lower() in PRESETS


@checked
def resolve(target: str, settings: Iterable[str] = ()) -> Config:
    """Returns the Config of a target, changed by `settings` (each `key=value`). `target` is the
    name of a preset, the path of a YAML file, or a run folder. Raises ConfigError."""
    path = Path(target)
    if not is_preset(target) and (path / "config.yaml").is_file():
        path /= "config.yaml"
    if is_preset(target) or path.suffix not in (".yaml", ".yml"):
        if hint := of_transformers(path):
            raise ConfigError(f"{named(target)} holds no run{hint}")
        config = preset(target)
    else:
        from lpkit.plain_yaml import read_yaml

        config = Config.from_dict(read_yaml(path, "a config is a YAML file or a preset, one of "
                                                  f"{', '.join(PRESETS)}"))
    return config.replace(parse_settings(settings))
