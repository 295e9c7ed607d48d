"""From what a scenario asks to the client that asks it, and whether the target can answer at all."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock_load.clients.client import Answer, Client, Endpoint, TargetError
from penstock_load.clients.grpc import GrpcClient, GrpcTarget, StreamClient, metadata_of, open_channel
from penstock_load.clients.http import (
    BINARY_EXTENSION,
    HttpPort,
    HttpRequest,
    HttpTarget,
    ImageClient,
    RestClient,
    binary_request,
    image_requests,
    image_url,
    json_request,
    results_wanted,
)
from penstock_load.clients.payloads import (
    InputTensor,
    ModelSignature,
    Picture,
    ServerIdentity,
    grpc_request_of,
    https_question,
    make_pictures,
    make_tensors,
    no_model,
    nothing_answers,
    read_pictures,
)
from penstock_load.results import Status
from penstock_load.scenario import Kind, RequestSpec

PICTURES = 8
TENSORS, TENSORS_BYTES = 4, 64 << 20
RequestT = TypeVar("RequestT")
_NO_ENDPOINT = ("404:", "405:")
_NO_CONNECTION = "Cannot connect"  # as aiohttp's ClientConnectorError begins


async def connect(ask: RequestSpec, endpoint: Endpoint, *, seed: int, images: str, timeout_s: float) -> Client:
    """The client of the ask's kind, its payloads made; timeout_s is each request's deadline.

    images: a folder whose pictures go instead of generated ones. Raises TargetError.
    """
    match ask.kind:
        case Kind.IMAGE:
            return _image_client(ask, endpoint, _pictures(ask, seed=seed, images=images), timeout_s)
        case Kind.REST:
            return await _rest_client(ask, endpoint, seed, timeout_s)
        case Kind.GRPC | Kind.GRPC_STREAM:
            return await _grpc_client(ask, endpoint, seed, timeout_s)
        case Kind.VIDEO:
            raise TargetError("a video stream is not asked for picture by picture; run it with `penstock load run`")


async def preflight(
    ask: RequestSpec, endpoint: Endpoint, *, seed: int = 1, images: str = "", timeout_s: float
) -> Answer:
    """The good answer to one real request. Raises TargetError, which says what the target cannot do."""
    client = await connect(ask, endpoint, seed=seed, images=images, timeout_s=timeout_s)
    try:
        answer = await client.send(0)
    finally:
        await client.aclose()
    if answer.status is not Status.OK:
        raise TargetError(await _why_not(ask, endpoint, answer, timeout_s))
    return answer


async def server_identity(endpoint: Endpoint, timeout_s: float) -> ServerIdentity:
    """Name, version and extensions from GET /v2; empty where there is no v2 server, or nothing at all."""
    async with HttpPort(endpoint, timeout_s) as port:
        try:
            return await HttpTarget(port, endpoint.http_url).identity()
        except TargetError:
            return ServerIdentity()


def _pictures(ask: RequestSpec, *, seed: int, images: str) -> list[Picture]:
    if not images:
        return make_pictures(PICTURES, seed=seed, size=ask.picture_px)
    try:
        return read_pictures(Path(images))
    except (OSError, ValueError) as error:
        raise TargetError(f"no pictures to send: {error}") from error


def _image_client(ask: RequestSpec, endpoint: Endpoint, pictures: list[Picture], timeout_s: float) -> Client:
    requests = image_requests(endpoint, ask.model, pictures, batch=ask.batch)
    return ImageClient(HttpPort(endpoint, timeout_s), requests, results=results_wanted(endpoint, ask.batch))


async def _rest_client(ask: RequestSpec, endpoint: Endpoint, seed: int, timeout_s: float) -> Client:
    port = HttpPort(endpoint, timeout_s)
    try:
        target = HttpTarget(port, endpoint.http_url)
        face = await target.model(ask.model)
        is_binary = BINARY_EXTENSION in (await target.identity()).extensions
        return RestClient(port, _rest_requests(ask, endpoint, face, seed=seed, is_binary=is_binary))
    except BaseException:
        await port.aclose()
        raise


def _rest_requests(
    ask: RequestSpec, endpoint: Endpoint, face: ModelSignature, *, seed: int, is_binary: bool
) -> list[HttpRequest]:
    make = binary_request if is_binary else json_request
    return _variants(ask, face, seed, lambda tensors: make(endpoint.http_url, ask.model, tensors))


async def _grpc_client(ask: RequestSpec, endpoint: Endpoint, seed: int, timeout_s: float) -> Client:
    channel = open_channel(endpoint)
    try:
        face = await GrpcTarget(channel, endpoint, timeout_s).model(ask.model)
        messages = _grpc_messages(ask, face, seed)
    except BaseException:
        await channel.close(None)
        raise
    kind = StreamClient if ask.kind is Kind.GRPC_STREAM else GrpcClient
    return kind(channel, messages, outputs=face.outputs, metadata=metadata_of(endpoint), timeout_s=timeout_s)


def _grpc_messages(ask: RequestSpec, face: ModelSignature, seed: int) -> list[bytes]:
    """Serialised. A decoupled model is asked to say which of its responses is the last."""
    if face.is_decoupled and ask.kind is Kind.GRPC:
        raise TargetError(f"{ask.model} is decoupled: it answers over streams only; ask it with {Kind.GRPC_STREAM}")
    return _variants(ask, face, seed, lambda tensors: _message(ask.model, tensors, is_decoupled=face.is_decoupled))


def _message(model: str, tensors: list[InputTensor], *, is_decoupled: bool) -> bytes:
    request = grpc_request_of(model, tensors)
    if is_decoupled:
        request.parameters["triton_enable_empty_final_response"].bool_param = True
    message: bytes = request.SerializeToString()
    return message


def _variants(
    ask: RequestSpec, face: ModelSignature, seed: int, make: Callable[[list[InputTensor]], RequestT]
) -> list[RequestT]:
    """Requests with different contents: several, where memory allows it, so that nothing answers from a cache."""
    requests: list[RequestT] = []
    size_bytes = 0
    try:
        while len(requests) < TENSORS and (not requests or size_bytes * (len(requests) + 1) <= TENSORS_BYTES):
            tensors = make_tensors(face.inputs, batch=ask.batch, sizes=ask.sizes, seed=seed + len(requests))
            size_bytes = sum(len(tensor.content) for tensor in tensors)
            requests.append(make(tensors))
    except ValueError as error:
        raise TargetError(f"{ask.model} cannot be asked: {error}") from error
    return requests


async def _why_not(ask: RequestSpec, endpoint: Endpoint, answer: Answer, timeout_s: float) -> str:
    is_http = ask.kind in (Kind.IMAGE, Kind.REST)
    where = endpoint.http_url if is_http else f"gRPC at {endpoint.grpc_address}"
    reply = f"{answer.code}: {answer.error}" if answer.code else answer.error
    if ask.kind is Kind.GRPC_STREAM and answer.code == "UNIMPLEMENTED":
        return f"this server does not stream over gRPC ({endpoint.grpc_address} answered {reply})"
    if is_http and not answer.code and answer.status is Status.FAILED:
        is_absent = reply.startswith(_NO_CONNECTION)
        broken = f"{where} broke off the first {ask.label} ({reply})"
        return nothing_answers(where, reply) if is_absent else broken + https_question(where)
    if answer.status is Status.TIMEOUT:
        return f"{where} took longer than {timeout_s:g} s over the first request of {ask.label}"
    if ask.kind is Kind.IMAGE:
        return await _why_no_image(ask, endpoint, reply, timeout_s)
    return f"{where} did not do what {ask.label} asks ({reply})"


async def _why_no_image(ask: RequestSpec, endpoint: Endpoint, reply: str, timeout_s: float) -> str:
    if reply.startswith(_NO_ENDPOINT):
        async with HttpPort(endpoint, timeout_s) as port:
            served = await HttpTarget(port, endpoint.http_url).models()
        if served and ask.model not in served:
            return no_model(endpoint.http_url, ask.model, served, reply)
        return f"there is no image endpoint at {image_url(endpoint, ask.model)} (POST answered {reply})"
    return f"{image_url(endpoint, ask.model)} did not take the first picture ({reply})"
