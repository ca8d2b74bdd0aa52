"""asv's page of the results that the documents quote, as a reader meets it. Needs chromium and npm, and a
network for npm: `nox -s browser`. With `GRADPARITY_SCREENSHOTS` set, pictures are left in that folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from asv.config import Config

from benchmarks.published import KINDS, publish
from browser.exhibits import BROWSER, WITHOUT

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason=WITHOUT),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm, which has the page's libraries, is missing"),
]

#: what the page takes from the network, by the file's name in its address: package of npm, file in it
LIBRARIES = {
    "jquery-3.3.1.min.js": ("jquery@3.3.1", "dist/jquery.min.js"),
    "jquery.flot.min.js": ("flot@0.8.3", "jquery.flot.js"),
    "jquery.flot.time.min.js": ("flot@0.8.3", "jquery.flot.time.js"),
    "jquery.flot.selection.min.js": ("flot@0.8.3", "jquery.flot.selection.js"),
    "jquery.flot.categories.min.js": ("flot@0.8.3", "jquery.flot.categories.js"),
    "jquery.flot.orderBars.js": ("flot-orderbars@1.0.0", "js/jquery.flot.orderBars.js"),
    "stupidtable.min.js": ("stupid-table-plugin@1.1.3", "stupidtable.min.js"),
    "md5.min.js": ("blueimp-md5@2.19.0", "js/md5.min.js"),
    "bootstrap.min.js": ("bootstrap@3.1.1", "dist/js/bootstrap.min.js"),
    "bootstrap.min.css": ("bootstrap@3.1.1", "dist/css/bootstrap.min.css"),
}
SHOWN = ("track_step_ratio", "time_step")
HERE = "http://page.test/"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of the page, and that of the libraries."""
    folder = tmp_path_factory.mktemp("asv")
    packages = {package for package, _ in LIBRARIES.values()}
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder)]
    subprocess.run([*install, *packages], check=True, capture_output=True)
    config = Config.load()
    config.results_dir, config.html_dir = str(folder / "results"), str(folder / "html")
    config.branches = ["HEAD"]
    html = publish(config)
    index = html / "index.html"  # npm's files are the same programs, not the same bytes
    index.write_text(re.sub(r' integrity="[^"]+"', "", index.read_text()))
    return html, folder / "node_modules"


@pytest.fixture
def page(browser: Any, files: tuple[Path, Path], request: pytest.FixtureRequest) -> Iterator[Any]:
    html, packages = files
    errors: list[str] = []

    def serve(route: Any) -> None:
        address = unquote(route.request.url.partition("?")[0])
        if address.startswith(HERE):
            path = html / (address.removeprefix(HERE) or "index.html")
        else:
            package, name = LIBRARIES[address.rpartition("/")[2]]
            path = packages / package.partition("@")[0] / name
        if path.is_file():
            route.fulfill(path=path)
        else:
            errors.append(f"{address} is missing")
            route.abort()

    context = browser.new_context(viewport={"width": getattr(request, "param", 1400), "height": 900})
    context.route("**/*", serve)
    opened = context.new_page()
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(HERE)
    yield opened
    if folder := os.environ.get("GRADPARITY_SCREENSHOTS"):
        opened.screenshot(path=Path(folder, re.sub(r"\W+", "-", request.node.name) + ".png"))
    context.close()
    assert errors == []


@pytest.mark.parametrize("page", [400, 1400], indirect=True)
def test_the_first_page_shows_every_benchmark(page: Any) -> None:
    for name in KINDS:
        page.locator("#summarygrid-display a", has_text=name.rpartition(".")[2]).first.wait_for()


@pytest.mark.parametrize("page", [400, 1400], indirect=True)
def test_the_list_shows_ratios_beside_times(page: Any) -> None:
    page.goto(HERE + "#/summarylist")
    page.locator("#summarylist-body tr", has_text="track_step_ratio").first.wait_for()
    rows = page.locator("#summarylist-body tr").all_inner_texts()
    of = {
        name: {row.split("\t")[0].partition(" ")[2] for row in rows if _has_value(row, name)}
        for name in SHOWN
    }
    assert of["track_step_ratio"]
    assert of["track_step_ratio"] <= of["time_step"]


def _has_value(row: str, name: str) -> bool:
    benchmark, value, *_ = row.split("\t")
    return f".{name} " in benchmark and value != ""


def test_a_ratio_is_drawn(page: Any) -> None:
    page.goto(HERE + "#training.track_step_ratio")
    page.locator("#main-graph canvas.flot-base").wait_for()
    ways = page.locator("#graphdisplay-navigation a.active", has_text="retrograd")
    assert ways.count() == 1, "the picture that comes first shows one way of ours"
