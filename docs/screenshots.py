"""Takes screenshots of every page of the console, with real models and two cameras, at three widths, light and dark.

    make screenshots ARGS="--video vtest.avi --photo coffee.jpg --model yolox_nano.onnx"

Starts a stack of its own and stops it afterwards. index.html in the folder shows all screenshots.
"""

import argparse
import contextlib
import html
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from penstock import Client
from tests.console.browser import WIDTHS, horizontal_overflow, shown_page, started_chromium
from tests.support.http import Answer, call
from tests.support.ports import free_port
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

SHARED = CHECKOUT.parent / "shared"
OUT = CHECKOUT / "build" / "screenshots"
SCHEMES = ("light", "dark")
SETTLE_MS = 1500  # until pictures and figures are there
LOAD_S = 300
EVENTS = 6
EVENTS_S = 120
ROAD = [[0.43, 0.36], [0.73, 0.36], [0.73, 0.55], [0.43, 0.55]]
PENSTOCK = Path(sys.executable).with_name("penstock")
TIMEOUT_S = 300
RULES = {
    "line-crossing": [{"name": "pavement", "line": [[0.13, 0.6], [0.91, 0.6]], "mode": "loose"}],
    "overcrowding": [{"name": "road", "roi": ROAD, "object-threshold": 2, "class-id": "person"}],
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m docs.screenshots", description=__doc__.partition("\n")[0])
    media, models = SHARED / "media", SHARED / "models"
    parser.add_argument("--video", type=Path, default=media / "vtest.avi", help="people who walk [%(default)s]")
    parser.add_argument("--photo", type=Path, default=media / "coffee.jpg", help="[%(default)s]")
    parser.add_argument("--model", type=Path, default=models / "yolox_nano.onnx", help="YOLOX-Nano [%(default)s]")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="[%(default)s]")
    parser.add_argument("--only", default="", metavar="TEXT", help="only pages whose name contains this")
    options = parser.parse_args(arguments)
    for file in (options.video, options.photo, options.model):
        if not file.is_file():
            parser.error(f"{file} is not there: name the files with --video, --photo and --model")
    return options


@contextlib.contextmanager
def stack_to_show(options: argparse.Namespace) -> Iterator[RunningStack]:
    """A stack with YOLOX-Nano, two cameras with rules and events, answered requests and a finished load test."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run_penstock(home, "models", "add", options.model, "--name", "yolox-nano")
        console = ("--console", "on", "--console-port", "0", "--video", "--video-port", str(free_port()))
        stack = start_stack(home, "--engine", "embedded", *console, "--models", "street,yolox-nano")
        try:
            stack.wait_for_log("control API")
            fill(stack, options)
            yield stack
        finally:
            stop_stack(stack)


def run_penstock(home: Path, *words: object) -> None:
    """Runs a command of Penstock; its output is shown only if it fails. Raises SystemExit then."""
    command = [str(PENSTOCK), *map(str, words)]
    home.mkdir(parents=True, exist_ok=True)
    # TMPDIR: so that no other stack of this user is found
    environ = {"PENSTOCK_HOME": str(home), "PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


def fill(stack: RunningStack, options: argparse.Namespace) -> None:
    """Makes what the pages show. Raises AssertionError if a call fails or nothing happens in time."""
    runs = f"{stack.http_url}/v1/load/runs"
    send("POST", runs, {"scenario": "image-burst"})
    with Client(stack.http_url) as client:
        for _ in range(20):
            client.infer("yolox-nano", options.photo)
    wait_for(lambda: call("GET", runs).json["running"] is None, LOAD_S, "the load test has ended")
    streams = f"{stack.console_url}video/v1/streams"
    for name, title in (("market", "Market square"), ("school", "")):
        camera = {"uri": str(options.video), "source_id": name, "camera_name": title}
        send("POST", streams, camera | {"is_realtime": True, "is_loop": True})
        send("PUT", f"{streams}/{name}/rules", RULES)
    events = f"{stack.console_url}video/v1/events?limit=20"
    wait_for(lambda: len(call("GET", events).json["events"]) >= EVENTS, EVENTS_S, f"{EVENTS} events")


def send(method: str, url: str, body: object) -> Answer:
    """A call with a JSON body, which succeeds."""
    answer = call(method, url, json.dumps(body).encode(), {"content-type": "application/json"})
    assert answer.status < 300, f"{method} {url}: {answer.status} {answer.body[:500]!r}"
    return answer


def open_camera_form(page: Page) -> None:
    """The form with which a camera is added."""
    page.get_by_role("button", name="Add a camera").click()


def draw_line(page: Page) -> None:
    """A line that is being drawn."""
    page.get_by_role("button", name="Draw a line").click()
    page.get_by_role("button", name="Place it in the middle").click()


def open_event(page: Page) -> None:
    """The newest event, with its picture."""
    page.get_by_role("region", name="Events").get_by_role("button").first.click()


def open_report(page: Page) -> None:
    """The report of the load test that ran."""
    page.get_by_role("table").get_by_role("link").first.click()


def choose_model(page: Page, *, file: Path) -> None:
    """What was found in a model's file."""
    page.get_by_role("button", name="Add a model").click()
    page.get_by_label("Drop an ONNX file").set_input_files(file)
    expect(page.get_by_text("can be served")).to_be_visible(timeout=1000 * TIMEOUT_S)


