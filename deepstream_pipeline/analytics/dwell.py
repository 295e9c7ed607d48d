"""dwell: who stays in a polygon for long. Counts who is over the time now. Ours; nvdsanalytics has no such rule."""

from deepstream_pipeline.analytics.geometry import Scale
from deepstream_pipeline.analytics.rules import Dwell
from deepstream_pipeline.analytics.scene import Scene
from deepstream_pipeline.analytics.stays import Stay, Stays
from deepstream_pipeline.analytics.watch import Said, now_there
from deepstream_pipeline.types import AnalyticsEvent, AnalyticsKind


class DwellWatch:
    """An event when an object has been inside for after_s, and one when it leaves after that; its value: seconds
    inside. Who passes through in less is not told. One that is lost inside was there until it was last seen, and is
    told when it is taken for gone (scene.LOST_AFTER_S).
    """

    def __init__(self, rule: Dwell) -> None:
        self._rule = rule
        self._stays = Stays(rule.polygon)
        self._over: set[int] = set()

    def fit(self, scale: Scale) -> None:
        """In the source's pixels."""
        self._stays.fit(scale)

    def observe(self, scene: Scene) -> Said:
        """The rule holds for those who are inside and over the time."""
        crowd = scene.crowd(self._rule.class_ids)
        left = self._stays.leave(scene.gone) if scene.gone else []
        inside, changed = self._stays.move(scene, crowd)
        left += [stay for stay in changed if stay.until_s is not None]
        events = [self._event(scene, stay) for stay in left if stay.track_id in self._over]
        self._over.difference_update(stay.track_id for stay in left)
        over = []
        for number, track_id in enumerate(crowd.track_ids):
            if inside[number] and track_id >= 0 and self._is_over(scene, track_id, events):
                over.append(number)
        return now_there([crowd.rows[number] for number in over], (crowd.class_ids[number] for number in over), events)

    def _is_over(self, scene: Scene, track_id: int, events: list[AnalyticsEvent]) -> bool:
        if track_id not in self._over:
            stay = self._stays.stay(track_id)
            if round(scene.pts_s - stay.since_s, 6) < self._rule.after_s:
                return False
            self._over.add(track_id)
            events.append(self._event(scene, stay))
        return True

    def _event(self, scene: Scene, stay: Stay) -> AnalyticsEvent:
        until_s = scene.pts_s if stay.until_s is None else stay.until_s
        seconds = round(until_s - stay.since_s, 6)
        return scene.event(
            AnalyticsKind.DWELL, self._rule.name, seconds, track_id=stay.track_id, class_id=stay.class_id
        )
