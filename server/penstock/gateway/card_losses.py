"""Reports lost cards to the replicas, to the watch, and to the parent process, which stops and starts engines."""

from collections.abc import Callable, Mapping

from penstock.engines.replicas import Replicas
from penstock.engines.watch import EngineWatch
from penstock.gateway.card_engines import CardEngines
from penstock.gateway.workers.gateway_process import LostCards


class CardLosses:
    """Call `observe` after each telemetry message. No effect while no model runs on a GPU."""

    def __init__(
        self, cards: CardEngines, replicas: Replicas, watch: EngineWatch, send: Callable[[LostCards], None]
    ) -> None:
        self._cards, self._replicas, self._watch, self._send = cards, replicas, watch, send
        self._lost: Mapping[str, str] = {}

    def observe(self, lost: Mapping[str, str]) -> None:
        """lost: the reason by UUID."""
        of_label = self._cards.labels(lost) if self._watch.has_model_on_gpu else {}
        if of_label == self._lost:
            return
        self._lost = of_label
        self._replicas.set_lost(of_label)
        self._send(LostCards(of_label))
        self._watch.suspect()
