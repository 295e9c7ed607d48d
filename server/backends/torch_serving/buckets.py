"""Batch sizes that a program is captured for: a batch runs in the smallest that holds it."""

import bisect
from collections.abc import Sequence


def default_buckets(max_batch_size: int) -> tuple[int, ...]:
    """Powers of two up to max_batch_size, and it. max_batch_size: 0 for a model without a batch dimension."""
    largest = max(max_batch_size, 1)
    powers = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return (*powers, largest)


def bucket_for(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds that many rows, 1 or more. buckets: ascending. ValueError above the last."""
    if rows > buckets[-1]:
        raise ValueError(f"{rows} rows are more than the largest bucket, {buckets[-1]}")
    return buckets[bisect.bisect_left(buckets, rows)]
