"""What a relayed call does, and who may ask for it."""

from enum import StrEnum

from server.core.caller import Caller, Role
from server.core.errors import PermissionDenied


class Verb(StrEnum):
    """What a relayed call does, as far as the gateway cares.

    configure: changes trace or log settings. share, unshare: registers or unregisters shared memory.
    """

    INFER = "infer"
    READ = "read"
    LOAD = "load"
    UNLOAD = "unload"
    CONFIGURE = "configure"
    SHARE = "share"
    UNSHARE = "unshare"


ROLE_OF: dict[Verb, Role] = {
    Verb.INFER: Role.INFER,
    Verb.READ: Role.READ,
    Verb.LOAD: Role.ADMIN,
    Verb.UNLOAD: Role.ADMIN,
    Verb.CONFIGURE: Role.ADMIN,
    Verb.SHARE: Role.ADMIN,
    Verb.UNSHARE: Role.ADMIN,
}


def require_role(verb: Verb, caller: Caller) -> None:
    """Raises PermissionDenied, which says which role is missing."""
    if ROLE_OF[verb] not in caller.roles:
        raise PermissionDenied(f"this needs the role {ROLE_OF[verb]}; use an API key that has it")
