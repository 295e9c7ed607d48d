"""The Try page in a real browser: pictures from files, the clipboard and a webcam, and what is drawn and listed."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from penstock.gateway.rest.image_results import result_json
from penstock.protocol.image_answer import ImageAnswer, ImageResult
from penstock.protocol.vision_results import (
    Classes,
    DepthMap,
    Detections,
    Embedding,
    Mask,
    SegmentationMap,
    TextLine,
    TextLines,
    VisionResult,
)
from penstock.vision.masks import rle_of
from penstock.vision.palette import PALETTE, color_of
from tests.console.browser import horizontal_overflow, serious_findings
from tests.console.conftest import KeyedConsole, Show, sample_picture
from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("console")
HOSTILE = 'it\'s $(touch made) "<b>".jpg'
PIXEL = "([x, y]) => [...document.querySelector('canvas').getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3)"
COLOURED = """canvas => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d");
  copy.drawImage(canvas, 0, 0);
  const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
  const spread = at => Math.max(data[at], data[at + 1], data[at + 2]) - Math.min(data[at], data[at + 1], data[at + 2]);
  return Array.from({length: data.length / 4}, (_, index) => spread(4 * index)).filter(value => value > 20).length;
}"""
DROPPED = """([text, type, target]) => {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], "dropped.jpg", {type: "image/jpeg"}));
  const event = type === "paste" ? new ClipboardEvent(type, {clipboardData: data, bubbles: true})
    : new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true});
  document.querySelector(target).dispatchEvent(event);
}"""


def choose(page: Page, name: str = "coffee.jpg", content: bytes | None = None) -> None:
    """Chooses a file by the page's file input."""
    buffer = sample_picture().read_bytes() if content is None else content
    page.locator("input[type=file]").set_input_files({"name": name, "mimeType": "image/jpeg", "buffer": buffer})


def labels(page: Page) -> list[str]:
    """The first column of the table of results."""
    return page.locator(".result-list tbody td:first-child").all_inner_texts()


def drawn(page: Page) -> str:
    """The canvas as text, to compare."""
    return str(page.locator("canvas").evaluate("canvas => canvas.toDataURL()"))


def test_picture_is_drawn_listed_timed_and_explained(show: Show) -> None:
    """What the model found is in the picture and in the table, whose rows and boxes point to each other."""
    with show("/try?model=yolox-nano") as page:
        choose(page)
        expect(page.get_by_text("2 objects · yolox-nano, version 1 · 600 × 400 pixels")).to_be_visible()
        assert labels(page) == ["cup", "dining table"]
        scale = page.locator("canvas").evaluate("canvas => canvas.width") / 600
        left = page.evaluate(PIXEL, [round(162.3 * scale), round(150 * scale)])
        assert left == pytest.approx(color_of(41), abs=25)  # the cup's left edge
        plain = drawn(page)
        page.locator(".result-list tbody tr").first.hover()
        assert drawn(page) != plain
        page.mouse.move(0, 0)
        assert drawn(page) == plain
        page.locator(".result-list tbody tr").first.focus()
        page.keyboard.press("ArrowDown")
        expect(page.locator(".result-list tbody tr").nth(1)).to_be_focused()
        assert drawn(page) != plain
        page.locator("canvas").hover()
        expect(page.locator(".result-list tr.marked")).to_contain_text("cup")
        for stage in ("decode the picture", "preprocess", "queue", "engine", "decode the outputs"):
            expect(page.locator(".legend").get_by_text(stage)).to_contain_text("ms")
        expect(page.locator(".try-report")).to_contain_text("for its batch of 1 request and 1 row")
        page.get_by_text("Answer as JSON").click()
        assert json.loads(page.locator("pre.json").inner_text())["model_name"] == "yolox-nano"
        assert serious_findings(page) == []


