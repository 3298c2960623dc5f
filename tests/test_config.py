"""Settings round-trip everywhere, and say what is wrong with them."""

import pytest

from lpkit.config import Config, ModelConfig, flat, parse_settings
from lpkit.errors import ConfigError
from lpkit.presets import PRESETS, preset, resolve


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_round_trips(name):
    config = preset(name)
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_yaml(config.to_yaml()) == config
    assert config.replace({key: str(value) for key, value in flat(config).items()}) == config


def test_settings_change_what_they_name_and_nothing_else():
    config = Config().replace(parse_settings(["model.layers=6", "optimizer.lr=3e-4", "system.compile=no", "steps=1_000",
                                              "model.kv_heads=2", "system.threads=none"]))
    changed = {key for key, value in flat(config).items() if value != flat(Config())[key]}
    assert changed == {"model.layers", "optimizer.lr", "system.compile", "steps", "model.kv_heads"}
    assert (config.model.layers, config.optimizer.lr, config.system.compile, config.steps, config.model.G) == \
        (6, 3e-4, False, 1000, 2)


def test_derived_sizes_follow_a_change():
    model = ModelConfig(width=128, heads=8).__class__(width=512, heads=8)
    assert (model.F, model.G, model.E) == (2048, 8, 64)


BAD = {
    "model.layer=6": r"no setting 'model.layer'; did you mean 'model.layers'",
    "modell.layers=6": r"did you mean 'model.layers'",
    "model=6": r"'model' is a group of settings",
    "steps=many": r"steps must be a whole number, got 'many'",
    "steps=1.5": r"steps must be a whole number, got '1.5'",
    "steps=0": r"steps must be positive, got 0",
    "optimizer.lr=nan": r"optimizer.lr must be positive, got nan",
    "model.width=250": r"model.width=250 is not a multiple of model.heads=4; nearest widths: 248 or 252",
    "model.kv_heads=3": r"kv_heads may be 1, 2, 4",
    "model.norm=rmsnorn": r"did you mean 'rmsnorm'",
    "accumulate=3": r"accumulate may be 1, 2, 4, 8, 16",
    "version=2": r"newer than this lpkit understands \(1\); upgrade lpkit",
    "system.compile=maybe": r"true or false or auto, got 'maybe'",
    "steps": r"expected key=value, got 'steps'",
}


@pytest.mark.parametrize("setting", BAD)
def test_a_bad_setting_says_the_way_out(setting):
    with pytest.raises(ConfigError, match=BAD[setting]):
        resolve("cpu-3m", [setting])


def test_unknown_targets_say_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"no preset 'cpu-3n'; did you mean 'cpu-3m'"):
        resolve("cpu-3n")
    with pytest.raises(ConfigError, match=r"cannot read the config file"):
        resolve(str(tmp_path / "none.yaml"))
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        resolve(str(tmp_path / "bad.yaml"))


def test_a_config_of_a_newer_version_is_refused_before_its_keys():
    with pytest.raises(ConfigError, match="version 7, newer"):
        Config.from_dict({"version": 7, "model": {"experts": 8}})


def test_numbers_that_yaml_reads_as_text():
    assert Config.from_yaml("optimizer: {lr: 1e-3}").optimizer.lr == 1e-3   # YAML 1.1 wants 1.0e-3
