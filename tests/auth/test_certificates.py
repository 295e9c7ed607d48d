"""TLS files: which files are refused, what a reload changes, and which client a certificate identifies."""

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from penstock.gateway.auth.access_file import AccessFileError, read_access_file
from penstock.gateway.auth.authenticator import Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.protocol.errors import PermissionDenied
from penstock.protocol.identity import Role
from penstock.tls import Certificates, TlsFileError, TlsFiles, subject_of
from tests.auth.authorities import Authority

OURS = Authority("ours")
ACCESS = """[certificates]
roles = ["infer"]
rate = "7/second"

[certificates.subjects."CN=ops,O=acme"]
roles = ["admin", "read"]
"""


def files_of(folder: Path, name: str = "server") -> TlsFiles:
    return TlsFiles(*OURS.sign(folder, name), OURS.file(folder))


def replace_with(path: Path, content: bytes) -> None:
    """Replaces the file, as cert-manager and Kubernetes do."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)


@pytest.mark.parametrize("broken", ["certificate", "key", "client_ca"])
@pytest.mark.parametrize(
    "content", [None, b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_tls_file_that_cannot_be_used_is_refused_with_its_setting(
    tmp_path: Path, broken: str, content: bytes | None
) -> None:
    """One sentence names the setting and the file if it is missing, empty or not PEM."""
    files = files_of(tmp_path)
    path: Path = getattr(files, broken)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(TlsFileError, match=f"tls_.*{path.name}") as refused:
        Certificates(files)
    assert "\n" not in str(refused.value)


def test_tls_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    """Certificate and key must belong together."""
    certificate, _ = OURS.sign(tmp_path, "one")
    _, key = OURS.sign(tmp_path, "other")
    with pytest.raises(TlsFileError, match="cannot be used with tls_cert"):
        Certificates(TlsFiles(certificate, key))


def test_tls_key_with_a_password_is_refused(tmp_path: Path) -> None:
    """The message says that the password is the reason."""
    certificate, key = OURS.sign(tmp_path, "one")
    secret = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    with pytest.raises(TlsFileError, match=r"\(the key has a password\); give the certificate's own key"):
        Certificates(TlsFiles(certificate, key))


def handshake(certificates: Certificates, folder: Path, client: tuple[Path, Path] | None) -> bytes:
    """A handshake in memory; the server's certificate as the client sees it (DER). Raises ssl.SSLError."""
    client_context = ssl.create_default_context(cafile=str(OURS.file(folder, "trusted.pem")))
    if client is not None:
        client_context.load_cert_chain(*client)
    return shake_hands(certificates, client_context)[0].getpeercert(binary_form=True) or b""


