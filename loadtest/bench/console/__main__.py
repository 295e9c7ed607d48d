"""The console in a real browser with many streams and events: first page, scrolling, and CPU of every program.

    python -m loadtest.bench.console [--streams 200] [--events 100000] [--rounds 3] [--json console.json]

By hand; needs Chromium and playwright. A stack (`penstock up --engine embedded`) with its console stands before the
video program's real API, whose streams and pictures are made (video_api.py), and whose event store is real.

first     From the address to the first picture on the page Streams, and to the first row on the page Events; each in a
          browser session of its own.
scroll    Times between drawn frames while the mouse wheel turns: a frame of a smooth page takes 17 ms. Headless
          Chromium draws on the CPU, so a real machine is faster.
wall      CPU of browser, video API, console and gateway, in per cent of a core, and pictures a second that the API
          sent, while the page Streams is shown and nothing is touched.
idle      The same for the page System, which reads the gateway every three seconds, and without a page.
"""

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import psutil
from playwright.sync_api import Browser, Page, expect, sync_playwright

from loadtest.bench.child import Child
from loadtest.bench.console.video_api import COUNTER
from loadtest.bench.report import spread

START_S = 120.0
WATCH_S = 15.0
SCROLL_S = 4.0
FLAGS = ("--no-sandbox", "--disable-gpu")
FRAMES = """() => {
  window.frames_ms = [];
  let last = performance.now();
  const note = now => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(note); };
  requestAnimationFrame(note);
}"""


@contextmanager
def stack(folder: Path, streams: int, events: int) -> Iterator[tuple[str, dict[str, Child]]]:
    """The console's URL, and the programs by name."""
    words = ("-m", "loadtest.bench.console.video_api", str(folder / "events"), str(streams), str(events))
    with started("video API", (sys.executable, *words), folder) as video:
        url = found_in(video, r"^(http://\S+)$")
        options = ("--engine", "embedded", "--models", "street", "--http-port", "0", "--grpc-port", "0")
        ports = ("--metrics-port", "0", "--console-port", "0", "--video-url", url, "--home", str(folder / "home"))
        command = (sys.executable, "-m", "penstock.cli.main", "up", *options, *ports)
        with started("stack", command, folder) as up:
            console = found_in(up, r"^console: (http\S+)")
            found_in(up, r"^(ready): ")
            yield console, {"video API": video, "stack": up}


@contextmanager
def started(name: str, command: tuple[str, ...], folder: Path) -> Iterator[Child]:
    """A program that ends with the block."""
    child = Child(name, command, folder / f"{name.replace(' ', '-')}.log")
    try:
        yield child
    finally:
        child.end()


def found_in(child: Child, pattern: str) -> str:
    """The group of the first line that matches, waited for. Raises BadAnswer."""

    def match() -> re.Match[str] | None:
        return re.search(pattern, child.text(), re.MULTILINE)

    child.wait(lambda: match() is not None, time.monotonic() + START_S)
    found = match()
    assert found is not None
    return found[1]


@contextmanager
def shown(browser: Browser, url: str) -> Iterator[Page]:
    """A page in a session of its own."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(url)
    yield page
    context.close()


def first_ms(browser: Browser, url: str, ready: Callable[[Page], None]) -> float:
    """Milliseconds from the address until `ready` returns."""
    with shown(browser, "about:blank") as page:  # a browser's new tab is not the page's time
        began = time.perf_counter()
        page.goto(url, wait_until="commit")
        ready(page)
        return 1000 * (time.perf_counter() - began)


def streams_ready(page: Page) -> None:
    """The first picture is on the screen."""
    expect(page.locator("article.tile img").first).to_be_visible(timeout=20_000)


def events_ready(page: Page) -> None:
    """The first row is on the screen."""
    expect(page.locator(".virtual-row").first).to_be_visible(timeout=20_000)


def scrolled_ms(page: Page) -> list[float]:
    """Times between frames while the wheel turns, in milliseconds, sorted."""
    page.mouse.move(700, 600)
    page.evaluate(FRAMES)
    until = time.monotonic() + SCROLL_S
    while time.monotonic() < until:
        page.mouse.wheel(0, 300)
        page.wait_for_timeout(30)
    return sorted(page.evaluate("window.frames_ms"))


def processes(children: Mapping[str, Child], browser_pid: int) -> dict[str, list[psutil.Process]]:
    """Of each program. The rest of the stack is its parent, its engine and its decoders."""
    browser = psutil.Process(browser_pid)
    found = {"browser": [browser, *browser.children(recursive=True)], "video API": children["video API"].family()}
    for process in children["stack"].family():
        words = process.cmdline()
        name = "console" if "console" in words else "gateway" if "penstock.gateway" in words else "rest of the stack"
        found.setdefault(name, []).append(process)
    return found


def cpu_s(members: list[psutil.Process]) -> float:
    """CPU seconds of processes so far; those that ended have none."""
    seconds = 0.0
    for process in members:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system
    return seconds


def watched(children: Mapping[str, Child], browser_pid: int, pictures: Callable[[], int]) -> dict[str, float]:
    """Per cent of a core by program, and pictures a second, over WATCH_S."""
    known = processes(children, browser_pid)
    before, sent, began = {name: cpu_s(members) for name, members in known.items()}, pictures(), time.monotonic()
    time.sleep(WATCH_S)
    passed_s = time.monotonic() - began
    figures = {f"{name}, % of a core": 100 * (cpu_s(known[name]) - before[name]) / passed_s for name in known}
    return {**figures, "pictures/s": (pictures() - sent) / passed_s}


def measured(browser: Browser, browser_pid: int, console: str, children: Mapping[str, Child]) -> dict[str, float]:
    """One round."""
    api = found_in(children["video API"], r"^(http://\S+)$")

    def pictures() -> int:
        """Sent so far."""
        with urlopen(f"{api}/v1/streams/{COUNTER}") as answer:
            return int(json.load(answer)["frames"])

    figures = {
        "first picture of Streams, ms": first_ms(browser, f"{console}streams", streams_ready),
        "first row of Events, ms": first_ms(browser, f"{console}events", events_ready),
    }
    for name, path, ready in (("Streams", "streams", streams_ready), ("Events", "events", events_ready)):
        with shown(browser, f"{console}{path}") as page:
            ready(page)
            times = scrolled_ms(page)
            figures |= {
                f"scrolling {name}, frame p50, ms": statistics.median(times),
                f"scrolling {name}, frame p99, ms": times[int(0.99 * (len(times) - 1))],
                f"scrolling {name}, longest frame, ms": times[-1],
            }
    for name, url in (("wall", f"{console}streams"), ("idle", f"{console}system"), ("no page", "about:blank")):
        with shown(browser, url) as page:
            page.wait_for_timeout(2000)
            figures |= {f"{name}: {key}": value for key, value in watched(children, browser_pid, pictures).items()}
    return figures


def main() -> None:
    """Prints a table, and writes JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, stack(Path(name), chosen.streams, chosen.events) as (console, children):
        known = set(psutil.Process().children())
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chosen.chromium, args=list(FLAGS))
            (driver,) = set(psutil.Process().children()) - known
            rounds = [measured(browser, driver.pid, console, children) for _ in range(chosen.rounds)]
            browser.close()
    for key in rounds[0]:
        print(f"{key:45} {spread([one[key] for one in rounds])}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
