"""What the engines of this project know of the machine that they share with this program."""

from server.backends.ort_serving.threads import available_cores
from server.local.card_interrupts import Interrupts, InterruptWatch, mostly_interrupted

__all__ = ["InterruptWatch", "Interrupts", "available_cores", "mostly_interrupted"]
