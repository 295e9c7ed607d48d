"""The Models page in a real browser: states and figures, a model's own page, and adding a file."""

import json
import re
from base64 import b64encode
from copy import deepcopy
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from penstock.gateway.model_uploads import ModelUploads
from penstock.protocol.errors import InvalidRequest
from tests.console.browser import horizontal_overflow, serious_findings
from tests.console.conftest import KeyedConsole, Show, sample_picture
from tests.console.test_system_page import log_in
from tests.support import made_networks
from tests.support.http import call
from tests.support.pulled_models import SOURCE
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("console")
HOSTILE = "<img src=x onerror=alert(1)>"
WORK_MS = 60_000  # for a process that reads or loads a model, on a busy machine
COUNT_CHANGES = """() => {
  window.changes = 0;
  const observer = new MutationObserver(found => (window.changes += found.length));
  observer.observe(document.querySelector("table"), {childList: true, subtree: true});
}"""


DROP = """([content, name]) => {
  const bytes = Uint8Array.from(atob(content), one => one.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], name));
  for (const kind of ["dragover", "drop"]) {
    document.querySelector("main").dispatchEvent(new DragEvent(kind, {bubbles: true, cancelable: true, dataTransfer}));
  }
}"""


def row_of(page: Page, name: str) -> Locator:
    """The row of a model in the list."""
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def send_pictures(stack: RunningStack, count: int) -> None:
    picture = sample_picture().read_bytes()
    for _ in range(count):
        answer = call("POST", f"{stack.http_url}/v2/models/yolox-nano/image", picture, {"content-type": "image/jpeg"})
        assert answer.status == 200


def drop(page: Page, name: str, content: bytes) -> Locator:
    """Drops a file on the page. Returns the dialog that adds it."""
    expect(page.get_by_role("button", name="Add a model")).to_be_enabled()
    page.evaluate(DROP, [b64encode(content).decode(), name])
    return page.get_by_role("dialog", name="Add a model")


def unload_load_and_remove(page: Page, name: str) -> None:
    """On the model's page: each step asks first where it hurts, and says what came of it."""
    page.get_by_role("button", name="Unload").click()
    page.get_by_role("dialog", name=f"Unload {name}?").get_by_role("button", name="Unload").click()
    expect(page.get_by_text(f"{name} is unloaded.")).to_be_visible()
    expect(page.locator("main").get_by_text("not loaded", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="Try it")).to_be_hidden()
    page.get_by_role("button", name="Load", exact=True).click()
    expect(page.get_by_text(f"{name} is loaded.")).to_be_visible(timeout=WORK_MS)
    expect(page.get_by_role("button", name="Load again")).to_be_enabled()
    page.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog", name=f"Remove {name}?").get_by_role("button", name="Remove").click()
    expect(page.get_by_text(f"{name} is removed.")).to_be_visible()
    expect(row_of(page, "yolox-nano")).to_be_visible()
    expect(row_of(page, name)).to_have_count(0)


def made_report(stack: RunningStack, count: int) -> dict[str, Any]:
    """GET /v1/models with `count` models, made of the real one of YOLOX-Nano."""
    report = json.loads(call("GET", f"{stack.http_url}/v1/models").body)
    (one,) = (row for row in report["models"] if row["name"] == "yolox-nano")
    return {"models": [deepcopy(one) | {"name": f"model-{number:03}"} for number in range(count)], "omitted": 0}


def test_list_shows_state_card_and_figures_of_each_model(show: Show, console_stack: RunningStack) -> None:
    """After a few requests a row has their number, latency and batches; what is not loaded says why."""
    with show("/models") as page:
        row = row_of(page, "yolox-nano")
        expect(row).to_contain_text("yolox · 416 × 416 · 80 labels · version 1 · cpu in FP32")
        before = int(row.get_by_text("in all").inner_text().split()[0].replace(",", ""))
        send_pictures(console_stack, 3)
        expect(row).to_contain_text(f"{before + 3} in all")
        expect(row).to_contain_text("p99")
        expect(row).to_contain_text("mean 1")
        expect(row.get_by_text("ready")).to_be_visible()
        expect(row_of(page, "people")).to_contain_text("start with --engine triton")
        page.get_by_label("Find a model").fill("HEATMAP")
        expect(page.get_by_role("row")).to_have_count(2)
        page.get_by_label("Find a model").fill("")
        page.get_by_role("button", name="not loaded").click()
        expect(row_of(page, "people")).to_be_visible()
        expect(row).to_have_count(0)


def test_refresh_of_100_models_changes_only_what_is_new(show: Show, console_stack: RunningStack) -> None:
    """A figure that changed is replaced; every other cell, the focus and the place on the page stay."""
    report = made_report(console_stack, 100)
    with show("/models") as page:
        page.route("**/gateway/v1/models", lambda route: route.fulfill(json=report))
        expect(page.get_by_role("row")).to_have_count(101)
        page.get_by_role("link", name="model-060").focus()
        before = page.evaluate("scrollY")
        assert before > 500
        page.evaluate(COUNT_CHANGES)
        report["models"][60]["traffic"]["requests"] = 123456
        expect(row_of(page, "model-060")).to_contain_text("123,456 in all")
        assert page.evaluate("window.changes") == 1
        expect(page.get_by_role("link", name="model-060")).to_be_focused()
        assert page.evaluate("scrollY") == before


