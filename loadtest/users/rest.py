"""v2 tensors over HTTP with the binary extension, shaped by the model's own metadata."""

import itertools
from collections.abc import Callable
from functools import partial
from urllib.parse import quote

import msgspec

from loadtest.clients.client import Endpoint
from loadtest.clients.replies import is_good, reason_of, short
from loadtest.clients.rest import binary_request
from loadtest.clients.tensors import InputSpec, make_tensors
from loadtest.scenario import Ask
from loadtest.users.http import HttpAsker
from loadtest.users.terms import CannotAsk, HttpSession, Line

SEED = 1


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: tuple[int, ...]


class _Metadata(msgspec.Struct):
    inputs: tuple[_Input, ...]


def prepare(ask: Ask, endpoint: Endpoint, session: HttpSession) -> Callable[[Line], HttpAsker]:
    """Askers that send one seeded tensor an input again and again.

    Raises CannotAsk where the server knows no such model, or nothing here can fill its inputs.
    """
    url = f"{endpoint.http_url}/v2/models/{quote(ask.model, safe='')}"
    answer = session.get(url, headers=dict(endpoint.headers))
    if not is_good(answer.status_code):
        why = f"{answer.status_code} {reason_of(answer.content or b'')}" if answer.status_code else "no answer"
        raise CannotAsk(f"{endpoint.http_url} says nothing of the model {ask.model}: {why}")
    try:
        metadata = msgspec.json.decode(answer.content or b"", type=_Metadata)
        specs = [InputSpec(one.name, one.datatype, one.shape) for one in metadata.inputs]
        tensors = make_tensors(specs, batch=ask.batch, sizes=ask.sizes, seed=SEED)
    except (msgspec.DecodeError, ValueError) as error:
        raise CannotAsk(f"model {ask.model}: {error}") from None
    requests = [binary_request(endpoint.http_url, ask.model, tensors)]
    return partial(HttpAsker, requests=requests, complaint=_without_outputs, turn=itertools.count())


def _without_outputs(body: bytes) -> str:
    return "" if b'"outputs"' in body else short(f"no outputs in {body[:100].decode(errors='replace')}")
