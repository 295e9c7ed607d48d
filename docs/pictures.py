"""Makes the pictures of the pages from real runs: a street with its counts, the page of that run, and a drawn photo.

    .venv/bin/python -m docs.pictures --video vtest.avi --photo coffee.jpg --model yolox_nano.onnx

The model runs in engines of this script's own, as `yolox-nano`. Chromium takes the picture of the page.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cv2
from playwright.sync_api import sync_playwright

from tests.support.stack import start_stack, stop_stack

IMAGES = Path(__file__).resolve().parent / "images"
PENSTOCK = Path(sys.executable).with_name("penstock")
RULES = ("--line", "pavement=100,350,700,350", "--zone", "road=0.43,0.36,0.73,0.36,0.73,0.55,0.43,0.55")
PAGE_SIZE = (1040, 1350)  # pixels: the page's first screens
QUALITY = 82
TIMEOUT_S = 300


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("--video", type=Path, required=True, metavar="FILE", help="vtest.avi of OpenCV's samples")
    parser.add_argument("--photo", type=Path, required=True, metavar="FILE", help="coffee.jpg of scikit-image")
    parser.add_argument("--model", type=Path, required=True, metavar="ONNX", help="YOLOX-Nano")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER", help=f"of the pictures [{IMAGES}]")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> None:
    """Makes street.jpg, summary.jpg and coffee.jpg."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        home = work / "home"
        out = work / "out"
        run_penstock(home, "models", "add", options.model, "--name", "yolox-nano")
        video = ("--source", options.video, "--model", "yolox-nano", *RULES, "--out", out, "--summary")
        run_penstock(home, "video", "run", *video, "--engine", "embedded", "--no-api", "--no-progress")
        stack = start_stack(home, "--engine", "embedded", "--models", "yolox-nano")
        try:
            photo = (options.photo, "--url", stack.http_url, "--draw", work / "photo.png")
            run_penstock(home, "infer", "yolox-nano", *photo)
        finally:
            stop_stack(stack)
        take_page(out / "summary.html", work / "page.png")
        options.out.mkdir(parents=True, exist_ok=True)
        for made, name in (
            (out / "poster.jpg", "street"),
            (work / "page.png", "summary"),
            (work / "photo.png", "coffee"),
        ):
            write_jpeg(made, options.out / f"{name}.jpg")


def run_penstock(home: Path, *words: object) -> None:
    """Runs a command of Penstock; its output is shown only if it fails. Raises SystemExit then."""
    command = [str(PENSTOCK), *map(str, words)]
    environ = {"PENSTOCK_HOME": str(home), "PATH": "/usr/bin:/bin", "HOME": str(home)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


def take_page(page_file: Path, picture: Path) -> None:
    """Writes a PNG of the beginning of a page."""
    width, height = PAGE_SIZE
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
        page.goto(page_file.as_uri())
        page.screenshot(path=picture)
        browser.close()


def write_jpeg(made: Path, at: Path) -> None:
    """Writes a picture as a small JPEG, without metadata."""
    picture = cv2.imread(str(made))
    if picture is None or not cv2.imwrite(str(at), picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY]):
        raise SystemExit(f"{at}: cannot be made of {made}")
    sys.stdout.write(f"{at}  {at.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(parse_arguments())
