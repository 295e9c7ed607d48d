"""What can go wrong here. Every message is one sentence that reaches the user as it is."""


class LoadError(Exception):
    """The model cannot be served: raised while loading, the load fails with this sentence."""


class RequestError(Exception):
    """One request fails, its batch-mates do not. The caller's fault: 400 to a client."""
