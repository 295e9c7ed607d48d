"""A caller as one process of the gateway tells another of it, over a socket that no client reaches.

It goes in a header (metadata over gRPC) that is believed there only, and taken off whatever a client sends.
"""

import json
from dataclasses import asdict

from server.core.caller import Caller, Quota, Role

CALLER_HEADER = "x-penstock-caller"


def caller_told(caller: Caller) -> str:
    """The caller as ASCII text on one line."""
    return json.dumps(asdict(caller) | {"roles": sorted(caller.roles)}, separators=(",", ":"))


def caller_heard(text: str) -> Caller:
    """What `caller_told` made the text of. Raises ValueError where nobody did."""
    try:
        fields = json.loads(text)
        quota = fields.pop("quota")
        roles = frozenset(Role(name) for name in fields.pop("roles"))
        return Caller(**fields, roles=roles, quota=Quota(**quota) if quota is not None else None)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no caller is told by {text[:80]!r}") from error