def test_sliders_change_what_is_found(show: Show) -> None:
    """They begin at the model's own values, work with keys, and can be reset; the shown request has their values."""
    with show("/try?model=yolox-nano") as page:
        conf = page.get_by_label("Lowest score")
        expect(conf).to_have_value("0.25")
        expect(page.get_by_text("0.45 (the model's own)")).to_be_visible()
        choose(page)
        expect(page.get_by_text("2 objects")).to_be_visible()
        conf.fill("0.84")
        page.keyboard.press("ArrowRight")
        expect(page.get_by_text("1 object ·")).to_be_visible()
        expect(page.locator("pre").first).to_contain_text("/v2/models/yolox-nano/image?conf=0.85")
        page.keyboard.press("End")
        expect(page.get_by_text("Nothing found. A lower score threshold may show more.")).to_be_visible()
        page.get_by_role("button", name="Reset").click()
        expect(page.get_by_text("2 objects")).to_be_visible()
        expect(page.locator("pre").first).not_to_contain_text("conf")
        page.get_by_label("Model").select_option("street")
        expect(page.get_by_text("street, version 1")).to_be_visible()
        conf.press("End")
        expect(page.get_by_text("This model knows: person, bicycle, car.")).to_be_visible()
        assert page.url.endswith("/try?model=street")


def test_shown_requests_give_the_same_boxes(show: Show, console_stack: RunningStack, tmp_path: Path) -> None:
    """curl, Python and gRPC run as they are shown, whatever the file's name has in it."""
    (tmp_path / HOSTILE).write_bytes(sample_picture().read_bytes())
    texts = {}
    with show("/try?model=yolox-nano") as page:
        choose(page, HOSTILE)
        page.get_by_label("Lowest score").fill("0.3")
        page.get_by_label("Most overlap").fill("0.6")
        expect(page.locator("pre").first).to_contain_text("?conf=0.3&iou=0.6")
        expect(page.get_by_text("2 objects")).to_be_visible()
        for name in ("curl", "Python", "gRPC"):
            page.get_by_role("tab", name=name).click()
            page.get_by_role("button", name="Copy").click()
            expect(page.get_by_text("Copied")).to_be_visible()
            texts[name] = str(page.evaluate("navigator.clipboard.readText()"))
        scores = page.locator(".result-list tbody td:nth-child(2)").all_inner_texts()

    def run(*words: str) -> str:
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60).stdout

    found = json.loads(run("bash", "-c", texts["curl"]))["results"][0]["detections"]
    assert [f"{one['score']:.3f}" for one in found] == scores
    lines = run(sys.executable, "-c", texts["Python"]).splitlines()
    assert [line.split()[0] for line in lines] == ["cup", "dining"]
    in_python = [line for line in lines if f"{found[0]['score']:.3f}" in line]
    assert in_python == lines[:1]
    port = int(console_stack.http_url.rpartition(":")[2]) + 1
    assert f'"127.0.0.1:{port}"' in texts["gRPC"]  # as of `penstock up` without other ports
    outputs = run(sys.executable, "-c", texts["gRPC"].replace(f"127.0.0.1:{port}", console_stack.grpc_address))
    assert outputs == "output (1, 3549, 85)\n"
    assert not (tmp_path / "made").exists()


def test_key_of_the_session_is_not_in_the_shown_request(
    show_keyed: Show, keyed_console: KeyedConsole, tmp_path: Path
) -> None:
    """The text names a variable, and runs with a key in it. Without the role, the gateway's refusal is shown."""
    (tmp_path / "coffee.jpg").write_bytes(sample_picture().read_bytes())
    with show_keyed("/try") as page:
        log_in(page, keyed_console.secrets["all"])
        choose(page)
        expect(page.get_by_text("street, version 1")).to_be_visible()
        shown = page.locator("pre").first.inner_text()
        assert keyed_console.secrets["all"] not in page.content()
        page.get_by_role("button", name="Log out").click()
        log_in(page, keyed_console.secrets["read"])
        choose(page)
        expect(page.get_by_role("alert").filter(has_text="lacks the role infer")).to_be_visible()
    environment = {"PATH": os.environ["PATH"], "PENSTOCK_API_KEY": keyed_console.secrets["infer"]}
    done = subprocess.run(["bash", "-c", shown], cwd=tmp_path, env=environment, capture_output=True, timeout=30)
    assert json.loads(done.stdout)["model_name"] == "street"


