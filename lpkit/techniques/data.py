"""Data policies: which tokens are seen, in what order. The implementation is a
contracts.DataPolicy, made of (tokens, batch, context, seed)."""

from lpkit.techniques.row import Row

POLICIES = {
    "random-windows": Row(why="windows drawn uniformly, with replacement",
                          implementation="lpkit.datasets.policies:RandomWindows"),
    "sequential-windows": Row(why="every window once, in the order of the corpus, then again",
                              implementation="lpkit.datasets.policies:SequentialWindows"),
    "spread-windows": Row(why="every window once, any few of them a fair sample of the corpus",
                          implementation="lpkit.datasets.policies:SpreadWindows"),
}
EVALUATION = "spread-windows"
