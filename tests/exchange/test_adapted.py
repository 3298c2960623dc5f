"""Runs with adapters, for other programs: merged for transformers, and as files of peft in both
directions.

Only these tests catch: a merged or written adapter with other logits in transformers or peft, a
file of peft that is read wrongly, losses that differ from peft's, and a map of layers that is
applied twice.
"""

import pytest
import torch

import lpkit
from lessons.rows import adapters as adapters
from lpkit import cli
from lpkit.datasets.tokenizers import tokenizer_from_dict
from lpkit.errors import ConfigError
from lpkit.exchange.adapted import bring_adapter, rebuilt
from lpkit.exchange.export import export
from lpkit.exchange.imported import bring, planned
from lpkit.nn.adapters import Lora
from lpkit.training.runs import Run
from lpkit.training.sampling import trained
from lpkit.training.training import Training
from tests.exchange.test_export import MODELS, SMALL

transformers = pytest.importorskip("transformers")
# peft beside transformers 5
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
ADAPTED = [{"name": "lora", "rank": 4}, {"name": "rslora", "rank": 4, "targets": ["attention.*"]},
           {"name": "pissa", "rank": 4},
           {"name": "dora", "rank": 4}, {"name": "ia3"}]
PEFTS = [{"name": "lora", "rank": 4}, {"name": "rslora", "rank": 4}, {"name": "pissa", "rank": 4},
         {"name": "dora", "rank": 4},
         {"name": "prompt", "length": 5}, {"name": "prefix", "length": 5}]


def of_each(changes):
    """Return all changes for a base of the Llama family, and for GPT-2 the changes whose files
    differ: its weights are transposed, with q, k and v in one matrix."""
    return [*(("LlamaForCausalLM", change) for change in changes),
            *(("GPT2LMHeadModel", change)
              for change in changes if change["name"] in ("lora", "dora")),
            ("Qwen3ForCausalLM", changes[0])]


def named(value):
    return value if isinstance(value, str) else value["name"]


@pytest.fixture(scope="module", params=MODELS)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return lpkit.train(SMALL.replace({**MODELS[request.param], "data.tokenizer": "bpe",
                                      "model.vocab": 257, "steps": 4}), out=folder / "base")


def adapted(base, folder, *changes, steps=4, **more):
    """Return a run whose weights have changed by more than rounding."""
    config = base.config.replace({"start.run": str(base.path), "model.changes": [*changes],
                                  "steps": steps, "optimizer.lr": 0.03,
                                  "schedule": "constant", "optimizer.weight_decay": 0.0, **more})
    return lpkit.train(config, out=folder / "adapted")


def logits(run, tokens):
    with torch.no_grad():
        return trained(run).logits(tokens).float()