@pytest.mark.parametrize("width", [1440, 1205, 640, 390])
def test_slider_stays_where_it_is_when_it_is_moved(show: Show, width: int) -> None:
    """Its label and its value have one line, whether the value is the model's own or another."""
    with show("/try?model=yolox-nano", width=width) as page:
        conf = page.get_by_label("Lowest score")
        expect(conf).to_have_value("0.25")
        before = conf.bounding_box()
        conf.press("ArrowRight")
        expect(page.get_by_text("0.26", exact=True)).to_be_visible()
        assert conf.bounding_box() == before
        line = page.get_by_text("Lowest score (conf)").bounding_box()
        assert line is not None
        assert (line["height"] < 30, horizontal_overflow(page)) == (True, 0)


def test_key_that_may_only_infer_tries_a_model_by_its_name(show_keyed: Show, keyed_console: KeyedConsole) -> None:
    """The list needs the role read; the first key of docs/security.md has the role infer only."""
    with show_keyed("/try") as page:
        log_in(page, keyed_console.secrets["infer"])
        choose(page)
        expect(page.get_by_role("alert").filter(has_text="Enter the name of the model.")).to_be_visible()
        page.get_by_label("Model").fill("street")
        page.keyboard.press("Enter")
        expect(page.get_by_text("street, version 1")).to_be_visible()
        assert page.url.endswith("/try?model=street")


def test_page_opens_with_the_model_used_last(show: Show) -> None:
    """Of the models of this gateway, and without a model in the address."""
    with show("/try") as page:
        last = page.get_by_label("Model").locator("option").last.get_attribute("value")
        page.get_by_label("Model").select_option(last)
        page.get_by_role("link", name="System").click()
        page.get_by_role("link", name="Try").click()
        expect(page.get_by_label("Model")).to_have_value(str(last))


def log_in(page: Page, secret: str) -> None:
    """Enters a key in the dialog that asks for it."""
    page.get_by_role("dialog", name="API key").locator("input").fill(secret)
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="API key")).to_be_hidden()


def test_key_is_named_by_its_variable_in_shown_requests(show: Show) -> None:
    """The text for a gateway with keys has $PENSTOCK_API_KEY; addresses of this machine become those that it has."""
    request = {
        **{"gateway": "https://g.example:8000", "model": "a/b'c", "fileName": "p.jpg", "kind": "embedding"},
        **{"options": {"conf": None}, "inputName": 'in"put', "needsKey": True},
    }
    script = """async request => {
      const {curlText, pythonText, grpcText, reachable} = await import("/pages/try/request.js");
      const own = "http://127.0.0.1:8000";
      const hosts = [[own, "box.example"], [own, "localhost"], ["https://g:1/", "box"]];
      const texts = [curlText, pythonText, grpcText].map(text => text(request));
      return {texts, hosts: hosts.map(pair => reachable(...pair))};
    }"""
    with show("/try") as page:
        made = page.evaluate(script, request)
    curl, python, grpc = made["texts"]
    assert '-H "authorization: Bearer $PENSTOCK_API_KEY"' in curl
    assert "'https://g.example:8000/v2/models/a%2Fb'\\''c/image'" in curl
    assert "PENSTOCK_API_KEY" in python
    assert "print(result.vector)" in python
    assert 'InferenceServerClient("g.example:8001", ssl=True)' in grpc
    assert 'InferInput("in\\"put"' in grpc
    compile(python, "python", "exec")
    compile(grpc, "grpc", "exec")
    assert made["hosts"] == ["http://box.example:8000", "http://127.0.0.1:8000", "https://g:1"]


