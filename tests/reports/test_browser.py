"""The report in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright
from pypdf import PdfReader
from run_builder import RunSpec, build_run
from test_history import store

from reports import render, render_history, render_together
from reports.sections import SECTIONS

FLAGS = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is not installed; the pipeline must run `apt-get install chromium` before the tests")
        pytest.skip("chromium is not installed (apt-get install chromium); the report was not looked at in a browser")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=[*FLAGS, "--disable-sync"], chromium_sandbox=False)
        yield launched
        launched.close()


class Watched:
    """A page with everything it logged, threw and asked the network for."""

    def __init__(self, browser: Browser, folder: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page: Page = self.context.new_page()
        self.console: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.console.append(message.text))
        self.page.on("pageerror", lambda error: self.console.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto((folder if folder.is_file() else folder / "report.html").as_uri())


@pytest.fixture
def show(browser: Browser) -> Iterator[Any]:
    opened: list[Watched] = []

    def watched(folder: Path, **options: Any) -> Watched:
        opened.append(Watched(browser, folder, **options))
        return opened[-1]

    yield watched
    for one in opened:
        one.context.close()


@pytest.mark.parametrize("name", ["plain", "hostile", "failed"])
def test_nothing_is_logged_requested_or_run(rendered: dict[str, Path], show: Any, name: str) -> None:
    watched = show(rendered[name])
    assert watched.console == []
    outside = [url for url in watched.requests if not url.startswith(("file:", "data:"))]
    assert outside == []
    assert watched.page.evaluate("window.pwned") is None


@pytest.mark.parametrize("name", ["plain", "hostile", "failed"])
def test_a_phone_never_scrolls_sideways(rendered: dict[str, Path], show: Any, name: str) -> None:
    page = show(rendered[name], viewport={"width": 390, "height": 844}).page
    assert page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.parametrize("verdict", ["enable", "skip", "enable_below_batch", "no_clear_winner", "not_measurable"])
def test_the_answer_is_whole_on_screen_and_in_print(tmp_path: Path, show: Any, verdict: str) -> None:
    folder = build_run(tmp_path / "run", RunSpec(requests=12, k=(1, 3), batch_sizes=(1, 16), verdict=verdict))
    render([folder])
    page = show(folder).page
    for medium in ("screen", "print"):
        page.emulate_media(media=medium)
        box = page.locator("section.answer").bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 1280
        assert page.locator("section.answer h2").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plain", "hostile", "failed"])
def test_axe_finds_no_serious_fault_and_text_has_contrast(rendered: dict[str, Path], show: Any, name: str, scheme: str) -> None:
    page = show(rendered[name], color_scheme=scheme).page
    found = Axe().run(page).response["violations"]
    serious = [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]
    assert serious == []


def test_the_browser_tests_see_every_section_there_is(rendered: dict[str, Path], show: Any) -> None:
    titles = [show(rendered[name]).page.locator("section.block h2").all_inner_texts() for name in ("plain", "hostile")]
    assert {title for page in titles for title in page} == {section.title for section in SECTIONS}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_what_is_folded_away(rendered: dict[str, Path], show: Any, scheme: str) -> None:
    page = show(rendered["hostile"], color_scheme=scheme).page
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.locator("#funnel details[open] li").count() == 1
    found = Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:120]) for v in found if v["impact"] in ("serious", "critical")] == []


@pytest.fixture(scope="module")
def other_pages(rendered: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Several runs side by side, and the trend of stored gates."""
    folder = tmp_path_factory.mktemp("pages")
    render_together([rendered["plain"], rendered["hostile"]], folder / "together.html")
    for day in range(1, 13):
        store(folder / "gates", day, slow=1.08 if day >= 8 else 1.0)
    return [folder / "together.html", render_history(folder / "gates")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_pages_over_several_runs_are_as_sound(other_pages: list[Path], show: Any, scheme: str) -> None:
    for path in other_pages:
        watched = show(path, color_scheme=scheme, viewport={"width": 390, "height": 844})
        assert watched.console == []
        assert watched.page.evaluate("document.documentElement.scrollWidth") == 390
        found = Axe().run(watched.page).response["violations"]
        assert [
            (path.name, v["id"], v["nodes"][0]["html"][:120]) for v in found if v["impact"] in ("serious", "critical")
        ] == []


def test_the_data_behind_a_trend_downloads_as_csv(other_pages: list[Path], show: Any) -> None:
    page = show(other_pages[1]).page
    with page.expect_download() as started:
        page.locator("button.csv").first.click()
    assert len(Path(started.value.path()).read_text(encoding="utf-8").splitlines()) == 13  # twelve gates and their heads


CONTRAST = """(names) => {
  const luminance = (colour) => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const style = getComputedStyle(document.documentElement);
  const of = (name) => luminance(style.getPropertyValue(name));
  return names.map(([a, b]) => { const [x, y] = [of(a), of(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_can_be_read_in_both_schemes(rendered: dict[str, Path], show: Any, scheme: str) -> None:
    page = show(rendered["plain"], color_scheme=scheme).page
    text = [("--ink", "--surface"), ("--muted", "--surface"), ("--predicted", "--surface")]
    text += [("--heat-ink", f"--{step}") for step in ("p1", "p2", "p3", "p4", "n1", "n2", "n3", "n4", "tie")]
    ratios = dict(zip(text, page.evaluate(CONTRAST, text), strict=True))
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    lines = [(f"--s{i}", "--surface") for i in range(1, 9)]
    assert min(page.evaluate(CONTRAST, lines)) >= 3  # graphics, WCAG 1.4.11


def visible_trials(page: Page) -> list[str]:
    rows = page.locator("#trial-table tbody tr:not([hidden])").all()
    return [row.locator("td").first.locator("bdi").first.inner_text() for row in rows]


def sort_keys(page: Page, column: str) -> list[float | None]:
    return page.evaluate(  # type: ignore[no-any-return]
        """(title) => {
          const heads = [...document.querySelectorAll("#trial-table thead th")];
          const at = heads.findIndex((h) => h.textContent === title);
          return [...document.querySelectorAll("#trial-table tbody tr")].map((r) => {
            const key = r.cells[at]?.dataset.sort; return key === undefined ? null : Number(key); });
        }""",
        column,
    )


def test_the_trial_table_sorts_with_empty_cells_last(rendered: dict[str, Path], show: Any) -> None:
    page = show(rendered["plain"]).page
    for ascending in (True, False):
        page.get_by_role("button", name="E2E p50 ms").click()
        keys = sort_keys(page, "E2E p50 ms")
        known = [k for k in keys if k is not None]
        assert known == sorted(known, reverse=not ascending)
        assert keys == [*known, None, None]  # the failed and the refused trial
    assert page.locator("th[aria-sort=descending]").inner_text() == "E2E p50 ms"


def test_the_trial_table_filters(rendered: dict[str, Path], show: Any) -> None:
    page = show(rendered["plain"]).page
    everything = len(visible_trials(page))
    page.get_by_label("State").select_option("FAIL")
    assert len(visible_trials(page)) == 1
    page.get_by_label("State").select_option("")
    page.get_by_label("Variant").select_option("off")
    off = len(visible_trials(page))
    assert 0 < off < everything
    page.get_by_role("searchbox").fill("confirm")
    assert 0 < len(visible_trials(page)) < off
    assert page.locator("#filter-count").inner_text() == f"{len(visible_trials(page))} of {everything} trials"


def test_the_data_behind_a_figure_downloads_as_csv(rendered: dict[str, Path], show: Any) -> None:
    page = show(rendered["plain"]).page
    with page.expect_download() as started:
        page.locator("#positions-0 button.csv").click()
    lines = Path(started.value.path()).read_text(encoding="utf-8").splitlines()
    assert started.value.suggested_filename == "positions-0.csv"
    assert lines[:2] == ["configuration,draft_position,marginal_acceptance", '"n-gram, K = 5",1,0.55']


@pytest.mark.parametrize("name", ["plain", "hostile"])
def test_the_print_has_every_section(rendered: dict[str, Path], show: Any, name: str) -> None:
    page = show(rendered[name]).page
    reader = PdfReader(io.BytesIO(page.pdf(prefer_css_page_size=True)))
    text = " ".join(" ".join(sheet.extract_text() for sheet in reader.pages).split())
    shown = page.locator("section.block h2").all_inner_texts()
    assert set(shown) <= {section.title for section in SECTIONS}
    assert len(shown) >= 12
    assert [title for title in ["Turn speculative decoding on below batch size 17", *shown] if title not in text] == []
