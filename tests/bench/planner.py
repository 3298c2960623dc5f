"""The planner's page in Chromium, against its budgets: from the navigation to the first answer,
with empty caches; and from an input to its drawing, at the median over every step of every slider.

The page is made by docs/make_planner.py of a checkout, and served on this machine.
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lpkit.errors import ConfigError
from lpkit.files import PACKAGE
from tests.bench.browser import chromium, chromium_path, static
from tests.bench.harness import ROUNDS, Result, paired

FIRST_SECONDS, MOVE_SECONDS = 12.0, 0.05
# Every slider to each of its steps and back to where it was.
MOVES = """() => {
    performance.clearMeasures('move');
    for (const range of document.querySelectorAll('input[type=range]')) {
        const was = range.value, steps = [...Array(Number(range.max) + 1).keys()];
        for (const step of [...steps, was]) {
            range.value = step;
            range.dispatchEvent(new Event('input', {bubbles: true}));
        }
    }
    return performance.getEntriesByName('move').map(move => move.duration / 1000);
}"""


def run(rounds: int = ROUNDS) -> list[Result]:
    """Errors: ConfigError where the page cannot be made, or there is no browser."""
    if chromium_path() is None:
        raise ConfigError("there is no chromium, chromium-browser or google-chrome on PATH")
    firsts, moves = [], []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        with static(Path(folder)) as address:
            for _ in range(rounds):
                with chromium() as context:     # a browser that has seen nothing
                    page = context.new_page()
                    firsts.append(first_seconds(page, address))
                    moves.append(statistics.median(page.evaluate(MOVES)))
    common = {"better": "lower", "target": 1.0, "packages": ("playwright",)}
    return [paired("planner", case="first answer, cold", ours=firsts,
                   peer=[FIRST_SECONDS] * rounds, peer_name="a budget of 12 s", **common),
            paired("planner", case="a move", ours=moves, peer=[MOVE_SECONDS] * rounds,
                   peer_name="a budget of 50 ms", **common)]


def make(folder: Path) -> None:
    """The page into `folder`. Raises ConfigError with what it lacks."""
    script = PACKAGE.parent / "docs" / "make_planner.py"
    done = subprocess.run([sys.executable, script, folder], stderr=subprocess.PIPE,
                          text=True)
    if done.returncode:
        raise ConfigError(done.stderr.strip())


def first_seconds(page, address: str) -> float:
    """Open the planner at `address` and wait for its first answer."""
    page.goto(address)
    page.wait_for_function("() => performance.getEntriesByName('first').length", timeout=120_000)
    return page.evaluate("performance.getEntriesByName('first')[0].duration") / 1000
