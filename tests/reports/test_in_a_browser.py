"""The pages in a real browser: Debian's Chromium without a window, driven by Playwright."""

import csv
import re
import shutil
import time

import matplotlib as mpl
import pytest
from axe_playwright_python.sync_playwright import Axe
from built import EVIL
from playwright.sync_api import sync_playwright
from synthetic_runs import run_study, write_run

from experiments.games import ATARI_57
from experiments.study import find_study, study_names
from reports import build

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
        page.set_default_timeout(120_000)  # on a machine that does other things, too
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


def until(true, seconds=120):
    """Wait until something is true; the pages' policy forbids Playwright's own way."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def drawn(page):
    """Wait until all figures are shown, and the interactive chart of a page that has one."""
    shown = "[...document.querySelectorAll('figure img')].every(i => i.complete && i.naturalWidth)"
    chart = "!document.getElementById('explorer-spec') || document.querySelector('#curves path')"
    until(lambda: page.evaluate(f"{shown} && Boolean({chart})"))


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
    drawn(page)
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
    drawn(page)
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "quickstart/index.html"])
def test_axe_finds_no_serious_problem_of_accessibility(visit, site, name, scheme):
    page = visit(site / "site" / name, color_scheme=scheme)
    assert serious(page) == []


def serious(page):
    """Return the serious problems that axe-core finds, each with the first element that has it."""
    page.evaluate(
        "for (const one of document.querySelectorAll('section > details')) one.open = true"
    )
    violations = Axe().run(page).response["violations"]
    return [
        (one["id"], one["nodes"][0]["html"][:200])
        for one in violations
        if one["impact"] in ("serious", "critical")
    ]


def test_the_data_and_the_picture_of_a_figure_can_be_saved(report, site):
    page = report()
    figure = page.locator("figure[data-name=curves_time]")
    with page.expect_download() as waiting:
        figure.get_by_role("button", name="CSV").click()
    with waiting.value.path().open() as file:
        rows = list(csv.DictReader(file))
    folder = site / "site/quickstart/figures"
    assert waiting.value.suggested_filename == "curves_steps.csv"  # which has the times, too
    assert waiting.value.path().read_bytes() == (folder / "curves_steps.csv").read_bytes()
    assert {row["run"] for row in rows if row["run"]} == {
        path.parent.name for path in (site / "runs/quickstart").glob("*/run.json")
    }
    with page.expect_download() as waiting:
        figure.get_by_role("button", name="SVG").click()
    assert waiting.value.path().read_bytes() == (folder / "curves_time.svg").read_bytes()


def test_the_interactive_chart_shows_one_environment_and_leads_to_runs(report):
    page = report()
    chart = page.locator("#curves")
    thin = chart.locator("path[stroke-width='1.2']")
    thin.first.wait_for(state="attached")
    assert thin.count() == 12  # 2 systems x 2 settings x 3 seeds
    marks = chart.locator(".layer_4_marks path")
    shapes = {(mark.get_attribute("d"), mark.get_attribute("fill")) for mark in marks.all()}
    assert (
        len({d for d, _ in shapes}) == len({fill for _, fill in shapes}) == 2
    )  # one for each system
    lines = chart.locator(".role-legend-symbol path[stroke-dasharray]")
    assert lines.count() == 2  # of the settings
    assert all(line.get_attribute("stroke") != "transparent" for line in lines.all())
    before = thin.first.get_attribute("d")
    environment, against = chart.locator("select").all()
    environment.select_option("Catch-v0")
    until(lambda: thin.first.get_attribute("d") != before)
    steps = thin.first.get_attribute("d")
    against.select_option("wall time (s)")
    until(lambda: thin.first.get_attribute("d") != steps)
    page.mouse.click(*point_on(thin.first))
    found = page.locator("#t-runs tr.found")
    found.wait_for()
    assert found.locator("td").first.inner_text() == "Catch-v0"
    assert page.wrong == []


def point_on(path):
    """Return a point of the screen where a path is uppermost, late on the curve."""
    path.scroll_into_view_if_needed()
    x, y = path.evaluate("""path => {
        const length = path.getTotalLength();
        for (let share = 0.99; share > 0.5; share -= 0.01) {
            const on = path.getPointAtLength(share * length).matrixTransform(path.getScreenCTM());
            if (document.elementFromPoint(on.x, on.y) === path) return [on.x, on.y];
        }
        return [-1, -1];
    }""")
    assert x > 0
    return x, y


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(study_names()))
def test_the_first_screen_of_every_study_holds_question_finding_and_main_figure(visit, place, name):
    run_study(place / "runs", name)
    shutil.copy(find_study(name), place / "runs" / name / "study.toml")
    mpl.use("agg")
    assert build.main([name]) == 0
    for width, height, parts in (
        (1300, 900, (".question", ".finding", "header figure img")),
        (360, 740, (".question", ".finding")),
    ):
        page = visit(place / f"site/{name}/index.html", viewport={"width": width, "height": height})
        drawn(page)
        for part in parts:
            box = page.locator(part).first.bounding_box()
            assert box["height"] > 10, part
            assert box["y"] + box["height"] <= height, (part, box)
        assert page.wrong == []


@pytest.mark.soak
def test_57_games_are_a_page_that_can_be_read_and_sent(visit, place):
    for game in ATARI_57:
        for system in ("cleanba_ppo", "cleanba_ppo-sync", "cleanba_impala", "cleanba_impala-sync"):
            for seed in (1, 2, 3):
                folder = place / f"runs/large/{system}__a0-l0-t1__{game}__s{seed}"
                write_run(folder, system, "a0-l0-t1", game, seed, steps=51_200)
    mpl.use("agg")
    assert build.main(["large"]) == 0
    file = place / "site/large/index.html"
    assert file.stat().st_size < 5_000_000
    for scheme in ("light", "dark"):
        page = visit(file, color_scheme=scheme, viewport={"width": 1300, "height": 900})
        drawn(page)
        assert page.evaluate("document.documentElement.scrollHeight") < 10_000
        names = page.locator("section[id]").evaluate_all("all => all.map(one => one.id)")
        first = [names.index(name) for name in ("aggregates", "profiles", "improvements")]
        assert first == sorted(first)
        assert first[-1] < names.index("curves_steps")
        assert serious(page) == []
        assert page.wrong == []
