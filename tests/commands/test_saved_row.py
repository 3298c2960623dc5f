"""`lpkit measure`: a measured step, matmuls and copies become a machine for predictions.

Only these tests catch: a measured step or matmul whose prediction differs from its measurement,
a link or a factor that is applied twice, and a file that is cut off, of another machine, or
overwritten.
"""

import json
import math
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

import lpkit.measure
from lpkit import cli
from lpkit.commands import machine, measure
from lpkit.config import Config
from lpkit.contracts import Choice
from lpkit.errors import ConfigError
from lpkit.measure import updates
from lpkit.parallel.processes import Processes
from lpkit.predict import evidence
from lpkit.predict.links import link
from lpkit.predict.plan import plan
from lpkit.predict.prediction import predict
from lpkit.predict.roofline import REACHED, nearest, product_seconds
from lpkit.predict.time import calibrate, step_time, with_step
from lpkit.presets import preset
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import CATALOGUE, from_dict
from tests.bench import saved

SMALL = Config().replace({"model.layers": 1, "global_batch": 4, "precision.recipe": "bf16",
                          "system.device": "cpu"})
OTHER = SMALL.replace({"model.width": 512, "model.heads": 8})
WORDS = ["model.layers=1", "global_batch=4", "precision.recipe=bf16", "system.device=cpu"]
BY_HAND = {"title": "a box", "kind": "cpu", "memory_bytes": 8e9, "bytes_per_second": 1e10,
           "flops": {"fp32": 1e11, "bf16": 2e11}}
MEASURED = {"device": "a box", "torch": "2.13", "command": "lpkit measure", "date": "2026-11-26",
            "ranks": 1, "others": 0.0, "seconds": 0.2,
            "products": {"bf16": [[1024, 256, 256, 0.5], [1024, 1024, 256, 0.25]]},
            "config": SMALL.to_dict()}
ROW = {**BY_HAND, "measured": MEASURED}


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """The path of the file that the command wrote on this machine, and its output with --json."""
    path, printed = tmp_path_factory.mktemp("saved") / "mine.yaml", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "say", printed.append)
        assert cli.main(["measure", "cpu-3m", *WORDS, "--save", str(path), "--json"]) == 0
    return path, json.loads(printed[0])


def test_the_step_that_was_measured_is_predicted_as_it_was(taken):
    path, printed = taken
    on = machine(str(path))
    # as it ran: the config contains what races between backends chose
    ran = Config.from_dict(printed["measured"]["config"])
    assert step_time(ran, on).step_seconds == pytest.approx(printed["measured"]["seconds"],
                                                            rel=1e-9)
    assert (printed["factor"] == pytest.approx(on.measured["factor"]) and on.name == "mine"
            and on.title == printed["measured"]["device"])
    assert ({shape[:3] == [1024, 256, 256] for shape in printed["measured"]["products"]["bf16"]}
            == {True, False})
    for dtype, each in printed["measured"]["products"].items():
        assert all(0 < share <= 1 for *_, share in each) and on.flops[dtype] > 0
    assert path.read_text().splitlines()[-1].startswith(
        "flops: {"), "a file that is cut short is no YAML"


def test_a_measured_product_is_priced_as_it_was(taken):
    """The share is relative to the highest speed of this machine; the formula's seconds of a
    measured shape are its FLOPs divided by the measured rate."""
    on = machine(str(taken[0]))
    reached = evidence.efficiency(on)
    for M, N, K, share in on.measured["products"]["bf16"]:
        alone = product_seconds(int(M), int(N), int(K), on, replace(reached, kernel_seconds=0),
                                dtype="bf16", bits=1e-9, result_bytes=0)
        assert alone == pytest.approx(2 * M * N * K / (share * on.flops["bf16"]))


