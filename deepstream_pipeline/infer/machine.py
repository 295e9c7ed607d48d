"""What the engines of this project know of the machine that they share with this program."""

from server.backends.ort_serving.threads import available_cores

__all__ = ["available_cores"]