def test_dropped_and_pasted_pictures_are_sent(show: Show) -> None:
    """A drop anywhere on the page's work area, and Ctrl+V."""
    text = base64.b64encode(sample_picture().read_bytes()).decode()
    with show("/try?model=yolox-nano") as page:
        page.wait_for_selector(".try")
        page.evaluate(DROPPED, [text, "paste", "body"])
        expect(page.get_by_text("2 objects")).to_be_visible()
        expect(page.get_by_role("button", name="Save dropped.jpg")).to_be_visible()
        page.evaluate(DROPPED, [text, "drop", ".try"])
        expect(page.get_by_role("button", name="Save dropped.jpg")).to_be_hidden()
        expect(page.get_by_text("2 objects")).to_be_visible()
        assert page.url.endswith("/try?model=yolox-nano")


def test_webcam_gives_one_picture_and_live_ones(show: Show) -> None:
    """Live pictures follow each other until the button is pressed again; the webcam ends with the page."""
    with show("/try?model=street") as page:
        page.get_by_role("button", name="Use the webcam").click()
        page.get_by_role("button", name="Take picture").click()
        expect(page.locator(".result-head")).to_contain_text("street, version 1")
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.url) if request.url.endswith("/image") else None)
        live = page.get_by_role("button", name="Live")
        live.click()
        expect(live).to_have_attribute("aria-pressed", "true")
        for _ in range(3):
            page.wait_for_event("requestfinished", lambda request: request.url.endswith("/image"))
        live.click()
        expect(live).to_have_attribute("aria-pressed", "false")
        assert len(sent) >= 3
        track = page.evaluate_handle("document.querySelector('video').srcObject.getVideoTracks()[0]")
        page.get_by_role("link", name="System").click()
        assert track.evaluate("track => track.readyState") == "ended"


def made_results() -> dict[str, VisionResult]:
    """A result of each form, for a picture of 60 x 40 pixels."""
    box = np.array([[10, 8, 40, 30]], np.float32)
    score, class_id = np.array([0.9], np.float32), np.array([1])
    ring = np.ones((20, 30), np.bool_)
    ring[5:15, 10:20] = False
    mask = Mask(40, 60, 10, 8, ring)
    points = np.array([[[12, 10, 0.9], [38, 28, 0.9]]], np.float32)
    return {
        "box": Detections(box, score, class_id),
        "mask": Detections(box, score, class_id, masks=(mask,)),
        "keypoints": Detections(box, score, class_id, keypoints=points),
        "oriented": Detections(box, score, class_id, xywhr=np.array([[25, 19, 30, 10, 0.5]], np.float32)),
        "classes": Classes(score, class_id),
        "embedding": Embedding(np.linspace(0, 1, 512, dtype=np.float32)),
        "text": TextLines((TextLine("STOP", 0.9, np.array([[10, 8], [40, 8], [40, 20], [10, 20]], np.float32)),)),
        "segmentation": SegmentationMap(40, 60, class_id, (mask,)),
        "depth": DepthMap(np.linspace(2, 7, 2400, dtype=np.float32).reshape(40, 60)),
    }


SHOWN = {
    "box": ["<i>helmet</i>", "0.900", "10, 8, 40, 30"],
    "mask": ["500 px"],
    "keypoints": ["Keypoints"],
    "oriented": ["29°"],
    "classes": ["<i>helmet</i>", "0.900"],
    "embedding": ["512 values", "0.0000, 0.0020, 0.0039"],
    "text": ["STOP", "0.900"],
    "segmentation": ["<i>helmet</i>", "20.8 %"],
    "depth": ["Lowest value", "2", "Highest value", "7"],
}


