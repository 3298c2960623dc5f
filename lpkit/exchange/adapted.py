"""Runs with adapters: merge the adapters into the weights, write them as files of peft, or import
files of peft as a run.

An adapter of peft is a folder with two files. `adapter_config.json` contains the settings.
`adapter_model.safetensors` contains a matrix A (rank, in) and a matrix B (out, rank) for each
adapted module; module names are those of transformers. transformers has three modules for q, k and
v, and lpkit has one (qkv); if our adapter is `shared`, the three modules get the same A.

A row of `model.changes` names the functions that write (`saves`) and read (`brings`) its files. In
this module, "ours" are names and tensors of lpkit, "theirs" those of transformers or peft.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lpkit import records
from lpkit.config import Config, ModelConfig
from lpkit.errors import ConfigError, shown
from lpkit.exchange import families, imported
from lpkit.exchange.families import Family
from lpkit.exchange.imported import parameters, written
from lpkit.nn.adapters import Lora, side_by_side
from lpkit.techniques.adapters import CODED
from lpkit.techniques.blocks import MODEL_CHANGES
from lpkit.training import build, start
from lpkit.training.runs import Run

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Keys of adapter_config.json. FREE: keys that may have any value, because they do not change a
# saved adapter, or because the functions below read them. MEANS: key -> the values that it may
# have.
FREE = {*"""auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha
    target_modules use_rslora lora_dropout fan_in_fan_out megatron_core qalora_group_size
    runtime_config eva_config num_virtual_tokens num_attention_heads init_weights
    prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs
    encoder_hidden_size prefix_projection""".split()}
MEANS = {"task_type": (None, "CAUSAL_LM"), "bias": (None, "none"),
         "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
         "num_transformer_submodules": (None, 1)}
OTHERS = "lessons.rows.adapters"    # the module that adds rows for DoRA, a prompt and a prefix


def rebuilt(run: Run, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Builds the model of `run` in float32: with the weights from which the run started, replaced
    by those weights that `tensors` contains (by our names). Raises ConfigError if the weights from
    which the run started have changed since."""
    began = start.read(run.config)
    began.refuse_other(run)
    model = build.initial_model(run.config, "plain", began)
    weights = model.state_dict()
    with torch.no_grad():
        for name in weights.keys() & tensors.keys():    # the other tensors are states of a recipe
            weights[name].copy_(tensors[name])
    return model