def test_names_and_reasons_of_models_are_text(show: Show, console_stack: RunningStack) -> None:
    """Markup in names and reasons is shown as text."""
    report = made_report(console_stack, 1)
    report["models"][0] |= {"name": HOSTILE, "state": "unavailable", "reason": f"failed: {HOSTILE}"}
    with show("/models") as page:
        page.route("**/gateway/v1/models", lambda route: route.fulfill(json=report))
        expect(row_of(page, HOSTILE)).to_contain_text(f"failed: {HOSTILE}")
        assert page.locator("main img").count() == 0


def test_page_of_a_model_shows_its_card_and_draws_its_figures(show: Show, console_stack: RunningStack) -> None:
    """Size, colors, thresholds, tensors, labels, versions; and charts that move with the requests."""
    with show("/models/yolox-nano") as page:
        expect(page.get_by_role("heading", name="yolox-nano")).to_be_visible()
        card = page.locator("section").filter(has=page.get_by_role("heading", name="Card"))
        device = page.locator("section").filter(has=page.get_by_role("heading", name="Device"))
        expect(device).to_contain_text("cpu in FP32")
        for text in ("416 × 416", "BGR", "padded at the right and the bottom with 114", "images FP32 [3, 416, 416]"):
            expect(card).to_contain_text(text)
        page.get_by_text("80 labels").click()
        expect(page.get_by_text("toothbrush")).to_be_visible()
        expect(page.get_by_role("row", name="1 ready")).to_be_visible()
        expect(page.get_by_role("link", name="Try it")).to_have_attribute("href", "/try?model=yolox-nano")
        page.get_by_role("button", name="Check").click()
        found = page.get_by_role("dialog", name="Check of yolox-nano")
        expect(found).to_contain_text("ok compared with golden.jpg, golden.json, ONNX Runtime", timeout=WORK_MS)
        found.get_by_role("button", name="Close").click()
        send_pictures(console_stack, 3)
        expect(page.get_by_role("img", name=re.compile(r"Latency: p50 [0-9.]+ ms"))).to_be_visible()
        expect(page.get_by_role("img", name="Mean batch: rows 1 rows")).to_be_visible()
        expect(page.get_by_text(re.compile(r"^HTTP: \d+ × 200"))).to_be_visible()
        expect(page.get_by_text("toothbrush")).to_be_visible()
        assert (horizontal_overflow(page), serious_findings(page)) == (0, [])


def test_load_that_fails_shows_the_reason(show: Show) -> None:
    """The engine's own sentence, and the buttons work again. An unknown model has a page that names it."""
    with show("/models/people") as page:
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator(".toast")).to_contain_text("start with --engine triton")
        expect(page.get_by_role("button", name="Load", exact=True)).to_be_enabled()
        expect(page.get_by_role("button", name="Remove")).to_be_hidden()
    with show(f"/models/{quote(HOSTILE)}") as page:
        expect(page.get_by_text("There is no such model")).to_be_visible()
        expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()


