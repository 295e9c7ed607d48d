"""roi-filtering: who is in a polygon. Counts who is there now; an event for each who enters (1.0) and leaves (0.0)."""

from deepstream_pipeline.analytics.geometry import Scale
from deepstream_pipeline.analytics.rules import RoiFiltering
from deepstream_pipeline.analytics.scene import Scene
from deepstream_pipeline.analytics.stays import Stays
from deepstream_pipeline.analytics.watch import Said, now_there
from deepstream_pipeline.types import AnalyticsKind


class RoiWatch:
    """Who appears inside enters; who is lost inside leaves when it is taken for gone (scene.LOST_AFTER_S)."""

    def __init__(self, rule: RoiFiltering) -> None:
        self._rule = rule
        self._stays = Stays(rule.polygon, is_inverse=rule.is_inverse)

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        self._stays.fit(scale)

    def observe(self, scene: Scene) -> Said:
        """The rule holds for those inside."""
        crowd = scene.crowd(self._rule.class_ids)
        left = self._stays.leave(scene.gone) if scene.gone else []
        inside, changed = self._stays.move(scene, crowd)
        there = [number for number, is_inside in enumerate(inside) if is_inside]
        events = [
            scene.event(
                AnalyticsKind.ROI_FILTERING, self._rule.name, 1.0 if stay.until_s is None else 0.0,
                track_id=stay.track_id, class_id=stay.class_id,
            )
            for stay in left + changed
        ]  # fmt: skip
        rows = [crowd.rows[number] for number in there]
        return now_there(rows, (crowd.class_ids[number] for number in there), events)
