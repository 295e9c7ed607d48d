"""What a call of penstock.Client costs over code that sends the same request by hand, in interleaved rounds.

    python -m loadtest.bench.gateway.client_overhead

The server is loadtest.bench.null_server with a detector's answer: it takes the picture and answers at once, so that a
call's time is the client's, the kernel's and the loopback's. By hand: http.client, urllib3 and, where it is installed,
requests, each with one connection that is kept open and the answer as Python's json reads it. Client.infer also checks
the answer's types and makes the NumPy arrays. Each round has one stretch of calls of each; the order is random.
"""

import argparse
import http.client
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import urllib3

from loadtest.bench.child import CHECKOUT
from loadtest.bench.report import format_table, present, spread
from penstock import Client

PATH = "/v2/models/detector/image"
HEADERS = {"content-type": "image/jpeg"}
PICTURE = b"\xff\xd8\xff" + bytes(60_000)
BOX = {"xyxy": [10.25, 20.5, 200.125, 300.5], "class_id": 0, "label": "person", "score": 0.912345}
ANSWER = {
    "model_name": "detector",
    "model_version": "1",
    "results": [{"detections": [BOX] * 10}],
    "timings_ms": {"decode": 1.5, "preprocess": 0.25, "queue": 0.0, "infer": 12.0, "postprocess": 0.125, "total": 14.0},
    "batch_size": 1,
}
BY_HAND = ("http.client", "urllib3", "requests")
OURS = "Client.infer"
HEAD = ("", "µs a call", *(f"over {name}" for name in BY_HAND))
Call = Callable[[], object]


@contextmanager
def null_server() -> Iterator[int]:
    """The port of a server that gives the answer."""
    command = [sys.executable, "-m", "loadtest.bench.null_server", json.dumps(ANSWER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.terminate()


def make_calls(port: int, stack: ExitStack) -> dict[str, Call]:
    """A call of each kind, by its name."""
    connection = stack.enter_context(closing(http.client.HTTPConnection("127.0.0.1", port)))
    pool = stack.enter_context(urllib3.PoolManager())
    client = stack.enter_context(Client(f"http://127.0.0.1:{port}", api_key=""))
    url = f"http://127.0.0.1:{port}{PATH}"

    def by_http_client() -> object:
        connection.request("POST", PATH, PICTURE, HEADERS)
        return json.loads(connection.getresponse().read())["results"][0]["detections"]

    calls: dict[str, Call] = {
        "http.client": by_http_client,
        "urllib3": lambda: pool.request("POST", url, body=PICTURE, headers=HEADERS).json()["results"][0]["detections"],
        OURS: lambda: client.infer("detector", PICTURE),
    }
    if importlib.util.find_spec("requests"):
        session: Any = stack.enter_context(importlib.import_module("requests").Session())
        calls["requests"] = lambda: session.post(url, PICTURE, headers=HEADERS).json()["results"][0]["detections"]
    return calls


def measure(calls: dict[str, Call], *, rounds: int, count: int) -> dict[str, list[float]]:
    """The median microseconds of a call in each round, by name."""
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # the first one warms up
        for name in random.sample(list(calls), len(calls)):
            took = []
            for _ in range(count):
                begin = time.perf_counter()
                calls[name]()
                took.append(time.perf_counter() - begin)
            if number:
                medians[name].append(statistics.median(took) * 1e6)
    return medians


def rows_of(medians: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row a kind; ours with what it costs more than each other one, by rounds."""
    rows = []
    for name, figures in medians.items():
        over = {}
        if name == OURS:
            over = {
                other: spread([ours - theirs for ours, theirs in zip(figures, medians[other], strict=True)])
                for other in BY_HAND
                if other in medians
            }
        rows.append({"client": name, "us": spread(figures), "over_us": over})
    return rows


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gateway.client_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=400, help="of each stretch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here, too")
    return parser.parse_args(arguments)


def main() -> int:
    """Prints the table."""
    options = parse_arguments()
    with ExitStack() as stack:
        calls = make_calls(stack.enter_context(null_server()), stack)
        rows = rows_of(measure(calls, rounds=options.rounds, count=options.calls))
    cells = [(row["client"], row["us"], *(row["over_us"].get(name, "") for name in BY_HAND)) for row in rows]
    note = f"{options.rounds} interleaved rounds of {options.calls} calls: median of medians (lowest-highest), µs"
    present(rows, note, format_table(HEAD, cells), options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
