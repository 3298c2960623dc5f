"""Turn a model folder of transformers into a run from which other runs can start.

    lpkit import smollm --out runs/smollm       config.json, *.safetensors, tokenizer.json

`planned` reads only the headers of the files, so it quickly accepts or refuses a model of any size.
(If a tied head is in a file, `planned` also compares the head with the embedding.) `bring` then
writes a checkpoint of step 0, one block at a time, so it needs only the memory of one block.
Nothing is downloaded, unpickled or executed. A folder with a tensor that our model does not have
raises ConfigError.

In this module, "ours" are names and tensors of lpkit, "theirs" those of transformers.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lpkit import files, records
from lpkit.config import Config
from lpkit.datasets import tokenizers
from lpkit.errors import ConfigError, named, shown
from lpkit.exchange import families
from lpkit.exchange.families import Family
from lpkit.training import build, checkpoint, runs, shards
from lpkit.training.runs import Run
from lpkit.values import Place, checked

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# files with weights that would have to be unpickled
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# ends of the names of constants in old files, which are not weights
NO_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """A folder of transformers, as described by its config.json and the headers of its files.

    places:    their tensor -> its file
    ours:      our parameter -> names of their tensors from which it is made
    tokenizer: the tokenizer as a dict (`Tokenizer.to_dict`)
    weights:   number of parameters
    """

    folder: Path
    family: Family
    config: Config
    places: Mapping[str, Path]
    ours: Mapping[str, tuple[str, ...]]
    tokenizer: dict[str, Any]
    weights: int

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns our parameters `names` with the names and the dtype of a checkpoint. Reads their
        tensors memory-mapped."""
        weights, in_bf16 = {}, self.config.memory.param_dtype.name == "bf16"
        for name in names:
            parts = [tensor(self.places[theirs], theirs) for theirs in self.ours[name]]
            whole = self.family.whole(name, parts, self.config.model)
            weights[f"model/{name}"] = whole.to(torch.bfloat16 if in_bf16 else torch.float32)
        return weights


@checked
def planned(folder: Place, tokenizer: str = "") -> ImportPlan:
    """Returns the ImportPlan of a folder, without reading weights. `tokenizer`: the name of a
    tokenizer, such as "bytes", if the folder contains none. Raises ConfigError for a folder without
    a model, or with a model that this kit does not compute."""
    folder = files.expanded(folder)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{str(folder)!r} holds no model of transformers (no {CONFIG}); give the "
                          f"folder that save_pretrained wrote")
    if (adapter := folder / "adapter_config.json").exists():
        raise ConfigError(f"{str(adapter)!r} is an adapter, which transformers adds to the model; "
                          f"move it into a folder of its own, and import it with --base")
    settings = records.of_others(folder / CONFIG)
    family = families.of_type(settings.get("model_type"))
    model, headers = family.model(settings), _headers(folder)
    if model.L > len(headers):          # checked before the model is built, which could take long
        raise ConfigError(f"{str(folder)!r} has {len(headers)} tensors, but {CONFIG} says "
                          f"{model.L:,} layers; the files belong to different models")
    tied = {family.named("head.weight")} & headers.keys() if model.tied else set()
    wanted, shapes, missing = {}, {}, []
    for name, t in (ours := parameters(model)).items():
        theirs = {family.named(part_name): tuple(part.shape)
                  for part_name, part in family.parts(name, t, model).items()}
        # their names if a file was saved from the whole model, or from the model without its head
        wanted[name] = tuple(key if key in headers else key.removeprefix(family.prefix)
                             for key in theirs)
        missing += [key for key, in_file in zip(theirs, wanted[name]) if in_file not in headers]
        shapes |= dict(zip(wanted[name], theirs.values()))
    if missing:
        raise ConfigError(f"{str(folder)!r} lacks {len(missing)} tensors of a "
                          f"{family.architecture} of {model.L} layers, {missing[0]} first; get "
                          f"the whole folder again")
    for name in shapes:
        if (has := tuple(headers[name][1])) != shapes[name]:
            raise ConfigError(f"{name} is {has} in {headers[name][0].name}, but {CONFIG} says "
                              f"{shapes[name]}; the files belong to different models")
    left = [name for name in sorted(headers.keys() - shapes.keys() - tied)
            if not name.endswith(NO_WEIGHTS)]
    if left:
        raise ConfigError(f"{str(folder)!r} has {len(left)} tensors that no {family.architecture} "
                          f"of this kit has, {named(left[0])} first; without them, it would "
                          f"compute something else")
    for head in tied:
        weight, embedding = (tensor(headers[name][0], name)
                             for name in (head, *wanted["embed.weight"]))
        if weight.dtype != embedding.dtype or not torch.equal(weight, embedding):
            raise ConfigError(f"{CONFIG} of {str(folder)!r} has tie_word_embeddings=true, but "
                              f"{head} is not the embedding; set tie_word_embeddings to false")
    of = _tokenizer(folder, tokenizer)
    if (known := tokenizers.tokenizer_from_dict(of).vocab) > model.V:
        raise ConfigError(f"the tokenizer of {str(folder)!r} has {known:,} entries, and the model "
                          f"has {model.V:,}; the files belong to different models")
    kinds = {headers[name][2] for name in shapes}
    param_dtype = "bf16" if kinds == {"BF16"} else "fp32"
    config = Config(model=model).replace({
        "data.tokenizer": of["name"], "memory.param_dtype": param_dtype, "steps": 1})
    return ImportPlan(folder=folder, family=family, config=config, ours=wanted, tokenizer=of,
                      weights=sum(t.numel() for t in ours.values()),
                      places={name: headers[name][0] for name in shapes})


