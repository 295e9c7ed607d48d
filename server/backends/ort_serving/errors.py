"""What can go wrong here. Every message is one sentence that reaches the user as it is."""


class LoadError(Exception):
    """The model cannot be served: raised while loading, the load fails with this sentence."""


class RequestError(Exception):
    """One request fails, its batch-mates do not."""

    def __init__(self, message: str, *, is_callers_fault: bool) -> None:
        super().__init__(message)
        self.is_callers_fault = is_callers_fault