def choose_file(page: Page, *, file: Path) -> None:
    """A picture, as if it had been dropped."""
    page.locator("input[type=file]").set_input_files(file)


def views(options: argparse.Namespace) -> tuple[tuple[str, str, Callable[[Page], None] | None], ...]:
    """Of each screenshot: name, path, and what is done there."""
    return (
        ("models", "models", None),
        ("models-add", "models", partial(choose_model, file=options.model)),
        ("models-one", "models/yolox-nano", None),
        ("try-empty", "try", None),
        ("try", "try?model=yolox-nano", partial(choose_file, file=options.photo)),
        ("streams", "streams", None),
        ("streams-add", "streams", open_camera_form),
        ("streams-camera", "streams/market", None),
        ("streams-draw", "streams/market", draw_line),
        ("events", "events", None),
        ("events-one", "events", open_event),
        ("events-objects", "events/objects", None),
        ("events-occupancy", "events/occupancy", None),
        ("load", "load", None),
        ("load-report", "load", open_report),
        ("system", "system", None),
        ("system-findings", "system/findings", None),
        ("system-logs", "system/logs", None),
        ("system-audit", "system/audit", None),
        ("system-config", "system/config", None),
    )


def take(browser: Browser, stack: RunningStack, options: argparse.Namespace) -> list[str]:
    """Writes the PNGs. Returns what is wrong with pages: wider than the window, or refused by the browser."""
    faults = []
    for name, path, act in views(options):
        if options.only not in name:
            continue
        for width in WIDTHS:
            for scheme in SCHEMES:
                with shown_page(browser, stack.console_url + path, width=width, scheme=scheme) as page:
                    expect(page.get_by_role("heading", level=1).first).to_be_visible()
                    page.wait_for_timeout(SETTLE_MS)
                    if act:
                        act(page)
                        page.wait_for_timeout(SETTLE_MS)
                    page.screenshot(path=options.out / f"{name}-{width}-{scheme}.png", full_page=True)
                    if excess := horizontal_overflow(page):
                        faults.append(f"{name} at {width} px, {scheme}: wider than the window by {excess} px")
        sys.stdout.write(f"{name}\n")
    return faults


def write_index(folder: Path) -> None:
    """A page with all screenshots of the folder."""
    names = sorted(file.name for file in folder.glob("*.png"))
    figures = "".join(
        f'<figure><figcaption>{n}</figcaption><img src="{n}" loading="lazy"></figure>' for n in map(html.escape, names)
    )
    style = "img{max-width:100%;border:1px solid gray}"
    (folder / "index.html").write_text(f"<!doctype html><title>Screenshots</title><style>{style}</style>{figures}\n")


def main(options: argparse.Namespace) -> int:
    """The exit code: 1 if a page is wrong."""
    options.out.mkdir(parents=True, exist_ok=True)
    with stack_to_show(options) as stack, started_chromium() as browser:
        faults = take(browser, stack, options)
    write_index(options.out)
    sys.stdout.write("".join(f"{fault}\n" for fault in faults) + f"{options.out}/index.html shows all\n")
    return bool(faults)


if __name__ == "__main__":
    raise SystemExit(main(parse_arguments()))
