"""How the batches of one model are formed."""

from dataclasses import dataclass

from server.core.batching import Owner

DEFAULT_EXECUTION_TIMEOUT_S = 30.0
DEFAULT_MAX_QUEUE_SIZE = 1024
DEFAULT_MAX_QUEUE_BYTES = 512 << 20
PRIORITY_LEVELS = 3  # 1 the highest; a request that names none has the middle one


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What the queue of a model needs to know. Times in seconds.

    max_batch_size: rows of one engine call, at least 1. instances: engine calls that the engine runs at once; one more
    may wait there. slo_s: the deadline of a request that brings none, from the end of its body on; None for none.
    max_queue_delay_s: how long rows may be waited for while a slot is free, never into a deadline; 0 for not at all.
    max_queue_size: requests that may wait. max_queue_bytes: of their tensors.
    execution_timeout_s: a model that has a call and answers nothing for this time hangs.
    unmerged: why each request, picture and frame has a call of its own; empty if they may share one.
    """

    owner: Owner = Owner.OFF
    max_batch_size: int = 1
    instances: int = 1
    slo_s: float | None = None
    max_queue_delay_s: float = 0.0
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES
    execution_timeout_s: float = DEFAULT_EXECUTION_TIMEOUT_S
    unmerged: str = ""

    @property
    def slots(self) -> int:
        """Engine calls in flight at most: one an instance, and one that waits at the engine's door."""
        return self.instances + 1
