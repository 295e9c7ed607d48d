"""Converts complete responses to values or errors, and failed connections to errors. Sans-IO."""

import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from penstock.client.operations import HttpReply, Operation
from penstock.client.options import API_KEY_VARIABLE, URL_VARIABLE, ClientOptions
from penstock.network import CA_VARIABLE, CERTIFICATE_VARIABLE
from penstock.protocol.error_codes import REASON_HEADER, error_of_grpc, error_of_http
from penstock.protocol.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    GatewayUnreachable,
    InferenceError,
    Unauthenticated,
)

START_ADVICE = f"start it with `penstock up`, or give its URL as `url` or {URL_VARIABLE}"
KEY_ADVICE = f"give a valid key as `api_key` or {API_KEY_VARIABLE}"
_LONGEST_WAIT_S = 3600.0
_MAX_TEXT = 2000
_UNAVAILABLE = 14
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _ErrorBody:
    error: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request as it is sent. timeout_s: until the complete response must have arrived."""

    operation: Operation[object]
    target: str
    headers: Mapping[str, str] = field(repr=False)
    timeout_s: float


def value_of_reply(operation: Operation[T], reply: HttpReply, options: ClientOptions) -> T:
    """The decoded response. Raises InferenceError."""
    if reply.status not in operation.accepts:
        raise error_of_reply(operation, reply, options)
    from msgspec import DecodeError

    try:
        return operation.decode(reply)
    except (DecodeError, ValueError, RecursionError) as error:
        raise _not_a_gateway(options, str(error)) from error


def error_of_reply(operation: Operation[object], reply: HttpReply, options: ClientOptions) -> InferenceError:
    """The error, with the gateway's message and its Retry-After."""
    http = f"HTTP {reply.status} {reply.phrase}".strip()
    if 300 <= reply.status < 400:
        there = urlsplit(reply.headers.get("location", ""))
        other = f"{there.scheme}://{there.hostname}" if there.hostname else "another address"
        return ConnectionFailed(
            f"{options.url} redirects to {other} ({http}), which is not followed: give the gateway's own address"
        )
    text = _error_text(reply.body)
    if text is None:
        return _not_a_gateway(options, http)
    if reply.status < 400 or (reply.status == 404 and not operation.names_model):
        return _not_a_gateway(options, text)
    error = error_of_http(reply.status, text, reply.headers.get(REASON_HEADER, ""), _retry_after_s(reply.headers))
    return _with_key_advice(error, options)


def error_of_status(code: int, details: str, metadata: Mapping[str, str], options: ClientOptions) -> InferenceError:
    """The error for a gRPC status. code: its number. metadata: trailing metadata."""
    reason, address = metadata.get(REASON_HEADER, ""), options.grpc_address
    if (
        code == _UNAVAILABLE and not reason and "retry-after" not in metadata
    ):  # set by the gRPC library, not by the gateway
        if "failed to connect" in details:
            return GatewayUnreachable(f"nothing answers over gRPC at {address}: {START_ADVICE}")
        advice = "try again; if that does not help, check grpc_address"
        return ConnectionFailed(
            f"the connection to {address} broke ({details[:_MAX_TEXT]}): {advice}", is_transient=True
        )
    retry_after_s = _seconds(metadata.get("retry-after", ""))
    return _with_key_advice(error_of_grpc(code, details[:_MAX_TEXT], reason, retry_after_s), options)


def late(options: ClientOptions, timeout_s: float) -> DeadlineExceeded:
    """The error for a response that did not arrive in time."""
    return DeadlineExceeded(f"{options.url} did not answer within {timeout_s:.3g} s")


def _with_key_advice(error: InferenceError, options: ClientOptions) -> InferenceError:
    if not isinstance(error, Unauthenticated):
        return error
    refused = f"refused the API key ({error.message.partition(';')[0]})"
    return Unauthenticated(f"{options.url} {refused if options.api_key else 'requires an API key'}: {KEY_ADVICE}")


def connection_error(
    error: BaseException, options: ClientOptions, timeout_s: float
) -> ConnectionFailed | DeadlineExceeded:
    """The error for a failed connection. error: an OSError or an exception of http.client."""
    url = options.url
    match error:
        case ConnectionRefusedError() | socket.gaierror():
            return GatewayUnreachable(f"nothing answers at {url}: {START_ADVICE}")
        case TimeoutError():
            return late(options, timeout_s)
        case ssl.SSLCertVerificationError():
            remedy = f"set {CA_VARIABLE} to the file of the CA that signed it"
            return ConnectionFailed(f"the certificate of {url} is not trusted ({error.verify_message}): {remedy}")
        case ssl.SSLError():
            return ConnectionFailed(f"TLS with {url} failed ({error.reason}): {_advice(url)}")
    advice = f"try again; if that does not help, {_address_advice(url)}"
    return ConnectionFailed(f"the connection to {url} broke ({error}): {advice}", is_transient=True)


def closed_without_response(options: ClientOptions) -> ConnectionFailed:
    """The error for a connection that ended before the response's first byte."""
    url = options.url
    return ConnectionFailed(f"{url} closed the connection without a response: {_advice(url)}", is_transient=True)


def not_http(options: ClientOptions) -> ConnectionFailed:
    """The error for a response that is not HTTP."""
    return ConnectionFailed(f"the server at {options.url} does not speak HTTP: {_address_advice(options.url)}")


def too_large(options: ClientOptions, limit_bytes: int) -> ConnectionFailed:
    """The error for a response over the size limit."""
    return ConnectionFailed(f"the response of {options.url} exceeds {limit_bytes} bytes: request fewer results")


def _not_a_gateway(options: ClientOptions, why: str) -> ConnectionFailed:
    return ConnectionFailed(f"the server at {options.url} is not a gateway ({why[:_MAX_TEXT]}): check the address")


def _error_text(body: bytes) -> str | None:
    import msgspec

    try:
        return msgspec.json.decode(body, type=_ErrorBody).error[:_MAX_TEXT]
    except (msgspec.DecodeError, RecursionError):
        return None


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    return _seconds(headers.get("retry-after", ""))


def _seconds(text: str) -> float | None:
    """Parses a number of seconds, capped at one hour; None for any other text."""
    return min(float(text), _LONGEST_WAIT_S) if _NUMBER.fullmatch(text) else None


def _address_advice(url: str) -> str:
    """Advice for an address that may be wrong. A server with TLS resets plain connections or sends an alert."""
    return "check the address: does it take https?" if url.startswith("http://") else "check the address"


def _advice(url: str) -> str:
    """Advice if the server closed the connection during the TLS handshake, or if TLS was expected but not used."""
    if url.startswith("http://"):
        return "try again, with https:// if the server uses TLS"
    return (
        "check the address (http:// if the server has no TLS); "
        f"if it requires client certificates, set {CERTIFICATE_VARIABLE}"
    )