def test_reader_sees_figures_and_which_role_an_action_needs(show_keyed: Show, keyed_console: KeyedConsole) -> None:
    """Buttons that the key's roles do not allow are disabled, with a sentence that names the role."""
    with show_keyed("/models/street") as page:
        log_in(page, keyed_console.secrets["read"])
        expect(page.get_by_text("need the role admin; this key has read.")).to_be_visible()
        expect(page.get_by_role("button", name="Unload")).to_be_disabled()
        expect(page.get_by_text("center-heatmap")).to_be_visible()
        page.get_by_role("link", name="All models").click()
        expect(page.get_by_text("Adding a model needs the role admin; this key has read.")).to_be_visible()
        expect(page.get_by_role("button", name="Add a model")).to_be_disabled()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/models", "The list of models needs the role read"),
        ("/system", "This view needs the role read"),
        ("/system/logs", "This view needs the role admin"),
    ],
)
def test_page_says_which_role_its_key_lacks(
    show_keyed: Show, keyed_console: KeyedConsole, path: str, sentence: str
) -> None:
    """A key with the role infer only sees no empty tables, and no name of an HTTP header when its key is wrong."""
    with show_keyed(path) as page:
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("API key").fill("pk-wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text("the API key is unknown")
        log_in(page, keyed_console.secrets["infer"])
        expect(page.get_by_text(sentence)).to_be_visible()
        expect(page.get_by_role("table")).to_have_count(0)


def test_dropped_file_is_described_added_unloaded_loaded_and_removed(show: Show) -> None:
    """From the drop over what was found in it to a model that serves; its page then unloads, loads and removes it."""
    with show("/models") as page:
        box = drop(page, "UltraFace (320).onnx", (SOURCE / "ultraface_rfb320.onnx").read_bytes())
        expect(box.get_by_text("can be served")).to_be_visible(timeout=WORK_MS)
        for text in ("ultraface", "320 × 240", "1: face", "face 0.79"):
            expect(box.get_by_text(text).first).to_be_visible()
        assert (horizontal_overflow(page), serious_findings(page)) == (0, [])
        expect(box.get_by_label("Name", exact=True)).to_have_value("UltraFace-320")
        box.get_by_label("Name", exact=True).fill("street")
        box.get_by_role("button", name="Add", exact=True).click()
        expect(box.get_by_role("alert")).to_contain_text("this gateway has a model 'street': choose another name")
        box.get_by_label("Name", exact=True).fill("faces-2")
        box.get_by_role("button", name="Add", exact=True).click()
        expect(box.get_by_text("faces-2 is served.")).to_be_visible(timeout=WORK_MS)
        expect(box.get_by_role("link", name="Try it")).to_have_attribute("href", "/try?model=faces-2")
        box.get_by_role("link", name="Its page").click()
        expect(page.get_by_role("heading", name="faces-2")).to_be_visible()
        unload_load_and_remove(page, "faces-2")


def advice_of_taken_name(home: Path) -> str:
    """The gateway's sentence for a name that an added model has."""
    (home / "models" / "yolox").mkdir(parents=True)
    with pytest.raises(InvalidRequest) as refusal:
        ModelUploads(home, (home / "models",)).check("yolox", may_replace=False)
    return refusal.value.message


def test_open_questions_are_asked_and_an_answer_is_taken_back(show: Show, tmp_path: Path) -> None:
    """A blocking question hides the button Add; each answer has the file read again without sending it."""
    file = made_networks.yolox(tmp_path / "yolox.onnx")
    with show("/models") as page:
        page.get_by_role("button", name="Add a model").click()
        box = page.get_by_role("dialog", name="Add a model")
        box.get_by_label("Drop an ONNX file").set_input_files(file)
        question = box.get_by_role("group", name="Question: layout")
        expect(question).to_contain_text("this layout does not decode them", timeout=WORK_MS)
        expect(box.get_by_role("button", name="Add", exact=True)).to_be_hidden()
        question.get_by_label("layout").fill("no-such-layout")
        question.get_by_role("button", name="Answer").click()
        expect(box.get_by_role("alert")).to_contain_text("'no-such-layout' is not one of", timeout=WORK_MS)
        expect(question.get_by_role("button", name="Answer")).to_be_focused()
        question.get_by_label("layout").fill("yolox")
        question.get_by_role("button", name="Answer").click()
        color = box.get_by_role("group", name="Question: color")
        expect(color.get_by_role("button").first).to_be_focused(timeout=WORK_MS)
        color.get_by_role("button", name="bgr [color=bgr]").click()
        expect(box.get_by_text("can be served")).to_be_visible(timeout=WORK_MS)
        expect(box.get_by_role("button", name="Add", exact=True)).to_be_visible()
        expect(box.get_by_label("Name", exact=True)).to_be_focused()
        box.get_by_text("Change what was found").click()
        expect(box.get_by_label("What")).to_contain_text("Standard deviation that divides [std]")
        advice = advice_of_taken_name(tmp_path)
        page.route("**/models/yolox/add*", lambda route: route.fulfill(status=400, json={"error": advice}))
        box.get_by_role("button", name="Add", exact=True).click()
        expect(box.get_by_role("alert")).to_have_text(
            "this gateway has a model 'yolox': choose another name; "
            "or check “Replace a model of this name that was added before”"
        )
        box.get_by_role("button", name="Take back layout=yolox").click()
        expect(box.get_by_text("a question is open")).to_be_visible(timeout=WORK_MS)


def test_file_that_is_no_model_or_too_large_is_refused_with_a_sentence(show: Show) -> None:
    """The gateway's own sentence, or before anything is sent. A file's name is text."""
    with show("/models") as page:
        box = drop(page, f"{HOSTILE}.onnx", b"this is no model" * 100)
        expect(box.get_by_role("alert")).to_contain_text("the file is text, not an ONNX model", timeout=WORK_MS)
        expect(box.get_by_role("alert")).to_contain_text(HOSTILE)
    with show("/models") as page:
        settings = {"settings": [{"name": "max_model_bytes", "value": 1000}]}
        page.route("**/gateway/v1/system/config", lambda route: route.fulfill(json=settings))
        page.route("**/gateway/v1/inspect", lambda route: route.abort())
        box = drop(page, "large.onnx", bytes(1001))
        expect(box.get_by_role("alert")).to_have_text(
            "large.onnx has 1.0 kB, and this gateway takes 1.0 kB at most (max_model_bytes)."
        )