def batch(run, seed=1):
    return torch.randint(run.config.model.V, (2, run.config.model.T),
                         generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("base, change", of_each(ADAPTED), indirect=["base"], ids=named)
def test_merged_for_transformers_it_has_the_same_logits(base, change, tmp_path):
    run = adapted(base, tmp_path, change)
    tokens = batch(run)
    assert (logits(run, tokens) - logits(base, tokens)).abs().max() > 1e-3
    assert cli.main(["export", str(run.path), "--out", str(tmp_path / "out")]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, logits(run, tokens), rtol=0, atol=2e-5)
    back = bring(planned(tmp_path / "out"), tmp_path / "back")
    assert not back.config.model.changes and back.config.model.L == run.config.model.L


def test_what_is_no_matrix_is_not_merged(base, tmp_path):
    run = adapted(base, tmp_path, {"name": "bottleneck", "width": 8}, steps=1)
    with pytest.raises(ConfigError,
                       match=r"no matrix of a model is the same as one with "
                             r"model\.changes=bottleneck; only an adapter that equals one Linear"):
        export(run, tmp_path / "out")
    for adapted_run, name in ((run, "bottleneck"), (base, "none")):
        with pytest.raises(ConfigError,
                           match=rf"peft's files hold one of lora, dora, pissa, prefix, prompt, "
                                 rf"rslora, and this run has model\.changes={name}"):
            export(adapted_run, tmp_path / "out", adapter=True)
    if not fused(base):
        for name in ("prompt", "prefix"):
            run = adapted(base, tmp_path / name, {"name": name}, steps=1)
            with pytest.raises(ConfigError,
                               match=rf"no matrix of a model is the same as one with "
                                     rf"model\.changes={name}"):
                export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_pissa_is_a_lora_of_twice_its_rank(base, tmp_path):
    """The files hold the adapter of the whole base, which peft has, not of what pissa left of
    the base."""
    run = adapted(base, tmp_path, {"name": "pissa", "rank": 4, "shared": fused(base)}, steps=1)
    module = next(module for module in rebuilt(run, {}).modules() if isinstance(module, Lora))
    whole = trained(base).model.blocks[0].attention.qkv.weight
    assert (whole - module.base.weight).norm() > 0.1 * whole.norm()
    export(run, tmp_path / "out", adapter=True)
    [row] = bring_adapter(tmp_path / "out", base, tmp_path / "back").config.model.changes
    assert (row.name, row.rank, row.scale) == ("lora", 8, 1.0)


def fused(base):
    """Return True for GPT-2's c_attn, which has one A for q, k and v."""
    return base.config.model.norm == "layernorm"


def of_base(change, base):
    """Return a change in the form that this base supports: GPT-2 has one A for q, k and v."""
    return change | {"shared": fused(base)} if "rank" in change else change


@pytest.mark.parametrize("base, change", of_each(PEFTS), indirect=["base"], ids=named)
def test_peft_reads_our_file(change, base, tmp_path):
    peft = pytest.importorskip("peft")
    run = adapted(base, tmp_path, of_base(change, base))
    export(base, tmp_path / "model")
    assert cli.main(["export", str(run.path), "--out", str(tmp_path / "out"), "--adapter"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = peft.PeftModel.from_pretrained(model, str(tmp_path / "out")).eval()
    tokens = batch(run)
    assert (logits(run, tokens) - logits(base, tokens)).abs().max() > 1e-3
    with torch.no_grad():
        torch.testing.assert_close(of_text(theirs(tokens)), logits(run, tokens), rtol=0, atol=2e-5)
    back = bring_adapter(tmp_path / "out", base, tmp_path / "back")
    torch.testing.assert_close(logits(back, tokens), logits(run, tokens), rtol=0,
                               atol=2e-5 if change["name"] == "pissa" else 1e-6)
    assert back.summary["status"] == "imported" and not back.problems


def of_text(out):
    """Return the logits without those of virtual tokens, which come first."""
    return out.logits[:, -SMALL.model.T:]


@pytest.mark.parametrize("base, kind", [
    *(("LlamaForCausalLM", kind) for kind in ("lora", "prompt", "prefix", "dora")),
    ("GPT2LMHeadModel", "lora"), ("GPT2LMHeadModel", "dora"), ("Qwen3ForCausalLM", "lora")],
    indirect=["base"])
def test_we_read_what_peft_wrote(kind, base, tmp_path):
    """Set all weights of an adapter to new random numbers, also the lengths of DoRA. Only q and
    v are adapted, as by the authors of LoRA."""
    peft = pytest.importorskip("peft")
    export(base, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    targets = ["c_attn", "c_proj"] if fused(base) else ["q_proj", "v_proj", "down_proj"]
    asked = {"prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
             "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
             "lora": lambda: peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets,
                                             use_rslora=True, fan_in_fan_out=fused(base)),
             "dora": lambda: peft.LoraConfig(r=4, target_modules=targets, use_dora=True,
                 fan_in_fan_out=fused(base))}[kind]()
    theirs = peft.get_peft_model(model, asked)
    torch.manual_seed(3)
    for name, p in theirs.named_parameters():
        if "magnitude" in name:
            p.data *= torch.rand_like(p) + 0.5
        elif p.requires_grad:
            torch.nn.init.normal_(p, 0, 0.2)
    theirs.eval().save_pretrained(tmp_path / "out")
    assert cli.main(["import", str(tmp_path / "out"), "--base", str(base.path), "--out",
                     str(tmp_path / "run")]) == 0
    tokens = batch(base)
    with torch.no_grad():
        due = of_text(theirs(tokens))
    torch.testing.assert_close(logits(Run.open(tmp_path / "run"), tokens), due, rtol=0, atol=2e-5)
    assert (due - logits(base, tokens)).abs().max() > 1e-2


@pytest.mark.parametrize("base, change", of_each([change for change in PEFTS if change["name"] in (
    "lora", "dora", "prompt", "prefix")])[:5], indirect=["base"], ids=named)
def test_the_same_losses_as_peft_over_fifty_steps(change, base, tmp_path):
    """From the same start and on the same tokens, by AdamW without weight decay: losses of about
    5 agree to 1e-6."""
    peft = pytest.importorskip("peft")
    config = base.config.replace({"start.run": str(base.path), "steps": 50,
                                  "schedule": {"name": "constant", "warmup_steps": 0},
                                  "optimizer.lr": 0.002, "optimizer.clip": 0.0,
                                  "optimizer.weight_decay": 0.0,
                                  "model.changes": [of_base(change, base)]})
    start = lpkit.train(config.replace({"steps": 1, "optimizer.lr": 1e-12}), out=tmp_path / "start")
    export(start, tmp_path / "adapter", adapter=True)
    export(base, tmp_path / "model")
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
        str(tmp_path / "adapter"),
                                            is_trainable="length" not in change)
    if "length" in change:     # peft reads it for inference only
        theirs.prompt_encoder.requires_grad_(True)
    ours = Training.build(config)
    ours.model.load_state_dict(trained(start).model.state_dict())
    optimizer = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.002,
                                  betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(50):
        batch = ours.batch(step)
        loss = torch.nn.functional.cross_entropy(of_text(theirs(batch.tokens)).flatten(0, 1),
            batch.targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append((ours.update(step).loss.item(), loss.item()))
    assert max(abs(a - b) for a, b in losses) < 5e-6, losses[::7]
    began = dict(trained(start).model.named_parameters())
    # 50 steps at a rate of 0.002
    assert all((p - began[name]).abs().max() > 0.01 for name, p in ours.model.named_parameters()
               if p.requires_grad)


def test_transformers_splits_a_text_as_the_run_does(base, tmp_path):
    """For Qwen2, transformers always uses its own tokenizer class, whatever the folder says; so
    the test requests the plain class."""
    export(base, tmp_path / "out")
    asked = (transformers.PreTrainedTokenizerFast if base.config.model.biased_qkv
             and not base.config.model.bias else transformers.AutoTokenizer)
    theirs, ours, text = asked.from_pretrained(tmp_path / "out"), tokenizer_from_dict(
        base.tokenizer), "def main():\n    return 10  # \u00e9te\u0301\n"
    assert (theirs.encode(text, add_special_tokens=False) == list(ours.encode(text))
            and theirs.eos_token_id == ours.end)


@pytest.mark.slow
def test_lm_eval_gives_a_text_the_same_probability(base, tmp_path, monkeypatch):
    """The merged run, and the adapter with its base model, as lm-evaluation-harness reads them."""
    lm_eval = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = adapted(base, tmp_path, {"name": "lora", "rank": 4, "shared": True})
    export(run, tmp_path / "merged")
    export(base, tmp_path / "model")
    export(run, tmp_path / "adapter", adapter=True)
    text = "def main():\n    return 0\n"
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    for files in ({"pretrained": str(tmp_path / "merged")},
                  {"pretrained": str(tmp_path / "model"), "peft": str(tmp_path / "adapter")}):
        lm = lm_eval.HFLM(**files, device="cpu", dtype="float32", batch_size=1)
        tokens = torch.tensor([[lm.prefix_token_id, *lm.tok_encode(text)]])
        assert 1 < tokens.shape[1] <= run.config.model.T
        ours = torch.log_softmax(logits(run, tokens[:, :-1]), -1).gather(-1,
            tokens[:, 1:, None]).sum().item()
        assert lm.loglikelihood_rolling([request]) == [pytest.approx(ours, rel=1e-5)]


def test_an_adapter_of_a_base_that_was_mapped_from_another_is_not_mapped_again(tmp_path):
    """A map exchanges layers 0 and 1 of the earlier run. If it were applied twice, they would be
    exchanged back."""
    first = lpkit.train(SMALL.replace({"data.tokenizer": "bpe", "model.vocab": 257, "steps": 2}),
                        out=tmp_path / "first")
    base = lpkit.train(first.config.replace({"start.run": str(first.path),
        "start.map": "blocks.0:blocks.1,blocks.1:blocks.0"}), out=tmp_path / "base")
    run = adapted(base, tmp_path, of_base({"name": "lora", "rank": 4}, base), **{"start.map": []})
    export(run, tmp_path / "out", adapter=True)
    tokens = batch(run)
    torch.testing.assert_close(logits(bring_adapter(tmp_path / "out", base, tmp_path / "back"),
                                      tokens), logits(run, tokens), rtol=0, atol=1e-6)
