"""The console's frame in a real browser: pages, login, theme, keyboard; and what holds for every page."""

import pytest
from playwright.sync_api import Page, expect

from tests.console.browser import WIDTHS, horizontal_overflow, serious_findings
from tests.console.conftest import KeyedConsole, Show
from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("console")


def test_address_of_the_gateway_leads_to_the_console(show: Show, console_stack: RunningStack) -> None:
    """/ on the REST port redirects to the console's first page."""
    answer = call("GET", f"{console_stack.http_url}/")
    assert (answer.status, dict(answer.headers)["location"]) == (307, console_stack.console_url)
    with show("/") as page:
        expect(page.get_by_role("heading", level=1)).to_have_text("Models")


def _pages(page: Page) -> list[str]:
    """The paths in the navigation."""
    page.wait_for_selector("#nav a")
    return [
        str(path) for path in page.locator("#nav a").evaluate_all("links => links.map(l => l.getAttribute('href'))")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_its_window_and_is_accessible(show: Show, width: int, scheme: str) -> None:
    """No page is wider than the window, and axe-core finds nothing serious, in light and dark."""
    with show("/", width=width, scheme=scheme) as page:
        faults = {}
        paths = _pages(page)
        cut = "nav => Math.max(0, nav.scrollWidth - nav.clientWidth)"
        assert page.locator("#nav").evaluate(cut) == 0, "every page can be seen in the navigation"
        for path in paths:
            page.locator(f'#nav a[href="{path}"]').click()
            expect(page.locator(f'#nav a[href="{path}"]')).to_have_attribute("aria-current", "page")
            expect(page.get_by_role("heading", level=1).first).to_be_visible()
            found = serious_findings(page) if width != 1024 else []
            if horizontal_overflow(page):
                found.append(f"wider than the window by {horizontal_overflow(page)} px")
            if found:
                faults[path] = found
        assert faults == {}


def test_theme_button_changes_the_colors_and_is_remembered(show: Show) -> None:
    """The button cycles through system, light and dark, and a reload keeps the choice."""
    with show("/", scheme="light") as page:
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        light = page.evaluate(ground)
        page.get_by_role("button", name="Theme: system").click()
        page.get_by_role("button", name="Theme: light").click()
        assert page.evaluate(ground) != light
        page.reload()
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()


def test_pages_are_reached_by_keyboard(show: Show) -> None:
    """The first Tab offers to skip the navigation; Enter on a link shows its page."""
    with show("/") as page:
        page.wait_for_selector("#nav a")
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Skip to the content")
        last = page.locator("#nav a").last
        last.focus()
        page.keyboard.press("Enter")
        expect(last).to_have_attribute("aria-current", "page")


def test_page_of_an_address_is_shown_after_a_reload_and_the_back_button_works(show: Show) -> None:
    """The URL of a page can be reloaded and shared."""
    with show("/") as page:
        last = _pages(page)[-1]
        page.locator(f'#nav a[href="{last}"]').click()
        page.reload()
        expect(page.locator(f'#nav a[href="{last}"]')).to_have_attribute("aria-current", "page")
        page.go_back()
        expect(page.locator("#nav a").first).to_have_attribute("aria-current", "page")


def test_key_is_asked_for_once_and_kept_until_logout(show_keyed: Show, keyed_console: KeyedConsole) -> None:
    """A wrong key shows the gateway's error; a valid key works until logout, also after a reload."""
    with show_keyed("/") as page:
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("API key").fill("not-a-key-of-this-gateway")
        dialog.get_by_role("button", name="Log in").click()
        expect(dialog.get_by_role("alert")).to_contain_text("the API key is unknown")
        dialog.get_by_label("API key").fill(keyed_console.secrets["all"])
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.get_by_text("street").first).to_be_visible()
        page.reload()
        expect(page.get_by_text("street").first).to_be_visible()
        state = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert keyed_console.secrets["all"] not in state
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_role("dialog", name="API key")).to_be_visible()


def test_console_that_lost_its_gateway_says_so_and_recovers(show: Show) -> None:
    """The page shows one error while calls fail, and hides it when they succeed again."""
    with show("/models") as page:
        expect(page.get_by_text("yolox-nano").first).to_be_visible()
        page.route(
            "**/gateway/**", lambda route: route.fulfill(status=502, json={"error": "no answer from the gateway"})
        )
        expect(page.get_by_role("alert").first).to_have_text("no answer from the gateway")
        page.unroute("**/gateway/**")
        expect(page.get_by_role("alert").first).to_be_hidden()
