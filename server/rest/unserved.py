"""What is told of models that the engine would serve and the gateway does not."""

from collections.abc import Mapping

import msgspec

from server.core.relay import HttpAnswer

UNAVAILABLE = "UNAVAILABLE"


class IndexQuestion(msgspec.Struct):
    """The body of a question for the index. ready: only models that are served."""

    ready: bool = False


def index_with_refusals(answer: HttpAnswer, asked: bytes, refusals: Mapping[str, str]) -> HttpAnswer:
    """The engine's index, the refused models as unavailable with the reason. asked: the question's body."""
    if not refusals or answer.status != 200:
        return answer
    rows = msgspec.json.decode(answer.body, type=list[dict[str, str]])
    if _wants_ready(asked):
        rows = [row for row in rows if row.get("name") not in refusals]
    told = [_told(row, refusals.get(row.get("name", ""), "")) for row in rows]
    return HttpAnswer(answer.status, answer.headers, msgspec.json.encode(told))


def _told(row: dict[str, str], refusal: str) -> dict[str, str]:
    return {**row, "state": UNAVAILABLE, "reason": refusal} if refusal and row.get("state") == "READY" else row


def _wants_ready(asked: bytes) -> bool:
    try:
        return msgspec.json.decode(asked, type=IndexQuestion).ready
    except msgspec.DecodeError:  # the engine took it, so it asked for all
        return False
