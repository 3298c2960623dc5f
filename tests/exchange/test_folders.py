"""Folders of transformers and adapters of peft, key by key. `tests/inputs/folders.py` has the
cases; these tests show that it lacks no key.

Only these tests catch: a key of a config that transformers reads and the kit does not know, and
a default that differs from the default of the class.
"""

import pytest
import torch

from lpkit.exchange.families import FAMILIES
from tests.inputs import folders

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
CASES = dict(folders.cases())


def test_there_are_enough_and_of_both_kinds():
    assert len(CASES) >= 590 and len([*folders.cases()]) == len(CASES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_missing_key_means_the_default_of_the_class(family):
    kind = type(transformers.AutoConfig.for_model(family.model_type))
    theirs = folders.fields(kind)
    for key, due in family.defaults.items():
        assert theirs.get(key) == due, key
    for key, fine in family.means.items():     # the values if none are given
        assert theirs.get(key, fine[0]) == fine[0] or key in family.defaults, key
    assert dict(family.also) == getattr(kind, "attribute_map", {}) and kind.default_theta == 1e4


# Attributes that transformers reads from a config and that cannot change logits: attributes that
# it makes itself, plans of layouts, forms of outputs, and names that other classes have.
# Attributes with a leading "_" are its own.
NEUTRAL = {"base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan", "base_model_tp_plan",
           "sub_configs", "is_heterogeneous", "name_or_path",
           "gradient_checkpointing", "output_attentions", "output_cross_attentions", "return_dict",
           "model_type", "vision_aspect_ratio",
           "vision_feature_layer", "vision_feature_select_strategy"}
# With these, transformers loads none of the five families, or the same model.
OF_OTHER_CLASSES = ("text_config", "text_encoder", "decoder", "generator", "fusion_config",
                    "kv_sharing_modes")


@pytest.mark.parametrize("kind", folders.FAMILIES)
def test_whatever_transformers_reads_of_a_config_is_known(kind, monkeypatch):
    """Also keys that are no field of the config class, such as is_causal: a file that sets them
    changes what is computed."""
    [family] = [family for family in FAMILIES if family.model_type == kind]
    folder, read = folders.base(kind), set()
    config = transformers.AutoConfig.from_pretrained(folder)

    def spied(self, key, get=transformers.PreTrainedConfig.__getattribute__):
        read.add(key)
        return get(self, key)

    with folders.quiet(), torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedConfig, "__getattribute__", spied)
        transformers.AutoModelForCausalLM.from_pretrained(folder, config=config,
            dtype=torch.float32).eval()(folders.tokens())
    read = {key for key in read if not key.startswith("_")
            and not callable(getattr(type(config), key, None))}
    assert {"is_causal", "tie_word_embeddings", "num_hidden_layers"} <= read
    known = {*family.sizes.values(), *family.means, *family.defaults, *family.also,
             *folders.HARMLESS, *NEUTRAL, *OF_OTHER_CLASSES, "rope_parameters", "layer_types"}
    of_generation = transformers.GenerationConfig().to_dict().keys()
    assert not read - known - of_generation


@pytest.mark.parametrize("key, value", [
    *((key, {"model_type": "llama", "num_hidden_layers": 1}) for key in OF_OTHER_CLASSES),
    *(("text_config", value) for value in (True, "x", [1], {}))], ids=str)
def test_keys_of_other_classes_make_no_other_model(key, value):
    with folders.copied("llama") as folder:
        folders.changed(**{key: value})(folder)
        try:
            theirs = folders.by_transformers(folder)
        except Exception as error:
            assert not isinstance(error, AssertionError)
        else:
            assert torch.equal(theirs, folders.by_transformers(folders.base("llama")))


def test_a_window_of_llama_changes_what_is_generated():
    """The forward pass of Llama ignores sliding_window, but the cache of `generate` reads it. So
    a folder with sliding_window is refused."""
    texts, text = [], folders.tokens()[:, :12]
    for window in (None, 4):
        with folders.copied("llama") as folder, folders.quiet(), torch.no_grad():
            folders.changed(sliding_window=window)(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
            texts.append((model(text).logits, model.generate(text, max_new_tokens=4,
                min_new_tokens=4, do_sample=False, pad_token_id=0)))
    (whole, long), (cut, short) = texts
    assert torch.equal(whole, cut) and not torch.equal(long, short)
