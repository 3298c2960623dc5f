"""Write the weights of a run for transformers: model.safetensors and config.json.

  lpkit export runs/six --out six

`AutoModelForCausalLM.from_pretrained("six")` then loads the model. All weights are written to one
file, even if several processes wrote the checkpoint of the run.
"""

from argparse import Namespace

from lpkit.commands import a_folder, opened, options
from lpkit.errors import named

arguments = options({
    "run RUN": (a_folder, "run folder"),
    "--adapter": "write only the adapter, in the format of peft (default: merge the adapter "
                 "into the weights)",
    "--out! DIR": (a_folder, "new folder")})


def run(args: Namespace) -> dict:
    run = opened(args.run)
    from lpkit.exchange.export import export  # imports torch

    return {"run_dir": str(args.run), "out": str(export(run, args.out, adapter=args.adapter)),
            "adapter": args.adapter}


def text(result: dict) -> str:
    what = "adapter_model.safetensors and adapter_config.json" if result["adapter"] else \
        "model.safetensors and config.json"
    return f"wrote {what} of {named(result['run_dir'])} to {named(result['out'])}"
