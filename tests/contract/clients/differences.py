"""Where the gateway answers a client otherwise than the bare Triton behind it, and why: the whole list.

A promise takes Triton's answer and gives the gateway's; whatever is not listed here is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.protocol.errors import without_traceback
from penstock.protocol.shared_memory import is_slab_name
from tests.contract.clients.asking import Reply

OWN_HEADERS = {"x-penstock-reason"}  # of every error of the gateway's, over HTTP and gRPC
OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length"}
JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    """What a client's user sees, and the heads of every answer on the wire: (status, headers) over HTTP, for gRPC
    the blocks of headers, initial and trailing; None if they are not promised."""

    reply: Reply
    heads: list[Reply] | None


@dataclass(frozen=True)
class Difference:
    """calls: their names in the tables. kinds: what the names of the clients begin with."""

    why: str
    calls: tuple[str, ...]
    promise: Callable[[Answer], Answer]
    kinds: str = ""


def is_json(answer: Answer) -> Answer:
    """The same, declared as JSON."""
    return Answer(answer.reply, [(status, headers | JSON) for status, headers in answer.heads or ()])


def is_ready(answer: Answer) -> Answer:
    """Ready, whatever Triton says; over HTTP with a body."""
    heads = [head if isinstance(head, dict) else (200, JSON) for head in answer.heads or ()]
    return Answer(True, heads)


def says(error: str) -> Callable[[Answer], Answer]:
    """Triton's status with another text."""
    return lambda answer: Answer(answer.reply | {"error": error}, answer.heads)


def alone(answer: Answer) -> Answer:
    """The same to the user; what is sent to one who has gone is not compared."""
    return Answer(answer.reply, None)


def refuses(error: str) -> Callable[[Answer], Answer]:
    """As the client's mistake, with this text, whatever Triton does."""

    def promise(answer: Answer) -> Answer:
        is_http = isinstance((answer.heads or [{}])[0], tuple)
        return Answer({"status": "400" if is_http else "StatusCode.INVALID_ARGUMENT", "error": error}, None)

    return promise


def is_refused(answer: Answer) -> Answer:
    """Triton's text as the client's mistake."""
    return refuses(answer.reply["error"])(answer)


def without_slabs(answer: Answer) -> Answer:
    """Lists of names without those of the gateway's own memory."""
    return Answer([[name for name in names if not is_slab_name(name)] for names in answer.reply], answer.heads)


def opens(answer: Answer) -> Answer:
    """Initial headers of their own before the trailing ones."""
    (only,) = answer.heads or ({},)
    initial = {name: value for name, value in only.items() if not name.startswith("grpc-")}
    accepts = {"grpc-accept-encoding": "identity, deflate, gzip"}
    return Answer(answer.reply, [initial | accepts, {"grpc-status": only["grpc-status"]}])


def has_no_traceback(answer: Answer) -> Answer:
    """Triton's text without the Python lines of its backend; over gRPC, heads have it percent-encoded."""
    reply = answer.reply | {"error": without_traceback(answer.reply["error"])}
    if all(isinstance(head, tuple) for head in answer.heads or ()):
        return Answer(reply, answer.heads)
    heads = []
    for head in answer.heads or ():
        message = without_traceback(head.get("grpc-message", "").replace("%0A", "\n"))
        heads.append(head | {"grpc-message": message.replace("\n", "%0A")})
    return Answer(reply, heads)


OFFSET = (
    "shared memory region '{}' begins at offset {}; Triton reads such a region at the wrong place: register the "
    "segment from offset 0 on, and give each tensor a shared_memory_offset"
)
DIFFERENCES = (
    Difference(
        "health has a JSON body, since KServe's client reads one; Triton's is empty",
        ("live",), is_json, "http",
    ),
    Difference(
        "requests are taken though a model of the repository cannot be loaded; Triton says that it is not ready",
        ("ready",), is_ready,
    ),
    Difference(
        "an unknown path is answered in JSON as every other error, which KServe's client needs to read it; Triton says "
        "text/plain of the same bytes",
        ("a version that is no number",), is_json, "http",
    ),
    Difference(
        "an input that is given twice is refused before it reaches Triton, with a text that does not name the request",
        ("an input twice",), says("input 'x' is given twice"), "http",
    ),
    Difference(
        "after a client gave up, what is still written to it differs; it sees DEADLINE_EXCEEDED of both",
        ("too late",), alone, "grpc",
    ),
    Difference(
        "a stream's headers are sent when it is opened; Triton keeps them for the first answer",
        ("a stream without a request",), opens,
    ),
    Difference(
        "a client's mistake in a log setting is a 400, as over gRPC; a 503 asks for the same again",
        ("a log format that is none",), is_refused, "http",
    ),
    Difference(
        "a load that the repository cannot serve is the client's mistake; Triton says over HTTP that the server failed",
        ("load with a file alone", "load of an unknown model"), is_refused, "http",
    ),
    Difference(
        "the error of a failed load has no Python traceback, which shows paths of the server",
        ("load of a broken model",), has_no_traceback,
    ),
    Difference(
        "a region that begins within its segment is refused; Triton 2.51 answers with memory of its own",
        ("a region with an offset",), refuses(OFFSET.format("later", 4096)),
    ),
    Difference(
        "the same, where the offset is beyond the segment or no page's beginning",
        ("a region behind its segment",), refuses(OFFSET.format("odd", 1 << 20)),
    ),
    Difference(
        "a key that no one made is the client's mistake; Triton says that the server failed",
        ("a region without a segment",), is_refused,
    ),
    Difference(
        "a region without bytes is refused before Triton maps it",
        ("a region of nothing",), refuses("failed to register shared memory region 'odd': invalid args"),
    ),
    Difference(
        "the memory that the gateway shares with Triton is no client's: Triton names it, after its registration",
        ("several regions",), without_slabs,
    ),
)  # fmt: skip
# How often these have to ask varies, so their heads do.
ASK_UNTIL = {"statistics"}
# grpcio writes an empty grpc-message where a call went well; Triton's C++ leaves it out. No client tells them apart.
EMPTY_MESSAGE = ("grpc-message", "")


def promised(kind: str, call: str, answer: Answer) -> Answer:
    """What the gateway has to answer where Triton answers this."""
    for difference in DIFFERENCES:
        if call in difference.calls and kind.startswith(difference.kinds):
            answer = difference.promise(answer)
    return Answer(answer.reply, None) if call in ASK_UNTIL else answer


def agrees(through: Answer, promise: Answer) -> bool:
    """Whether the gateway's answer is the promised one."""
    return through.reply == promise.reply and promise.heads in (None, through.heads)


def comparable(reply: Reply, heads: list[Reply]) -> Answer:
    """An answer without what belongs to a connection, and without the gateway's own headers."""
    return Answer(reply, [(head[0], _kept(head[1])) if isinstance(head, tuple) else _kept(head) for head in heads])


def _kept(headers: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name not in OF_THE_CONNECTION | OWN_HEADERS}
    return dict(pair for pair in kept.items() if pair != EMPTY_MESSAGE)
