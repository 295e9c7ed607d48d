"""overcrowding: too many in a polygon for too long. Counts who is there now."""

from deepstream_pipeline.analytics.geometry import Area, Scale, scaled
from deepstream_pipeline.analytics.rules import Overcrowding
from deepstream_pipeline.analytics.scene import Scene
from deepstream_pipeline.analytics.watch import Said, now_there
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind

BREAK_S = 0.5  # fewer for less than this is taken for a detector that missed somebody


class CrowdWatch:
    """An event with the count when object_threshold or more have been there for time_threshold_s; one with 0 when they
    have been fewer for BREAK_S. Needs no identities. A cut ends it: what was before it is over.
    """

    def __init__(self, rule: Overcrowding) -> None:
        self._rule = rule
        self._area = Area(scaled(rule.polygon, (1.0, 1.0)))
        self._since_s: float | None = None
        self._short_since_s: float | None = None
        self._is_over = False

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        self._area = Area(scaled(self._rule.polygon, scale))

    def observe(self, scene: Scene) -> Said:
        """The rule holds for those inside while there are too many."""
        crowd = scene.crowd(self._rule.class_ids)
        inside = self._area.holds(crowd.feet).tolist() if crowd.rows else []
        there = [number for number, is_inside in enumerate(inside) if is_inside]
        events = self._ends(scene) if scene.is_cut else []
        if len(there) >= self._rule.object_threshold:
            events += self._lasts(scene, len(there))
        elif self._since_s is not None:
            if self._short_since_s is None:
                self._short_since_s = scene.pts_s
            if round(scene.pts_s - self._short_since_s, 6) >= BREAK_S:
                events += self._ends(scene)
        said = now_there(
            [crowd.rows[number] for number in there], (crowd.class_ids[number] for number in there), events
        )
        if not self._is_over:
            said.rows = []
        return said

    def _lasts(self, scene: Scene, count: int) -> list[AnalyticsEvent]:
        self._short_since_s = None
        if self._since_s is None:
            self._since_s = scene.pts_s
        if self._is_over or round(scene.pts_s - self._since_s, 6) < self._rule.time_threshold_s:
            return []
        self._is_over = True
        return [scene.event(AnalyticsKind.OVERCROWDING, self._rule.name, float(count))]

    def _ends(self, scene: Scene) -> list[AnalyticsEvent]:
        was_over, self._is_over = self._is_over, False
        self._since_s = self._short_since_s = None
        return [scene.event(AnalyticsKind.OVERCROWDING, self._rule.name, 0.0)] if was_over else []
