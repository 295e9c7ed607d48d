"""Where the time of several images went, as one request's stages."""

from collections.abc import Sequence

from server.core.infer import Timings
from server.vision.decoder import Prepared


def times_of(prepared: Sequence[Prepared], passed_s: float) -> Timings:
    """Of images prepared side by side: what took longest, and what of the time was waiting."""
    at_work_s = max(item.decode_s + item.preprocess_s for item in prepared)
    return Timings(
        decode=max(item.decode_s for item in prepared),
        preprocess=max(item.preprocess_s for item in prepared),
        queue=max(passed_s - at_work_s, 0.0),
    )


def times_side_by_side(timings: Sequence[Timings], passed_s: float) -> Timings:
    """Of images that went together: of each stage what took longest; what is left of the time was waiting."""
    if len(timings) == 1:
        (one,) = timings
        queue = passed_s - one.decode - one.preprocess - one.infer - one.postprocess
        return Timings(one.decode, one.preprocess, max(queue, 0.0), one.infer, one.postprocess, one.batch_size)
    decode, preprocess = max(item.decode for item in timings), max(item.preprocess for item in timings)
    infer, postprocess = max(item.infer for item in timings), max(item.postprocess for item in timings)
    queue = max(passed_s - decode - preprocess - infer - postprocess, 0.0)
    return Timings(decode, preprocess, queue, infer, postprocess, max(item.batch_size for item in timings))


def times_in_turn(timings: Sequence[Timings]) -> Timings:
    """One after the other; the largest batch counts."""
    return Timings(
        decode=sum(item.decode for item in timings),
        preprocess=sum(item.preprocess for item in timings),
        queue=sum(item.queue for item in timings),
        infer=sum(item.infer for item in timings),
        postprocess=sum(item.postprocess for item in timings),
        batch_size=max(item.batch_size for item in timings),
    )
