"""A run with adapters: merged into one model, and as the files of peft, both ways.

peft's layout: `adapter_config.json`, and in `adapter_model.safetensors` an A (rank, in) and a B
(out, rank) for each of its modules, whose names are those of transformers. A is the same for q, k
and v where ours is `shared`. DoRA has a magnitude (out,) besides. A prompt, (tokens, width), and a
prefix, each layer's keys and then its values, are one tensor.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lpkit import records
from lpkit.config import ModelConfig
from lpkit.errors import ConfigError, shown
from lpkit.nn.adapters import Dora, Lora, side_by_side
from lpkit.techniques.adapters import CODED, LoraSettings, virtual
from lpkit.training import build, families, imported, start
from lpkit.training.families import Family
from lpkit.training.imported import parameters, written
from lpkit.training.runs import Run

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
LEARNED, VIRTUAL = "prompt_embeddings", {"PROMPT_TUNING": "prompt", "PREFIX_TUNING": "prefix"}
MAGNITUDE = "lora_magnitude_vector"
# keys that change nothing of a saved adapter, or are read below; and values that others may have
FREE = {*"""auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha
    target_modules use_rslora use_dora lora_dropout fan_in_fan_out megatron_core qalora_group_size
    runtime_config eva_config num_virtual_tokens num_attention_heads init_weights
    prompt_tuning_init prompt_tuning_init_text tokenizer_name_or_path tokenizer_kwargs
    encoder_hidden_size prefix_projection""".split()}
MEANS = {"peft_type": ("LORA", *VIRTUAL), "task_type": (None, "CAUSAL_LM"), "bias": (None, "none"),
         "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva", "mica"),
         "num_transformer_submodules": (None, 1)}


def rebuilt(run: Run, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Builds the model of `run` in float32, with the weights that it began from and its own. Raises
    ConfigError where it was begun from others."""
    began = start.read(run.config)
    began.refuse_other(run)
    model = build.made(run.config, "plain", began)
    own = model.state_dict()
    with torch.no_grad():
        for name, t in tensors.items():
            own[name].copy_(t)
    return model


