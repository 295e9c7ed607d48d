"""TLS: the server's certificate, the CA of client certificates, and the identity in a client certificate."""

import ssl
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from server.logs import get_logger

LOOK_INTERVAL_S = 1.0
KNOWN_CERTIFICATES = 1024

log = get_logger("tls")
_Stamp = tuple[tuple[int, int, int], ...]


class TlsFileError(Exception):
    """A certificate, key or CA file cannot be used. One sentence: the file, what is wrong with it, and what to do."""


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
    """Reloads the files when they change. New connections get the new certificate; open connections stay.

    A new connection checks for changes, at most once a second. If the new files cannot be used, the old ones stay in
    use, failed_reads is incremented, and the log says why.
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
        """The context for a new connection. After a change of the files it is a new one without TLS sessions.

        A resumed session would have the client certificate that was verified with the old files.
        """
        self._look_if_due()
        return self._loaded.context

    def pem(self) -> tuple[bytes, bytes, bytes | None]:
        """The certificate chain, its key and the client CA, for a new connection."""
        self._look_if_due()
        return self._loaded.certificate, self._loaded.key, self._loaded.client_ca

    def look_again(self) -> None:
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

    def _look_if_due(self) -> None:
        """Checks for changes, at most once an interval. Any thread may call it."""
        if time.monotonic() - self._looked_at < LOOK_INTERVAL_S or not self._looking.acquire(blocking=False):
            return
        try:
            self.look_again()
        finally:
            self._looking.release()


@lru_cache(KNOWN_CERTIFICATES)
def subject_of(certificate: bytes) -> str:
    """The subject of a verified client certificate (DER or PEM) by RFC 4514: "CN=camera-7,O=acme"."""
    from cryptography import x509  # here, since it takes 30 ms to import and most gateways have no TLS

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
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
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


def _no_password() -> str:
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
