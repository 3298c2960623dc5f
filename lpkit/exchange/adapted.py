"""A run with adapters: merge the adapters into one model, or write and read them as files of peft.

peft has two files. `adapter_config.json` holds the settings. `adapter_model.safetensors` holds an A
(rank, in) and a B (out, rank) for each adapted module; module names are those of transformers. If
our adapter is `shared`, q, k and v have equal A. A row of `model.changes` names the functions that
write (`saves`) and read (`brings`) its files.
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
# FREE: keys that do not change a saved adapter, or that are read below. MEANS: the values that
# other keys may have.
FREE = {*"""auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha
    target_modules use_rslora lora_dropout fan_in_fan_out megatron_core qalora_group_size
    runtime_config eva_config num_virtual_tokens num_attention_heads init_weights
    prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs
    encoder_hidden_size prefix_projection""".split()}
MEANS = {"task_type": (None, "CAUSAL_LM"), "bias": (None, "none"),
         "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
         "num_transformer_submodules": (None, 1)}
OTHERS = "lessons.rows.adapters"    # the module with rows for DoRA, a prompt and a prefix


def rebuilt(run: Run, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Builds the model of `run` in float32, with the weights that it started from and the weights
    of the run. Raises ConfigError if the run started from other weights than its config names."""
    began = start.read(run.config)
    began.refuse_other(run)
    model = build.made(run.config, "plain", began)
    own = model.state_dict()
    with torch.no_grad():
        for name in own.keys() & tensors.keys():    # other tensors are states of a recipe
            own[name].copy_(tensors[name])
    return model


