"""How long the engine is waited for where a request brings no deadline of its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds.

    connect: one connection attempt. control: our own probes, metadata, index, unload. load: our own loads.
    read: a relayed call that only reads. call: a relayed inference or load, or an inference of ours.
    keepalive: silence on a gRPC connection with calls in flight before a ping asks whether the engine is there;
    keepalive_timeout: how long the pong may take.
    """

    connect_s: float = 2.0
    control_s: float = 5.0
    load_s: float = 600.0
    read_s: float = 30.0
    call_s: float = 600.0
    keepalive_s: float = 10.0
    keepalive_timeout_s: float = 5.0
