"""The console in a real browser: every page renders under its policy, asks no other host, follows a batch, and acts on it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from tests.support.sdks import sync_api
from tests.web import stages
from tests.web.calls import create, upload
from tests.web.console.world import FORMS, HOSTILE, PAGES, Console
from tests.web.server import NOWHERE
from tidegate.core.ports import Present
from tidegate.settings.capacity import ModelDeployment, ModelSettings
from tidegate.store.operators.audit import AuditNote

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# Where a reviewer finds a picture of each page after a run.
PICTURES = Path(__file__).parents[3] / "build" / "console"
AXE = PICTURES.parent / "axe"
AXE_VERSION = "4.14.0"
AXE_SHA256 = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    assert found, "the console's tests need Chromium: `make browser` installs it"
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser without the tabs of earlier tests, which would go on asking for their servers."""
    yield chromium
    for context in chromium.contexts:
        context.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core, which is fetched once and kept."""
    script = AXE / "package" / "axe.min.js"
    if not script.exists():
        AXE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", f"axe-core@{AXE_VERSION}"], cwd=AXE, check=True, timeout=300)
        subprocess.run(["tar", "xzf", f"axe-core-{AXE_VERSION}.tgz"], cwd=AXE, check=True, timeout=60)
    data = script.read_bytes()
    assert hashlib.sha256(data).hexdigest() == AXE_SHA256
    return data.decode()


# Every chart that the page draws is kept in `drawn`, so that a test can ask it what it shows.
KEEP_CHARTS = """
window.drawn = [];
let made;
Object.defineProperty(window, "uPlot", {
  configurable: true,
  get: () => made,
  set: (real) => {
    made = function (...given) { const plot = new real(...given); drawn.push(plot); return plot; };
    Object.assign(made, real);
  },
});
"""


class Visit:
    """One tab, and what went wrong or elsewhere in it."""

    def __init__(self, browser: Browser, console: Console, **options: Any) -> None:
        context = browser.new_context(base_url=console.web.url, **options)
        self.page: Page = context.new_page()
        self.troubles: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda one: self.troubles.append(one.text) if one.type == "error" else None)
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("dialog", lambda dialog: dialog.accept())

    def sign_in(self, key: str) -> None:
        self.page.goto("/console")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        sync_api.expect(self.page.get_by_role("heading", name="Overview")).to_be_visible()

    def keep(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(PICTURES / f"{name}.png"), full_page=True)


@pytest.fixture(scope="module")
def web_settings() -> dict[str, Any]:
    places = tuple(ModelDeployment(NOWHERE, name=name) for name in ("gpu-1", "gpu-2"))
    return {"models": {"m": ModelSettings(places)}}


def org_page(console: Console) -> str:
    """The path of the page of the batch's owner."""
    rows = console.web.client(console.reader_key).get("/admin/v1/orgs").json()["data"]
    return "/orgs/" + next(str(row["id"]) for row in rows if row["name"] != "ops")


def violations(page: Page, axe: str) -> list[str]:
    """What axe-core finds wrong with a page, each with the first element that it is about."""
    page.evaluate(axe)
    # Every rule is checked; only the reports of those that hold are left out.
    seen = page.evaluate("axe.run({ resultTypes: ['violations'] }).then((seen) => seen.violations)")
    return [f"{page.url}: {one['id']} {one['nodes'][0]['html'][:120]}" for one in seen]


