"""What the control API is started with. Exposed without a key it does not start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Protocol, Self

from deepstream_pipeline.api.audit import Audit
from deepstream_pipeline.errors import PipelineError
from server.access.tls_acceptor import CurrentTls
from server.core.browser_policy import BrowserPolicy
from server.core.outbound import Outbound

KEY_VARIABLE = "PENSTOCK_VIDEO_API_KEY"  # of the environment: where the command has the key from
_HOW_TO_CHANGE = f"its port: --api-port; its key: {KEY_VARIABLE}; without it: --no-api"


class ApiRefused(PipelineError):
    """The control API cannot be started so. The text says what to give, and how."""

    reason = "api_refused"

    def __init__(self, message: str) -> None:
        super().__init__(f"{message} ({_HOW_TO_CHANGE})")


class ListenSettings(Protocol):
    """The program's settings for the API's address and for browsers."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def allowed_hosts(self) -> tuple[str, ...]: ...

    @property
    def cors_origins(self) -> tuple[str, ...]: ...

    @property
    def allowed_outbound(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """Where the control API listens, and whom it lets in.

    host, port: 127.0.0.1 answers this machine alone; port 0 lets the system pick one. api_key: what callers have to
    present, as x-api-key, as Bearer, or as the password of Basic; empty for nobody has to. allow_files: whether callers
    may add files and devices of this machine; None to allow it if only this machine can connect. allowed_hosts,
    cors_origins: see BrowserPolicy. allowed_outbound: where sources that clients add may connect, besides public hosts.
    max_viewers: of moving previews, all sources together.
    call_timeout_s: for the pipeline's answer. client_timeout_s: for a request's head, its body, and each picture that
    a viewer is sent. tls: None for plain HTTP. audit: None for no audit log.
    """

    host: str = "127.0.0.1"
    port: int = 8010
    api_key: str = field(default="", repr=False)
    allow_files: bool | None = None
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_outbound: tuple[str, ...] = ()
    max_viewers: int = 16
    max_connections: int = 256
    max_body_bytes: int = 1024 * 1024
    call_timeout_s: float = 10.0
    client_timeout_s: float = 10.0
    tls: CurrentTls | None = field(default=None, repr=False)
    audit: Audit | None = field(default=None, repr=False)
    browser_policy: BrowserPolicy = field(init=False, repr=False, compare=False)
    outbound: Outbound = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            policy = BrowserPolicy(self.host, self.allowed_hosts, self.cors_origins)
            outbound = Outbound(self.allowed_outbound, is_from_api=True)
        except ValueError as error:
            raise ApiRefused(f"the control API: {error}") from None
        object.__setattr__(self, "browser_policy", policy)
        object.__setattr__(self, "outbound", outbound)
        if not self.is_local and not self.api_key:
            raise ApiRefused(
                f"the control API on {self.host} could be asked by others to open any address; give it an API key, "
                "or let it listen on 127.0.0.1"
            )
        if self.api_key != self.api_key.strip() or not self.api_key.isascii():
            raise ApiRefused("the control API's key cannot be sent in a header; use letters and digits, without blanks")

    @classmethod
    def of(
        cls,
        settings: "ListenSettings",
        environ: Mapping[str, str],
        *,
        tls: CurrentTls | None = None,
        audit: Audit | None = None,
    ) -> Self:
        """The options from the settings, with the key from the environment. Raises ApiRefused."""
        return cls(
            settings.host,
            settings.port,
            environ.get(KEY_VARIABLE, ""),
            allowed_hosts=settings.allowed_hosts,
            cors_origins=settings.cors_origins,
            allowed_outbound=settings.allowed_outbound,
            tls=tls,
            audit=audit,
        )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return is_loopback(self.host)

    @property
    def takes_files(self) -> bool:
        """Whether files and devices of this machine may be added."""
        return self.is_local if self.allow_files is None else self.allow_files


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