def shake_hands(
    certificates: Certificates, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """A handshake in memory: the client's side and the server's. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_side = certificates.context().wrap_bio(to_server, to_client, server_side=True)
    client_side = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    done = set[ssl.SSLObject]()
    for _ in range(10):
        for side in (client_side, server_side):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    assert done == {client_side, server_side}
    return client_side, server_side


def test_tls_files_that_change_are_used_for_the_next_connection(tmp_path: Path) -> None:
    """Certificate, key and client CA are replaced; a client of the old CA is refused from then on."""
    files = files_of(tmp_path)
    certificates = Certificates(files)
    theirs = Authority("theirs")
    our_client, their_client = OURS.sign(tmp_path, "ours"), theirs.sign(tmp_path, "theirs")
    before = handshake(certificates, tmp_path, our_client)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(certificates, tmp_path, their_client)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        handshake(certificates, tmp_path, None)
    fresh = OURS.sign(tmp_path, "fresh")
    for path, new in zip((files.certificate, files.key), fresh, strict=True):
        replace_with(path, new.read_bytes())
    assert files.client_ca is not None
    replace_with(files.client_ca, theirs.pem)
    certificates.reload_if_changed()
    assert handshake(certificates, tmp_path, their_client) not in (before, b"")
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        handshake(certificates, tmp_path, our_client)


def test_tls_session_of_a_replaced_client_ca_is_not_resumed(tmp_path: Path) -> None:
    """Neither tickets nor session IDs work: otherwise a client of the old CA would keep its identity."""
    files = files_of(tmp_path)
    certificates = Certificates(files)
    client = ssl.create_default_context(cafile=str(OURS.file(tmp_path, "trusted.pem")))
    client.load_cert_chain(*OURS.sign(tmp_path, "ours"))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    before, first = shake_hands(certificates, client)
    assert before.session is not None
    assert files.client_ca is not None
    replace_with(files.client_ca, Authority("theirs").pem)
    certificates.reload_if_changed()
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake_hands(certificates, client, before.session)
    assert first.getpeercert(binary_form=True)  # the open connection stays


def test_tls_files_that_break_leave_the_last_good_ones_in_use(tmp_path: Path) -> None:
    """An incomplete renewal is counted and refuses no client; the next valid files are used."""
    files = files_of(tmp_path)
    certificates = Certificates(files)
    client = OURS.sign(tmp_path, "client")
    before = handshake(certificates, tmp_path, client)
    fresh = OURS.sign(tmp_path, "fresh")
    replace_with(files.certificate, fresh[0].read_bytes())
    certificates.reload_if_changed()
    assert certificates.failed_reads == 1
    assert handshake(certificates, tmp_path, client) == before
    replace_with(files.key, fresh[1].read_bytes())
    certificates.reload_if_changed()
    assert handshake(certificates, tmp_path, client) != before
    assert certificates.failed_reads == 1


def test_tls_certificate_shows_when_it_expires(tmp_path: Path) -> None:
    """An expired certificate stays in use: clients decide whether they accept it."""
    good, expired = (Certificates(TlsFiles(*OURS.sign(tmp_path, str(days), days=days))) for days in (5, -1))
    assert 5.9 < (good.expires_at - expired.expires_at) / 86_400 < 6.1


def door_of(folder: Path, text: str, anonymous: frozenset[Role] = frozenset()) -> Authenticator:
    (folder / "access.toml").write_text(text)
    options = AuthOptions(folder / "access.toml", anonymous=anonymous)
    return Authenticator(options, RateLimiter(max_requests=10, max_bytes=1000), clock=lambda: 100.0)


async def test_client_certificate_has_the_roles_of_its_subject(tmp_path: Path) -> None:
    """A listed subject has its own roles, all other certificates the default ones; the client's name has it."""
    door = door_of(tmp_path, ACCESS)
    ops = await door.admit([], Role.ADMIN, certificate="CN=ops,O=acme")
    camera = await door.admit([], Role.INFER, certificate="CN=camera-7,O=acme")
    assert (ops.key_name, ops.roles) == ("certificate:CN=ops,O=acme", {Role.ADMIN, Role.READ})
    assert (camera.key_name, camera.roles) == ("certificate:CN=camera-7,O=acme", {Role.INFER})
    assert camera.quota is not None
    assert camera.quota.rate == 7
    with pytest.raises(PermissionDenied, match="lacks the role admin"):
        await door.admit([], Role.ADMIN, certificate="CN=ops,O=other")


async def test_client_certificate_without_rules_may_do_what_anonymous_clients_may(tmp_path: Path) -> None:
    """A verified certificate never has fewer rights than none."""
    door = door_of(tmp_path, "[keys]\n", frozenset({Role.READ}))
    assert (await door.admit([], Role.READ, certificate="CN=x")).roles == {Role.READ}


def test_access_file_with_an_unknown_role_for_a_subject_is_refused(tmp_path: Path) -> None:
    """The message names the subject's section."""
    (tmp_path / "access.toml").write_text('[certificates.subjects."CN=x"]\nroles = ["root"]\n')
    with pytest.raises(AccessFileError, match="CN=x"):
        read_access_file(tmp_path / "access.toml")


def test_subject_is_read_alike_from_der_and_pem(tmp_path: Path) -> None:
    """HTTP gives DER and gRPC PEM, and both give the same identity."""
    certificate, _ = OURS.sign(tmp_path, "camera, 7", organization="acme")
    pem = certificate.read_bytes()
    assert subject_of(pem) == subject_of(ssl.PEM_cert_to_DER_cert(pem.decode())) == r"CN=camera\, 7,O=acme"
