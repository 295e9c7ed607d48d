"""Penstock: inference serving with Triton or an embedded engine behind a batching gateway.

`from penstock import Client, AsyncClient`: the Python client, which is imported on use.
"""

import os

VERSION = "0.1.0"  # as in pyproject.toml

# ONNX Runtime's wheels report each process and session to their maker, and write ~/.cache/Microsoft. It reads this
# variable at import, and Triton and our other children inherit it. Set it to 0 to send the reports.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

TYPE_CHECKING = False  # typing's, whose import takes time
if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient as AsyncClient
    from penstock.client.client import Client as Client

_CLIENTS = {"AsyncClient": "penstock.client.aio", "Client": "penstock.client.client"}


def __getattr__(name: str) -> object:
    if name in _CLIENTS:
        from importlib import import_module

        return getattr(import_module(_CLIENTS[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
