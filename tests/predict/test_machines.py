"""The catalogue against arithmetic on the chips, what drivers print, and the loader against
nonsense."""

import dataclasses
import re

import pytest

from lpkit.errors import ConfigError
from lpkit.predict import evidence
from lpkit.techniques import machines
from lpkit.techniques.machines import CATALOGUE, MIB

PCIE_SECONDS = 5.7e-6

# units that multiply 16-bit numbers, fused multiply-adds of each in a clock, MHz: of the vendors'
# architecture papers
CHIPS = {
    "a100-80": (432, 256, 1410), "h100": (528, 512, 1830), "h200": (528, 512, 1830),
    "gh200": (528, 512, 1830),
    "h100-pcie": (456, 512, 1620), "v100": (640, 64, 1530), "t4": (320, 64, 1590),
    "rtx-3090": (328, 64, 1695),
    "a6000": (336, 128, 1800), "a10g": (320, 64, 1710), "l4": (232, 128, 2040),
    "l40s": (568, 128, 2520),
    "rtx-4090": (512, 64, 2520), "rtx-5090": (680, 64, 2407), "mi300x": (1216, 256, 2100),
    "mi325x": (1216, 256, 2100),
    "mi355x": (1024, 512, 2400), "mi350x": (1024, 512, 2200),
    "a40": (336, 128, 1740), "a5000": (256, 128, 1695), "rtx-6000-ada": (568, 128, 2505),
    "rtx-pro-6000": (752, 128, 2617),
}


@pytest.mark.parametrize("name", CHIPS)
def test_a_peak_is_units_times_clock(name):
    """Peaks are dense, so half of the sparse peaks that datasheets print. The units of RTX 3090 and
    A10G add up in float32 at half their speed."""
    units, products, megahertz = CHIPS[name]
    flops = CATALOGUE[name].flops
    assert flops["fp16"] == pytest.approx(units * products * 2 * megahertz * 1e6, rel=0.0125)
    assert flops.get("bf16", flops["fp16"]) == flops["fp16"]


def test_memory_is_what_the_driver_reports():
    printed = {"h100": 81_559, "h200": 143_771, "b200": 183_359, "rtx-4090": 24_564, "t4": 15_360}
    for name, row in CATALOGUE.items():
        assert row.memory_bytes == printed.get(name, row.memory_bytes // MIB) * MIB
    # the driver keeps 16 MiB
    for name, gibibytes in {"mi300x": 192, "mi325x": 256, "mi350x": 288,
                            "mi355x": 288}.items():
        assert CATALOGUE[name].memory_bytes == gibibytes * 2**30 - 16 * MIB
    # the sizes in names are of 2^30 bytes, less some
    for row in CATALOGUE.values():
        for size in re.findall(r"(\d+)GB", row.title):
            assert 0.99 < row.memory_bytes / int(size) / 2**30 <= 1


def test_a_slot_is_slower_to_begin_than_a_switch():
    for row in CATALOGUE.values():
        slot = row.link.startswith("PCIe")
        assert row.link_seconds == (PCIE_SECONDS if slot else machines.NVLINK_SECONDS)
        assert (row.link_bytes_per_second < 150e9) == slot
    assert machines.NVLINK_SECONDS < PCIE_SECONDS < machines.NETWORK_SECONDS


def test_prices_are_dated_and_say_what_is_assumed():
    for row in CATALOGUE.values():
        assert re.search(r"(May|August|September|November) 2026", row.price_source)
        priced = row.price_per_hour is not None
        assert priced != row.price_source.startswith("no list price")
        assert not priced or "https://" in row.price_source
    h100, card, gb300 = (CATALOGUE[name] for name in ("h100", "rtx-4090", "gb300"))
    assert machines.mixed_prices([h100, gb300]) == machines.mixed_prices([card, gb300]) == ""
    assert machines.mixed_prices([h100, card, gb300]) == (
        "prices of rtx-4090 are the lowest of a market, and those of h100 are list prices: they do "
        "not compare")


def test_cards_reach_what_torch_mm_was_measured_to():
    """Measured TFLOP/s of torch.mm in bf16, from
    https://github.com/zzc0721/torch-performance-test-data."""
    for name, measured in {"rtx-3090": 76.58, "a10g": 69.5, "a6000": 123.34, "a40": 122.29,
                           "rtx-4090": 163.09, "l40s": 269.15, "rtx-5090": 236.03,
                           "rtx-pro-6000": 417.98, "h20": 141.86}.items():
        row = evidence.GENERATIONS[evidence.generation_of(CATALOGUE[name])]
        assert (row.sixteen * CATALOGUE[name].flops["bf16"] / 1e12
                == pytest.approx(measured, rel=0.025)), name
    share = evidence.efficiency(CATALOGUE["rtx-5090"]).products["bf16"]
    numbers = evidence.fitted()["numbers"]
    kept = numbers.get("sm_120_geforce keeps", numbers["h100 keeps"])
    assert share == pytest.approx(1.127 * kept)      # a share above 1 is used as it is


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_row_of_the_catalogue_is_a_machine_of_one_s_own(name):
    """The limits of the loader must allow every machine of the catalogue."""
    values = dataclasses.asdict(CATALOGUE[name])
    assert (machines.from_dict({key: value for key, value in values.items() if key != "details"})
            == dataclasses.replace(CATALOGUE[name], details={}))


WHOLE = {"memory_bytes": "80e9", "bytes_per_second": "3.35e12", "flops": {"bf16": "9.9e14"}}


@pytest.mark.parametrize("field, values", [
    ("memory_bytes", [80, 0, -80e9, "80 GB", 1e18, True, [80e9], {}, float("nan"), float("inf"),
                      80e9 + 0.5]),
    ("bytes_per_second", [3.35, 0, -1, "fast", 1e30, float("inf"), False, []]),
    ("link_bytes_per_second", [0, 900, -900e9, "NVLink", 1e30]),
    ("network_bytes_per_second", [50, -1, 1e30, {"a": 1}]),
    ("link_seconds", [0, -1e-6, 3.4, "µs", float("nan")]),
    ("network_seconds", [-1, 14, True, float("inf")]),
    ("devices_per_node", [0, -8, 1.5, "eight", 10**9]), ("watts", [0, -700, 1e9, "low"]),
    ("price_per_hour", [0, -3, 1e9, "free", float("nan")]), ("kind", ["tpu", 1, ["gpu"]]),
    ("title", ["", "  ", 3, ["a"]]), ("source", ["", {}]), ("link", ["", 4]),
    ("network", [[], " "]),
])
def test_nonsense_is_refused_by_its_field(field, values):
    for value in values:
        with pytest.raises(ConfigError) as raised:
            machines.from_dict({**WHOLE, field: value})
        assert str(raised.value).startswith(field)


@pytest.mark.parametrize("dtype, rate", [("bf16", 0), ("bf16", -1), ("bf16", 989.4), ("fp8", 1e30),
    ("fp8", None), ("bf16", "fast"),
                                         ("fp4", True), ("fp4", [1e15])])
def test_a_rate_that_is_none_is_refused_by_its_dtype(dtype, rate):
    with pytest.raises(ConfigError, match=rf"^flops\.{dtype} must be"):
        machines.from_dict({**WHOLE, "flops": {"bf16": 1e15, dtype: rate}})
