"""Whether bytes still come fast enough to be worth waiting for. Pure: the times are given."""

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Judges windows of at least window_s seconds each, by what came in them."""

    least_bytes_per_s: float
    window_s: float
    begin_s: float
    came_bytes: int = 0

    def is_too_slow(self, now_s: float, size_bytes: int) -> bool:
        """Notes size_bytes that came at now_s; True where a window ends in which too few did."""
        self.came_bytes += size_bytes
        elapsed_s = now_s - self.begin_s
        if elapsed_s < self.window_s:
            return False
        is_too_slow = self.came_bytes < self.least_bytes_per_s * elapsed_s
        self.begin_s, self.came_bytes = now_s, 0
        return is_too_slow
