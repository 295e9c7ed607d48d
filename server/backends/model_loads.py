"""Checks load requests of both protocols before they reach the engine."""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from server.backends.model_code import check_model, parse_config
from server.backends.wire.threads import in_thread
from server.core.errors import InvalidRequest
from server.core.relay import GrpcCall, HttpCall

CONFIG, FILE_PREFIX = "config", "file:"


class _Body(msgspec.Struct):
    parameters: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class LoadPolicy:
    """allows_code: whether clients may load models that run code of theirs (--allow-model-code)."""

    allows_code: bool = False

    async def check_http(self, call: HttpCall) -> None:
        """Raises InvalidRequest for a load that is not allowed. The engine checks all other parameters."""
        await in_thread(len(call.body), self._check_http, call.body)

    async def check_grpc(self, call: GrpcCall) -> None:
        """As check_http."""
        await in_thread(len(call.message), self._check_grpc, call.message)

    def _check_http(self, body: bytes) -> None:
        try:
            given = msgspec.json.decode(body or b"{}", type=_Body).parameters
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"malformed JSON in the load: {error}") from error
        config = given.get(CONFIG)
        files = {
            name.removeprefix(FILE_PREFIX): _decoded(name, text)
            for name, text in given.items()
            if name.startswith(FILE_PREFIX) and isinstance(text, str)
        }
        self._check(config if isinstance(config, str) else "", files)

    def _check_grpc(self, message: bytes) -> None:
        try:
            given = service_pb2.RepositoryModelLoadRequest.FromString(message).parameters
        except DecodeError as error:
            raise InvalidRequest("the message is not a RepositoryModelLoadRequest") from error
        config = given[CONFIG].string_param if CONFIG in given else ""
        files = {
            name.removeprefix(FILE_PREFIX): parameter.bytes_param
            for name, parameter in given.items()
            if name.startswith(FILE_PREFIX)
        }
        self._check(config, files)

    def _check(self, config_json: str, files: Mapping[str, bytes]) -> None:
        config = parse_config(config_json) if config_json else None
        check_model(config, files, allows_code=self.allows_code)


def _decoded(name: str, text: str) -> bytes:
    """A file's content. Raises InvalidRequest if it is not strict base64: decoders read other input differently."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"the parameter {name[:80]!r} of the load is not base64: {error}") from error
