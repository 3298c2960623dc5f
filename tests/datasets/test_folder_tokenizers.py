"""A run that was imported reads, ends and goes out as transformers does with the same folder: ids
of prompts, greedy text, ends, chat templates.

Only these tests catch: a prompt, an end or a chat turn whose ids are not those of transformers with
the same folder.
"""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

from lpkit import cli
from lpkit.datasets.tokenizers import tokenizer_from_dict
from lpkit.errors import ConfigError, printable
from lpkit.exchange.export import export
from lpkit.exchange.imported import bring, planned
from lpkit.training.sampling import cast_once, generate, sample, trained
from tests.exchange.test_import import FOLDERS

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
from tests.inputs import tokenizers as zoo  # noqa: E402

CHAT = ("{{ bos_token or '' }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
TURNS = ("<|im_start|>", "<|im_end|>")
PROMPTS = ["def import(folder):", "The quick", "a\nb", "caf\u00e9s \U0001f642", "x" * 40]


def llama2():
    return zoo.with_tokens(zoo.byte_fallback(),
                           *(zoo.AddedToken(turn, normalized=False, special=True)
                             for turn in TURNS))


def llama3():
    return zoo.with_template(zoo.byte_level(("<s>", "</s>", *TURNS), zoo.LLAMA3))


def qwen2():
    return zoo.byte_level(("<|endoftext|>", *TURNS), zoo.QWEN, normalizer=zoo.normalizers.NFC())


# by family: (its tokenizer, the settings of its class, the end tokens)
KINDS = {
    "gpt2": (lambda: zoo.byte_level(("<|endoftext|>", *TURNS)),
             {"eos_token": "<|endoftext|>", "add_bos_token": False}, [0]),
    "llama": (llama3, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
                       "eos_token": "</s>"}, [1, 3]),
    "llama 2": (llama2, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
                         "eos_token": "</s>", "unk_token": "<unk>"}, [2]),
    # transformers 5 reads only tokenizer.json, which has no template here
    "llama, bos by its settings": (lambda: zoo.byte_level(("<s>", "</s>", *TURNS), zoo.LLAMA3), {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>",
        "add_bos_token": True}, [1]),
    "qwen2": (qwen2, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>",
                      "add_bos_token": False}, [2, 0]),
}


QUICK = {"gpt2", "llama 2", "qwen2"}


@pytest.fixture(scope="module",
                params=[pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.slow)
                        for kind in KINDS])
