"""TLS of our servers: certificate files that are reloaded when they change, and an acceptor that limits handshakes."""

import asyncio
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from penstock.logs import get_logger
from penstock.port_policy import PortLimits

CHECK_INTERVAL_S = 1.0
CACHED_SUBJECTS = 1024

log = get_logger("tls")
_Stamp = tuple[tuple[int, int, int], ...]


class TlsFileError(Exception):
    """A certificate, key or CA file cannot be used."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: CAs that sign clients' certificates; None if clients need no certificate."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The files' content at one time. expires_at: of the server's certificate, in Unix seconds."""

    context: ssl.SSLContext
    certificate: bytes
    key: bytes
    client_ca: bytes | None
    expires_at: float


class Certificates:
    """Reloads changed files for new connections, checked at most once a second.

    If the new files are unusable, the old ones stay in use, failed_reads is incremented, and the reason is logged.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises TlsFileError."""
        self._files = files
        self._looking = threading.Lock()
        self._looked_at = time.monotonic()
        self._stamp = _stamp_of(files)
        self._loaded = _load(files)
        self._warn_if_expired()
        self.failed_reads = 0

    @classmethod
    def of(cls, certificate: Path | None, key: Path | None, client_ca: Path | None) -> "Certificates | None":
        """From the settings; None without TLS. Raises TlsFileError."""
        if certificate is None or key is None:
            return None
        return cls(TlsFiles(certificate, key, client_ca))

    @property
    def wants_client_certificates(self) -> bool:
        """Whether a connection without a client certificate is refused."""
        return self._files.client_ca is not None

    @property
    def expires_at(self) -> float:
        """When the gateway's certificate expires, in Unix seconds."""
        return self._loaded.expires_at

    def context(self) -> ssl.SSLContext:
        """The context for a new connection; a new one after a change of the files, without old TLS sessions."""
        self._reload_if_due()
        return self._loaded.context

    def pem(self) -> tuple[bytes, bytes, bytes | None]:
        """The certificate chain, its key and the client CA, for a new connection."""
        self._reload_if_due()
        return self._loaded.certificate, self._loaded.key, self._loaded.client_ca

    def reload_if_changed(self) -> None:
        """Reads the files again if one of them changed. Never raises TlsFileError."""
        self._looked_at = time.monotonic()
        stamp = _stamp_of(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._loaded = _load(self._files)
        except TlsFileError as error:
            self.failed_reads += 1
            log.error("certificate not reloaded; the last one stays in use", error=str(error))
            return
        log.info("certificate reloaded", expires_at=int(self.expires_at))
        self._warn_if_expired()

    def _warn_if_expired(self) -> None:
        if self.expires_at < time.time():
            log.warning("the TLS certificate has expired; clients refuse it", file=str(self._files.certificate))

    def _reload_if_due(self) -> None:
        """Checks for changes, at most once per interval. Thread-safe."""
        if time.monotonic() - self._looked_at < CHECK_INTERVAL_S or not self._looking.acquire(blocking=False):
            return
        try:
            self.reload_if_changed()
        finally:
            self._looking.release()


@lru_cache(CACHED_SUBJECTS)
def subject_of(certificate: bytes) -> str:
    """The subject of a verified client certificate (DER or PEM) by RFC 4514: "CN=camera-7,O=acme"."""
    from cryptography import x509  # here because it takes 30 ms to import and most gateways have no TLS

    is_pem = certificate.lstrip().startswith(b"-----")
    read = x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate
    return read(certificate).subject.rfc4514_string()


def _new_context(wants_client_certificates: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED if wants_client_certificates else ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    context.num_tickets = 0  # a resumed session would stay valid after its client certificate has expired
    return context


def _load(files: TlsFiles) -> _Loaded:
    from cryptography import x509

    context = _new_context(files.client_ca is not None)
    certificate, key = _read(files.certificate, "tls_cert"), _read(files.key, "tls_key")
    client_ca = _read(files.client_ca, "tls_client_ca") if files.client_ca is not None else None
    try:
        expires = x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
    except ValueError:
        raise TlsFileError(
            f"tls_cert {files.certificate} contains no PEM certificate; give a PEM certificate chain"
        ) from None
    try:
        context.load_cert_chain(files.certificate, files.key, password=_reject_password)
    except (OSError, ValueError) as error:
        raise TlsFileError(
            f"tls_key {files.key} cannot be used with tls_cert {files.certificate} ({_reason(error)}); "
            "give the certificate's own key, as PEM without a password"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(cadata=client_ca.decode("ascii"))
        except (ssl.SSLError, ValueError):
            raise TlsFileError(
                f"tls_client_ca {files.client_ca} contains no PEM certificate; give the CA's certificate"
            ) from None
    return _Loaded(context, certificate, key, client_ca, expires)


def _reject_password() -> str:
    raise ValueError("the key has a password")


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFileError(f"{setting} {path} cannot be read ({error.strerror}); give a PEM file") from None


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


def _stamp_of(files: TlsFiles) -> _Stamp:
    """Changes when a file is written or replaced, or when a symbolic link to it is changed."""
    stamps = []
    for path in filter(None, (files.certificate, files.key, files.client_ca)):
        try:
            status = path.stat()
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)


BACKLOG = 2048
ACCEPT_RETRY_S = 1.0

CurrentTls = Callable[[], ssl.SSLContext]
"""The TLS context for a new connection."""


class TlsAcceptor:
    """Replaces asyncio.Server, which creates a protocol only after the handshake.

    That would not limit clients that never complete their handshakes. Here an address with too many handshakes cannot
    begin another one, and beyond the total limit the oldest is dropped.
    """

    def __init__(
        self,
        listener: socket.socket,
        tls: CurrentTls,
        protocol: Callable[[], asyncio.Protocol],
        *,
        limits: PortLimits,
        handshake_timeout_s: float,
        refused: Callable[[str], None],
    ) -> None:
        """Starts to accept. refused: called with a stable reason for each connection that is closed."""
        self._listener = listener
        self._tls = tls
        self._protocol = protocol
        self._limits = limits
        self._handshake_timeout_s = handshake_timeout_s
        self._refused = refused
        self._handshakes: dict[asyncio.Task[None], str] = {}  # the client's address; oldest first
        self._by_address: Counter[str] = Counter()
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stops accepting, and cancels handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when no more connections are accepted."""
        await asyncio.wait({self._accepting, *self._handshakes})

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, client = await loop.sock_accept(self._listener)
            except OSError as error:
                log.warning("cannot accept a connection", error=error.strerror, retry_s=ACCEPT_RETRY_S)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._begin(connection, client[0])
            await asyncio.sleep(0)  # let other tasks run, however many connections wait here

    def _begin(self, connection: socket.socket, address: str) -> None:
        if self._by_address[address] >= self._limits.allowed_from(address):
            connection.close()
            self._refused("connections_full")
            return
        if len(self._handshakes) >= self._limits.max_connections:
            next(iter(self._handshakes)).cancel()
            self._refused("connections_full")
        task = asyncio.create_task(self._shake_hands(connection))
        self._handshakes[task] = address
        self._by_address[address] += 1
        task.add_done_callback(self._ended)

    async def _shake_hands(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                self._protocol, connection, ssl=self._tls(), ssl_handshake_timeout=self._handshake_timeout_s
            )
        except OSError as error:  # no certificate, another protocol, too slow, disconnected
            log.debug("TLS handshake failed", error=str(error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        address = self._handshakes.pop(task)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("TLS handshake failed", error=repr(error))
