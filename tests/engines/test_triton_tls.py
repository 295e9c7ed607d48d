"""An engine behind TLS: https:// makes both ports encrypted, and an untrusted certificate is refused."""

import asyncio
import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from tritonclient.grpc import service_pb2

CHECKOUT = Path(__file__).resolve().parents[2]

CLIENT = """
import asyncio, sys
from penstock.engines.triton.client import TritonEngine
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.call import HttpCall

async def main():
    async with TritonEngine(http_url=sys.argv[1], grpc_address=sys.argv[2], max_connections=1) as backend:
        try:
            answer = await backend.send(HttpCall("GET", b"/v2", (), b""), deadline=None)
            print(answer.status, await backend.ready())
        except EngineUnavailable as error:
            print("unavailable", await backend.ready(), error)

asyncio.run(main())
"""


class Identity(NamedTuple):
    """Who the engine says it is."""

    certificate: Path
    key: Path


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    """A certificate for localhost that vouches for itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *subject, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return Identity(certificate, key)


@asynccontextmanager
async def tls_engine(identity: Identity, *, needs_client: bool = False) -> AsyncIterator[tuple[str, str]]:
    """Answers every HTTP request with 200 and says that it is live over gRPC."""

    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def live(_: bytes, __: object) -> bytes:
        message: bytes = service_pb2.ServerLiveResponse(live=True).SerializeToString()
        return message

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    if needs_client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(identity.certificate)
    http_server = await asyncio.start_server(answer_http, "localhost", 0, ssl=context)
    grpc_server = grpc.aio.server()
    handlers = {"ServerLive": grpc.unary_unary_rpc_method_handler(live)}
    grpc_server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
    )
    pem = identity.certificate.read_bytes()
    pair, roots = [(identity.key.read_bytes(), pem)], pem if needs_client else None
    credentials = grpc.ssl_server_credentials(pair, roots, needs_client)
    grpc_port = grpc_server.add_secure_port("localhost:0", credentials)
    await grpc_server.start()
    try:
        yield f"https://localhost:{http_server.sockets[0].getsockname()[1]}", f"localhost:{grpc_port}"
    finally:
        http_server.close()
        await grpc_server.stop(0)


async def run_client(addresses: tuple[str, str], roots: Path | None, own: Path | None = None) -> str:
    """The client's output. roots: CAs that it trusts, None for the system's. own: its certificate with the key."""
    names = ("SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "PENSTOCK_CLIENT_CERTIFICATE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if roots is not None:
        environment["SSL_CERT_FILE"] = str(roots)
    if own is not None:
        environment["PENSTOCK_CLIENT_CERTIFICATE"] = str(own)
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, *addresses, stdout=subprocess.PIPE, cwd=CHECKOUT, env=environment
    )
    output, _ = await client.communicate()
    return output.decode()


async def test_backend_https_reaches_both_ports_over_tls(identity: Identity) -> None:
    """HTTP and gRPC answer through TLS where the certificate is trusted."""
    async with tls_engine(identity) as addresses:
        assert await run_client(addresses, identity.certificate) == "200 True\n"


async def test_backend_sends_its_client_certificate_to_both_ports(identity: Identity, tmp_path: Path) -> None:
    """PENSTOCK_CLIENT_CERTIFICATE names a PEM file with the certificate and its key."""
    both = tmp_path / "both.pem"
    both.write_bytes(identity.certificate.read_bytes() + identity.key.read_bytes())
    async with tls_engine(identity, needs_client=True) as addresses:
        assert await run_client(addresses, identity.certificate, both) == "200 True\n"
        assert "200 True" not in await run_client(addresses, identity.certificate)


async def test_backend_https_unknown_certificate_is_refused(identity: Identity) -> None:
    """Nothing is sent to an engine that cannot prove who it is."""
    async with tls_engine(identity) as addresses:
        output = await run_client(addresses, None)

    assert output.startswith("unavailable False cannot connect to the engine at localhost:")
    assert "certificate" in output
