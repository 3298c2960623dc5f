"""A real Chromium, and a folder of files for it: `chromium()` starts the browser that is installed,
and `static(folder)` a server on a free port. Nothing leaves 127.0.0.1."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--no-first-run", "--no-default-browser-check", "--disable-extensions",
         "--font-render-hinting=none", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(*, width: int = 1200, height: int = 1000) -> Iterator:
    """A context of Playwright on the installed Chromium; pages have `width` x `height` pixels."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            yield browser.new_context(viewport={"width": width, "height": height},
                                      accept_downloads=False)
        finally:
            browser.close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def static(folder: Path) -> Iterator[str]:
    """The address of `folder`'s files, served as any static host does."""
    here = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), here) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
