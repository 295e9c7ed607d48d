"""What is on its way to being a tensor: how many images, and how long that takes lately. Sans-IO."""

from collections import Counter

WEIGHT = 0.1  # of one image in the usual time


class Preparing:
    """Images of the models whose batches the gateway forms; their queues do not know of them yet."""

    def __init__(self) -> None:
        self._images: Counter[str] = Counter()
        self._usual_s = 0.0

    def images(self, model_name: str) -> int:
        """Being made ready now."""
        return self._images[model_name]

    def takes_s(self, model_name: str) -> float:
        """What one takes, waiting for a decoder included; 0 where none is on its way: that time may be over."""
        return self._usual_s if self._images[model_name] else 0.0

    def began(self, model_name: str) -> None:
        """One more is on its way."""
        self._images[model_name] += 1

    def ended(self, model_name: str, seconds: float) -> None:
        """It took so long, whatever became of it."""
        self._images[model_name] -= 1
        self._usual_s += (seconds - self._usual_s) * WEIGHT
