"""Turn a folder of a transformers model into a run from which other runs can start.

  lpkit import smollm --out runs/smollm
  lpkit train runs/smollm/config.yaml start.run=runs/smollm data.tokenizer=runs/smollm \\
              data.source='books/*.txt' steps=300 --out runs/books

The command reads config.json, *.safetensors and tokenizer.json of GPT-2, Llama, Mistral, Qwen2 and
Qwen3. It never downloads, unpickles or executes anything. --check reads only the headers of the
files, and writes nothing.
"""

from argparse import Namespace
from itertools import product

from lpkit.commands import a_folder, opened, options
from lpkit.errors import ConfigError, named
from lpkit.predict.fit import fit
from lpkit.tables import picked
from lpkit.techniques.operation import POSITIONS

arguments = options({
    "folder FOLDER": (a_folder, "folder of a transformers model, or of a peft adapter"),
    "--out DIR": (a_folder, "new run folder"),
    "--tokenizer NAME=": "tokenizer if FOLDER has no tokenizer.json: bytes or gpt2",
    "--base RUN": (a_folder, "run of the base model, if FOLDER is a peft adapter"),
    "--check": "check the folder and print what it contains; write nothing"})


def run(args: Namespace) -> dict:
    """Import the folder, or only check it. Return the facts about the model, and in `fits` the
    settings with which it can be trained on this machine."""
    if not (args.out or args.check):
        raise ConfigError("lpkit import needs --out DIR, a new folder, or --check")
    if args.base:
        return _adapter(args)
    from lpkit import hardware
    from lpkit.exchange.imported import bring, planned
    from lpkit.training.build import choose_device  # imports torch

    plan = planned(args.folder, args.tokenizer)
    if not args.check:
        bring(plan, args.out)
    m, machine = plan.config.model, hardware.room(choose_device("auto").used)
    # candidates for the printed command: the longest context and the largest batch that fit here
    contexts = [m.T >> i for i in range(32) if POSITIONS[m.position].turns
                # only rotary positions work with a shorter context
                and 128 <= m.T >> i <= 4096] or [m.T]
    fits = (f"model.context={T} global_batch={batch}"
            for T, batch in product(contexts, (16, 8, 4, 2, 1)) if fit(plan.config.replace({
                "model.context": T, "global_batch": batch}), machine
            ).peak_bytes <= machine.memory_bytes)
    return {"folder": str(args.folder), "run_dir": None if args.check else str(args.out),
            **picked(plan, "family.architecture", parameters="weights",
                     param_dtype="config.memory.param_dtype.name"),
            **picked(m, "layers width context vocab"), "tokenizer": plan.tokenizer["name"],
            "fits": next(fits, "model.changes=lora")}


def _adapter(args: Namespace) -> dict:
    """Import an adapter of peft."""
    if not args.out or args.check or args.tokenizer:
        raise ConfigError("lpkit import --base needs --out DIR, without --check or --tokenizer")
    base = opened(args.base)
    from lpkit.exchange.adapted import bring_adapter  # imports torch

    [row] = bring_adapter(args.folder, base, args.out).config.model.changes
    return {"folder": str(args.folder), "run_dir": str(args.out), "base": str(args.base),
            "adapter": row.name, **{key: list(value) if isinstance(value, tuple) else value
                                    for key, value in vars(row).items() if key != "name"}}


def text(result: dict) -> str:
    if "base" in result:
        of = {key: value for key, value in result.items()
              if key not in ("folder", "run_dir", "base", "adapter")}
        settings = ", ".join(f"{key} {', '.join(value) if isinstance(value, list) else value}"
                             for key, value in of.items())
        return (f"wrote the run {named(result['run_dir'])}: {named(result['base'])} with "
                f"{result['adapter']}, {settings}")
    what = (f"{named(result['folder'])}: {result['architecture']}, {result['parameters']:,} "
            f"parameters in {result['param_dtype']}, {result['layers']} layers of width "
            f"{result['width']}, context {result['context']}, vocabulary {result['vocab']:,}")
    if not (run := result["run_dir"]):
        return what
    return (f"{what}\nwrote the run {named(run)}. To train from it: lpkit train "
            f"{named(run)}/config.yaml start.run={named(run)} data.tokenizer={named(run)} "
            f"{result['fits']} data.source=... --out ...")
