"""The same bytes to the gateway and to the Triton behind it, and the same answers, byte for byte."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.protocol.call import HttpCall
from tests.contract.gateway_cases import CASES, COUNTED, DIFFERENCES, ORDER, OUR_WORDS
from tests.contract.raw_http import RawAnswer, ask
from tests.contract.wire_case import HttpCase
from tests.contract.wire_models import write_models
from tests.support.stack import ENGINE_PORTS, RunningStack, start_stack, stop_stack
from tests.support.words_model import write_bf16, write_words

pytestmark = pytest.mark.xdist_group("gateway_is_triton")

PLAIN = b"/v2/models/plain/"
OWNED_CASES = [case for case in CASES if case.call.target.startswith(PLAIN) and b"/infer" in case.call.target]
DIGITS = re.compile(rb"[0-9]+")
UNREADABLE = re.compile(
    rb'\{"error":"(Unable to (parse|set)|failed to (parse|get)|attempt to (access|get)|Expected JSON object|'
    rb"invalid argument for --log_format|(Converting keyword: 'parameters': )?parameter key)"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack of its own, since the calls change settings and models."""
    home = tmp_path_factory.mktemp("home")
    write_models(home / "models")
    write_words(home / "models")
    write_bf16(home / "models")
    shutil.copytree(home / "models" / "plain", home / "models" / "owned")
    stack = start_stack(home, "--batching", "owned=gateway", *ENGINE_PORTS)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gateway_answers_as_the_bare_triton(running: RunningStack, case: HttpCase) -> None:
    """Status, headers and body; what differs stands in a table, with its reason, and does differ."""
    theirs = ask(running.engine_http_url, case.call)
    ours = ask(running.http_url, case.call)
    why, status = DIFFERENCES.get(case.name, ("", None))
    if not why:
        compare(ours, theirs, has_own_words=case.name in OUR_WORDS)
    elif why == ORDER:
        assert (ours.status, ours.headers, sorted(ours.body)) == (theirs.status, theirs.headers, sorted(theirs.body))
    elif why == COUNTED:
        assert DIGITS.sub(b"", ours.body) == DIGITS.sub(b"", theirs.body)
    else:
        assert ours.status == (theirs.status if status is None else status), why
        assert ours != theirs, why


@pytest.mark.parametrize("case", OWNED_CASES, ids=lambda case: case.name)
def test_gateway_answers_as_the_bare_triton_for_a_model_whose_batches_it_forms(
    running: RunningStack, case: HttpCase
) -> None:
    """The same calls for the same model, decoded, in a batch, and encoded by the gateway."""
    call = replace(case.call, target=case.call.target.replace(PLAIN, b"/v2/models/owned/"))
    ours, theirs = ask(running.http_url, call), ask(running.engine_http_url, call)
    why, status = DIFFERENCES.get(case.name, ("", None))
    if case.name == "large numbers":  # the same numbers; Triton's digits are not the fewest
        assert json.loads(ours.body) == json.loads(theirs.body)
    elif why:
        assert ours.status == (theirs.status if status is None else status), why
    else:
        compare(ours, theirs, has_own_words=case.name in OUR_WORDS)


def compare(ours: RawAnswer, theirs: RawAnswer, *, has_own_words: bool) -> None:
    """Equal, but for what is so of every error (see gateway_cases)."""
    is_unreadable = theirs.status >= 500 and UNREADABLE.match(theirs.body) is not None
    assert ours.status == (400 if is_unreadable else theirs.status)
    if ours.status < 400:
        assert ours == theirs
        return
    assert without_type_of_json(ours) == without_type_of_json(theirs)
    if has_own_words:
        assert ours.body != theirs.body
        assert ours.body.startswith(b'{"error":"')
    elif not is_unreadable:
        assert ours.body == theirs.body


def without_type_of_json(answer: RawAnswer) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of an error that do not differ by rule."""
    types = ((b"content-type", b"application/json"), (b"content-type", b"text/plain"))
    own = (b"allow", b"accept-encoding", b"x-penstock-reason")
    return tuple(header for header in answer.headers if header not in types and header[0] not in own)


def test_gateway_body_of_an_error_is_json_and_a_405_says_what_is_allowed(running: RunningStack) -> None:
    """Where Triton says text/plain, and nothing."""
    for call in (HttpCall("GET", b"/nothing", (), b""), HttpCall("PUT", b"/v2/health/live", (), b"")):
        ours, theirs = ask(running.http_url, call), ask(running.engine_http_url, call)
        assert ours.body == theirs.body
        assert (b"content-type", b"application/json") in ours.headers
        assert (b"content-type", b"text/plain") in theirs.headers
    assert (b"allow", b"GET") in ours.headers
    assert b"allow" not in dict(theirs.headers)