def merged(run: Run, tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Returns the model without changes that computes the same, and weights as the run keeps them.
    Raises ConfigError for changes that no Linear is."""
    model = rebuilt(run, tensors)
    for name, one in reversed(list(model.named_modules())):     # what is inside comes first
        if whole := getattr(one, "merged", lambda: None)():
            weight, bias = whole
            linear = nn.Linear(*weight.shape[::-1], bias=bias is not None)
            linear.weight = nn.Parameter(weight)
            linear.bias = None if bias is None else nn.Parameter(bias)
            model.set_submodule(name, linear)
    plain = run.config.replace({"model.changes": []}).model
    found, changes = model.state_dict(), ", ".join(map(str, run.config.model.changes))
    if (virtual(run.config.model) or not parameters(plain).keys() <= found.keys()
            or any(".base." in name for name in found)):
        raise ConfigError(f"no matrix of a model is the same as one with model.changes={changes}; "
                          f"lora, rslora, dora, pissa and ia3 can be merged")
    dtype = next(t.dtype for name, t in tensors.items() if not name.endswith(CODED))
    return plain, {name: t.to(dtype) for name, t in found.items()}


def _loras(model: nn.Module) -> Iterator[tuple[str, Lora]]:
    return ((name, one) for name, one in model.named_modules() if isinstance(one, Lora))


def _lies_transposed(family: Family, m: ModelConfig) -> bool:
    [t] = family.parts("blocks.0.mlp.down.weight", torch.empty(2, 1), m).values()
    return t.shape[0] == 1


def save_adapter(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the files of peft: PiSSA as a LoRA of twice its rank, W - B A of its start + B A as
    they are now. Raises ConfigError for what it does not have."""
    plain, settings = run.config.replace({"model.changes": []}).model, run.config.model.changes
    if virtual(run.config.model):
        [row] = settings
        width = plain.D if row.name == VIRTUAL["PROMPT_TUNING"] else plain.G * plain.E
        about = {"peft_type": next(key for key, name in VIRTUAL.items() if name == row.name),
                 "num_virtual_tokens": row.length, "token_dim": width, "num_layers": plain.L,
                 "num_attention_heads": width // plain.E, "num_transformer_submodules": 1}
        own = [p.detach() for p in rebuilt(run, tensors).parameters() if p.requires_grad]
        _write(folder, about, {LEARNED: torch.cat(own, dim=1)})
        return
    if [isinstance(row, LoraSettings) for row in settings] != [True]:
        raise ConfigError(f"peft's files hold one of lora, rslora, dora, pissa, prompt and prefix, and "
                          f"this run has model.changes={', '.join(map(str, settings)) or 'none'}; "
                          f"without --adapter it is merged")
    [lora], found, family = settings, {}, families.of_model(plain)
    transposed, rank = _lies_transposed(family, plain), lora.rank * (1 if lora.keeps_base else 2)
    began = {} if lora.keeps_base else dict(_loras(rebuilt(run, {})))
    for name, one in _loras(rebuilt(run, tensors)):
        As, Bs = one.A.weight.chunk(len(one.B)), [B.weight for B in one.B]
        if began:
            first = began[name]
            As = [torch.cat(pair) for pair in zip(As, first.A.weight.chunk(len(Bs)))]
            Bs = [torch.cat((B, -old.weight), dim=1) for B, old in zip(Bs, first.B)]
        B = side_by_side(Bs, one.groups, 0)
        parts = {family.named(key).removesuffix(".weight"): part.mT if transposed else part
                 for key, part in family.parts(f"{name}.weight", B, plain).items()}
        if len(As) not in (1, len(parts)):
            raise ConfigError(f"{family.architecture} has one A for {', '.join(parts)}, and this run "
                              f"one for each of q, k and v; train with shared=true")
        for A, (key, part) in zip(As * (len(parts) // len(As)), parts.items()):
            found[f"{PREFIX}{key}.lora_A.weight"] = A.detach().clone()
            found[f"{PREFIX}{key}.lora_B.weight"] = part.detach().clone()
        if isinstance(one, Dora):
            lengths = family.parts(f"{name}.bias", one.magnitude.detach(), plain)
            found |= {f"{PREFIX}{key}.{MAGNITUDE}": part.clone()
                      for key, part in zip(parts, lengths.values())}
    targets = {name.split(".lora_")[0].split(".")[-1] for name in found}
    _write(folder, {
        "peft_type": "LORA", "bias": "none", "r": rank, "lora_alpha": lora.scale * rank,
        "target_modules": sorted(targets), "use_dora": lora.name == "dora",
        "fan_in_fan_out": transposed}, found)


def _write(folder: Path, about: Mapping[str, Any], found: Mapping[str, Tensor]) -> None:
    about = {"task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
             **about}
    save_file({name: t.contiguous() for name, t in found.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def bring_adapter(folder: Path, base: Run, out: Path) -> Run:
    """Makes a run of the model that peft loads: `base` with an adapter, where what the files leave out
    has an A and a B of zeros. Raises ConfigError, with the name of the key, for another adapter."""
    said, m, means = records.of_others(folder / CONFIG), base.config.model, MEANS
    if kind := VIRTUAL.get(str(said.get("peft_type"))):
        width = m.D if kind == "prompt" else m.G * m.E
        means = MEANS | {"token_dim": (None, width), "num_layers": (None, m.L),
                         "task_type": ("CAUSAL_LM",)}       # else peft leaves the places out
    for key, value in {**dict.fromkeys(means), **said}.items():
        fine = means.get(key, (None, False, [], {}))        # of other keys: switched off
        if value not in fine and key not in FREE:
            raise ConfigError(f"{str(folder)!r} has {key}={shown(value)}, and this kit reads adapters "
                              f"with {key}={' or '.join(map(shown, fine))}")
    headers, family, of, due, aimed = imported.header(folder / WEIGHTS), families.of_model(m), {}, {}, set()
    transposed, dora = _lies_transposed(family, m), bool(said.get("use_dora"))
    length, targets = said.get("num_virtual_tokens"), said.get("target_modules")
    r, alpha = said.get("r", 8), said.get("lora_alpha", 8)
    if kind:
        due[LEARNED] = length, width if kind == "prompt" else 2 * m.L * width
    else:
        if not (targets and type(targets) is list and type(r) is int and type(alpha) in (int, float)):
            raise ConfigError(f"{str(folder)!r} has target_modules={shown(targets)}, r={shown(r)} and "
                              f"lora_alpha={shown(alpha)}; they must be a list and two numbers")
        for name, t in parameters(m).items():
            for one, part in family.parts(name, t, m).items():
                if name.startswith("blocks.") and t.ndim == 2:
                    key = family.named(one).removesuffix(".weight")
                    of.setdefault(name.removesuffix(".weight"), []).append(key)
                    n_out, n_in = part.shape[::-1] if transposed else part.shape
                    if any(f".{key}".endswith(f".{target}") for target in targets):
                        aimed.add(name.removesuffix(".weight").split(".", 2)[2])
                        due |= {f"{PREFIX}{key}.lora_A.weight": (r, n_in),
                                f"{PREFIX}{key}.lora_B.weight": (n_out, r)}
                        due |= {f"{PREFIX}{key}.{MAGNITUDE}": (n_out,)} if dora else {}
    has = {name: tuple(shape) for name, (_, shape, _) in headers.items()}
    if wrong := [one for one in sorted(has.keys() | due.keys()) if has.get(one) != due.get(one)]:
        keys = "num_virtual_tokens" if kind else "r, use_dora and target_modules"
        raise ConfigError(f"{shown(wrong[0])} of {str(folder)!r} is {has.get(wrong[0], 'not there')}; by "
                          f"{keys} it should be {shown(due.get(wrong[0], 'not there'))}")
    theirs = {name: imported.tensor(folder / WEIGHTS, name) for name in due}
    config = base.config.replace({"start.run": str(base.path), "start.map": [], "model.changes": [
        {"name": kind, "length": length} if kind else {
            "name": "dora" if dora else "lora", "rank": r, "shared": transposed,
            "alpha": alpha * r**0.5 if said.get("use_rslora") else alpha,
            "targets": sorted(aimed)}]})
    began = start.read(config)
    model = build.made(config, "plain", began)
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        if kind:
            for p, t in zip(own.values(), theirs[LEARNED].chunk(len(own), 1)):
                p.copy_(t)
        for name, one in _loras(model):
            pairs = []
            for key, B in zip(of[name], one.B):
                blank = torch.zeros(r, one.in_features), torch.zeros_like(B.weight)
                pairs.append([theirs.get(f"{PREFIX}{key}.lora_{ab}.weight", t)
                              for ab, t in zip("AB", blank)])
            if transposed:      # of one matrix, whose rows lie otherwise
                [(A, B)] = pairs
                pairs = [(A, family.whole(f"{name}.weight", [B.mT], m))]
            one.A.weight.copy_(torch.cat([A for A, _ in pairs]))
            for B, (_, t) in zip(one.B, pairs):
                B.weight.copy_(t)
            if isinstance(one, Dora):       # those that are not adapted keep theirs
                lengths = family.parts(f"{name}.bias", one.magnitude, m).values()
                one.magnitude.copy_(family.whole(f"{name}.bias", [
                    theirs.get(f"{PREFIX}{key}.{MAGNITUDE}", t)
                    for key, t in zip(of[name], lengths)], m))
    return written(config, base.tokenizer, out, start=began.sha256,
                   tensors={f"model/{name}": p for name, p in own.items()})
