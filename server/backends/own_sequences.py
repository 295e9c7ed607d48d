"""Sequence IDs of clients with a key: each key has its own, so that no key continues, ends or reads another's sequence.

An engine identifies a sequence by its ID only. The gateway replaces the client's ID by a hash of the key's name and the
ID, which is the same in every gateway: a number for a number, a string for a string. To reach another key's sequence, a
client has to find an ID whose hash has the same 63 bits.
"""

import hashlib
from dataclasses import replace

import msgspec
from tritonclient.grpc import service_pb2

from server.backends.wire.http_request import header_length_of
from server.backends.wire.threads import in_thread
from server.core.caller import Caller
from server.core.compression import inflate
from server.core.relay import GrpcCall, HttpCall, InferHead

_READ_BYTES = 1 << 31  # the gateway has already read the body, within its own limit
_ENCODING, _LENGTH = b"content-encoding", b"inference-header-content-length"
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def engine_sequence(client: str, sequence: int | str) -> int | str:
    """The ID for the engine: an integer below 2^63, or 32 characters. 0 and "" mean no sequence and are not changed."""
    if not sequence:
        return sequence
    digest = hashlib.blake2b(repr((client, sequence)).encode(errors="backslashreplace"), digest_size=16).digest()
    if isinstance(sequence, str):
        return digest.hex()
    return int.from_bytes(digest[:8]) >> 1 or 1


async def own_http(call: HttpCall, head: InferHead, caller: Caller) -> HttpCall:
    """The inference with the engine's ID, if it is a step of a sequence and its client has a key."""
    if not head.sequence or not caller.key_name:
        return call
    return await in_thread(len(call.body), _own_http, call, engine_sequence(caller.owner, head.sequence))


def own_grpc(call: GrpcCall, head: InferHead, caller: Caller) -> GrpcCall:
    """The same over gRPC; 0 and "" are rewritten, too. If a parameter occurs twice, protobuf uses the last one."""
    if head.sequence is None or not caller.key_name:
        return call
    added, own = service_pb2.ModelInferRequest(), engine_sequence(caller.owner, head.sequence)
    if isinstance(own, str):
        added.parameters["sequence_id"].string_param = own
    else:
        added.parameters["sequence_id"].int64_param = own
    return replace(call, message=call.message + added.SerializeToString())


def _own_http(call: HttpCall, own: int | str) -> HttpCall:
    headers = dict(call.headers)
    body = inflate(call.body, headers.get(_ENCODING, b"").decode("latin-1").lower(), _READ_BYTES)
    length = header_length_of(headers.get(_LENGTH))
    members = _OBJECT.decode(body[:length])
    parameters = _OBJECT.decode(members["parameters"]) | {"sequence_id": msgspec.Raw(msgspec.json.encode(own))}
    text = msgspec.json.encode(members | {"parameters": parameters})
    kept = tuple((name, value) for name, value in call.headers if name not in (_ENCODING, _LENGTH))
    if length is None:
        return replace(call, headers=kept, body=text)
    return replace(call, headers=(*kept, (_LENGTH, b"%d" % len(text))), body=text + body[length:])
