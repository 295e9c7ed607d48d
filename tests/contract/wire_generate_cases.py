"""Generation over REST: a model's inputs by their names."""

import math
from typing import Any

from tests.contract.wire_case import Difference, HttpCase, Json, get, post
from tests.contract.wire_http_cases import UNREADABLE

WORD_FOR_KIND = Difference("the parser has its own words, and Triton calls it its own failure", code=400)
P: Json = {"x": [1, 2, 3]}


def _generate(model: str, body: Any, suffix: str = "", **headers: str) -> Any:
    return post(f"/v2/models/{model}/generate{suffix}", body, headers)


def _cases(name: str, *bodies: tuple[str, Any], but: Difference | None = None) -> list[HttpCase]:
    return [
        HttpCase(f"generate{suffix}: {name} {index}", _generate(model, body, suffix), but)
        for index, (model, body) in enumerate(bodies)
        for suffix in ("", "_stream")
    ]


GENERATE = [
    *_cases("array", ("plain", P), ("plain", {"x": [1, 2, 3, 4, 5, 6]}), ("vary", {"x": list(range(9))})),
    *_cases("element", ("vary", {"x": 5}), ("scalars", {"x": 3}), ("lookup", {"index": 0}), ("word", {"x": "hi"})),
    *_cases("strings", ("text", {"x": ["a", "é"]}), ("text", {"x": [["a"], ["b"]]}), ("word", {"x": ["a", "b"]})),
    *_cases("optional", ("optional", P), ("optional", P | {"bias": 1})),
    *_cases("outputs", ("pair", {"a": [1, 2, 3], "b": [1, 2, 3]}), ("dynamic", {"x": [1, 2, 3, 4]})),
    *_cases("empty", ("vary", {"x": []}), ("text", {"x": []}), ("dynamic", {"x": []}), ("optional", {"x": []})),
    *_cases("empty rows", ("plain", {"x": []})),
    *_cases("numbers", ("plain", {"x": [0.1, 1e-7, 3.4e38]}), ("plain", {"x": [math.nan, math.inf, -math.inf]})),
    *_cases("id", ("plain", P | {"id": "7"}), ("plain", P | {"id": ""}), ("plain", P | {"id": 'a"b'})),
    *_cases("id is a number", ("plain", P | {"id": 7}), but=UNREADABLE),
    *_cases("version", ("versions", P), ("versions/versions/1", P), ("versions/versions/9", P)),
    *_cases("missing", ("missing", P), ("broken", P)),
    *_cases("parameters", ("plain", P | {"a": 1, "b": 1.5, "y": "s", "c": True}), ("plain", {"parameters": P}),
            ("plain", P | {"parameters": {"id": "9", "a": 1}}), ("plain", P | {"triton_x": 1, "priority": -1})),
    *_cases("no parameter", *(("plain", P | {"a": value}) for value in (None, [1], {"b": 1})),
            ("plain", P | {"parameters": {"a": None}}), ("plain", P | {"parameters": {"parameters": {"b": 1}}})),
    *_cases("parameters is no object", ("plain", P | {"parameters": None}), ("plain", P | {"parameters": 5}),
            but=WORD_FOR_KIND),
    *_cases("shape", *(("plain", {"x": value}) for value in ([1, 2], [1, 2, 3, 4], 1, None, "a", True, {"a": 1})),
            ("plain", {"x": [[1, 2, 3], [4, 5, 6]]}), ("optional", {"x": [1] * 6}),
            ("optional", P | {"bias": [1, 2]}), ("plain", {"parameters": {"x": [1, 2]}})),
    *_cases("nested", ("vary", {"x": [[1, 2], [3, 4]]}), but=UNREADABLE),
    *_cases("kind", ("lookup", {"index": 1.5}), ("lookup", {"index": "1"}), ("scalars", {"x": None}),
            ("scalars", {"x": "a"}), ("scalars", {"x": {}}), ("text", {"x": 5}), ("text", {"x": ["a", 1]}),
            but=WORD_FOR_KIND),
    *_cases("missing", ("pair", {"a": [1, 2, 3]})),
    *_cases("nothing", ("plain", {})),
    *_cases("twice", ("plain", {"parameters": P} | P)),
    *_cases("batch too large", ("plain", {"x": list(range(30))})),
    *_cases("FP16", ("types", {"in_FP16": [1, 2]})),
    HttpCase("generate: failure inside the model", _generate("lookup", {"index": 99})),
    HttpCase("generate_stream: failure inside the model", _generate("lookup", {"index": 99}, "_stream"),
             Difference("Triton has begun its stream by then and tells it as an event", is_text=True)),
    *_cases("unreadable", ("plain", b"{"), ("plain", b""), ("plain", b"[]"), ("plain", b'{"x":[1,2,3]} x'),
            but=UNREADABLE),
    HttpCase("generate: gzip", _generate("plain", P, **{"content-encoding": "gzip"})),
    HttpCase("generate: query", _generate("plain", P, "?x=1")),
    HttpCase("generate: GET", get("/v2/models/plain/generate")),
]  # fmt: skip