def parameters(model: Any) -> dict[str, Tensor]:
    """Returns our parameters of a ModelConfig by name, on the meta device (without memory)."""
    with torch.device("meta"):
        module = build.initial_model(Config(model=model), "plain")
    return dict(module.named_parameters())


def bring(plan: ImportPlan, out: Path) -> Run:
    """Writes the run of an ImportPlan into the folder `out`, and returns it. Raises ConfigError if
    `out` exists."""
    # parameters that are read together: those of each block, and all others under ""
    groups: dict[str, list[str]] = {}
    for name in plan.ours:
        groups.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks.") else "", []
                          ).append(name)
    return written(plan.config, plan.tokenizer, out, tensors={},
                   write=lambda folder, _: shards.save_whole(
                       folder, len(groups), map(plan.read, groups.values())))


def written(config: Config, tokenizer: Mapping[str, Any], out: Path, *, start: str = "",
            tensors: Mapping[str, Tensor], write: checkpoint.Write = shards.save) -> Run:
    """Writes a run whose weights were trained by another program: a checkpoint of step 0 without
    optimizer state. The folder `out` appears only when it is complete. Raises ConfigError if `out`
    exists.

    start:   SHA-256 of the weights from which the run started; empty: none
    tensors: tensors of the checkpoint, by name
    write:   function that writes the checkpoint's weights
    """
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists already; choose another --out")
    tokenizer = {key: value for key, value in tokenizer.items() if key != records.RUN}
    who = runs.identify(config, {}, tokenizer, born=uuid4().hex, start=start)
    mark = who["run"][:records.MARK_DIGITS]
    files.own_folder(out.parent)
    with files.whole_folder(out) as folder:
        checkpoint.save(folder / runs.CHECKPOINTS, 0, tensors, {"optimizer": {}}, keep=1,
                        run=who["run"], write=write)
        records.write(folder / runs.TOKENIZER, {**tokenizer, records.RUN: mark})
        records.write(folder / runs.IDENTITY, who)
        files.write_atomically(folder / runs.CONFIG, runs.sealed_yaml(config, mark))
        run = Run.open(folder)
        records.write(folder / runs.SUMMARY, runs.results(run) | {
            "status": "imported", "run_dir": str(out), records.RUN: mark,
            "vouches": run.vouches(ended=True)})
    return Run.open(out)


def _headers(folder: Path) -> dict[str, tuple[Path, list[int], str]]:
    """Returns {name of their tensor: (its file, shape, dtype)} for all files of a model. Raises
    ConfigError."""
    names, headers = {WEIGHTS}, {}
    if (folder / INDEX).is_file() and not (folder / WEIGHTS).exists():      # as in transformers
        of = records.of_others(folder / INDEX).get("weight_map")
        if not isinstance(of, Mapping) or not of:
            raise ConfigError(f"{INDEX} has weight_map={shown(of)}, which must be an object with "
                              f"the file of each tensor; get it again")
        names = {files.one_name(name) for name in of.values()}
    for name in sorted(names):
        for tensor_name, place in header(folder / name).items():
            if headers.setdefault(tensor_name, place) is not place:
                raise ConfigError(f"{shown(tensor_name)} is in two files, {name} too; keep one of "
                                  f"them")
    return headers


def header(path: Path) -> dict[str, tuple[Path, list[int], str]]:
    """Returns {name: (`path`, shape, dtype)} from the header of a safetensors file. Raises
    ConfigError, also for a dtype that is not in DTYPES."""
    if not os.path.lexists(path):
        pickled = [file.name for kind in PICKLED for file in path.parent.glob(kind)]
        if pickled and not path.with_name(INDEX).is_file():
            raise ConfigError(f"{str(path.parent)!r} has its weights in {named(pickled[0])}, a "
                              f"pickle, which can execute any code when it is read; if you trust "
                              f"it, convert it: save_pretrained(..., safe_serialization=True)")
        raise ConfigError(f"{str(path.parent)!r} lacks {path.name}; get the whole folder again")
    files.check_regular(path)
    try:
        # framework "pt" would allocate memory for all tensors
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            headers = {name: (path, part.get_shape(), part.get_dtype())
                       for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{str(path)!r} is not a whole file of safetensors ({error}); get it "
                          f"again") from None
    for name, (_, _, kind) in headers.items():
        if kind not in DTYPES and not name.endswith(NO_WEIGHTS):
            raise ConfigError(f"{named(name)} in {path.name} is in {kind}; this kit begins from "
                              f"weights in {', '.join(DTYPES)}")
    return headers


def tensor(path: Path, name: str) -> Tensor:
    """Returns a memory-mapped tensor of a file. Raises ConfigError for NaN and infinity."""
    with safe_open(path, framework="pt") as file:
        t = file.get_tensor(name)
    if t.numel() and not all(map(torch.isfinite, t.aminmax())):
        raise ConfigError(f"{named(name)} in {named(path)} has NaN or infinity among its numbers; "
                          f"get the file again, or repair the weights where they were trained")
    return t


def _tokenizer(folder: Path, name: str) -> dict[str, Any]:
    """Return a tokenizer as a dict: the tokenizer `name`, or if `name` is empty, the tokenizer of
    the folder. Raises ConfigError."""
    if name:
        return tokenizers.builder(name).build(0, lambda: iter(()), folder).to_dict()
    if not os.path.lexists(folder / tokenizers.FILE):
        raise ConfigError(f"{str(folder)!r} has no {tokenizers.FILE} of the `tokenizers` library; "
                          f"save it from a fast tokenizer, or name one: --tokenizer bytes")
    return tokenizers.of_folder(folder).to_dict()