def look(page: Page, *, is_hidden: bool) -> None:
    """Hide a page, or look at it again."""
    page.evaluate(
        """(isHidden) => {
            Object.defineProperty(document, "hidden", { value: isHidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        is_hidden,
    )


def test_an_operator_signs_in_looks_around_and_acts(browser: Browser, console: Console, axe: str) -> None:
    visit = Visit(browser, console, viewport={"width": 1280, "height": 800})
    page = visit.page
    visit.sign_in(console.writer_key)
    for path in (*PAGES, *FORMS):
        page.goto(f"/console{path}")
        sync_api.expect(page.get_by_role("heading", level=1)).to_be_visible()
        visit.keep(f"light{path.replace('/', '-')}")
        if path in FORMS:
            assert violations(page, axe) == []
    for name, path in (
        ("org", org_page(console)),
        ("compare", f"/batches/{console.batch}/compare?with={console.run_again()}"),
        ("sorted", "/batches?sort=failed"),
    ):
        page.goto(f"/console{path}")
        visit.keep(f"light-{name}")
    page.goto("/console/deployments")
    page.get_by_role("button", name="Drain gpu-1").click()
    sync_api.expect(page.get_by_role("button", name="Resume gpu-1")).to_be_visible()
    visit.keep("light-deployments")
    page.goto("/console/batches")
    page.get_by_role("link", name=console.batch).click()
    sync_api.expect(page.get_by_text("of 3 requests done")).to_be_visible()
    visit.keep("light-batch")
    assert violations(page, axe) == []
    # The page follows the batch without a reload.
    page.evaluate("document.body.dataset.kept = 'yes'")
    stages.finish(console.web, console.batch, {2: b"{}\n"})
    sync_api.expect(page.get_by_text("finalizing").first).to_be_visible(timeout=30_000)
    assert page.evaluate("document.body.dataset.kept") == "yes"
    page.get_by_role("button", name="Abandon").click()
    sync_api.expect(page.locator("b.bad", has_text="failed")).to_be_visible(timeout=30_000)
    assert console.web.job(console.batch).state == "failed"
    # What has ended is not asked for again, whatever is clicked.
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.get_by_role("heading", name="Timeline").click()
    page.wait_for_timeout(300)
    assert asked == []
    page.goto("/console/audit")
    sync_api.expect(page.get_by_text("batch.abandon")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    sync_api.expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    page.goto("/console/batches")
    sync_api.expect(page.get_by_role("button", name="Sign in")).to_be_visible()
    assert visit.troubles == []
    assert visit.hosts == {urlsplit(console.web.url).netloc}


def test_it_fits_a_phone_in_the_dark_and_axe_finds_nothing(browser: Browser, console: Console, axe: str) -> None:
    visit = Visit(browser, console, viewport={"width": 360, "height": 800}, color_scheme="dark")
    visit.sign_in(console.writer_key)
    found: list[str] = []
    org = org_page(console)
    # Names and actors that no line can hold, and no space to break them at.
    web, wide = console.web, console.web.client(console.web.make_key(255 * "W"))
    wide_batch = str(create(wide, upload(wide))["id"])
    note = AuditNote("aud_" + 22 * "0", "operation:op_" + 22 * "W", "batch.pause", "batch", wide_batch)
    assert web.run(web.store.audited(note).pause_job(web.job(wide_batch).tenant_id, wide_batch))
    one = f"/batches/{console.batch}"
    more = (
        one,
        f"/batches/{wide_batch}",
        f"{one}/items",
        f"{one}/compare?with={console.run_again()}",
        "/operations/impact?action=pause",
        org,
    )
    for path in (*PAGES, *FORMS, *more):
        visit.page.goto(f"/console{path}")
        sync_api.expect(visit.page.get_by_role("heading", level=1)).to_be_visible()
        visit.keep(
            f"phone{path.partition('?')[0].replace(console.batch, 'batch').replace(org, '/org').replace('/', '-')}"
        )
        too_wide = visit.page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        assert not too_wide, path
        # No column of a table is out of sight either.
        cut_off = visit.page.evaluate(
            "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert not cut_off, path
        found += violations(visit.page, axe)
    assert found == []
    assert visit.troubles == []
    reading = Visit(browser, console, color_scheme="dark")
    reading.sign_in(console.reader_key)
    reading.page.goto(f"/console/batches/{console.batch}")
    sync_api.expect(reading.page.get_by_role("button", name="Pause")).to_have_count(0)
    assert reading.troubles == []


def test_long_looks_leave_room_for_who_changed_what(browser: Browser, console: Console) -> None:
    """A key's id or `operator` stands on one line beside the long JSON of a new key."""
    visit = Visit(browser, console, viewport={"width": 1280, "height": 800})
    made = console.web.client(console.writer_key).post("/admin/v1/keys", json={"org": "ops", "label": "a label"})
    assert made.status_code == 200, made.text
    visit.sign_in(console.writer_key)
    visit.page.goto("/console/audit")
    names = visit.page.locator("td.name code")
    assert names.count() >= 2
    lines = names.evaluate_all(
        "all => all.filter(one => one.innerText.length <= 12).map(one => one.getClientRects().length)"
    )
    assert lines
    assert set(lines) == {1}
    assert visit.troubles == []


def test_a_chart_of_one_moment_is_one_of_minutes(browser: Browser, console: Console) -> None:
    visit = Visit(browser, console)
    visit.page.add_init_script(KEEP_CHARTS)
    visit.sign_in(console.reader_key)
    sync_api.expect(visit.page.locator("figure canvas").first).to_be_visible()
    spans = visit.page.evaluate(
        "drawn.map((plot) => [plot.scales.x.max - plot.scales.x.min, plot.scales.x.max - plot.data[0].at(-1)])"
    )
    assert spans == [[300, 0]] * len(spans)
    assert len(spans) >= 2
    assert visit.troubles == []


def test_figures_and_what_needs_a_look_stand_above_the_charts(browser: Browser, console: Console) -> None:
    """There is a chart for each deployment: on a phone, twenty of them are twenty screens."""
    console.web.rewrite("update jobs set step_failures = 3")
    visit = Visit(browser, console)
    visit.sign_in(console.reader_key)
    sync_api.expect(visit.page.locator("figure canvas").first).to_be_visible()
    tops = [
        visit.page.locator(place).first.evaluate("(one) => one.getBoundingClientRect().top")
        for place in ("h1", "#now", "h2.attention", "div.attention", "#charts", "h2:text-is('Processes')")
    ]
    assert tops == sorted(tops)
    visit.keep("light-needs-a-look")
    assert visit.troubles == []


@pytest.mark.soak
def test_charts_follow_the_load_and_stop_when_the_page_is_hidden(browser: Browser, start_web: Any, axe: str) -> None:
    """Deployments of hostile names too; without script the tables show the same."""
    places = tuple(ModelDeployment(NOWHERE, name=name) for name in ("gpu-1", HOSTILE))
    console = Console(start_web(models={"m": ModelSettings(places)}))
    report = {"gpu-1": Present(1, 5, 2, 0, True, "5 calls (quiet)", 8), HOSTILE: Present(1, 3, 0, 0, tide=4)}
    console.web.run(console.web.store.report_to_fleet("worker_x", report))
    for options, name in (
        ({}, "light"),
        ({"color_scheme": "dark", "viewport": {"width": 390, "height": 800}}, "phone"),
    ):
        visit = Visit(browser, console, **options)
        visit.sign_in(console.reader_key)
        page = visit.page
        figure = page.locator("figure", has_text="gpu-1")
        sync_api.expect(figure.locator("canvas")).to_be_visible()
        sync_api.expect(figure.locator(".legend")).to_contain_text("background calls 5")
        sync_api.expect(figure.locator(".legend")).to_contain_text("tide 8")
        assert page.locator("figure").count() == 4
        report["gpu-1"] = Present(1, 5, 7, 0, True, "5 calls (busy)", 6)
        console.web.run(console.web.store.report_to_fleet("worker_x", report))
        sync_api.expect(figure.locator(".legend")).to_contain_text("interactive calls 7", timeout=30_000)
        report["gpu-1"] = Present(1, 5, 2, 0, True, "5 calls (quiet)", 8)
        console.web.run(console.web.store.report_to_fleet("worker_x", report))
        visit.keep(f"{name}-charts")
        assert violations(page, axe) == []
        assert visit.troubles == []
    asked: list[str] = []
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/console")):
        look(page, is_hidden=True)
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(4_000)
    assert asked == [], "a page that is not looked at asks for nothing"
    plain = Visit(browser, console, java_script_enabled=False)
    plain.sign_in(console.reader_key)
    sync_api.expect(plain.page.locator("#charts")).to_be_hidden()
    sync_api.expect(plain.page.get_by_role("row", name="gpu-1")).to_contain_text("8")


def test_keys_lead_to_pages_and_through_lists(browser: Browser, console: Console, axe: str) -> None:
    visit = Visit(browser, console)
    visit.sign_in(console.writer_key)
    page = visit.page
    palette = page.get_by_role("dialog")

    def open_palette(key: str) -> None:
        # The script of a page shows the button when it is ready for keys.
        sync_api.expect(page.get_by_role("button", name="Go to")).to_be_visible()
        page.keyboard.press(key)
        sync_api.expect(palette).to_be_visible()

    open_palette("Control+k")
    assert violations(page, axe) == []
    visit.keep("light-palette")
    page.keyboard.type("depl")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
    open_palette("/")
    page.keyboard.type(console.batch)
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_text("of 3 requests done")).to_be_visible()
    open_palette("/")
    page.keyboard.type("<img src=x onerror=alert(1)>")
    sync_api.expect(palette.get_by_role("option")).to_contain_text("Search batches for")
    page.keyboard.press("Escape")
    sync_api.expect(palette).to_be_hidden()
    page.goto("/console/deployments")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == "gpu-2"
    page.goto("/console/batches")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.textContent") == console.batch
    # News do not take the focus away, though a batch comes in above it.
    another = console.run_again()
    sync_api.expect(page.get_by_role("link", name=another)).to_be_visible(timeout=30_000)
    page.wait_for_timeout(300)
    assert page.evaluate("document.activeElement.textContent") == console.batch
    page.keyboard.press("Enter")
    sync_api.expect(page.get_by_text("of 3 requests done")).to_be_visible()
    page.goto("/console/batches/new")
    page.get_by_label("File of requests").set_input_files({"name": "a.jsonl", "mimeType": "", "buffer": b"not json"})
    page.get_by_role("button", name="Check the file").click()
    sync_api.expect(page.get_by_text("This cannot be run")).to_be_visible()
    assert violations(page, axe) == []
    visit.keep("light-check")
    assert visit.troubles == []