def test_without_a_datasheet_the_nearest_shape_answers_for_all():
    reached = evidence.efficiency(from_dict(ROW))

    def share(*shape):
        return nearest(reached.shapes["bf16"], *shape)

    assert share(1024, 256, 256) == (1, 0.5) and share(1024, 1024, 256) == (1, 0.25)
    assert share(2048, 500, 256)[1] == 0.5 and share(2048, 530, 256)[1] == 0.25, "in logarithms"
    assert share(8192, 256, 256) == (0, 0.5), "8 times as many rows are far"
    assert (product_seconds(8192, 256, 256, from_dict(ROW), reached, dtype="bf16", bits=16)
            == pytest.approx(2 * 8192 * 256**2 / (0.5 * 2e11)))
    assert nearest((), 1, 1, 1) == (0, 0), "nothing was measured in fp32"
    assert json.loads(json.dumps(asdict(reached)))["shapes"]["bf16"][0] == [1024, 256, 256, 0.5]


def h200(seconds=None):
    """Return the recorded row of an H200. seconds: of an update as a CUDA graph, in place of the
    recorded seconds."""
    row = json.loads((evidence.MEASURED / "measure-nvidia-h200.json").read_text())["row"]
    row = {key: number for key, number in row.items() if key not in ("target", "saved", "factor")}
    if seconds:
        config = Config.from_dict(row["measured"]["config"]).replace({"system.cuda_graphs": True})
        row["measured"] |= {"seconds": seconds, "config": config.to_dict()}
    return with_step(from_dict(row))


def test_a_row_of_one_width_does_not_spoil_others():
    """Eight steps of two other widths, recorded on the same H200. With the row, the median error
    was 26%, and five steps were outside of their range; with the datasheet alone, it is 5.4%."""
    record = json.loads((evidence.MEASURED / "fp8-step-nvidia-h200.json").read_text())
    base = Config().replace({"model.vocab": 50_304, "model.context": 1024, "global_batch": 8})
    nanogpt = json.loads((evidence.MEASURED / "train-nanogpt-nvidia-h200.json").read_text())
    for on in (h200(), h200(nanogpt["ours_median"])):
        errors = []
        for size, heads in (("26 x 1664", 13), ("4 x 4096", 32)):
            layers, width = map(int, size.split(" x "))
            config = base.replace({"model.layers": layers, "model.width": width,
                                   "model.heads": heads})
            seconds = {}
            for case in record["cases"]:
                if size in case["case"] and case["peer"] == "bf16":
                    seconds |= {case["case"].split(", ")[0]: case["ours_median"],
                                "bf16": case["peer_median"]}
            assert len(seconds) == 4
            for recipe, took in seconds.items():
                step = step_time(config, on, precision=recipe)
                low, high = step.seconds_range
                assert low <= took <= high, (size, recipe)
                errors.append(abs(step.step_seconds / took - 1))
        assert statistics.median(errors) < 0.045, errors
    ran = Config.from_dict(on.measured["config"])
    step = step_time(ran, on)
    assert step.step_seconds == pytest.approx(nanogpt["ours_median"]) and step.calibrated == 1


def test_far_from_what_was_measured_the_datasheet_answers():
    """Far from the measured step, the range is that of the datasheet. Between the two, it is
    wider than after a step of the same shapes."""
    on, sheet = h200(0.0331), CATALOGUE["h200"]
    reached, known = evidence.efficiency(on), evidence.efficiency(sheet)
    far = (65_536, 16_384, 16_384)
    assert (2 * math.prod(far) / product_seconds(*far, on, reached, dtype="bf16", bits=16)
            == pytest.approx(2 * math.prod(far) / product_seconds(*far, sheet, known, dtype="bf16",
                                                                  bits=16), rel=0.02))
    gpt2 = Config.from_dict(on.measured["config"])
    configs = [gpt2.replace({"model.width": 64 * heads, "model.heads": heads})
               for heads in (12, 24, 200)]
    widths = [step_time(config, on) for config in configs]
    measured, near, wide = (time.spread for time in widths)
    assert near.low < 1.001 * measured.low and near.high > measured.high
    assert "of other shapes (its weight is 0." in near.words
    assert (wide == step_time(configs[2], sheet).spread and widths[2].factor == 1
            and measured.words.endswith("after one measured step"))


