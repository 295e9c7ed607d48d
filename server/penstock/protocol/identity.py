"""The identity of a client: key, address, roles and quota; which role each verb requires."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Literal

from penstock.protocol.errors import PermissionDenied


class Role(StrEnum):
    """Role of a client. admin: add, load and unload models, register shared memory, change trace and log settings."""

    INFER = "infer"
    READ = "read"
    ADMIN = "admin"


ALL_ROLES = frozenset(Role)
# In place of a role: the client needs none, but an unknown key is refused.
ANY_CLIENT: Literal["any client"] = "any client"
Needed = Role | Literal["any client"]


@dataclass(frozen=True, slots=True)
class Quota:
    """rate: requests in each period_s, 0 for no limit. share: of requests and bytes in flight, in (0, 1]."""

    rate: int = 0
    period_s: float = 1.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """The client that sent a request.

    key_name: name of its API key ("camera") or subject of its token ("token:alice"); "" if anonymous. connection:
    gRPC's peer ("ipv4:127.0.0.1:53210"), "" over HTTP. address: its host, "" if unknown. quota: None for no limit.
    """

    key_name: str = ""
    connection: str = ""
    address: str = ""
    roles: frozenset[Role] = ALL_ROLES
    quota: Quota | None = None

    @property
    def owner(self) -> str:
        """Owner of what this client registers: its key, else its gRPC connection, else its address."""
        if self.key_name:
            return f"key {self.key_name}"
        return f"connection {self.connection}" if self.connection else f"address {self.address}"

    @property
    def client(self) -> str:
        """The client for fair queueing: its key, or else its address."""
        return f"address {self.address}" if self.address and not self.key_name else self.owner


ANONYMOUS = Identity()


class Verb(StrEnum):
    """Kind of a relayed call.

    index, ready, config: read the repository's index, whether a model is ready, a model's config. read: any other read.
    add: adds a model from its file. remove: removes a model with its folder. configure: changes trace or log settings.
    share, unshare: registers or unregisters shared memory.
    """

    INFER = "infer"
    READ = "read"
    INDEX = "index"
    READY = "ready"
    CONFIG = "config"
    ADD = "add"
    REMOVE = "remove"
    LOAD = "load"
    UNLOAD = "unload"
    CONFIGURE = "configure"
    SHARE = "share"
    UNSHARE = "unshare"


_READS = (Verb.READ, Verb.INDEX, Verb.READY, Verb.CONFIG)
ROLE_OF = dict.fromkeys(Verb, Role.ADMIN) | dict.fromkeys(_READS, Role.READ) | {Verb.INFER: Role.INFER}


def require_role(verb: Verb, caller: Identity) -> None:
    """Raises PermissionDenied with the missing role."""
    if ROLE_OF[verb] not in caller.roles:
        raise PermissionDenied(f"this needs the role {ROLE_OF[verb]}; use an API key that has it")


IDENTITY_HEADER = "x-penstock-caller"


def encode_identity(caller: Identity) -> str:
    """The identity as ASCII text on one line."""
    return json.dumps(asdict(caller) | {"roles": sorted(caller.roles)}, separators=(",", ":"))


def decode_identity(text: str) -> Identity:
    """The identity in a text of `encode_identity`. Raises ValueError for any other text."""
    try:
        fields = json.loads(text)
        quota = fields.pop("quota")
        roles = frozenset(Role(name) for name in fields.pop("roles"))
        return Identity(**fields, roles=roles, quota=Quota(**quota) if quota is not None else None)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not an encoded identity: {text[:80]!r}") from error
