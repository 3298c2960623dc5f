"""Seconds of messages. Hops have a latency L in all. The bytes take W seconds at the bandwidth. A
message is sent in pieces, so its hops overlap, and it takes

    L + W + sqrt(L W)

A pipeline of pieces of the best size takes L + W + 2 sqrt(L W) (Sanders, Speck, Traeff 2009,
https://doi.org/10.1016/j.parco.2009.09.001). Published curves fit half of the last term
(data/published/collectives.csv, tests/predict/test_collectives.py).

    all-gather, reduce-scatter      a ring
    all-reduce over nodes           a tree or a ring, whichever is faster, as in NCCL
    all-reduce in a node            with switches that add up (NVLS), each rank sends its bytes once

Sources: Thakur, Rabenseifner, Gropp 2005, https://doi.org/10.1177/1094342005051521; the latencies
are from `machines.LATENCY_SOURCE`.
"""

import math
from dataclasses import dataclass

from lpkit.errors import ConfigError
from lpkit.predict.roofline import ASSUMED, Efficiency
from lpkit.techniques.layouts import FASTEST_FIRST, Layout
from lpkit.techniques.machines import LATENCY_SOURCE, Machine

RINGS = ("ring, Thakur et al. 2005, https://doi.org/10.1177/1094342005051521; "
         f"latency: {LATENCY_SOURCE}")


# Share of a node's link at which each rank sends in an all-reduce, if switches add up: 16 GiB over
# 8 H100 or H200 at 480 GB/s of bus bandwidth, over 8 B200 at 740 to 846.
SWITCHED = {"NVLink 4": 0.61, "NVLink 5": 0.5}


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link that joins the ranks of one group, per rank and direction.

    `hops_seconds` is the latency of a ring's round, `tree_seconds` the latency of a tree in one
    direction. `reduced_bytes_per_second` is the rate of an all-reduce, in which each node adds up
    its ranks before it sends; None: `bytes_per_second`.
    """

    size: int
    bytes_per_second: float
    hops_seconds: float
    words: str
    tree_seconds: float = math.inf
    reduced_bytes_per_second: float | None = None

    def all_gather_seconds(self, nbytes: float) -> float:
        """Return the seconds of an all-gather: (n - 1) hops, each with an n-th of the whole result
        of `nbytes`."""
        return _piecewise(self.hops_seconds, self.share * nbytes / self.bytes_per_second)

    # The messages of an all-gather in reverse; `nbytes` is the whole operand.
    reduce_scatter_seconds = all_gather_seconds

    def all_reduce_seconds(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter, then an all-gather (2 (n - 1) hops), or of a tree
        up and down."""
        rate = self.reduced_bytes_per_second or self.bytes_per_second
        hops = min(self.hops_seconds, self.tree_seconds)
        return _piecewise(2 * hops, 2 * self.share * nbytes / rate)

    def send_seconds(self, nbytes: float) -> float:
        """Return the seconds to send a message to the next rank."""
        if self.size == 1:
            return 0.0
        return self.hops_seconds / (self.size - 1) + nbytes / self.bytes_per_second

    @property
    def share(self) -> float:
        """The share of the bytes that each rank sends in a ring."""
        return (self.size - 1) / self.size


def _piecewise(hops_seconds: float, wire_seconds: float) -> float:
    return hops_seconds + wire_seconds + math.sqrt(hops_seconds * wire_seconds)


ALONE = Link(size=1, bytes_per_second=math.inf, hops_seconds=0.0, words="no link")


def stride(layout: Layout, axis: str) -> int:
    """Return the distance in ranks between neighbours along an axis."""
    faster = FASTEST_FIRST[:FASTEST_FIRST.index(axis)]
    return math.prod(getattr(layout, other) for other in faster)


def link(machine: Machine, layout: Layout, axis: str, efficiency: Efficiency = ASSUMED) -> Link:
    """Return the link of the group along an axis of the layout; "states" is `shard` and `context`
    together.

    Inside a node, the machine's link counts. Between nodes, every rank has its share of the
    network, and the ranks of a group in one node use their shares together. Raises ConfigError for
    a machine without a link or a network.
    """
    size = layout.state_ranks if axis == "states" else getattr(layout, axis)
    if size == 1:
        return ALONE
    first = "context" if axis == "states" else axis
    local = max(1, min(size, machine.devices_per_node // stride(layout, first)))
    nodes = -(-size // local)
    wire = (machine.link_bytes_per_second or 0) / 2         # datasheets add both directions
    missing = ""
    if nodes > 1 and not machine.network_bytes_per_second:
        missing = "network_bytes_per_second, between its nodes"
    elif local > 1 and not wire:
        missing = "link_bytes_per_second, inside its node"
    if missing:
        raise ConfigError(f"{axis}={size} on {machine.title} needs {missing}, and it says none; "
                          f"use one device, or describe the machine in YAML with it")
    rate, words = wire * efficiency.links, f"{machine.link or 'link'} in one node"
    hops = (nodes - 1) * machine.network_seconds + (size - nodes) * machine.link_seconds
    reduced, tree = rate, math.inf
    if local > 1 and local == machine.devices_per_node and machine.link in SWITCHED:
        added = wire * SWITCHED[machine.link] * efficiency.links / ASSUMED.links
        reduced, tree = max(rate, 2 * (1 - 1 / local) * added), hops / 2    # up and down at once
    if nodes > 1:
        pulling = 1 + efficiency.pooled * (local - 1)
        beyond = pulling * machine.network_bytes_per_second * efficiency.network
        # A ring sends (size - 1) / size of the bytes. Nodes that add up first send (nodes - 1) /
        # nodes.
        reduced = min(beyond * (1 - 1 / size) / (1 - 1 / nodes), reduced) if local > 1 else None
        tree = (local - 1) * machine.link_seconds + math.log2(nodes) * machine.network_seconds
        rate = min(beyond, rate) if local > 1 else beyond
        words = f"network, {nodes} nodes, {local} rank(s) in each"
    return Link(size=size, bytes_per_second=rate, hops_seconds=hops, words=words,
                tree_seconds=tree, reduced_bytes_per_second=reduced)