def test_a_step_that_waited_for_its_host_is_no_factor(capsys):
    assert h200().measured["factor"] == 1 != h200(0.0331).measured["factor"]
    assert "waited for its host" in evidence.efficiency(h200()).source


def test_one_step_is_a_factor_of_all_and_narrows_the_range():
    on, without = with_step(from_dict(ROW)), from_dict(BY_HAND)
    twice = with_step(from_dict({**BY_HAND, "measured": {**MEASURED, "seconds": 0.4}}))
    by_one_step, two = (step_time(OTHER, each) for each in (on, twice))
    assert (two.step_seconds == pytest.approx(2 * by_one_step.step_seconds)
            and two.factor == pytest.approx(2 * by_one_step.factor))
    assert ("after one measured step of other shapes" in by_one_step.spread.words
            and by_one_step.calibrated)
    # The measured step itself is known better. For other shapes, the range is never narrower.
    same = Config.from_dict(MEASURED["config"])
    wide, own = (step_time(same, each).spread for each in (without, on))
    assert (own.high < wide.high and "measured step" not in wide.words
            and by_one_step.spread.high >= own.high)
    assert (step_time(OTHER, on, efficiency=evidence.efficiency(without)).factor
            == 1), "who gives an efficiency has no factor"


def test_a_step_that_is_measured_later_is_a_factor_of_that():
    on = with_step(from_dict(ROW))
    again = calibrate(OTHER, on, 3.0)
    assert step_time(OTHER, on, calibration=again).step_seconds == pytest.approx(3.0)


def test_predict_and_plan_take_it_in_python_and_by_command(tmp_path, capsys):
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump(ROW))
    on = machine(str(path))
    seconds = step_time(SMALL, on).step_seconds
    assert seconds == pytest.approx(0.2)
    assert predict(SMALL, on).step_seconds == pytest.approx(seconds)
    assert (plan(SMALL, 1e6, on, devices=1).options[0].time.factor
            == pytest.approx(on.measured["factor"]))
    assert cli.main(["predict", "cpu-3m", *WORDS, "--machine", str(path)]) == 0
    page = capsys.readouterr().out
    assert (f"all seconds are multiplied by {on.measured['factor']:.3f}, from one measured step"
            in page and "after one measured step" in page)
    assert ("as a box took them on 2026-11-26" in page
            and "at the share of the nearest measured shape" not in page)
    assert cli.main(["plan", "--model", "cpu-3m", "--tokens", "1e6", "--devices", "1", "--machine",
                     str(path), "--show", "1"]) == 0
    page = capsys.readouterr().out
    assert (f"calibrated, multiplied by {on.measured['factor']:.3f}" in page
            and "at the share of the nearest measured shape" in page)
    assert cli.main(["advise", "cpu-3m", "--machine", str(path), "--json"]) == 0
    assert (json.loads(capsys.readouterr().out)["efficiency"]["factor"]
            == pytest.approx(on.measured["factor"]))


def test_a_deadline_counts_the_factor_too():
    """With the factor, a step is slower. So a deadline between the two times is met without the
    factor and missed with it."""
    on, config = with_step(from_dict(ROW)), SMALL
    bare = replace(on, measured={})
    slow, fast = (plan(config, 1e6, each, devices=1).options[0].bill.seconds for each in (on, bare))
    assert (not plan(config, 1e6, on, devices=1, deadline_seconds=math.sqrt(slow * fast)).options
            and slow > fast)


