"""Seconds of messages between ranks.

Let L be the sum of the latencies of a message's hops, and W its bytes divided by the bandwidth,
both in seconds. The message is sent in pieces, so that its hops overlap, and it takes

    L + W + sqrt(L W)

By theory, pieces of the best size take L + W + 2 sqrt(L W) (Sanders, Speck, Traeff 2009,
https://doi.org/10.1016/j.parco.2009.09.001). Published measurements fit half of the last term
(data/published/collectives.csv, tests/predict/test_collectives.py).

    all-gather, reduce-scatter      a ring
    all-reduce over nodes           a tree or a ring, whichever is faster, as in NCCL
    all-reduce in a node            if the switches add numbers (NVLS), each rank sends its bytes
                                    only once

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


# If switches add numbers: the share of a link's bandwidth at which each rank sends in an
# all-reduce. Measured: an all-reduce of 16 GiB has 480 GB/s of bus bandwidth on 8 H100 or H200, and
# 740 to 846 GB/s on 8 B200.
SWITCHED = {"NVLink 4": 0.61, "NVLink 5": 0.5}


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link that joins the ranks of one group.

    size                        number of ranks
    bytes_per_second            bandwidth of one rank in one direction
    hops_seconds                latency of once around the ring: the sum over `size` - 1 hops
    words                       the link in words
    tree_seconds                latency of a tree from its leaves to its root
    reduced_bytes_per_second    rate of an all-reduce, in which each node adds up its ranks'
                                numbers before it sends; None: `bytes_per_second`
    """

    size: int
    bytes_per_second: float
    hops_seconds: float
    words: str
    tree_seconds: float = math.inf
    reduced_bytes_per_second: float | None = None

    def all_gather_seconds(self, nbytes: float) -> float:
        """Return the seconds of an all-gather over n ranks: (n - 1) hops, each with 1 / n of the
        `nbytes` of the whole result."""
        return _piecewise(self.hops_seconds, self.share * nbytes / self.bytes_per_second)

    # A reduce-scatter sends the messages of an all-gather in reverse order. `nbytes` is the whole
    # operand.
    reduce_scatter_seconds = all_gather_seconds

    def all_reduce_seconds(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of `nbytes`: by a ring, a reduce-scatter and then an
        all-gather (2 (n - 1) hops); or by a tree, up to the root and down again."""
        rate = self.reduced_bytes_per_second or self.bytes_per_second
        hops = min(self.hops_seconds, self.tree_seconds)
        return _piecewise(2 * hops, 2 * self.share * nbytes / rate)

    def send_seconds(self, nbytes: float) -> float:
        """Return the seconds to send `nbytes` to the next rank."""
        if self.size == 1:
            return 0.0
        return self.hops_seconds / (self.size - 1) + nbytes / self.bytes_per_second

    @property
    def share(self) -> float:
        """The share of all bytes that each rank sends in a ring: (n - 1) / n."""
        return (self.size - 1) / self.size


def _piecewise(hops_seconds: float, wire_seconds: float) -> float:
    return hops_seconds + wire_seconds + math.sqrt(hops_seconds * wire_seconds)


ALONE = Link(size=1, bytes_per_second=math.inf, hops_seconds=0.0, words="no link")


def stride(layout: Layout, axis: str) -> int:
    """Return the difference of the rank numbers of two neighbours along an axis of the layout."""
    faster = FASTEST_FIRST[:FASTEST_FIRST.index(axis)]
    return math.prod(getattr(layout, other) for other in faster)


def link(machine: Machine, layout: Layout, axis: str, efficiency: Efficiency = ASSUMED) -> Link:
    """Return the link of the ranks along an axis of the layout. The axis "states" is `shard` and
    `context` together: the ranks that share model states.

    Inside a node, ranks use the machine's link. Between nodes, each rank has its share of the
    network, and the ranks of a group in one node use their shares together. Raises ConfigError if
    the machine's row has no bandwidth for a link or a network that the group needs.
    """
    size = layout.state_ranks if axis == "states" else getattr(layout, axis)
    if size == 1:
        return ALONE
    first = "context" if axis == "states" else axis
    local = max(1, min(size, machine.devices_per_node // stride(layout, first)))
    nodes = -(-size // local)
    wire = (machine.link_bytes_per_second or 0) / 2         # datasheets count both directions
    missing = ""
    if nodes > 1 and not machine.network_bytes_per_second:
        missing = "network_bytes_per_second, between its nodes"
    elif local > 1 and not wire:
        missing = "link_bytes_per_second, inside its node"
    if missing:
        raise ConfigError(f"{axis}={size} on {machine.title} needs {missing}, and its row has none;"
                          f" use a single device, or add the number to a YAML file of the machine")
    rate, words = wire * efficiency.links, f"{machine.link or 'link'} in one node"
    hops = (nodes - 1) * machine.network_seconds + (size - nodes) * machine.link_seconds
    reduced, tree = rate, math.inf
    if local > 1 and local == machine.devices_per_node and machine.link in SWITCHED:
        added = wire * SWITCHED[machine.link] * efficiency.links / ASSUMED.links
        # a switch sends up and down at the same time, so the latency counts once, not twice
        reduced, tree = max(rate, 2 * (1 - 1 / local) * added), hops / 2
    if nodes > 1:
        pulling = 1 + efficiency.pooled * (local - 1)
        beyond = pulling * machine.network_bytes_per_second * efficiency.network
        # A ring over ranks sends (size - 1) / size of the bytes. If each node adds up its ranks'
        # numbers first, a ring over nodes sends only (nodes - 1) / nodes of them.
        reduced = min(beyond * (1 - 1 / size) / (1 - 1 / nodes), reduced) if local > 1 else None
        tree = (local - 1) * machine.link_seconds + math.log2(nodes) * machine.network_seconds
        rate = min(beyond, rate) if local > 1 else beyond
        words = f"network, {nodes} nodes, {local} rank(s) in each"
    return Link(size=size, bytes_per_second=rate, hops_seconds=hops, words=words,
                tree_seconds=tree, reduced_bytes_per_second=reduced)
