"""Write the weights of a run for transformers: model.safetensors and config.json.

  lpkit export runs/six --out six

`AutoModelForCausalLM.from_pretrained("six")` then loads the model. The weights are in one
file, also if several processes wrote the checkpoint.
"""

from argparse import ArgumentParser, Namespace

from lpkit.commands import a_folder, opened
from lpkit.errors import named


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=a_folder, metavar="RUN", help="run folder")
    parser.add_argument("--adapter", action="store_true", help="write only the adapter, as peft "
                        "reads it (default: merge the adapter into the weights)")
    parser.add_argument("--out", type=a_folder, metavar="DIR", required=True, help="new folder")


def run(args: Namespace) -> dict:
    run = opened(args.run)
    from lpkit.exchange.export import export  # imports torch

    return {"run_dir": str(args.run), "out": str(export(run, args.out, adapter=args.adapter)),
            "adapter": args.adapter}


def text(result: dict) -> str:
    what = "adapter_model.safetensors and adapter_config.json" if result["adapter"] else \
        "model.safetensors and config.json"
    return f"wrote {what} of {named(result['run_dir'])} to {named(result['out'])}"