def test_a_gpu_of_the_catalogue_keeps_its_kind_and_its_links():
    h200 = CATALOGUE["h200"]
    row = {**{key: value for key, value in asdict(h200).items()
              if key not in ("details", "measured")}, "title": "NVIDIA H200"}
    on = from_dict({**row, "measured": {**MEASURED, "device": "NVIDIA H200", "ranks": 8}})
    assert evidence.kind_of(on, "bf16") == evidence.kind_of(h200, "bf16")
    efficiency, known = evidence.efficiency(on, "compiled"), evidence.efficiency(h200, "compiled")
    assert (efficiency.fused, efficiency.overlap) == (known.fused, known.overlap)
    layout = Layout(data=8)
    assert (link(on, layout, "data", efficiency).bytes_per_second == h200.link_bytes_per_second
            / 2), "a measured link is all of it"


def test_a_row_of_two_gpus_has_their_link_and_the_prices_of_their_kind(monkeypatch):
    """All parts that need a GPU are fakes: an H200 that reaches 4 of 4.8 TB/s, receives 380
    GB/s, and has a matmul that is faster than its best square matmul."""
    device, h200 = torch.device("cuda", 0), CATALOGUE["h200"]
    here = replace(h200, name="this", title="NVIDIA H200", bytes_per_second=4e12,
                   memory_bytes=h200.memory_bytes - 1, price_per_hour=None,
                   flops={"bf16": 6e14, "fp32": 5e13})
    used = {name: Choice(asked="auto", used=choice, why="")
            for name, choice in (("precision", "bf16"), ("attention", "plain"), ("threads", "8"),
                              ("compile", "blocks"), ("cuda_graphs", "on"))}
    programs = []

    class Ranks:
        def __init__(self, function, arguments, world):
            programs.append((function, arguments, world))

        def __enter__(self):
            return SimpleNamespace(wait=lambda: [3.8e11, 3.9e11])

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(updates, "decide", lambda config: SimpleNamespace(device=device,
        choices=used))
    monkeypatch.setattr(updates, "refuse_what_cannot_fit", lambda config, decisions: None)
    monkeypatch.setattr(updates, "Training",
                        SimpleNamespace(build=lambda *given, **named: SimpleNamespace(
                            update=time.sleep)))
    monkeypatch.setattr(updates, "take_turns",
                        lambda runners, rounds, watch: ([[0.3, 0.2, 0.4]], 0.1))
    monkeypatch.setattr(updates, "_rates",
                        lambda config, device: {"bf16": {(64, 64, 64): 7e14, (64, 64, 128): 3.5e14},
                                                "fp32": {(64, 64, 64): 1e13}})
    monkeypatch.setattr(updates.hardware, "machine", lambda device: here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(updates, "Processes", Ranks)
    measured = updates.row(preset("gpt2-124m"), "lpkit measure gpt2-124m")
    assert programs == [("lpkit.measure.ranks:run", {"program": "all-gather", "backend": "nccl"},
                         2)]
    on = from_dict(yaml.safe_load(yaml.safe_dump(measured)), name="mine")
    assert (on.name, on.price_per_hour, on.network_bytes_per_second) == ("h200",
        h200.price_per_hour, h200.network_bytes_per_second)
    assert (on.link_bytes_per_second, on.devices_per_node, on.bytes_per_second) == (7.6e11, 2,
        4e12) and on.memory_bytes == here.memory_bytes
    assert on.flops == {**h200.flops, "bf16": 7e14, "fp32": 5e13} and on.measured["seconds"] == 0.2
    assert on.measured["products"] == {"bf16": ((64, 64, 64, 1), (64, 64, 128, 0.5)),
        "fp32": ((64, 64, 64, 0.2),)}
    ran = Config.from_dict(on.measured["config"]).system
    assert (ran.attention, ran.compile, ran.cuda_graphs) == ("plain", "blocks", True)
    measured_link = link(on, Layout(data=2), "data", evidence.efficiency(on))
    heard = 2**26 / 3.8e11
    assert (measured_link.all_gather_seconds(2**27)
            == pytest.approx(heard + 3.4e-6 + math.sqrt(heard * 3.4e-6))), (
                "what was heard, and a hop")
    text = measure.text({"target": "gpt2-124m", "saved": None, "factor": 1.0, **measured})
    assert ("760 GB/s in both directions together, 2 ranks" in text
            and "2 matmuls, 0.50 to 1 times 700 TFLOP/s" in text and "10% of the CPUs" in text)


@pytest.mark.slow
def test_ranks_say_what_they_hear_of_one_another(parent):
    """The link in bytes per second, measured with a tensor of 64 MiB from each rank, on CPUs;
    slower than memory."""
    with Processes("lpkit.measure.ranks:run", {"program": "all-gather", "backend": "gloo"}, world=2,
                   parent=parent) as running:
        heard = running.wait()
    assert len(heard) == 2 and all(1e7 < speed < 1e11 for speed in heard)


def change(**changes):
    return {**ROW, "measured": {**MEASURED, **changes}}


@pytest.mark.parametrize("values, message", [
    (change(products={"bf16": [[64, 64, 64, 1.01]]}), "measured.products.bf16 has M, N, K and a "
                                                      "share above 0 and at most 1, got (64.0, "
                                                      "64.0, 64.0, 1.01)"),
    (change(products={"bf16": [[64, 64, 64, 0]]}), "above 0 and at most 1"),
    (change(products={"bf16": [[64, 64, 64]]}), "got (64.0, 64.0, 64.0)"),
    (change(products={"bf16": [[math.inf, 64, 64, 0.5]]}), "got (inf"),
    (change(products={"bf16": [[64, math.nan, 64, 0.5]]}), "got (64.0, nan"),
    (change(products={"bf16": []}), "measured.products.bf16 has"),
    (change(products={"bf61": [[64, 64, 64, 0.5]]}), "measured.products.bf61 has"),
    (change(products=3), "measured.products must be"),
    (change(products={"bf16": "all"}), "measured.products must be"),
    (change(device="another box"), "measured is of another machine, 'another box', than 'a box', "
                                   "the title"),
    (change(seconds=-1), "a measured step takes more than 0"),
    (change(seconds="soon"), "measured.seconds must be a number"),
    (change(seconds=1e6), "measured.seconds over their prediction (measure a larger config) must "
                          "be from 0.1 to 10"),
    (change(config={"model": {"width": -1}}), "model.width must be"),
    (change(config={"mdel": 1}), "mdel"), (change(config=[]), "measured.config must be"),
    (change(ranks="two"), "measured.ranks must be a whole number"),
    (change(more=1), "missing or too much: ['more']"),
    ({**ROW, "measured": {key: number for key, number in MEASURED.items()
                          if key not in ("seconds", "ranks")}},
     "measured has device, torch, date, command, ranks, others, products, seconds, config; missing "
     "or too much: ['ranks', 'seconds']; write"),
    ({**ROW, "measured": [1]}, "measured has device"),
    ({"measured": MEASURED}, "the machine lacks memory_bytes"),
])
def test_what_is_no_row_is_one_sentence(values, message, tmp_path, capsys):
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump(values))
    assert cli.main(["predict", "cpu-3m", "--machine", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err, err


@pytest.mark.parametrize("line", ["plan --model cpu-3m --tokens 1e6 --devices 1", "advise cpu-3m"])
def test_every_command_of_a_machine_refuses_it(line, tmp_path, capsys):
    path = tmp_path / "box.yaml"
    path.write_text(yaml.safe_dump(change(seconds=-1)))
    assert cli.main([*line.split(), "--machine", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "takes more than 0" in err, err


def test_a_file_that_was_cut_short_is_refused_wherever(taken):
    text, path = taken[0].read_text(), taken[0].with_name("cut.yaml")
    lines = [sum(map(len, text.splitlines(True)[:n])) for n in range(len(text.splitlines()))]
    for cut in sorted({*lines, *range(0, len(text) - 1, 97),
                       *range(len(text) - 60, len(text) - 1)}):
        path.write_text(text[:cut])
        with pytest.raises(ConfigError):
            machine(str(path))


def test_nothing_else_is_overwritten_and_no_half_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lpkit.measure, "row", lambda config, command: ROW, raising=False)
    path, words = tmp_path / "mine.yaml", ["measure", "cpu-3m", "--save"]
    for theirs in ("model: {width: 64}\n", "# another box, by lpkit measure\n"):
        path.write_text(theirs)
        assert cli.main([*words, str(path)]) == 2 and path.read_text() == theirs
        assert "does not begin with '# a box, by lpkit measure'" in capsys.readouterr().err
    path.unlink()
    for wrong in (tmp_path / "mine.json", tmp_path / "nowhere" / "mine.yaml"):
        assert (cli.main([*words, str(wrong)]) == 2
                and "must be a .yaml file in an existing folder" in capsys.readouterr().err)
    assert cli.main([*words, str(path)]) == 0 and "link" in capsys.readouterr().out
    before = path.read_text()
    assert (cli.main([*words, str(path)]) == 0
            and path.read_text() == before), "of this machine: it is renewed"
    monkeypatch.setattr("os.replace",
                        lambda *names: (_ for _ in ()).throw(OSError(28,
                            "No space left on device")))
    assert (cli.main([*words, str(path)]) == 2 and path.read_text() == before
            and [*tmp_path.iterdir()] == [path])
    capsys.readouterr()
    assert (cli.main(["measure", "cpu-3m"]) == 0
            and "no; use --save mine.yaml" in capsys.readouterr().out)


def test_several_devices_are_refused_before_anything_runs(capsys):
    assert cli.main(["measure", "cpu-3m", "parallel.shard=2"]) == 2
    assert "takes 2 processes, and this is one" in capsys.readouterr().err


def test_the_page_says_what_was_recorded():
    record = json.loads((evidence.MEASURED / "saved-row-amd-epyc.json").read_text())
    page = " ".join((Path(__file__).parents[2] / "docs" / "plan.md").read_text().split())
    ceilings, by_hand = (case for case in record["cases"] if case["case"] == "median")
    assert (ceilings["ours_median"] == by_hand["ours_median"]
            and len(record["cases"]) == 2 * (len(saved.OTHERS) + 1))
    assert (f"said {ceilings['ours_median']:.0f}% off at the median on a busy AMD EPYC, by the "
            f"same ceilings alone {ceilings['peer_median']:.0f}%, and by "
           f"the same file without what was measured {by_hand['peer_median']:.0f}% (") in page


def test_the_bench_says_how_far_off_each_is(monkeypatch):
    """One step takes twice as long as the row predicts, and another exactly as long."""
    half, third = (SMALL.replace({"global_batch": batch}) for batch in (2, 1))
    of_half, of_third = (step_time(config, with_step(from_dict(ROW))).step_seconds
                      for config in (half, third))
    monkeypatch.setattr(saved, "row", lambda config, command: ROW)
    monkeypatch.setattr(saved, "Bench", lambda config: SimpleNamespace(seconds=None,
        precision=SimpleNamespace(used="bf16")))
    monkeypatch.setattr(saved, "take_turns",
                        lambda runners, rounds, watch: ([[0.3, 0.2], [2 * of_half, 9.0],
                                                         [of_third]],
                            0.0))
    results = saved.compare(SMALL, {"half": half, "third": third}, 3)
    assert ([result.case for result in results] == 2 * ["half", "third", "median"]
            and {result.unit for result in results} == {"% off"})
    assert [result.ours_median for result in results[:3]] == pytest.approx([50, 0, 25])
    ceilings = step_time(half, from_dict(BY_HAND), efficiency=REACHED).step_seconds
    assert (results[0].peer_median == pytest.approx(100 * abs(ceilings / (2 * of_half) - 1))
            and results[0].peer == "its ceilings alone")