def theirs(request, tmp_path_factory):
    """A folder with random weights and all files that transformers saves for its tokenizer; and the
    model and the tokenizer that transformers loads from it."""
    folder = tmp_path_factory.mktemp("theirs") / "model"
    make, settings, ends = KINDS[request.param]
    library, kind = make(), request.param.partition(" ")[0].strip(",")
    library.save(str(zoo.folder(folder, library) / "tokenizer.json"))
    known = [library.token_to_id(token) for token in ("<s>",)] if kind == "llama" else [None]
    sizes = {**FOLDERS[kind], "vocab_size": library.get_vocab_size() + 3, "initializer_range": 0.4}
    sizes |= {"n_positions": 96} if kind == "gpt2" else {"max_position_embeddings": 96}
    config = transformers.AutoConfig.for_model(kind, **sizes,
        eos_token_id=ends if len(ends) > 1 else ends[0], bos_token_id=known[0])
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder, transformers.AutoModelForCausalLM.from_pretrained(
        folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def run(theirs, tmp_path_factory):
    plan = planned(theirs[0])
    return bring(replace(plan, config=plan.config.replace({"precision.recipe": "fp32"})),
                 tmp_path_factory.mktemp("run") / "run")


def test_prompts_have_the_ids_of_transformers(theirs, run):
    ours = tokenizer_from_dict(run.tokenizer)
    for text in [*PROMPTS, *(text for text in zoo.texts() if not text.startswith(" "))]:
        assert ours.prompt(text) == theirs[2](text)["input_ids"], text


def test_a_chat_turn_has_the_ids_of_transformers(theirs, run):
    ours, chat = tokenizer_from_dict(run.tokenizer), [{"role": "user", "content": "the quick fox"}]
    text = theirs[2].apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    due = theirs[2](text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, special=True) == due
    assert (len(ours.encode(text)) > len(due) + 10
            and not {ours.end, *ours.ends} & {*ours.encode(text)})


def ended(ids, ends):
    """Return the ids before the first end token."""
    return ids[:next((i for i, token in enumerate(ids) if token in ends), len(ids))]


def test_greedy_text_is_that_of_generate_token_for_token(theirs, run):
    """In float32, where the two largest logits of 300 differ by more than rounding errors. The text
    ends where `generate` ends."""
    _, model, tokenizer = theirs
    ours, training = tokenizer_from_dict(run.tokenizer), cast_once(trained(run))
    ends = model.generation_config.eos_token_id
    ends = {*ends} if isinstance(ends, list) else {ends}
    assert ours.ends == ends
    texts = []
    for text in PROMPTS[2:]:
        given = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            due = model.generate(**given, do_sample=False, max_new_tokens=24,
                                 pad_token_id=0)[0].tolist()
        new = [step[0] for step in generate(training, [ours.prompt(text)], 24, 0, None,
            [torch.Generator()])]
        due = ended(due[given["input_ids"].shape[1]:], ends)
        assert ended(new, ends) == due
        texts.append(text + ours.decode([*given["input_ids"][0],
            *due])[len(ours.decode(given["input_ids"][0])):])
    assert sample(run, prompt=PROMPTS[2:], tokens=24, temperature=0) == texts


@pytest.mark.parametrize("theirs", ["gpt2", "llama 2"], indirect=True)
def test_it_ends_at_each_of_the_ends_that_generation_config_has(theirs, run, tmp_path):
    """There are two end tokens, which the model generates after some tokens of two prompts."""
    folder, model, tokenizer = tmp_path / "theirs", theirs[1], theirs[2]
    shutil.copytree(theirs[0], folder)
    ours, training = tokenizer_from_dict(run.tokenizer), cast_once(trained(run))
    generated = [[step[0] for step in generate(training, [ours.prompt(text)], 12, 0, None,
        [torch.Generator()])] for text in PROMPTS[:2]]
    ends = [generated[0][9], generated[1][6]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    again = bring(replace(planned(folder), config=run.config), tmp_path / "again")
    for text, new in zip(PROMPTS[:2], generated):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            due = model.generate(**tokenizer(text, return_tensors="pt",
                return_token_type_ids=False), do_sample=False, max_new_tokens=12, pad_token_id=0,
                                 eos_token_id=ends)[0].tolist()
        short = ended(due[len(ours.prompt(text)):], ends)
        assert len(short) < 10 and short == ended(new, ends)
        assert (sample(again, prompt=text, tokens=12, temperature=0) == text
                + ours.decode([*ours.prompt(text), *short])[len(ours.decode(ours.prompt(text))):])
    assert (tokenizer_from_dict(again.tokenizer).ends == {*ends}
            and tokenizer_from_dict(again.tokenizer).end == ours.end)


def test_what_goes_out_is_read_as_what_came_in(theirs, run, tmp_path):
    folder, _, before = theirs
    export(run, tmp_path / "out")
    after = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": " the quick fox "},
            {"role": "assistant", "content": "jumps"}]
    for text in [*PROMPTS, *zoo.texts("<|im_start|> </s>")]:
        assert after(text)["input_ids"] == before(text)["input_ids"]
    assert (type(after) is type(before) and after.special_tokens_map == before.special_tokens_map
            and after.all_special_ids == before.all_special_ids)
    assert after.apply_chat_template(chat, tokenize=False) == before.apply_chat_template(chat,
        tokenize=False)
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        old, new = (kind.from_pretrained(path) for path in (folder, tmp_path / "out"))
        assert all(getattr(old, key) == getattr(new, key)
                   for key in ("bos_token_id", "eos_token_id", "pad_token_id"))
    again = bring(planned(tmp_path / "out"), tmp_path / "again")
    assert again.tokenizer == run.tokenizer


@pytest.mark.parametrize("theirs", ["qwen2"], indirect=True)
def test_prompts_may_spell_special_tokens_where_asked(theirs, run, capsys):
    text = "<|im_start|>user\nthe fox<|im_end|>\n"
    ours, plain = tokenizer_from_dict(run.tokenizer), theirs[2](text)["input_ids"]
    assert ours.prompt(text, special=True) == plain and len(ours.prompt(text)) > len(plain) + 8
    assert cli.main(["sample", str(run.path), "--prompt", text, "--tokens", "3", "--temperature",
                     "0", "--special-tokens"]) == 0
    assert (capsys.readouterr().out.removesuffix("\n")
            == printable(sample(run, prompt=text, tokens=3, temperature=0, special_tokens=True)))


@pytest.mark.parametrize("theirs", ["gpt2"], indirect=True)
def test_a_tokenizer_that_loses_text_is_imported_with_a_warning(theirs, tmp_path):
    """For example a Chinese GPT-2 with BERT's tokenizer: prompts have the ids of transformers, and
    the warning shows the first text that does not decode to itself."""
    shutil.copytree(theirs[0], tmp_path / "theirs",
                    ignore=shutil.ignore_patterns("token*", "generation*", "chat*"))
    zoo.word_piece().save(str(tmp_path / "theirs" / "tokenizer.json"))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": 2}))
    with pytest.warns(UserWarning,
                      match=r"decodes to another text \('A' comes back as 'a'\); a loss is of that "
                            r"text"):
        run = bring(planned(tmp_path / "theirs"), tmp_path / "run")
    assert run.config.data.tokenizer == "wordpiece"
    due = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")("The quick fox")[
        "input_ids"]
    assert (tokenizer_from_dict(run.tokenizer).prompt("The quick fox") == due and due[0] == 1
            and due[-1] == 2)


@pytest.mark.parametrize("theirs", ["gpt2", "llama 2"], indirect=True)
def test_an_empty_prompt_is_one_where_the_tokenizer_begins_it(theirs, run):
    if tokenizer_from_dict(run.tokenizer).prompt(""):
        assert theirs[2]("")["input_ids"] == tokenizer_from_dict(run.tokenizer).prompt("")
        assert isinstance(sample(run, prompt="", tokens=2, temperature=0), str)
    else:
        with pytest.raises(ConfigError, match="the prompt is empty"):
            sample(run, prompt="", tokens=2)
