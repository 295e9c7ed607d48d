"""Makes the pictures of the pages from real runs: a street with counts, that run's page, a drawn photo, the console.

    .venv/bin/python -m docs.pictures --video vtest.avi --photo coffee.jpg --model yolox_nano.onnx

The model runs in engines of this script's own, as `yolox-nano`. Chromium takes the picture of the page.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cv2

from docs.screenshots import SETTLE_MS, run_penstock, stack_to_show
from tests.console.browser import shown_page, started_chromium

IMAGES = Path(__file__).resolve().parent / "images"
RULES = ("--line", "pavement=100,350,700,350", "--zone", "road=0.43,0.36,0.73,0.36,0.73,0.55,0.43,0.55")
PAGE_SIZE = (1040, 1350)  # pixels: the page's first screens
CONSOLE_SIZE = (1280, 760)
QUALITY = 75


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__.partition("\n")[0])
    parser.add_argument("--video", type=Path, required=True, metavar="FILE", help="vtest.avi of OpenCV's samples")
    parser.add_argument("--photo", type=Path, required=True, metavar="FILE", help="coffee.jpg of scikit-image")
    parser.add_argument("--model", type=Path, required=True, metavar="ONNX", help="YOLOX-Nano")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER", help=f"of the pictures [{IMAGES}]")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> None:
    """Makes street.jpg, summary.jpg, coffee.jpg and console.jpg."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        home = work / "home"
        out = work / "out"
        run_penstock(home, "models", "add", options.model, "--name", "yolox-nano")
        video = ("--source", options.video, "--model", "yolox-nano", *RULES, "--out", out, "--summary")
        run_penstock(home, "video", "run", *video, "--engine", "embedded", "--no-api", "--no-progress")
        with stack_to_show(options) as stack:
            photo = (options.photo, "--url", stack.http_url, "--draw", work / "photo.png")
            run_penstock(home, "infer", "yolox-nano", *photo)
            take_page(f"{stack.console_url}streams/market", work / "console.png", CONSOLE_SIZE)
        take_page((out / "summary.html").as_uri(), work / "page.png", PAGE_SIZE)
        options.out.mkdir(parents=True, exist_ok=True)
        for made, name in (
            (out / "poster.jpg", "street"),
            (work / "page.png", "summary"),
            (work / "photo.png", "coffee"),
            (work / "console.png", "console"),
        ):
            write_jpeg(made, options.out / f"{name}.jpg")


def take_page(url: str, picture: Path, size: tuple[int, int]) -> None:
    """Writes a PNG of the beginning of a page. size: width and height in pixels."""
    with started_chromium() as browser, shown_page(browser, url, width=size[0], height=size[1]) as page:
        page.wait_for_timeout(SETTLE_MS)
        page.screenshot(path=picture)


def write_jpeg(made: Path, at: Path) -> None:
    """Writes a picture as a small JPEG, without metadata."""
    picture = cv2.imread(str(made))
    if picture is None or not cv2.imwrite(str(at), picture, [cv2.IMWRITE_JPEG_QUALITY, QUALITY]):
        raise SystemExit(f"{at}: cannot be made of {made}")
    sys.stdout.write(f"{at}  {at.stat().st_size} bytes\n")


if __name__ == "__main__":
    main(parse_arguments())
