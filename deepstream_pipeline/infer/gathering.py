"""Rows on the card to where the engine reads them."""

from collections.abc import Sequence

from deepstream_pipeline.infer.calls import Call, Loaded, Row, gathered
from deepstream_pipeline.infer.card_line import CardLine
from deepstream_pipeline.infer.network import Network
from deepstream_pipeline.types import DeviceRow


async def gather_all(
    network: Network, rows: Sequence[Row], calls: Sequence[Call], card: CardLine, deadline: float
) -> list[Loaded]:
    """The calls whose rows lie on the card, all or none; the rows may be written again after it. Raises InferFailed."""
    loaded: list[Loaded] = []
    try:
        for call in calls:
            lease = await card.gather([row for index in call.members if isinstance(row := rows[index], DeviceRow)])
            loaded.append(gathered(network, call, card, card.place_of(lease), lease, deadline))
    except BaseException:
        give_back(loaded)
        raise
    return loaded


def give_back(loaded: Sequence[Loaded]) -> None:
    """What was never asked."""
    for one in loaded:
        if one.lease is not None:
            one.lease.release()
