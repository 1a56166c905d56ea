"""The report in a headless Chromium: what can be moved, clicked and typed, in both themes, on a phone and on paper."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.reproduced import EXPERIMENTS, write_reproduced
from pullback.report.reproduced import write_report
from pullback.runs.files import read_arrays

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: make venv installs it")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: make browser installs it"),
    pytest.mark.xdist_group("browser"),
]
COMPUTED = "(element, name) => getComputedStyle(element).getPropertyValue(name)"
CONTRAST = """(selector) => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => numbers(colour).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const paper = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return (numbers(colour)[3] ?? 1) > 0.99 ? colour : paper(element.parentElement);
  };
  return [...document.querySelectorAll(selector)].map((element) => {
    const style = getComputedStyle(element);
    const drawn = element.closest("svg");
    const [one, other] = [light(drawn ? style.fill : style.color), light(paper(drawn ?? element))];
    return (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  });
}"""
TEXTS = (
    *(
        "h1",
        ".eyebrow",
        ".lead",
        "dl.facts dt",
        "dl.facts dd",
        "nav a",
        "nav summary",
        ".note",
        "a",
        "footer",
        "summary",
    ),
    *(".sentence", ".why", ".where", ".mark-of", ".share i", ".filter label", ".about", "pre", ".copy", "caption"),
    *("thead th", "tbody th", "td b", "td small", "td.of-paper", ".none", ".change", ".notes li", ".footnotes li"),
    *(".plot text", ".key label", "figcaption", "figcaption h3", ".said", ".side span"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A report with everything in it: compared with another run, and with an unfinished experiment."""
    root = tmp_path_factory.mktemp("browser")
    then, now = write_reproduced(root / "then"), write_reproduced(root / "now", shift=0.5, seed=1)
    (now / "unfinished").mkdir()
    (now / "unfinished" / "rows.jsonl").touch()
    write_report(now, then, order=EXPERIMENTS)
    return now


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as tools:
        started = tools.chromium.launch(executable_path=CHROMIUM)
        yield started
        started.close()


