"""The interface of a codec, which the modules http_codec and grpc_codec implement."""

from collections.abc import Callable
from typing import Protocol, cast

from penstock.protocol import grpc_codec, http_codec
from penstock.protocol.call import A, Call, HttpCall
from penstock.protocol.decoded_request import DecodedRequest
from penstock.protocol.engine import ModelState
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import InferResponse


class Codec(Protocol[A]):
    """Decodes a relayed inference to tensors, and encodes its response. See the modules' functions."""

    def parsed_bytes(self, call: Call[A], /) -> int: ...

    def decode(self, call: Call[A], model_name: str, max_body_bytes: int, /) -> DecodedRequest: ...

    def encode(self, response: InferResponse, ask: DecodedRequest, call: Call[A], /) -> A: ...

    def with_sequence(self, call: Call[A], sequence: int | str, /) -> Call[A]: ...

    def wants_ready_only(self, call: Call[A], /) -> bool: ...

    def with_index(self, answer: A, change: Callable[[list[ModelState]], list[ModelState]], /) -> A: ...

    def not_ready(self, error: InferenceError, /) -> A: ...

    def with_unmerged(self, answer: A, reason: str, /) -> A: ...

    def without_traceback(self, answer: A, /) -> A: ...

    def encode_error(self, error: InferenceError, /) -> A: ...


def codec_of(call: Call[A]) -> Codec[A]:
    """The codec of the call's protocol."""
    return cast(Codec[A], http_codec if type(call) is HttpCall else grpc_codec)
