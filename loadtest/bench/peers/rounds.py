"""The interleaved rounds: who still takes part, in which order, and why somebody does not."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadtest.bench.peers.answers import Found
from loadtest.bench.peers.child import NotServing
from loadtest.bench.peers.contenders import Contender
from loadtest.bench.peers.environments import NotPrepared
from loadtest.bench.peers.measuring import Load, Measured, OtherAnswer, audition, check, measure
from loadtest.bench.peers.model import ServedModel
from loadtest.bench.wire import BadAnswer

Say = Callable[[str], None]
LIGHT_SHARE = 0.5  # of the slowest contender's rate
FAILURES = (NotServing, NotPrepared, OtherAnswer, BadAnswer)


class OursFailed(Exception):
    """Our own server did not serve, so there is nothing to compare with; the message is a sentence."""


@dataclass(slots=True)
class Rounds:
    """measured: by name, a figure a round. light_rate: of the open loop. left_out: sentences, why somebody has none."""

    light_rate: float
    measured: dict[str, list[Measured]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


async def run_rounds(
    contenders: Sequence[Contender], model: ServedModel, load: Load, *, count: int, say: Say
) -> Rounds:
    """count rounds of all who answer as the first one, ours, does. Whoever fails in a round is out of all of them.

    One server is up at a time; the order is another one in each round. Raises OursFailed.
    """
    rounds, peers = await _auditioned(contenders, model, load, say)
    for number in range(count):
        for contender in random.sample(peers, len(peers)):
            say(f"round {number + 1} of {count}: {contender.name}")
            try:
                measured = await measure(contender, model, load, light_rate=rounds.light_rate, seed=number)
            except FAILURES as error:
                _leave_out(contender, contenders[0], error, rounds, say)
                peers = [peer for peer in peers if peer is not contender]
            else:
                rounds.measured.setdefault(contender.name, []).append(measured)
    rounds.measured = {one.name: rounds.measured[one.name] for one in peers}
    return rounds


async def _auditioned(
    contenders: Sequence[Contender], model: ServedModel, load: Load, say: Say
) -> tuple[Rounds, list[Contender]]:
    """(the empty rounds, those who answer the same boxes as the first one)."""
    rounds, peers, rates = Rounds(0.0), [], []
    ours: list[list[Found]] = []
    for contender in contenders:
        say(f"are its boxes ours: {contender.name}")
        try:
            boxes, rate = await audition(contender, model, load)
            ours = ours or boxes
            check(ours, boxes, name=contender.name, score_threshold=model.card.score_threshold)
        except FAILURES as error:
            _leave_out(contender, contenders[0], error, rounds, say)
        else:
            peers.append(contender)
            rates.append(rate)
    rounds.light_rate = load.light_rate or min(rates) * LIGHT_SHARE
    return rounds, peers


def _leave_out(contender: Contender, ours: Contender, error: Exception, rounds: Rounds, say: Say) -> None:
    if contender is ours:
        raise OursFailed(str(error)) from error
    rounds.left_out.append(str(error))
    say(f"left out: {error}")
