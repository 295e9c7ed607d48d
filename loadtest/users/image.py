"""The image endpoint: one picture a request, or as many in one form as the ask's batch."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from loadtest.clients.client import Endpoint
from loadtest.clients.image import image_requests
from loadtest.clients.replies import short
from loadtest.payloads import make_pictures, read_pictures
from loadtest.scenario import Ask
from loadtest.users.http import HttpAsker
from loadtest.users.terms import CannotAsk, Line

GENERATED_COUNT = 8
SEED = 1


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


_RESULTS = msgspec.json.Decoder(_Results)


def prepare(ask: Ask, endpoint: Endpoint, folder: str) -> Callable[[Line], HttpAsker]:
    """Askers that post the folder's pictures, or generated ones. Raises CannotAsk for a folder without any."""
    try:
        pictures = (
            read_pictures(Path(folder)) if folder else make_pictures(GENERATED_COUNT, seed=SEED, size=ask.picture_px)
        )
    except (ValueError, OSError) as error:
        raise CannotAsk(f"--images: {error}") from None
    requests = image_requests(endpoint, ask.model, pictures, batch=ask.batch)
    return partial(HttpAsker, requests=requests, complaint=_without_results, turn=itertools.count())


def _without_results(body: bytes) -> str:
    try:
        _RESULTS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return short(f"no results in {body[:100].decode(errors='replace')}")
    return ""
