"""Write a run's weights in the format of transformers: `model.safetensors` and `config.json`.

    lpkit export runs/six --out six          then AutoModelForCausalLM.from_pretrained("six")

The file contains whole tensors, even if several ranks wrote the checkpoint. A tied head is not
written, because transformers ties it to the embedding when it loads the model.
`lpkit.exchange.families` maps our names to those of transformers. A tokenizer of the `tokenizers`
library is exported, too.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from lpkit.datasets.tokenizers import CONFIG, FILE, TOKENS, tokenizer_from_dict
from lpkit.errors import ConfigError
from lpkit.exchange import adapted, families
from lpkit.files import own_folder, whole_folder
from lpkit.training import checkpoint
from lpkit.training.runs import Run
from lpkit.values import Folder, Place, checked


@checked
def export(run: Run | Place, out: Folder, *, adapter: bool = False) -> Path:
    """Write the weights of the newest undamaged checkpoint of a run into the new folder `out`, in
    the dtype of the run, and return `out`. Write the tokenizer, too, if it is a tokenizer of the
    `tokenizers` library (transformers has no equivalent of `bytes`).

    Adapters are merged into the weights that they adapt. With `adapter`, only the adapters are
    written, as files of peft.

    Raises ConfigError for a model that transformers does not have, a run without a checkpoint, and
    an existing folder.
    """
    run, out = run if isinstance(run, Run) else Run.open(run), Path(out)
    m = replace(run.config.model, changes=()) if run.config.model.changes else run.config.model
    kind = families.of_model(m)
    if out.exists():
        raise ConfigError(f"{str(out)!r} exists already; choose another --out")
    saved, _ = checkpoint.load_latest(run.checkpoints, run=run.identity["run"],
                                      only=checkpoint.WEIGHTS,
                                      lack=f"{str(run.path)!r} has no checkpoint")
    for problem in run.problems:
        print(f"lpkit: {problem}", file=sys.stderr)
    names = {name.removeprefix("model/"): t
             for name, t in checkpoint.evaluated_weights(saved.tensors).items()}
    ours = {name: t for name, t in names.items() if name.endswith((".weight", ".bias"))}
    own_folder(out.parent)
    if run.config.model.changes and not adapter:
        m, ours = adapted.merged(run, names)
    with whole_folder(out) as folder:
        if adapter:
            adapted.save_adapter(run, names, folder)
            return out
        save_file(kind.weights(ours, m), folder / "model.safetensors", metadata={"format": "pt"})
        about = kind.config(m) | {"torch_dtype": str(next(iter(ours.values())).dtype)[6:]}
        files, imported = {CONFIG: about}, run.tokenizer.get("files", {})
        if library := run.tokenizer.get("model"):
            about["eos_token_id"] = end = tokenizer_from_dict(run.tokenizer).end
            # without tokenizer_class, transformers would choose a class by the type of the model,
            # and this class may split text differently
            spelled = {token["id"]: {"eos_token": token["content"]}
                       for token in library.get("added_tokens", ())}
            named = {"tokenizer_class": "PreTrainedTokenizerFast"} | spelled.get(end, {})
            files = {TOKENS: named, FILE: library, **imported,
                     CONFIG: about | imported.get(CONFIG, {})}
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
    return out