def merged(run: Run, tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns an equivalent model without `changes`, and its weights in the dtype of the run.
    Raises ConfigError for a change that cannot be merged into one Linear."""
    model, plain = rebuilt(run, tensors), run.config.replace({"model.changes": []}).model
    dtype = next(tensors[name].dtype for name in model.state_dict()
                 if name in tensors and not name.endswith(CODED))
    for name, module in reversed(list(model.named_modules())):     # inner modules first
        if whole := getattr(module, "merged", lambda: None)():
            weight, bias = whole
            linear = nn.Linear(*weight.shape[::-1], bias=bias is not None)
            linear.weight = nn.Parameter(weight)
            linear.bias = None if bias is None else nn.Parameter(bias)
            model.set_submodule(name, linear)
    weights, changes = model.state_dict(), ", ".join(map(str, run.config.model.changes))
    with torch.device("meta"):
        due = build.made(Config(model=plain), "plain").state_dict()
    if weights.keys() != due.keys():
        raise ConfigError(f"no matrix of a model is the same as one with model.changes={changes}; "
                          f"an adapter that is one Linear, such as lora, can be merged")
    return plain, {name: t.to(dtype) for name, t in weights.items()}


def _loras(model: nn.Module) -> Iterator[tuple[str, Lora]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Lora))


def _lies_transposed(family: Family, m: ModelConfig) -> bool:
    [t] = family.parts("blocks.0.mlp.down.weight", torch.empty(2, 1), m).values()
    return t.shape[0] == 1


def save_adapter(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the files of peft. Raises ConfigError for an adapter that peft does not have."""
    settings = run.config.model.changes
    saves = [getattr(MODEL_CHANGES[change.name], "saves", "") for change in settings]
    if len(saves) != 1 or not saves[0]:
        able = [name for name, row in MODEL_CHANGES.items() if getattr(row, "saves", "")]
        raise ConfigError(f"peft's files hold one of {', '.join(able)}, and this run has "
                          f"model.changes={', '.join(map(str, settings)) or 'none'}; without "
                          f"--adapter it is merged")
    resolve_name(saves[0])(run, tensors, folder)


def save_lora(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes A and B. A row that changes the base matrix (such as PiSSA) is written with twice its
    rank: the difference to the original W is (B A now) - (B A at the start)."""
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
                              f"run one for each of q, k and v; train with shared=true")
        for A, (key, part) in zip(As * (len(parts) // len(As)), parts.items()):
            saved[f"{PREFIX}{key}.lora_A.weight"] = A.detach().clone()
            saved[f"{PREFIX}{key}.lora_B.weight"] = part.detach().clone()
        for vector, theirs in lora.vectors.items():
            numbers = family.parts(f"{name}.bias", getattr(module, vector).detach(), plain)
            saved |= {f"{PREFIX}{key}.{theirs}": part.clone()
                      for key, part in zip(parts, numbers.values())}
    targets = {name.split(".lora_")[0].split(".")[-1] for name in saved}
    write(folder, {
        "peft_type": "LORA", "bias": "none", "r": rank, "lora_alpha": lora.scale * rank,
        "target_modules": sorted(targets), "use_dora": False, "fan_in_fan_out": transposed,
        **MODEL_CHANGES[lora.name].theirs}, saved)


def write(folder: Path, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    about = {"task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
             **about}
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def bring_adapter(folder: Path, base: Run, out: Path) -> Run:
    """Makes a run of the model that peft would load: `base` with an adapter. Modules that the files
    do not adapt get A and B of zeros. Raises ConfigError, which names the key, for an adapter that
    this kit does not have."""
    settings, rows = records.of_others(folder / CONFIG), _read()
    fits = [name for name, theirs in rows.items() if theirs.items() <= settings.items()]
    # lora raises the error for unknown adapters
    name = max(fits, key=lambda name: len(rows[name]), default="lora")
    return resolve_name(MODEL_CHANGES[name].brings)(folder, settings, base, out, name)


def _read() -> dict[str, Mapping[str, Any]]:
    """Returns for each row, by name, the keys and values by which peft's files identify it."""
    rows = {name: getattr(row, "theirs", {}) for name, row in MODEL_CHANGES.items()}
    return {name: theirs for name, theirs in rows.items() if theirs}


def check_keys(folder: Path, settings: Mapping[str, Any], means: Mapping[str, tuple]) -> None:
    """Raises ConfigError for a key whose value makes it another adapter. `means`: further keys of
    this row and the values that they may have, in addition to MEANS and to the keys that identify
    rows."""
    means, rows = {**MEANS, **means}, _read().values()
    for key, value in (pair for theirs in rows for pair in theirs.items()):
        before = means.get(key, (None, False) if value is True else ())
        means[key] = (*before, *[value] * (value not in before))
    # checked first, since they name the kind of adapter
    kinds = [key for theirs in rows for key in theirs]
    for key, value in {**dict.fromkeys([*kinds, *means]), **settings}.items():
        fine = means.get(key, (None, False, [], {}))        # other keys must be switched off
        if value not in fine and key not in FREE:
            more = f"; DoRA, a prompt and a prefix are rows of {OTHERS}: add --import {OTHERS}"
            raise ConfigError(f"{str(folder)!r} has {key}={shown(value)}, and this kit reads "
                              f"adapters with {key}={' or '.join(map(shown, fine))}"
                              f"{more * (len(rows) == 1 and key in ('peft_type', 'use_dora'))}")


def tensors(folder: Path, due: Mapping[str, tuple], keys: str) -> dict[str, Tensor]:
    """Returns the tensors of the file. Raises ConfigError if names or shapes are not those of
    `due`, which follow from `keys` of the config."""
    has = {name: tuple(shape) for name, (_, shape, _) in imported.header(folder / WEIGHTS).items()}
    if wrong := [name for name in sorted(has.keys() | due.keys())
                 if has.get(name) != due.get(name)]:
        raise ConfigError(f"{shown(wrong[0])} of {str(folder)!r} is "
                          f"{has.get(wrong[0], 'not there')}; by {keys} it should be "
                          f"{shown(due.get(wrong[0], 'not there'))}")
    return {name: imported.tensor(folder / WEIGHTS, name) for name in due}


def begun(base: Run, change: Mapping[str, Any], out: Path,
          fill: Callable[[nn.Module], None]) -> Run:
    """Makes a run that starts from `base` with a change of the model. `fill(model)` sets the
    weights of the change."""
    config = base.config.replace({
        "start.run": str(base.path), "start.map": [], "model.changes": [change]})
    began = start.read(config)
    model = build.made(config, "plain", began)
    with torch.no_grad():
        fill(model)
    return written(config, base.tokenizer, out, start=began.sha256, tensors={
        f"model/{name}": p for name, p in model.named_parameters() if p.requires_grad})


def bring_lora(folder: Path, settings: Mapping[str, Any], base: Run, out: Path, name: str) -> Run:
    check_keys(folder, settings, {})
    m, vectors = base.config.model, MODEL_CHANGES[name].settings.vectors
    family, of, due, aimed = families.of_model(m), {}, {}, set()
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
                    due |= {f"{PREFIX}{key}.lora_A.weight": (r, n_in),
                            f"{PREFIX}{key}.lora_B.weight": (n_out, r)}
                    due |= {f"{PREFIX}{key}.{vector}": (n_out,) for vector in vectors.values()}
    theirs = tensors(folder, due, "r, use_dora and target_modules")

    def fill(model: nn.Module) -> None:
        for name, module in _loras(model):
            pairs = []
            for key, B in zip(of[name], module.B):
                blank = torch.zeros(r, module.in_features), torch.zeros_like(B.weight)
                pairs.append([theirs.get(f"{PREFIX}{key}.lora_{ab}.weight", t)
                              for ab, t in zip("AB", blank)])
            if transposed:      # theirs is one matrix for q, k and v; our rows have another order
                [(A, B)] = pairs
                pairs = [(A, family.whole(f"{name}.weight", [B.mT], m))]
            module.A.weight.copy_(torch.cat([A for A, _ in pairs]))
            for B, (_, t) in zip(module.B, pairs):
                B.weight.copy_(t)
            # modules that are not adapted keep their vector
            for vector, there in vectors.items():
                own = getattr(module, vector)
                numbers = family.parts(f"{name}.bias", own, m).values()
                own.copy_(family.whole(f"{name}.bias", [
                    theirs.get(f"{PREFIX}{key}.{there}", t)
                    for key, t in zip(of[name], numbers)], m))

    return begun(base, {"name": name, "rank": r, "shared": transposed, "targets": sorted(aimed),
                        "alpha": alpha * r**0.5 if settings.get("use_rslora") else alpha},
                 out, fill)
