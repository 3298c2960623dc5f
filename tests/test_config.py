"""Only these tests catch a setting that is lost on its way through a file or a command, that
changes another, or that is wrong and is not refused with the way out."""

import pytest

from lpkit.config import Config, flat, parse_settings
from lpkit.errors import ConfigError
from lpkit.presets import PRESETS, preset, resolve


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips(name):
    config = preset(name)
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_yaml(config.to_yaml()) == config
    typed = {key: ",".join(value) if isinstance(value, tuple) else str(value)
             for key, value in flat(config).items()}
    assert config.replace(typed) == config


def test_settings_change_what_they_name_and_nothing_else():
    config = Config().replace(parse_settings([
        "model.layers=6", "optimizer.lr=3e-4", "system.compile=no", "steps=1_000",
        "model.kv_heads=2", "system.threads=none"]))
    changed = {key: value for key, value in flat(config).items() if value != flat(Config())[key]}
    assert changed == {"model.layers": 6, "optimizer.lr": 3e-4, "system.compile": False,
                       "steps": 1000, "model.kv_heads": 2}
    assert config.model.G == 2


def test_a_name_brings_the_settings_of_its_row():
    config = Config().replace({"memory.recompute": "block", "memory.recompute.every": "2"})
    assert (config.memory.recompute.name, config.memory.recompute.every) == ("block", 2)
    assert config.to_dict()["memory"]["recompute"] == {"name": "block", "every": 2}
    assert (config == Config(memory={"recompute": {"name": "block", "every": 2}})
            == Config.from_yaml(config.to_yaml()))
    # changed, and both have it
    assert config.replace({"memory.recompute": "selective"}).memory.recompute.every == 2
    # and what only the old row has goes with it
    assert config.replace({"memory.recompute": "none"}) == Config()


@pytest.mark.parametrize("text", ["version: 2\nmodel: {layers: 2, attention: sdpa}",
                                  "version: 7\nmodel: {experts: 8}"])
def test_a_config_of_another_version_is_refused_before_its_keys_are_read(text):
    with pytest.raises(ConfigError, match=r"version [127], and this lpkit understands version 3 "):
        Config.from_yaml(text)


BAD = {
    "model.layer=6": r"no setting 'model.layer'; did you mean 'model.layers'",
    "model=6": r"'model' is a group of settings",
    "steps=many": r"steps must be a whole number, got 'many'",
    "steps=0": r"steps must be positive, got 0",
    "optimizer.lr=nan": r"optimizer.lr must be positive, got nan",
    "model.width=250": r"not a multiple of model.heads=4; nearest widths: 248 or 252",
    "model.kv_heads=3": r"kv_heads may be 1, 2, 4",
    "grad_accum_steps=3": r"grad_accum_steps may be 1, 2, 4, 8, 16",
    "memory.recompute=blok": r"no memory.recompute 'blok'; did you mean 'block'",
    "memory.recompute.every=2": r"none has no setting 'every'; selective, block have it",
    "memory.recompute.every.n=2": r"no setting 'memory.recompute.every.n'",
    "precision.recipe=fp8": r"no precision.recipe 'fp8'; choose one of fp8-blockwise, ",
    "precision.recipe.history=4": r"=auto has no setting 'history'; fp8-delayed has it",
    "optimizer=adamv": r"no optimizer 'adamv'; did you mean 'adam'",
    "optimizer.beta1=1": r"beta1 must be 0 or more and below 1, got 1",
    "parallel.zero=4": r"no ZeRO stage 4",
    "model.layers=1000000": r"model.layers must be from 1 to 10,000, got 1000000",
    "model.context=1000000000": r"model.context must be from 1 to 16,777,216",
    "model.vocab=1e12": r"model.vocab must be at most 2,147,483,647",
    "system.compile=maybe": r"true or false or auto or blocks or model, got 'maybe'",
    "steps": r"expected key=value, got 'steps'",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_says_the_way_out(setting):
    with pytest.raises(ConfigError, match=BAD[setting]):
        resolve("cpu-3m", [setting])


def test_unknown_targets_say_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"no preset 'cpu-3n'; did you mean 'cpu-3m'"):
        resolve("cpu-3n")
    assert resolve("LLAMA-8B") == resolve("llama-8b")
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file.*cpu-3m"):
        resolve(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        resolve(str(tmp_path / "bad.yaml"))


def test_numbers_that_yaml_reads_as_text():
    assert Config.from_yaml("optimizer: {lr: 1e-3}").optimizer.lr == 1e-3   # YAML 1.1 wants 1.0e-3


@pytest.mark.parametrize("value", ["1:30", "1:1:1", "1:2.5", "-1:00", "010", "0_7"])
def test_a_number_that_yaml_reads_in_another_base_is_refused(value):
    """YAML 1.1 makes 90 of 1:30, and 8 of 010."""
    with pytest.raises(ConfigError, match=rf"YAML reads {value} in base 60 or 8"):
        Config.from_yaml(f"steps: {value}")


@pytest.mark.parametrize("key", ["model", "model.attention", "governors", "zzz"])
def test_what_nests_without_end_is_refused(key):
    given = {}
    for _ in range(5000):
        given = {"a": given}
    with pytest.raises(ConfigError):
        Config().replace({key: given})


def test_a_group_and_one_of_its_settings_are_changed_together_and_the_callers_stays():
    given = {"attention": {"name": "window", "size": 8}}
    config = Config().replace({"model": given, "model.attention.size": 16})
    assert (config.model.attention.name, config.model.attention.size) == ("window", 16)
    assert given["attention"]["size"] == 8


def test_settings_and_rows_that_are_gone_are_refused_by_name():
    """A file of before names them; nothing reads them as something else. A setting that had one
    value is in the file of every older run, and is left out."""
    assert Config.from_yaml("parallel: {tensor_messages: apart}") == Config()
    for text, name in (
            ("parallel: {tensor_messages: async}", "setting 'parallel.tensor_messages'"),
            ("system: {attention: flash-attn-4}", "system.attention 'flash-attn-4'")):
        with pytest.raises(ConfigError, match=f"^there is no {name}; "):
            Config.from_yaml(text)
