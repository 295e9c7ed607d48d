"""TLS of our clients: the CAs that they trust and the client certificate that they send, both from the environment."""

import os
import ssl
from pathlib import Path

from server.core.errors import InvalidRequest

CERTIFICATE_VARIABLE, CA_VARIABLE = "PENSTOCK_CLIENT_CERTIFICATE", "SSL_CERT_FILE"


def client_context() -> ssl.SSLContext:
    """Trusts the system's CAs, or those in SSL_CERT_FILE. Raises InvalidRequest for an unusable client certificate."""
    context = ssl.create_default_context()
    if file := os.environ.get(CERTIFICATE_VARIABLE):
        try:
            context.load_cert_chain(file)
        except (ssl.SSLError, OSError) as error:
            raise _unusable(file, getattr(error, "reason", None) or error.strerror or str(error)) from error
    return context


def trusted_roots() -> bytes | None:
    """The CAs in SSL_CERT_FILE, as PEM; None for the default of the TLS library."""
    file = os.environ.get(CA_VARIABLE)
    try:
        return Path(file).read_bytes() if file else None
    except OSError:  # as OpenSSL does: the server's certificate is then not trusted
        return None


def client_certificate() -> bytes | None:
    """The client certificate and its key, as PEM; None to send none. Raises InvalidRequest."""
    file = os.environ.get(CERTIFICATE_VARIABLE)
    try:
        return Path(file).read_bytes() if file else None
    except OSError as error:
        raise _unusable(str(file), error.strerror or str(error)) from error


def _unusable(file: str, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{CERTIFICATE_VARIABLE} is {file!r}, which cannot be loaded ({reason}): set it to a PEM file with the "
        "certificate and its key"
    )
