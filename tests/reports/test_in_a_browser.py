"""The pages in a real browser: Debian's Chromium without a window, driven by Playwright."""

import re
import shutil

import pytest
from built import EVIL
from playwright.sync_api import sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here: the pages are not tried in a browser"
    ),
]


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium):
    """Opens a page in a window of its own, without a network; collects what went wrong in it."""
    contexts = []

    def open_page(file, **options):
        context = chromium.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.wrong = []
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("console", lambda m: page.wrong.append(m.text) if m.type == "error" else None)
        page.on("dialog", lambda dialog: page.wrong.append("a dialog opened"))
        page.on("requestfailed", lambda request: page.wrong.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def report(visit, site):
    return lambda **options: visit(site / "site/quickstart/index.html", **options)


def shown(page, table):
    """Return the texts of the rows of a table that can be seen."""
    rows = page.locator(f"#{table} tbody tr:visible")
    return [row.split("\t") for row in rows.evaluate_all("rows => rows.map(r => r.innerText)")]


def contrast(page, selector):
    """Return the contrast of a text with the page, as WCAG 2 defines it."""
    colours = page.locator(selector).first.evaluate(
        "e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]"
    )

    def luminance(text):
        parts = [int(part) / 255 for part in re.findall(r"\d+", text)[:3]]
        parts = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    dark, light = sorted(map(luminance, colours))
    return (light + 0.05) / (dark + 0.05)


def test_a_page_opens_offline_and_asks_for_nothing(report):
    page = report()
    assert page.wrong == []
    sizes = page.locator("figure img").evaluate_all("all => all.map(i => i.naturalWidth)")
    assert len(sizes) >= 5
    assert min(sizes) > 100  # every figure is there


def test_tables_sort_by_a_click_on_a_heading(report):
    page = report()
    heads = page.locator("#t-summary thead th").all_inner_texts()
    column = heads.index("final score")
    button = page.locator("#t-summary thead th button").nth(column)
    orders = []
    for direction in ("ascending", "descending"):
        button.click()
        assert (
            page.locator("#t-summary thead th").nth(column).get_attribute("aria-sort") == direction
        )
        cells = page.locator(f"#t-summary tbody td:nth-child({column + 1})")
        orders.append([float(v) for v in cells.evaluate_all("c => c.map(x => x.dataset.sort)")])
    assert len(orders[0]) == 8
    assert orders[0] == sorted(orders[0])
    assert orders[1] == sorted(orders[0], reverse=True)


def test_tables_filter_by_what_is_typed(report):
    page = report()
    page.locator("#runs > details > summary").click()
    assert len(shown(page, "t-runs")) == 24
    page.locator("input[data-table=t-runs]").fill("Catch-v0 synchronous")
    rows = shown(page, "t-runs")
    assert len(rows) == 6
    assert {(row[0], row[1]) for row in rows} == {("Catch-v0", "Cleanba PPO (synchronous)")}
    page.locator("input[data-table=t-runs]").fill("")
    assert len(shown(page, "t-runs")) == 24


def test_figures_enlarge_by_click_and_by_key_and_close_again(report):
    page = report()
    image = page.locator("figure img").first
    small = image.bounding_box()["width"]
    dialog = page.locator("dialog")
    for enlarge in (image.click, lambda: image.press("Enter")):
        enlarge()
        assert dialog.is_visible()
        assert dialog.locator("img").bounding_box()["width"] > small
        page.keyboard.press("Escape")
        assert not dialog.is_visible()
    image.click()
    dialog.click()
    assert not dialog.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_readable_by_day_and_by_night(report, scheme):
    page = report(color_scheme=scheme)
    for selector in ("h1", "p", ".dim", "figcaption", "a", ".good", ".bad", "td"):
        assert contrast(page, selector) > 4.5, selector
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(22, 24, 27)")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_makes_the_page_scroll_sideways(report, width):
    page = report(viewport={"width": width, "height": 800})
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0


def test_on_paper_all_tables_are_open_and_whole_and_nothing_is_to_be_clicked(report):
    page = report(viewport={"width": 718, "height": 1000})  # A4 between its margins
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("section > details:not([open])").count() == 0
    assert page.locator("nav:visible, .filter:visible").count() == 0
    widths = page.locator("table").evaluate_all(
        "all => all.map(t => t.getBoundingClientRect().right)"
    )
    assert max(widths) <= 718
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 3


@pytest.mark.parametrize("policy", [True, False])
def test_a_script_in_a_name_stays_text(visit, site, tmp_path, policy):
    html = (site / "site/evil/index.html").read_text()
    if not policy:  # escaping alone must be enough
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    file = tmp_path / "page.html"
    file.write_text(html)
    page = visit(file)
    assert page.title() == "Study evil"
    assert page.wrong == []
    assert page.locator("main img[onerror], main script").count() == 0
    assert EVIL in page.locator("#t-runs").inner_text()


def test_the_index_leads_to_the_pages(visit, site):
    page = visit(site / "site/index.html")
    page.get_by_role("link", name="quickstart").first.click()
    page.wait_for_url(re.compile("quickstart"))
    assert page.locator("#t-summary").is_visible()
    assert page.wrong == []
