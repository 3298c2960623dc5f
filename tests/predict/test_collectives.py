"""Seconds of messages beside curves that others published: bus bandwidth, as nccl-tests define it,
by size."""

import csv
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from lessons.published import FOLDER
from lpkit.predict.links import link
from lpkit.techniques.layouts import Layout
from lpkit.techniques.machines import find

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"
CURVES = list(csv.DictReader((FOLDER / "collectives.csv").read_text(encoding="utf-8").splitlines()))
MOVED = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}     # times (n - 1) / n of the bytes
SIZES = {"under 1 MiB": 2**20, "1 to 4 MiB": 2**24, "16 to 64 MiB": 2**28,
         "256 MiB to 1 GiB": 2**32, "4 GiB and more": 2**40}
GROUPS = {"one node, rings: A100, MI300X, gathers and scatters": lambda row: row["nodes"] == "1"
          and not switched(row),
          "one node whose switch adds up: H100, H200, B200": lambda row: switched(row)
          and row["nodes"] == "1",
          "two nodes of A100, four of B200": lambda row: row["nodes"] > "1"
          and row["machine"] != "h100",
          "two nodes of H100": lambda row: row["nodes"] == "2" and row["machine"] == "h100",
          "4 to 512 nodes of H100": lambda row: int(row["nodes"]) > 2 and row["machine"] == "h100"}


def switched(row):
    """Return whether the switches add numbers (NVLS): NCCL's all-reduce does so on NVLink 4 and
    later."""
    return (row["collective"] == "all-reduce" and row["machine"] in ("h100", "h200", "b200")
            and "NVLS off" not in row["note"])


def bandwidth_ratio(row):
    """Return the predicted bus bandwidth divided by the published one."""
    machine, ranks = find(row["machine"]), int(row["gpus"])
    machine = replace(machine, devices_per_node=ranks // int(row["nodes"]),
                      link=machine.link * ("NVLS off" not in row["note"]))
    if row["network_gigabits"]:
        machine = replace(machine, network_bytes_per_second=float(row["network_gigabits"]) * 1e9
                          / 8)
    ring, nbytes = link(machine, Layout(data=ranks), "data"), int(row["bytes"])
    seconds = getattr(ring, f"{row['collective'].replace('-', '_')}_seconds")(nbytes)
    return (MOVED[row["collective"]] * (ranks - 1) / ranks * nbytes / seconds
            / (float(row["bus_gigabytes"]) * 1e9))


def by_size():
    ratios = defaultdict(lambda: defaultdict(list))
    for row in CURVES:
        (group,) = (name for name, has in GROUPS.items() if has(row))
        ratios[group][next(size for size, below in SIZES.items()
                          if int(row["bytes"]) < below)].append(bandwidth_ratio(row))
    return ratios


def test_every_point_says_where_it_is_from():
    for row in CURVES:
        assert re.fullmatch(r"https://github\.com/.*/(blob/[0-9a-f]{40}/.*|issues/\d+)",
                            row["source"]), row
        assert row["at"].startswith(("line ", "figure", "title")), row
        assert (0 < float(row["bus_gigabytes"]) < 1.1 * find(row["machine"]).link_bytes_per_second
                / 2e9)
    assert len(CURVES) > 100 and len({row["source"] for row in CURVES}) == 10


def test_a_large_ring_is_priced_as_it_was_measured():
    """An all-gather, a reduce-scatter and an all-reduce (without NVLS) of 16 GiB over 8 H200 have
    361.4, 362.9 and 367.2 GB/s of bus bandwidth."""
    rings = [bandwidth_ratio(row) for row in CURVES
             if row["machine"] == "h200" and not switched(row)]
    assert len(rings) == 3 and rings == pytest.approx([1.0] * 3, abs=0.05)


def test_nodes_add_up_before_they_send():
    """An all-reduce of 1 GiB over 2 nodes of 8 A100 with 50 Gbit/s each reaches 76.8 GB/s. A ring
    through all ranks could reach 50 GB/s at most."""
    (row,) = (row for row in CURVES if row["machine"] == "a100-80" and row["nodes"] == "2"
              and int(row["bytes"]) == 2**30)
    assert float(row["bus_gigabytes"]) > 8 * 6.25
    assert bandwidth_ratio(row) == pytest.approx(1, abs=0.05)


def test_the_page_has_the_medians_by_size():
    lines = [f"| {group} | " + " | ".join(f"{median(ratios[size]):.2f}" if ratios[size] else ""
        for size in SIZES) + " |"
             for group, ratios in by_size().items()]
    page = PAGE.read_text(encoding="utf-8")
    assert len(lines) == len(GROUPS)
    for line in lines:
        assert line in page, line