@pytest.fixture
def open_page(browser, folder) -> Iterator[Any]:
    """A function that opens the report. What went wrong, and every request, is looked at when the test ends."""
    contexts, requests, errors = [], [], []

    def opened(**options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((folder / "report.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == [] and requests
    assert all(url.startswith(("file://", "data:")) for url in requests)


def computed(locator: Any, name: str) -> str:
    return locator.evaluate(COMPUTED, name)


def visible_claims(page: Any) -> list[str]:
    return [claim.locator(".sentence").inner_text() for claim in page.locator(".claim").all() if claim.is_visible()]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_its_paper(open_page, theme):
    page = open_page(color_scheme=theme)
    for selector in TEXTS:
        contrasts = page.evaluate(CONTRAST, selector)
        assert contrasts and min(contrasts) >= 4.5, (selector, min(contrasts, default=None))


def test_the_page_follows_the_system_and_the_button_turns_it_around(open_page):
    page = open_page(color_scheme="light")
    body = page.locator("body")
    light = computed(body, "background-color")
    page.emulate_media(color_scheme="dark")
    dark = computed(body, "background-color")
    assert light == "rgb(246, 248, 250)" and dark == "rgb(13, 17, 23)"
    page.get_by_role("button", name="Switch between light and dark").click()
    assert computed(body, "background-color") == light
    page.reload()
    assert computed(body, "background-color") == light, "the choice is remembered"
    page.emulate_media(color_scheme="light")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert computed(body, "background-color") == dark


def test_the_slider_fades_the_maps_and_the_box_draws_the_outlines(open_page):
    page = open_page()
    layer = page.locator(".layer").first
    assert computed(layer, "opacity") == "0.6"
    slider = page.get_by_role("slider", name="Map over the picture")
    slider.fill("25")
    assert computed(layer, "opacity") == "0.25" and page.locator("output").inner_text() == "25 %"
    slider.press("ArrowRight")
    assert computed(layer, "opacity") == "0.26"
    edge, box = page.locator(".edge").first, page.get_by_role("checkbox", name="outline the top 25 %")
    assert computed(edge, "display") != "none"
    box.press("Space")
    assert computed(edge, "display") == "none"


def test_the_divider_is_dragged_and_moved_by_keys(open_page):
    page = open_page()
    stage, after = page.locator(".stage").first, page.locator(".after").first
    assert computed(after, "clip-path") == "inset(0px 0px 0px 50%)"
    stage.scroll_into_view_if_needed()
    box = stage.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    moved = page.get_by_role("slider", name="Divider between before and after, picture 1")
    assert abs(int(moved.input_value()) - 20) <= 1
    moved.fill("30")
    moved.press("ArrowRight")
    assert computed(after, "clip-path") == "inset(0px 0px 0px 31%)"
    line = page.locator(".divider").first.bounding_box()
    assert abs(line["x"] + line["width"] / 2 - box["x"] - 0.31 * box["width"]) < 2
    assert computed(page.locator(".after").nth(1), "clip-path") == "inset(0px 0px 0px 50%)", "each has its own"


def test_a_click_on_a_patch_and_the_arrow_keys_show_its_neighbours(open_page, folder):
    page = open_page()
    nearest = read_arrays(folder / "output-metric" / "arrays" / "near.npz")["nearest"]  # [m, n, patches, k]
    near = page.locator(".near").first
    sides = near.locator("svg")

    def shown(side: int) -> list[int]:
        """The marked patches, the nearest first."""
        places = [hit.get_attribute("transform") for hit in sides.nth(side).locator(".hit").all()]
        pairs = [re.fullmatch(r"translate\((\d+) (\d+)\)", place).groups() for place in places]
        return [int(row) * 8 + int(column) for column, row in reversed(pairs)]

    assert shown(0) == nearest[0, 0, 36].tolist() and shown(1) == nearest[1, 0, 36].tolist()
    sides.nth(0).scroll_into_view_if_needed()
    box = sides.nth(0).bounding_box()
    page.mouse.click(box["x"] + 1.5 / 8 * box["width"], box["y"] + 2.5 / 8 * box["height"])
    assert shown(0) == nearest[0, 0, 17].tolist() and shown(1) == nearest[1, 0, 17].tolist()
    common = len(set(nearest[0, 0, 17]) & set(nearest[1, 0, 17]))
    said = near.locator("[aria-live]")
    assert said.inner_text().startswith(f"Patch in row 3, column 2; {common} of the 5 nearest are the same.")

    near.get_by_role("application").focus()
    for key in ("ArrowDown", "ArrowLeft", "ArrowLeft"):  # the last one would leave the picture
        page.keyboard.press(key)
    assert shown(1) == nearest[1, 0, 24].tolist() and "row 4, column 1" in said.inner_text()
    other = page.locator(".near").nth(1).locator("[aria-live]")
    assert "row 5, column 5" in other.inner_text(), "each picture has its own"


def test_verdicts_are_filtered_without_reload(open_page):
    page = open_page()
    assert len(visible_claims(page)) == 5
    page.get_by_text("does not hold 2").first.click()
    assert visible_claims(page) == [
        "Importance has the lowest degradation at every ratio.",
        "ToMe’s score is worse than random.",
    ]
    assert page.locator("#shown").inner_text() == "2 of 5 claims shown"
    page.keyboard.press("ArrowRight")
    assert len(visible_claims(page)) == 1 and page.locator("#show-not-at-this-scale").is_checked()
    page.get_by_role("radio", name="all 5").check()
    assert len(visible_claims(page)) == 5


def test_a_curve_is_hidden_and_shown_by_its_entry_in_the_key(open_page):
    page = open_page()
    figure = page.locator(".of-curves").first
    curves = figure.locator(".wide-only .k1")
    entry = figure.get_by_role("checkbox", name="tiny-scenes: ToMe score")
    assert curves.is_visible()
    entry.press("Space")
    assert not curves.is_visible() and figure.locator(".wide-only .k0").is_visible()
    entry.press("Space")
    assert curves.is_visible()


def test_a_command_is_copied_or_selected(open_page):
    page = open_page()
    button = page.locator("#taxonomy .copy")
    button.click()
    playwright.expect(button).not_to_have_text("Copy")
    if button.inner_text() == "Selected":
        assert page.evaluate("String(getSelection())") == "pullback reproduce taxonomy --scale tiny --out DIR"


@pytest.mark.parametrize("width", [320, 390, 700])
def test_on_a_phone_only_tables_scroll_sideways(open_page, width):
    page = open_page(viewport={"width": width, "height": 844}, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not page.locator(".contents ol").is_visible(), "the contents start closed"
    wide = page.locator("#cls-pruning .scroll").first
    if width < 700:
        assert wide.evaluate("box => box.scrollWidth > box.clientWidth")
        assert (
            page.locator(".narrow-only svg").first.is_visible()
            and not page.locator(".wide-only svg").first.is_visible()
        )


def test_it_is_walked_through_with_the_keyboard(open_page):
    page = open_page()
    page.keyboard.press("Tab")
    skip = page.locator(":focus")
    assert skip.inner_text() == "Skip to the verdicts" and skip.bounding_box()["x"] >= 0
    assert computed(skip, "outline-style") == "solid"
    page.keyboard.press("Enter")
    page.evaluate("seen = []; addEventListener('focusin', ({target}) => seen.push(target.className || target.type))")
    for _ in range(90):
        page.keyboard.press("Tab")
    seen = set(page.evaluate("seen"))
    for name in ("radio", "copy js-only", "fade", "outlined", "js-only", "board", "checkbox"):
        assert name in seen, f"{name} can be reached, of {seen}"
    assert computed(page.locator("html"), "scroll-behavior") == "smooth"
    page.emulate_media(reduced_motion="reduce")
    assert computed(page.locator("html"), "scroll-behavior") == "auto"


def test_on_paper_everything_is_there_and_nothing_to_click(open_page):
    page = open_page(color_scheme="dark")
    page.get_by_text("does not hold 2").first.click()
    page.get_by_role("checkbox", name="tiny-scenes: ToMe score").press("Space")
    page.emulate_media(media="print")
    assert len(visible_claims(page)) == 5 and page.locator(".of-curves .wide-only .k1").first.is_visible()
    for selector in ("nav", ".copy", ".filter", ".tools", ".divider", ".stage input"):
        assert not page.locator(selector).first.is_visible(), selector
    before, after = (page.locator(selector).first.bounding_box() for selector in (".before", ".after"))
    assert before["x"] + before["width"] <= after["x"] + 1, "side by side"
    assert computed(page.locator(".after").first, "clip-path") == "none"
    assert (
        page.locator(".origins td").first.is_visible() and computed(page.locator("body"), "color") == "rgb(31, 35, 40)"
    )


def test_without_scripts_everything_can_be_read(open_page):
    page = open_page(java_script_enabled=False)
    assert all(not slider.is_visible() for slider in page.locator("input[type=range], .js-only").all())
    before, after = (page.locator(selector).first.bounding_box() for selector in (".before", ".after"))
    assert before["x"] + before["width"] <= after["x"] + 1
    assert page.locator(".near .hit").first.is_visible() and page.locator(".layer").first.is_visible()
    page.locator("label:has(#show-holds)").click()
    assert visible_claims(page) == ["The head agrees with the target."], "the filter needs no script"