def merged(run: Run, tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns an equivalent model without adapters (`model.changes` is empty), and its weights in
    the dtype of the run. Raises ConfigError for a change that cannot be merged into a Linear."""
    model, plain = rebuilt(run, tensors), run.config.replace({"model.changes": []}).model
    dtype = next(tensors[name].dtype for name in model.state_dict()
                 if name in tensors and not name.endswith(CODED))
    # A module with a method `merged` becomes one Linear. Inner modules come first, because an outer
    # module may contain adapted modules.
    for name, module in reversed(list(model.named_modules())):
        if whole := getattr(module, "merged", lambda: None)():
            weight, bias = whole
            linear = nn.Linear(*weight.shape[::-1], bias=bias is not None)
            linear.weight = nn.Parameter(weight)
            linear.bias = None if bias is None else nn.Parameter(bias)
            model.set_submodule(name, linear)
    weights, changes = model.state_dict(), ", ".join(map(str, run.config.model.changes))
    with torch.device("meta"):
        expected = build.initial_model(Config(model=plain), "plain").state_dict()
    if weights.keys() != expected.keys():
        raise ConfigError(f"no matrix of a model is the same as one with model.changes={changes}; "
                          f"only an adapter that equals one Linear, such as lora, can be merged")
    return plain, {name: t.to(dtype) for name, t in weights.items()}


def _loras(model: nn.Module) -> Iterator[tuple[str, Lora]]:
    """Return an iterator over (name, module) of the modules with A and B."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Lora))


def _lies_transposed(family: Family, m: ModelConfig) -> bool:
    """Return True if the family stores weights as (in, out), as GPT-2 does."""
    [t] = family.parts("blocks.0.mlp.down.weight", torch.empty(2, 1), m).values()
    return t.shape[0] == 1


def save_adapter(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the adapter of `run` as files of peft into `folder`. tensors: the weights of the run
    by our names. Raises ConfigError for an adapter that peft does not have."""
    settings = run.config.model.changes
    saves = [getattr(MODEL_CHANGES[change.name], "saves", "") for change in settings]
    if len(saves) != 1 or not saves[0]:
        able = [name for name, row in MODEL_CHANGES.items() if getattr(row, "saves", "")]
        raise ConfigError(f"peft's files hold one of {', '.join(able)}, and this run has "
                          f"model.changes={', '.join(map(str, settings)) or 'none'}; without "
                          f"--adapter it is merged")
    resolve_name(saves[0])(run, tensors, folder)


def save_lora(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes A and B of each adapted module, in the order and orientation of transformers.

    A row that changes the base matrix W when a run starts, such as PiSSA, trains
    W - B0 A0 + B A, where A0 and B0 are A and B at the start. peft adds to W, so A and A0 are
    stacked, and so are B and -B0: an adapter of twice the rank."""
    plain, [lora] = run.config.replace({"model.changes": []}).model, run.config.model.changes
    saved, family = {}, families.of_model(plain)
    transposed, rank = _lies_transposed(family, plain), lora.rank * (1 if lora.keeps_base else 2)
    began = {} if lora.keeps_base else dict(_loras(rebuilt(run, {})))
    for name, module in _loras(rebuilt(run, tensors)):
        As, Bs = module.A.weight.chunk(len(module.B)), [B.weight for B in module.B]
        if began:
            first = began[name]
            As = [torch.cat(pair) for pair in zip(As, first.A.weight.chunk(len(Bs)))]
            Bs = [torch.cat((B, -old.weight), dim=1) for B, old in zip(Bs, first.B)]
        B = side_by_side(Bs, module.groups, 0)
        parts = {family.named(key).removesuffix(".weight"): part.mT if transposed else part
                 for key, part in family.parts(f"{name}.weight", B, plain).items()}
        if len(As) not in (1, len(parts)):
            raise ConfigError(f"{family.architecture} has one A for {', '.join(parts)}, and this "
                              f"run has an A for each of q, k and v; train with shared=true")
        for A, (key, part) in zip(As * (len(parts) // len(As)), parts.items()):
            saved[f"{PREFIX}{key}.lora_A.weight"] = A.detach().clone()
            saved[f"{PREFIX}{key}.lora_B.weight"] = part.detach().clone()
        for vector, theirs in lora.vectors.items():
            numbers = family.parts(f"{name}.bias", getattr(module, vector).detach(), plain)
            saved |= {f"{PREFIX}{key}.{theirs}": part.clone()
                      for key, part in zip(parts, numbers.values())}
    # the last part of module names, such as q_proj
    targets = {name.split(".lora_")[0].split(".")[-1] for name in saved}
    write(folder, {
        "peft_type": "LORA", "bias": "none", "r": rank, "lora_alpha": lora.scale * rank,
        "target_modules": sorted(targets), "use_dora": False, "fan_in_fan_out": transposed,
        **MODEL_CHANGES[lora.name].theirs}, saved)


def write(folder: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write the two files of peft. about: further settings of adapter_config.json. tensors: by
    their names."""
    about = {"task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
             **about}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def bring_adapter(folder: Path, base: Run, out: Path) -> Run:
    """Makes the run `out` whose model is `base` with the adapter in `folder`, as peft would load
    it. Modules that the files do not adapt get A and B of zeros. Raises ConfigError, whose message
    names the key, for an adapter that this kit does not have."""
    settings, rows = records.of_others(folder / CONFIG), _read()
    fits = [name for name, theirs in rows.items() if theirs.items() <= settings.items()]
    # the row with the most matching keys; without a match, `bring_lora` raises the error
    name = max(fits, key=lambda name: len(rows[name]), default="lora")
    return resolve_name(MODEL_CHANGES[name].brings)(folder, settings, base, out, name)


def _read() -> dict[str, Mapping[str, Any]]:
    """Returns {name of a row: the keys of adapter_config.json, with their values, that identify the
    row}."""
    rows = {name: getattr(row, "theirs", {}) for name, row in MODEL_CHANGES.items()}
    return {name: theirs for name, theirs in rows.items() if theirs}


def check_keys(folder: Path, settings: Mapping[str, Any], means: Mapping[str, tuple]) -> None:
    """Raises ConfigError if a key of `settings` (adapter_config.json) has a value with which the
    adapter computes something that the row does not compute. `means`: key -> the values that it may
    have for this row, in addition to MEANS and to the keys that identify rows."""
    means, rows = {**MEANS, **means}, _read().values()
    for key, value in (pair for theirs in rows for pair in theirs.items()):
        before = means.get(key, (None, False) if value is True else ())
        means[key] = (*before, *[value] * (value not in before))
    # first the keys that tell the kind of adapter, so that the message is about the kind
    kinds = [key for theirs in rows for key in theirs]
    for key, value in {**dict.fromkeys([*kinds, *means]), **settings}.items():
        fine = means.get(key, (None, False, [], {}))        # other keys must be switched off
        if value not in fine and key not in FREE:
            more = f"; DoRA, a prompt and a prefix are rows of {OTHERS}: add --import {OTHERS}"
            raise ConfigError(f"{str(folder)!r} has {key}={shown(value)}, but this kit reads "
                              f"adapters with {key}={' or '.join(map(shown, fine))}"
                              f"{more * (len(rows) == 1 and key in ('peft_type', 'use_dora'))}")


def tensors(folder: Path, expected: Mapping[str, tuple], keys: str) -> dict[str, Tensor]:
    """Returns the tensors of adapter_model.safetensors. expected: name -> shape that the file must
    have. keys: the keys of adapter_config.json from which these shapes follow, for the message.
    Raises ConfigError if names or shapes are different."""
    has = {name: tuple(shape) for name, (_, shape, _) in imported.header(folder / WEIGHTS).items()}
    if wrong := [name for name in sorted(has.keys() | expected.keys())
                 if has.get(name) != expected.get(name)]:
        raise ConfigError(f"{shown(wrong[0])} of {str(folder)!r} is "
                          f"{has.get(wrong[0], 'not there')}; by {keys} it should be "
                          f"{shown(expected.get(wrong[0], 'not there'))}")
    return {name: imported.tensor(folder / WEIGHTS, name) for name in expected}


def begun(base: Run, change: Mapping[str, Any], out: Path,
          fill: Callable[[nn.Module], None]) -> Run:
    """Makes the run `out`, which starts from `base` with `change` (settings of a row of
    `model.changes`). `fill(model)` sets the weights of the change; all trained weights are
    stored."""
    config = base.config.replace({
        "start.run": str(base.path), "start.map": [], "model.changes": [change]})
    began = start.read(config)
    model = build.initial_model(config, "plain", began)
    with torch.no_grad():
        fill(model)
    return written(config, base.tokenizer, out, start=began.sha256, tensors={
        f"model/{name}": p for name, p in model.named_parameters() if p.requires_grad})


def bring_lora(folder: Path, settings: Mapping[str, Any], base: Run, out: Path, name: str) -> Run:
    """Make a run from an adapter with A and B. settings: adapter_config.json. name: the row. Raises
    ConfigError."""
    check_keys(folder, settings, {})
    m, vectors = base.config.model, MODEL_CHANGES[name].settings.vectors
    # of: our module -> their modules; expected: their tensor -> shape; aimed: our adapted modules
    # in a block
    family, of, expected, aimed = families.of_model(m), {}, {}, set()
    transposed, targets = _lies_transposed(family, m), settings.get("target_modules")
    r, alpha = settings.get("r", 8), settings.get("lora_alpha", 8)
    if not (targets and type(targets) is list and type(r) is int and type(alpha) in (int, float)):
        raise ConfigError(f"{str(folder)!r} has target_modules={shown(targets)}, r={shown(r)} and "
                          f"lora_alpha={shown(alpha)}; they must be a list and two numbers")
    for ours, t in parameters(m).items():
        for part_name, part in family.parts(ours, t, m).items():
            if ours.startswith("blocks.") and t.ndim == 2:
                key = family.named(part_name).removesuffix(".weight")
                module = ours.removesuffix(".weight")
                of.setdefault(module, []).append(key)
                n_out, n_in = part.shape[::-1] if transposed else part.shape
                if any(f".{key}".endswith(f".{target}") for target in targets):
                    aimed.add(module.split(".", 2)[2])
                    expected |= {f"{PREFIX}{key}.lora_A.weight": (r, n_in),
                            f"{PREFIX}{key}.lora_B.weight": (n_out, r)}
                    expected |= {f"{PREFIX}{key}.{vector}": (n_out,) for vector in vectors.values()}
    theirs = tensors(folder, expected, "r, use_dora and target_modules")

    def fill(model: nn.Module) -> None:
        """Copy their A, B and vectors into the model; zeros where their files have none."""
        for name, module in _loras(model):
            pairs = []
            for key, B in zip(of[name], module.B):
                blank = torch.zeros(r, module.in_features), torch.zeros_like(B.weight)
                pairs.append([theirs.get(f"{PREFIX}{key}.lora_{ab}.weight", t)
                              for ab, t in zip("AB", blank)])
            # GPT-2 has one matrix for q, k and v, with rows in another order than ours
            if transposed:
                [(A, B)] = pairs
                pairs = [(A, family.whole(f"{name}.weight", [B.mT], m))]
            module.A.weight.copy_(torch.cat([A for A, _ in pairs]))
            for B, (_, t) in zip(module.B, pairs):
                B.weight.copy_(t)
            # modules that their files do not adapt keep their initial vector
            for vector, peft_name in vectors.items():
                parameter = getattr(module, vector)
                numbers = family.parts(f"{name}.bias", parameter, m).values()
                parameter.copy_(family.whole(f"{name}.bias", [
                    theirs.get(f"{PREFIX}{key}.{peft_name}", t)
                    for key, t in zip(of[name], numbers)], m))

    return begun(base, {"name": name, "rank": r, "shared": transposed, "targets": sorted(aimed),
                        "alpha": alpha * r**0.5 if settings.get("use_rslora") else alpha},
                 out, fill)
