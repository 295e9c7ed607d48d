"""What a video program's metrics page says of its sources, as far as the bench counts it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from loadtest.measure.buckets import Buckets

Key = TypeVar("Key")
_SAMPLE = re.compile(r"^penstock_video_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Page:
    """Counters so far, of one program or several. latency: upper bound in seconds → frames that took no longer.

    hand_over: rows by where they lay. processes: decode processes by decoder. prepare_s, decode_s: of CPU.
    """

    answered: Mapping[str, int] = field(default_factory=dict)
    decoded: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    latency: Mapping[float, int] = field(default_factory=dict)
    hand_over: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, int] = field(default_factory=dict)
    batches: int = 0
    batched: int = 0
    infer_s: float = 0.0
    decode_s: float = 0.0
    prepare_s: float = 0.0


def read_page(text: str) -> Page:
    """Of one program."""
    answered: dict[str, int] = {}
    decoded: dict[str, int] = {}
    restarts: dict[str, int] = {}
    by_source = {"inferred_total": answered, "frames_total": decoded, "restarts_total": restarts}
    dropped: dict[str, int] = {}
    latency: dict[float, int] = {}
    hand_over: dict[str, int] = {}
    processes: dict[str, int] = {}
    by_word = {"rows_total": (hand_over, "hand_over"), "decode_processes": (processes, "decoder")} | {
        "dropped_total": (dropped, "reason")
    }
    sums = dict.fromkeys(
        ("batch_frames_count", "batch_frames_sum", "infer_seconds_sum", "decode_seconds_sum", "prepare_seconds_sum"),
        0.0,
    )
    for name, words, value in _SAMPLE.findall(text):
        if name in by_source:
            by_source[name][_label(words, "source")] = int(float(value))
        elif name in by_word:
            counts, label = by_word[name]
            word = _label(words, label)
            counts[word] = counts.get(word, 0) + int(float(value))
        elif name == "glass_to_event_seconds_bucket":
            bound = float(_label(words, "le"))
            latency[bound] = latency.get(bound, 0) + int(float(value))
        elif name in sums:
            sums[name] += float(value)
    batches, batched, infer_s, decode_s, prepare_s = sums.values()
    return Page(
        answered, decoded, restarts, dropped, latency, hand_over, processes,
        int(batches), int(batched), infer_s, decode_s, prepare_s,
    )  # fmt: skip


def joined(pages: Iterable[Page]) -> Page:
    """Of several programs, whose sources have different ids."""
    pages = tuple(pages)
    return Page(
        answered=_added(page.answered for page in pages),
        decoded=_added(page.decoded for page in pages),
        restarts=_added(page.restarts for page in pages),
        dropped=_added(page.dropped for page in pages),
        latency=_added(page.latency for page in pages),
        hand_over=_added(page.hand_over for page in pages),
        processes=_added(page.processes for page in pages),
        batches=sum(page.batches for page in pages),
        batched=sum(page.batched for page in pages),
        infer_s=sum(page.infer_s for page in pages),
        decode_s=sum(page.decode_s for page in pages),
        prepare_s=sum(page.prepare_s for page in pages),
    )


def latency_between(before: Page, after: Page) -> Buckets:
    """Of the frames answered meanwhile. A source that was taken out in between is in neither."""
    return Buckets(tuple(sorted((bound, n - before.latency.get(bound, 0)) for bound, n in after.latency.items())))


def _added(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for one in counts:
        for key, n in one.items():
            found[key] = found.get(key, 0) + n
    return found


def _label(words: str, name: str) -> str:
    return next((value for key, value in _LABEL.findall(words) if key == name), "")
