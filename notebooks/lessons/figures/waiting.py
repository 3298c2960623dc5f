"""The progress of a cell that takes longer than three seconds."""

import time
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from IPython.display import display

from lpkit.tables import FONT, QUIET


def progress(steps: Sequence[Any]) -> Iterator[Any]:
    """Yield the steps one by one. A line below the cell shows how many steps are done and the
    estimated seconds left; after the last step, it shows the seconds that all steps took. Write
    `for step in progress(steps)` in a cell, or pass `watch=progress` to a function that runs for
    long."""
    began, done = time.perf_counter(), 0
    line = display(_shown(0, len(steps), 0.0), raw=True, display_id=True)

    def show(over: bool) -> None:
        if line:
            spent = time.perf_counter() - began
            line.update(_shown(done, len(steps), spent, over), raw=True)

    try:
        for step in steps:
            yield step
            done += 1
            show(done == len(steps))
    finally:
        if done < len(steps):       # the caller stopped early
            show(True)


def _shown(done: int, count: int, seconds: float, over: bool = False) -> dict[str, str]:
    """Return the output for IPython's display, by mime type, after `done` of `count` steps."""
    message = f"{done} of {count} parts"
    if over:
        message += f" took {seconds:.1f} s."
    elif done:
        message += f", {seconds / done * (count - done):.0f} s to go"
    bar = f"<progress value='{done}' max='{count}'></progress> "
    style = f"font:13px {escape(FONT)};color:{QUIET}"
    return {"text/plain": message,
            "text/html": f"<span style='{style}'>{bar * (not over)}{message}</span>"}
