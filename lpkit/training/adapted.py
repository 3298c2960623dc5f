"""A run with adapters: merged into one model, and as the files of peft, both ways.

peft's layout: `adapter_config.json`, and in `adapter_model.safetensors` an A (rank, in) and a B
(out, rank) for each of its modules, whose names are those of transformers. A is the same for q, k
and v where ours is `shared`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lpkit import records
from lpkit.config import ModelConfig
from lpkit.errors import ConfigError, shown
from lpkit.nn.adapters import Lora, side_by_side
from lpkit.techniques.adapters import CODED
from lpkit.training import build, families, start
from lpkit.training.families import Family
from lpkit.training.imported import parameters, written
from lpkit.training.runs import Run

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "modules_to_save": None,
         "rank_pattern": {}, "alpha_pattern": {}}


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
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, linear)
    plain = run.config.replace({"model.changes": []}).model
    found, changes = model.state_dict(), ", ".join(map(str, run.config.model.changes))
    if not parameters(plain).keys() <= found.keys() or any(".base." in name for name in found):
        raise ConfigError(f"no matrix of a model is the same as one with model.changes={changes}; "
                          f"lora, rslora, pissa and ia3 can be merged")
    dtype = next(t.dtype for name, t in tensors.items() if not name.endswith(CODED))
    return plain, {name: t.to(dtype) for name, t in found.items()}


def _loras(model: nn.Module) -> Iterator[tuple[str, Lora]]:
    return ((name, one) for name, one in model.named_modules() if isinstance(one, Lora))


def _lies_transposed(family: Family, m: ModelConfig) -> bool:
    [t] = family.parts("blocks.0.mlp.down.weight", torch.empty(2, 1), m).values()
    return t.shape[0] == 1


def save_adapter(run: Run, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes the files of peft. Raises ConfigError for what it does not have."""
    plain, settings = run.config.replace({"model.changes": []}).model, run.config.model.changes
    if [getattr(row, "keeps_base", False) for row in settings] != [True]:
        raise ConfigError(f"peft's files hold lora or rslora beside a base as it was, and this run has "
                          f"model.changes={', '.join(map(str, settings)) or 'none'}; without "
                          f"--adapter it is merged")
    [lora], found, family = settings, {}, families.of_model(plain)
    transposed = _lies_transposed(family, plain)
    for name, one in _loras(rebuilt(run, tensors)):
        B = side_by_side([B.weight for B in one.B], one.groups, 0)
        parts = {family.named(key).removesuffix(".weight"): part.mT if transposed else part
                 for key, part in family.parts(f"{name}.weight", B, plain).items()}
        As = one.A.weight.chunk(len(one.B))
        if len(As) not in (1, len(parts)):
            raise ConfigError(f"{family.architecture} has one A for {', '.join(parts)}, and this run "
                              f"one for each of q, k and v; train with shared=true")
        for A, (key, part) in zip(As * (len(parts) // len(As)), parts.items()):
            found[f"{PREFIX}{key}.lora_A.weight"] = A.detach().clone()
            found[f"{PREFIX}{key}.lora_B.weight"] = part.detach().clone()
    targets = {name.split(".")[-3] for name in found}
    about = PLAIN | {"task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": lora.rank,
                     "lora_alpha": lora.scale * lora.rank, "target_modules": sorted(targets),
                     "fan_in_fan_out": transposed, "inference_mode": True}
    save_file({name: t.contiguous() for name, t in found.items()}, folder / WEIGHTS,
              metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(about, indent=1) + "\n")


def bring_adapter(folder: Path, base: Run, out: Path) -> Run:
    """Makes a run of LoRA that begins from `base`, of peft's files. What they do not adapt of q, k
    and v, or of gate and up, has an A and a B of zeros. Raises ConfigError."""
    said, m = records.of_others(folder / CONFIG), base.config.model
    for key, due in PLAIN.items():
        if (has := said.get(key, due)) != due and has:
            raise ConfigError(f"{str(folder)!r} has {key}={shown(has)}, and this kit reads adapters "
                              f"with {key}={due}")
    family, theirs, r = families.of_model(m), load_file(folder / WEIGHTS), said["r"]
    transposed, used = _lies_transposed(family, m), set()
    of = {name.removesuffix(".weight"): [
        PREFIX + family.named(one).removesuffix(".weight") for one in family.parts(name, t, m)]
        for name, t in parameters(m).items() if name.startswith("blocks.") and t.ndim == 2}
    ours = {name: keys for name, keys in of.items()
            if any(f"{key}.lora_A.weight" in theirs for key in keys)}
    scale = said["lora_alpha"] / (r**0.5 if said.get("use_rslora") else r)
    config = base.config.replace({"start.run": str(base.path), "model.changes": [{
        "name": "lora", "rank": r, "alpha": scale * r, "shared": transposed,
        "targets": sorted({name.split(".", 2)[2] for name in ours})}]})
    began = start.read(config)
    model = build.made(config, "plain", began)
    for name, one in _loras(model):
        pairs = []
        for key, B in zip(ours[name], one.B):
            names = [f"{key}.lora_{ab}.weight" for ab in "AB"]
            blank = torch.zeros(r, one.in_features), torch.zeros_like(B.weight)
            pairs.append([theirs.get(n, t) for n, t in zip(names, blank)])
            used |= {*names}
        if transposed:      # of one matrix, whose rows lie otherwise
            [(A, B)] = pairs
            pairs = [(A, family.whole(f"{name}.weight", [B.mT], m))]
        with torch.no_grad():
            one.A.weight.copy_(torch.cat([A for A, _ in pairs]))
            for B, (_, t) in zip(one.B, pairs):
                B.weight.copy_(t)
    if left := theirs.keys() - used:
        raise ConfigError(f"{str(folder)!r} adapts {shown(min(left))}, which is no Linear of a block "
                          f"of {str(base.path)!r}")
    tensors = {f"model/{name}": p for name, p in model.named_parameters() if p.requires_grad}
    return written(config, base.tokenizer, out, start=began.sha256, tensors=tensors)
