"""What is on its way to being a tensor: how many images, and how long that takes lately. Sans-IO."""

from collections import Counter

WEIGHT = 0.1  # of one image in the usual time


class Preparing:
    """Images of the models whose batches the gateway forms; their queues do not know of them yet."""

    def __init__(self) -> None:
        self._images: Counter[str] = Counter()
        self._clients: Counter[tuple[str, str]] = Counter()
        self._clients_of: Counter[str] = Counter()
        self._usual_s: dict[tuple[str, str], float] = {}

    def rows_with(self, model_name: str, client: str, images: int) -> int:
        """Maximum number of rows that are ready once so many new images of the client are.

        Decoders take turns between clients, so a client that sends thousands does not delay others by all of them.
        """
        own = self._clients[model_name, client]
        clients = self._clients_of[model_name] + (not own)
        return min(self._images[model_name] + images, (own + images) * clients)

    def takes_s(self, model_name: str, client: str) -> float:
        """Usual time in seconds for one of the client's pictures, with the wait for a decoder.

        0 if none is in progress, because the value may then be outdated.
        """
        return self._usual_s.get((model_name, client), 0.0)

    def began(self, model_name: str, client: str) -> None:
        """One more is on its way."""
        self._images[model_name] += 1
        if not self._clients[model_name, client]:
            self._clients_of[model_name] += 1
        self._clients[model_name, client] += 1

    def ended(self, model_name: str, client: str, seconds: float) -> None:
        """It took so long, whatever became of it."""
        self._images[model_name] -= 1
        key = model_name, client
        self._clients[key] -= 1
        if not self._clients[key]:
            del self._clients[key]
            self._clients_of[model_name] -= 1
            self._usual_s.pop(key, None)
            return
        usual_s = self._usual_s.get(key, 0.0)
        self._usual_s[key] = usual_s + (seconds - usual_s) * WEIGHT
