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
    """Counters so far, of one program or several. latency: (source, upper bound in seconds) → its frames that took no
    longer. dropped: (source, reason) → frames.

    hand_over: rows by where they lay. processes: decode processes by decoder. prepare_s, decode_s: of CPU.
    """

    answered: Mapping[str, int] = field(default_factory=dict)
    decoded: Mapping[str, int] = field(default_factory=dict)
    restarts: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)
    latency: Mapping[tuple[str, float], int] = field(default_factory=dict)
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
    dropped: dict[tuple[str, str], int] = {}
    latency: dict[tuple[str, float], int] = {}
    hand_over: dict[str, int] = {}
    processes: dict[str, int] = {}
    by_word = {"rows_total": (hand_over, "hand_over"), "decode_processes": (processes, "decoder")}
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
        elif name == "dropped_total":
            dropped[_label(words, "source"), _label(words, "reason")] = int(float(value))
        elif name == "glass_to_event_seconds_bucket":
            latency[_label(words, "source"), float(_label(words, "le"))] = int(float(value))
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
    """Of the frames answered meanwhile, of the sources that are still there: one that goes takes its counts along."""
    return Buckets(tuple(sorted(_between(before.latency, after.latency).items())))


def dropped_between(before: Page, after: Page) -> dict[str, int]:
    """Frames by reason, of the sources that are still there."""
    return {why: n for why, n in _between(before.dropped, after.dropped).items() if n}


def _between(before: Mapping[tuple[str, Key], int], after: Mapping[tuple[str, Key], int]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for (source, key), n in after.items():
        found[key] = found.get(key, 0) + n - before.get((source, key), 0)
    return found


def _added(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    found: dict[Key, int] = {}
    for one in counts:
        for key, n in one.items():
            found[key] = found.get(key, 0) + n
    return found


def _label(words: str, name: str) -> str:
    return next((value for key, value in _LABEL.findall(words) if key == name), "")
