"""A served JupyterLab in a real Chromium, for tests and for looking.

`served(folder, state)` starts the kit's own server on a free port; `Notebook` opens one notebook in
the lab, runs it and says what went wrong: page errors, requests to another host, standard error,
failed cells. Nothing leaves 127.0.0.1.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import quote

from hosting.lab import Server, serve
from tests.attack import patience

HERE = re.compile(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:")
SETTINGS = {   # quiet, and every cell in the page whether it is in the viewport or not
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False,
                                                    "doNotDisturbMode": True},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "scrollPastEnd": False},
}


@contextmanager
def user(state: Path, config: Mapping[str, dict], settings: Mapping[str, dict]) -> Iterator[None]:
    """Somebody whose Jupyter keeps all in `state`: with `config` by class, in a file of its own
    beside others, and `settings` of JupyterLab by plugin."""
    folders = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "IPYTHONDIR": "ipython",
               "JUPYTERLAB_SETTINGS_DIR": "lab/settings",
               "JUPYTERLAB_WORKSPACES_DIR": "lab/workspaces"}
    where = {name: state.resolve() / place for name, place in folders.items()}
    files = {where["JUPYTER_CONFIG_DIR"] / f"jupyter_{which}_config.json": config
             for which in ("server", "lab")}
    for plugin, values in settings.items():
        files[where["JUPYTERLAB_SETTINGS_DIR"]
              / f"{plugin.replace(':', '/')}.jupyterlab-settings"] = values
    for path, values in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    with mock.patch.dict(os.environ, {name: str(path) for name, path in where.items()}):
        yield


@contextmanager
def served(folder: Path, state: Path) -> Iterator[Server]:
    """JupyterLab over `folder`, as `lpkit lab` serves it; what it writes about itself goes into
    `state`."""
    config = {"LabApp": {"expose_app_in_browser": True}, "ServerApp": {"terminals_enabled": False}}
    with user(state, config, SETTINGS), serve(folder) as server:
        yield server


class Notebook:
    """One notebook of `server` in a page of its own."""

    def __init__(self, context, server: Server, name: str):
        self.page = context.new_page()
        self.noted: list[str] = []      # while it was open
        self.page.on("pageerror", self._note_error)
        self.page.on("request", self._note_request)
        self.page.on("websocket", self._note_request)
        self.page.goto(server.url_of(quote(name)) + "&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000 * patience())
        # the toolbar says idle before a kernel is attached; running would open a dialog
        self.page.wait_for_function("""() => {
            const context = window.jupyterapp?.shell.currentWidget?.sessionContext;
            return context?.isReady && context.session?.kernel?.status === 'idle'
            }""", timeout=90_000 * patience())

    def _note_error(self, error: object) -> None:
        # anywidget's clock, on a page that was busy: a figure waits for nothing that it guards
        if "Failed to initialize model" not in str(error):
            self.noted.append(f"page error: {error}"[:500])

    def _note_request(self, request) -> None:
        if not HERE.match(request.url):
            self.noted.append(f"request to another host: {request.url}"[:200])

    def theme(self, name: str) -> None:
        """Of the lab: "Light" or "Dark"."""
        self.page.evaluate("theme => window.jupyterapp.commands.execute("
                           "'apputils:change-theme', {theme})", f"JupyterLab {name}")

    def command(self, name: str) -> None:
        """Start a command of the lab, without waiting: `evaluate` has no timeout."""
        self.page.evaluate("name => { window.lpkitDone = false; "
                           "window.jupyterapp.commands.execute(name).finally(() => { "
                           "window.lpkitDone = true }) }", name)

    def run(self, *, seconds: float = 120) -> None:
        """Run all cells, and wait until the last has ended or one has failed."""
        self.command("notebook:run-all-cells")
        self.page.wait_for_function("() => window.lpkitDone", timeout=seconds * 1000 * patience())

    def settle(self) -> None:
        """Until every figure of the kit is drawn."""
        self.page.wait_for_function("""() => [...document.querySelectorAll('.lpkit-figure')].every(
            figure => figure.dataset.drawn)""", timeout=60_000 * patience())

    def outputs(self) -> list[dict]:
        """Of all code cells, as nbformat has them, each with the number of its `cell`."""
        return self.page.evaluate("""() =>
            window.jupyterapp.shell.currentWidget.content.widgets.flatMap((cell, i) =>
                cell.model.type !== 'code' ? [] :
                    cell.model.outputs.toJSON().map(output => ({...output, cell: i})))""")

    def problems(self) -> list[str]:
        """What should not have happened, one sentence each."""
        problems = list(self.noted)
        for output in self.outputs():
            if output.get("name") == "stderr":
                problems.append(f"cell {output['cell']} wrote to standard error: "
                                f"{''.join(output['text'])[:2000]}")
            if output["output_type"] == "error":
                problems.append(f"cell {output['cell']} failed: {output['ename']}: "
                                f"{output['evalue']}")
        bad = ".jp-OutputArea-output:has-text('Error displaying widget'), .jp-mod-unsupported"
        problems += [f"the page says: {text.strip()[:200]}"
                     for text in self.page.locator(bad).all_inner_texts()]
        return problems

    def close(self) -> None:
        """Shut the kernel down, and close the page."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()
