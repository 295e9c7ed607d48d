"""A rule: an event when a region holds more objects than before. `analytics: {queue_rule:QueueRecord: [{name: …}]}`"""

from pydantic import BaseModel

from penstock_video.analytics.scene import RuleResult, Scene, present_result


class QueueRecord:
    """State of one rule of one source."""

    kind = "queue-record"  # of its events and counts, and its name for clients of the control API

    class Options(BaseModel):
        name: str
        left: float = 0.0  # pixels; objects to the right of it are in the queue

    def __init__(self, options: Options) -> None:
        self._name, self._left = options.name, options.left
        self._scale, self._record = 1.0, 0

    def fit(self, scale: tuple[float, float]) -> None:
        self._scale = scale[0]  # source pixels for each pixel of config-width

    def observe(self, scene: Scene) -> RuleResult:
        crowd = scene.crowd(())  # of every class
        inside = [row for row, foot in zip(crowd.rows, crowd.feet, strict=True) if foot[0] >= self._left * self._scale]
        is_record = len(inside) > self._record
        self._record = max(self._record, len(inside))
        events = [scene.event(self.kind, self._name, float(self._record))] if is_record else []
        return present_result(inside, [], events)
