"""Drawing, an image with a drawn result, and the HTML that a notebook shows for a result."""

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.protocol.errors import InvalidRequest

Column = Sequence[Any] | np.ndarray[Any, np.dtype[Any]]
MAX_SHOWN_ROWS, MAX_SHOWN_SIDE, SHOWN_QUALITY = 20, 800, 80  # in a notebook
STAGES = ("decode", "preprocess", "queue", "infer", "postprocess")


class Drawing(np.ndarray[Any, np.dtype[np.uint8]]):
    """An image with a drawn result: an array (height, width, 3) uint8 BGR that can be saved and shown in a notebook."""

    def save(self, path: str | Path) -> Path:
        """Saves the image. The suffix sets the format: .jpg, .png or .webp. Raises InvalidRequest."""
        target = Path(path)
        try:
            target.write_bytes(self.encoded(target.suffix))
        except OSError as error:
            raise InvalidRequest(f"{target} cannot be written ({error.strerror}): choose another path") from error
        return target

    def encoded(self, suffix: str) -> bytes:
        """The encoded image. suffix: .jpg, .png or .webp. Raises InvalidRequest."""
        import cv2

        if suffix.lower() not in (".jpg", ".jpeg", ".png", ".webp"):
            raise InvalidRequest(f"unsupported image format {suffix!r}: use the suffix .jpg, .png or .webp")
        data: bytes = cv2.imencode(suffix, np.asarray(self))[1].tobytes()
        return data

    def _repr_jpeg_(self) -> bytes:
        """JPEG for a notebook; large images are downscaled."""
        import cv2

        pixels = np.asarray(self)
        scale = MAX_SHOWN_SIDE / max(pixels.shape[:2])
        if scale < 1:
            pixels = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
        data: bytes = cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, SHOWN_QUALITY])[1].tobytes()
        return data


def timings_text(timings_ms: Mapping[str, float]) -> str:
    """The stages and their sum, such as "decode 1.5 + infer 12.0 = 14.0 ms"."""
    stages = [f"{stage} {timings_ms[stage]:.1f}" for stage in STAGES if stage in timings_ms]
    total = f" = {timings_ms['total']:.1f} ms" if "total" in timings_ms else " ms"
    return " + ".join(stages) + total


def notebook_html(drawn: Drawing, alt: str, notes: Sequence[str], columns: Mapping[str, Column]) -> str:
    """HTML with the drawn image as a data URL, the notes and the first rows. All text is escaped."""
    data = base64.b64encode(drawn._repr_jpeg_()).decode()
    picture = f'<img style="max-width:100%" alt="{html.escape(alt)}" src="data:image/jpeg;base64,{data}">'
    text = " · ".join(html.escape(note) for note in notes)
    return f"<div>{picture}<div>{text}</div>{_table(columns)}</div>"


def _table(columns: Mapping[str, Column]) -> str:
    """The first rows, escaped."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    rows = list(zip(*columns.values(), strict=True))
    shown = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row) + "</tr>"
        for row in rows[:MAX_SHOWN_ROWS]
    )
    more = f"<div>{len(rows) - MAX_SHOWN_ROWS} more rows</div>" if len(rows) > MAX_SHOWN_ROWS else ""
    return f"<table><tr>{head}</tr>{shown}</table>{more}"


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float | np.floating) else str(value)