def test_every_form_of_result_is_drawn_and_listed(show: Show) -> None:
    """None of the forms that the picture API has is left out; a form that the page does not know is shown as JSON."""
    results = made_results()
    answers = {name: result_json(result, ("person", "<i>helmet</i>")) for name, result in results.items()}
    present = {field for one in answers.values() for field, value in msgspec.to_builtins(one).items() if value}
    assert present == set(ImageResult.__struct_fields__)
    current: dict[str, Any] = {}
    with show("/try?model=yolox-nano", width=1024) as page:
        page.route("**/image*", lambda route: route.fulfill(json=current["answer"]))
        blank = grey_picture(page)
        for name, result in answers.items():
            whole = msgspec.to_builtins(ImageAnswer("yolox-nano", "1", [result], {"total": 1.0}, 1, name))
            current["answer"] = whole
            choose(page, f"{name}.png", blank)
            expect(page.get_by_role("img", name=f"{name}.png with its results")).to_be_visible()
            for text in SHOWN[name]:
                expect(page.locator(".result-list .scroll")).to_contain_text(text)
            count = page.locator("canvas").evaluate(COLOURED)
            assert count > 200, name
        current["answer"] = {**whole, "results": [{"hologram": [1, 2]}]}
        choose(page, "new.png", blank)
        expect(page.locator(".result-list .scroll")).to_contain_text("hologram")
        expect(page.locator(".result-list .scroll")).to_contain_text("[1,2]")


def grey_picture(page: Page) -> bytes:
    """A PNG of 60 x 40 grey pixels, made by the browser."""
    script = """async () => {
      const canvas = new OffscreenCanvas(60, 40);
      const context = canvas.getContext("2d");
      context.fillStyle = "#808080";
      context.fillRect(0, 0, 60, 40);
      return [...new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer())];
    }"""
    return bytes(page.evaluate(script))


def test_masks_are_painted_as_the_gateway_draws_them(show: Show) -> None:
    """COCO's run lengths give the same pixels in the browser, and both have the same colors."""
    random = np.random.default_rng(4)
    bits = random.random((37, 53)) > 0.5
    bits[:, 20:30] = True  # a run over several columns
    script = """async counts => {
      const {areaOf, paintMask, runLengths} = await import("/pages/try/masks.js");
      const {PALETTE, colorOf} = await import("/pages/try/drawing.js");
      const pixels = new Uint32Array(37 * 53);
      paintMask(runLengths(counts), 37, 1, {pixels, width: 53, height: 37}, 1);
      const colors = Array.from({length: 120}, (_, index) => colorOf(index));
      return {pixels: [...pixels], area: areaOf(runLengths(counts)), palette: PALETTE, colors};
    }"""
    with show("/try") as page:
        found = page.evaluate(script, rle_of(Mask(37, 53, 0, 0, bits)))
    assert np.array_equal(np.array(found["pixels"]).reshape(37, 53), bits)
    assert found["area"] == int(bits.sum())
    assert [tuple(color) for color in found["palette"]] == list(PALETTE)
    assert [tuple(color) for color in found["colors"]] == [color_of(number) for number in range(120)]


def test_faults_are_shown_with_the_gateways_sentence(show: Show, console_stack: RunningStack, tmp_path: Path) -> None:
    """No picture, a picture that is too large, a model that is not there; and none that takes pictures."""
    with show("/try?model=no-such-model") as page:
        alert = page.get_by_role("alert").first
        expect(alert).to_have_text("The model no-such-model is not here, or takes no pictures.")
        page.get_by_label("Model").select_option("yolox-nano")
        choose(page, content=b"no picture")
        url = f"{console_stack.http_url}/v2/models/yolox-nano/image"
        expect(alert).to_have_text(json.loads(call("POST", url, b"no picture").body)["error"])
        expect(page.get_by_text("The browser cannot show this picture.")).to_be_visible()
        large = tmp_path / "large.jpg"
        with large.open("wb") as file:
            file.truncate((64 << 20) + 1)
        page.locator("input[type=file]").set_input_files(large)
        expect(alert).to_contain_text("67108864")
        choose(page)
        expect(page.get_by_text("2 objects")).to_be_visible()
        expect(alert).to_be_hidden()
        page.route("**/v1/models", lambda route: route.fulfill(json={"models": [], "omitted": 0}))
        page.reload()
        expect(page.get_by_text("penstock models pull yolox-nano")).to_be_visible()
