"""The page in a real browser: no error, every view by its link, keys, both schemes, a phone, 1,024 ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.report.page.samples import HOSTILE, big_run, rank, write_run
from tpcompile.report.page.html import page
from tpcompile.report.page.of_run import evidence_of_run
from tpcompile.report.page.view import view_of

pytestmark = [pytest.mark.slow, pytest.mark.long]
api = pytest.importorskip("playwright.sync_api", reason="playwright is in the dev group")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECTIONS = ["verdict", "differences", "timeline", "ranks", "guards", "fusion", "environment", "checks"]


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    if BROWSER is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of a small run, of one with hostile names and of one with 1,024 ranks."""
    folder = tmp_path_factory.mktemp("pages")
    runs = {
        "small": write_run(folder / "small", [rank(0), rank(1, factor=3)]),
        "hostile": write_run(folder / "hostile", [rank(0, name=HOSTILE), rank(1, factor=3, name=HOSTILE)]),
        "big": big_run(folder / "big", 1024, odd=700),
    }
    made = {}
    for name, run in runs.items():
        verdict = run.read_verdict()
        assert verdict is not None
        made[name] = folder / f"{name}.html"
        made[name].write_text(page(view_of(evidence_of_run(run, verdict))))
    return made


Open = Callable[..., "api.Page"]

CONTRAST = """() => {
  const channel = (v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (at) => {
    for (; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const hasText = (at) => [...at.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  let worst = [99, ""];
  for (const at of document.querySelectorAll("body *")) {
    if (!hasText(at) || at.closest("svg, script, dialog") || !at.offsetParent) continue;
    const [a, b] = [light(parse(getComputedStyle(at).color)), light(ground(at))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, at.outerHTML.slice(0, 80)];
  }
  return worst;
}"""
"""The lowest ratio of light between a text and what is behind it, and the element."""


@pytest.fixture
def opened(browser: api.Browser, files: dict[str, Path]) -> Iterator[Open]:
    """Opens a page; at the end no page has had an error."""
    problems: list[str] = []
    contexts = []

    def open_page(name: str, part: str = "", **options: object) -> api.Page:
        context = browser.new_context(**options)
        contexts.append(context)
        shown = context.new_page()
        shown.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        shown.on("pageerror", lambda error: problems.append(str(error)))
        shown.on(
            "request", lambda asked: None if asked.url.startswith(("file:", "data:")) else problems.append(asked.url)
        )
        shown.goto(f"file://{files[name]}{part}")
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def top(shown: api.Page, selector: str) -> float:
    """How far an element is from the upper edge of the window, in pixels."""
    return float(shown.evaluate("(it) => document.querySelector(it).getBoundingClientRect().top", selector))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_view_has_a_link_of_its_own(opened: Open, section: str) -> None:
    shown = opened("small", f"#{section}", viewport={"width": 1000, "height": 300})
    assert -5 <= top(shown, f"#{section}") < 300


def test_the_first_difference_is_in_view_by_its_link(opened: Open) -> None:
    shown = opened("small", "#difference-1", viewport={"width": 1200, "height": 900})
    row = shown.locator("#difference-1 tr.differs").first
    assert row.is_visible() and 0 < top(shown, "#difference-1 tr.differs") < 900


def test_the_timeline_zooms_by_keys_and_its_link_keeps_what_is_shown(opened: Open) -> None:
    shown = opened("small", "#timeline")
    whole = shown.inner_html("#chart")
    shown.focus("#chart")
    shown.keyboard.press("+")
    shown.keyboard.press("ArrowRight")
    shown.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    link = shown.evaluate("location.hash")
    assert link.startswith("#timeline=")
    assert opened("small", link).inner_html("#chart") == shown.inner_html("#chart") != whole
    shown.keyboard.press("0")
    shown.wait_for_function("location.hash === '#timeline'")


def test_keys_lead_to_sections_differences_guards_and_help(opened: Open) -> None:
    shown = opened("small")
    shown.keyboard.press("4")
    assert shown.evaluate("location.hash") == "#ranks"
    shown.keyboard.press("n")
    assert shown.evaluate("location.hash") == "#difference-1"
    shown.keyboard.press("/")
    shown.keyboard.type("scale")
    assert shown.locator("#all-guards tbody tr").count() == 2  # one guard, two values
    assert shown.locator("#all-guards tr.differs").count() == 2
    shown.keyboard.press("Tab")
    shown.evaluate("document.activeElement.blur()")
    shown.keyboard.press("?")
    assert shown.locator("#help").is_visible()


def test_a_reader_without_a_mouse_reaches_everything_with_tab(opened: Open) -> None:
    shown = opened("small")
    reached = set()
    for _ in range(60):
        shown.keyboard.press("Tab")
        reached.add(shown.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 20)"))
    assert {"theme", "chart", "timeline", "checks"} <= reached


def test_ranks_are_chosen_by_click_and_arrow_and_by_layer(opened: Open) -> None:
    shown = opened("big", "#ranks=graph")
    boxes = shown.locator("#grid .picture rect")
    assert boxes.count() == 1024
    assert shown.locator("#grid .picture rect.g1").count() == 1
    shown.locator("#grid .picture rect.g1").click()
    assert "rank 700" in shown.locator("#rank").inner_text()
    shown.focus("#grid .picture")
    shown.keyboard.press("ArrowRight")
    assert "rank 701" in shown.locator("#rank").inner_text()
    shown.get_by_role("button", name="collectives").click()
    assert shown.locator("#grid .picture rect.g1").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(opened: Open, scheme: str) -> None:
    """Contrast of WCAG AA for all text, at least 4.5 to 1."""
    shown = opened("small", color_scheme=scheme)
    worst = shown.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst


def test_a_phone_scrolls_in_one_direction(opened: Open) -> None:
    for name in ("small", "big", "hostile"):
        shown = opened(name, viewport={"width": 375, "height": 700})
        assert shown.evaluate("document.documentElement.scrollWidth") <= 375


def test_hostile_names_do_not_run(opened: Open) -> None:
    shown = opened("hostile", "#guards=owned")
    assert "owned" not in shown.title()
    assert shown.locator("#all-guards tbody tr").count() == 2
    assert shown.locator("img").count() == 0


def test_the_verdict_is_readable_without_javascript(opened: Open) -> None:
    shown = opened("small", java_script_enabled=False)
    assert shown.locator("#verdict .cause").is_visible()
    assert shown.locator("#difference-1 tr.differs").first.is_visible()
    assert not shown.locator("#theme").is_visible()


def test_on_paper_all_is_open(opened: Open) -> None:
    shown = opened("small")
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert shown.locator("details:not([open])").count() == 0