def test_a_page_follows_only_while_it_is_looked_at(browser: Browser, console: Console) -> None:
    visit = Visit(browser, console)
    visit.sign_in(console.reader_key)
    page, path = visit.page, f"/console/batches/{console.batch}"
    with page.expect_request(lambda request: request.resource_type == "eventsource"):
        page.goto(path)
    with page.expect_event("requestfailed", lambda request: request.resource_type == "eventsource"):
        look(page, is_hidden=True)
    stages.finish(console.web, console.batch, {2: b"{}\n"})
    assert page.locator("#live b").first.text_content() == "in progress"
    with page.expect_request(lambda request: request.resource_type == "eventsource"):
        look(page, is_hidden=False)
    sync_api.expect(page.locator("#live b").first).to_contain_text("finalizing")
    # A page that is opened in the background asks for nothing until it is looked at.
    page.add_init_script("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.resource_type))
    page.goto(path, wait_until="networkidle")
    assert "eventsource" not in asked
    with page.expect_request(lambda request: request.resource_type == "eventsource"):
        look(page, is_hidden=False)
    assert visit.troubles == []


def test_a_page_outlives_its_server_and_goes_with_its_session(browser: Browser, console: Console) -> None:
    visit = Visit(browser, console)
    visit.sign_in(console.reader_key)
    page, web = visit.page, console.web
    page.goto(f"/console/batches/{console.batch}")
    port = web.port
    web.run(web.stop_listening())
    sync_api.expect(page.get_by_text("The connection to the server is lost")).to_be_visible(timeout=30_000)
    visit.keep("light-lost")
    stages.finish(web, console.batch, {2: b"{}\n"})
    web.run(web.listen(port))
    sync_api.expect(page.locator("#live b").first).to_contain_text("finalizing", timeout=30_000)
    sync_api.expect(page.locator("#trouble")).to_be_hidden()
    # Signed out in another tab.
    other = page.context.new_page()
    other.goto("/console")
    other.get_by_role("button", name="Sign out").click()
    sync_api.expect(page.get_by_label("API key")).to_be_visible(timeout=30_000)
    assert "in progress" not in page.content()


def test_news_take_away_neither_a_click_nor_a_selection(browser: Browser, console: Console) -> None:
    visit = Visit(browser, console)
    visit.sign_in(console.writer_key)
    page, web, status = visit.page, console.web, visit.page.locator("#live b").first
    tenant_id = web.job(console.batch).tenant_id

    def with_news(change: Any) -> None:
        """Change the batch, and wait until the page received the change."""
        page.evaluate(
            "window.changed = new Promise((done) => addEventListener('htmx:sseBeforeMessage', done, {once: true}))"
        )
        assert web.run(change(tenant_id, console.batch))
        page.evaluate("window.changed.then(() => true)")

    page.goto(f"/console/batches/{console.batch}")
    page.get_by_role("button", name="Requeue").hover()
    page.mouse.down()
    with_news(web.store.pause_job)
    sync_api.expect(status).to_have_text("in progress")
    with page.expect_request(f"**/console/batches/{console.batch}/requeue"):
        page.mouse.up()
    sync_api.expect(status).to_have_text("in progress, paused")
    # At once: between finding the heading and marking it, news may put another in its place.
    page.evaluate(
        "getSelection().selectAllChildren([...document.querySelectorAll('#live h2')].find((one) => one.textContent === 'Timeline'))"
    )
    with_news(web.store.resume_job)
    sync_api.expect(status).to_have_text("in progress, paused")
    assert page.evaluate("document.getSelection().toString()") == "Timeline"
    page.evaluate("document.getSelection().removeAllRanges()")
    sync_api.expect(status).to_have_text("in progress")
    assert visit.troubles == []
