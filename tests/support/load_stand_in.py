"""Stands in for `penstock load` where a test starts load tests: `python load_stand_in.py PARENT MEMORY FILE WORDS…`.

By --model: "quick" ends at once with a result, "fails" without one, "missing" says what to install; "waits" runs until
SIGTERM and then writes a result; "stubborn" ignores SIGTERM.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

SCENARIOS = [
    {
        "name": "steady",
        "about": "One picture after the other.",
        "slo_p99_ms": 250.0,
        "request": [{"kind": "image", "model": "street"}],
        "phase": [{"name": "steady", "seconds": 20.0, "is_judged": True}],
    },
    {
        "name": "video-streams",
        "about": "Cameras.",
        "slo_p99_ms": 1000.0,
        "request": [{"kind": "video", "model": "street"}],
        "phase": [{"name": "search", "seconds": 8.0}],
    },
]
SUMMARY = {"outcome": "pass", "headline": "PASS: fast", "began_at": "2026-11-29T03:00:00+00:00", "p99_ms": 12.5}
COMPARISON = {"a": "a", "b": "b", "rows": [], "warnings": ["the SLO differs"], "changes": []}
REPORT = "<!doctype html><title>report</title>"


def main(words: list[str]) -> int:
    """The exit code."""
    if words[0] == "scenarios":
        say(SCENARIOS)
        return 0
    if words[0] == "compare":
        say(COMPARISON)
        return 0
    values = dict(word.removeprefix("--").partition("=")[::2] for word in words[1:])
    model, folder = values.get("model", "quick"), Path(values["out"])
    (folder / "seen.json").write_text(json.dumps({"words": sys.argv[1:], "environment": dict(os.environ)}))
    if model == "fails":
        say({"exit_code": 1, "error": "http://127.0.0.1:8000: nothing answers"})
        return 1
    if model in ("waits", "stubborn"):
        wait_for_a_signal(Path(values["progress"]), ends=model == "waits")
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    (folder / "run.json").write_text('{"format": 1}')
    (folder / "report.html").write_text(REPORT)
    return 0


def say(content: object) -> None:
    """On standard output, as JSON."""
    sys.stdout.write(json.dumps(content) + "\n")


def wait_for_a_signal(progress: Path, *, ends: bool) -> None:
    """Returns at SIGTERM, if it ends; the progress file shows that the signal is awaited."""
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    lines = [
        {"at_s": 1.0, "phase": "steady", "p50_ms": 5.0, "p99_ms": 9.0, "ok_per_s": 80.0},
        {"at_s": 2.0, "text": "note"},
    ]
    progress.write_text("".join(json.dumps(line) + "\n" for line in lines))
    while not (ends and received):
        time.sleep(0.01)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[4:]))
