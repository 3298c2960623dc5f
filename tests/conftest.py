"""What several test files share: a small corpus, and one served JupyterLab and one Chromium for every browser test."""

import pytest

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i % 7}\n" for i in range(3000))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (folder / f"{i}.py").write_text(TEXT[i * 1000:(i + 30) * 1000])
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """(open, folder): `open(name)` opens a notebook of `folder` in a served JupyterLab, in a real browser."""
    from lpkit.bench.browser import Notebook, chromium, chromium_path, served

    if chromium_path() is None:
        pytest.skip("there is no chromium, chromium-browser or google-chrome on PATH")
    pytest.importorskip("playwright", reason="the browser is driven by playwright")
    folder = tmp_path_factory.mktemp("lab")
    with served(folder, tmp_path_factory.mktemp("state")) as server, chromium() as context:
        yield lambda name: Notebook(context, server, name), folder
