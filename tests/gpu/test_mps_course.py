"""What is done when MPS fails, decided from what was seen: the order, once each, and by whom the daemon is run."""

import itertools

import pytest

from penstock.gpu.mps.control import DaemonStatus, Server, ServerState
from penstock.gpu.mps.recovery import (
    ATTACH_S,
    FAULT_TIMEOUT_S,
    MAX_BACKOFF_S,
    MAX_RENEWALS,
    SILENCE_TIMEOUT_S,
    Action,
    EndClients,
    EngineObservation,
    LogEvent,
    Observation,
    RecoveryEvent,
    RecoveryPolicy,
    Refuse,
    StartDaemon,
)

TRITON, FIRST, SECOND, SERVER = 100, 101, 102, 50
STUBS = frozenset({FIRST, SECOND})


def daemon(*clients: int, state: ServerState = ServerState.ACTIVE, server: int = SERVER) -> DaemonStatus:
    """Up, with one server that has these clients."""
    return DaemonStatus(is_up=True, servers=(Server(server, state, clients),))


def engine(*holding: int, pid: int = TRITON, serves: bool = True) -> EngineObservation:
    """Running, with a process of its own and the two of its models."""
    return EngineObservation(pid, True, STUBS | {pid}, frozenset(holding), serves)


GONE = DaemonStatus(is_up=False, reason="it is gone")
DOWN = EngineObservation()
WELL = Observation(daemon(*STUBS), engine(*STUBS))


def course(*, owns: bool = True, must: bool = True) -> RecoveryPolicy:
    """One whose clients are all attached."""
    one = RecoveryPolicy(owns_daemon=owns, must_attach=must)
    assert events(one.decide(0.0, WELL)) == [RecoveryEvent.ATTACHED]
    return one


def events(actions: list[Action]) -> list[RecoveryEvent]:
    return [action.event for action in actions if isinstance(action, LogEvent)]


def kinds(actions: list[Action]) -> list[type[Action]]:
    return [type(action) for action in actions]


def test_course_of_a_healthy_mps_does_nothing_and_lets_clients_start() -> None:
    """Each event is logged once."""
    one = course()
    assert one.may_start
    assert [one.decide(now, WELL) for now in (1.0, 2.0, 3.0)] == [[], [], []]
    assert (one.attached, one.beside, one.restarts) == (STUBS, frozenset(), 0)


def test_fault_of_one_client_ends_all_once_and_they_start_when_the_server_is_well_again() -> None:
    """Until then none may start, for CUDA refuses it with error 807; the time is that from the sight to the service."""
    one = course()
    faulty = Observation(daemon(*STUBS, state=ServerState.FAULT), engine(*STUBS))
    (action,) = one.decide(10.0, faulty)
    assert isinstance(action, EndClients)
    assert action.is_lost
    assert "FAULT" in action.reason
    assert not one.may_start
    assert one.decide(10.1, faulty) == []  # they are being ended
    assert one.decide(10.5, Observation(daemon(state=ServerState.FAULT), DOWN)) == []
    assert not one.may_start
    assert one.decide(11.0, Observation(daemon(), DOWN)) == []
    assert one.may_start
    assert one.decide(12.0, Observation(daemon(), engine(pid=200, serves=False))) == []
    assert one.is_recovering
    back = one.decide(14.0, Observation(daemon(*STUBS), engine(*STUBS, pid=200)))
    assert events(back) == [RecoveryEvent.ATTACHED, RecoveryEvent.RECOVERED]
    assert (one.restarts, one.recovery_s, one.is_recovering) == (1, 4.0, False)


def test_server_that_stays_in_fault_without_clients_is_replaced_with_its_daemon_only_where_it_is_ours() -> None:
    """It is given its time; and never while clients of ours still hang on to it."""
    for owns in (True, False):
        one = course(owns=owns)
        faulty = daemon(state=ServerState.FAULT)
        one.decide(10.0, Observation(daemon(*STUBS, state=ServerState.FAULT), engine(*STUBS)))
        assert one.decide(10.0 + FAULT_TIMEOUT_S - 0.1, Observation(faulty, DOWN)) == []
        late = 10.0 + FAULT_TIMEOUT_S
        held = Observation(daemon(FIRST, state=ServerState.FAULT), EngineObservation(TRITON, False, STUBS))
        assert one.decide(late, held) == []
        assert kinds(one.decide(late, Observation(faulty, DOWN))) == [StartDaemon] * owns


def test_daemon_of_ours_that_died_is_started_anew_and_all_its_clients_too() -> None:
    """At once, and then after growing pauses as long as it does not stay."""
    one = course()
    assert kinds(one.decide(10.0, Observation(GONE, engine(*STUBS)))) == [EndClients, StartDaemon]
    starts = [10.0]
    now = 10.0
    while now < 120.0:
        now += 0.1
        if one.decide(now, Observation(GONE, DOWN)):
            starts.append(now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert pauses[0] == pytest.approx(0.2, abs=0.11)
    assert pauses == sorted(pauses, key=lambda pause: round(pause))
    assert max(pauses) == pytest.approx(MAX_BACKOFF_S, abs=0.2)
    assert not one.may_start
    assert one.restarts == 1


def test_foreign_daemon_that_died_costs_what_runs_nothing_until_it_is_back() -> None:
    """What runs goes on, nothing starts; when it is back, all attach to the new one, with time to end in."""
    one = course(owns=False)
    assert events(one.decide(10.0, Observation(GONE, engine(*STUBS)))) == [RecoveryEvent.DAEMON_AWAITED]
    assert one.decide(20.0, Observation(GONE, engine(*STUBS))) == []
    assert not one.may_start
    (action,) = one.decide(30.0, Observation(DaemonStatus(is_up=True), engine(*STUBS)))
    assert isinstance(action, EndClients)
    assert not action.is_lost
    assert one.may_start


def test_daemon_that_is_slow_to_answer_is_not_taken_for_dead_at_once() -> None:
    """On an overloaded machine its answer may be late; one that hangs on is replaced."""
    silent = Observation(DaemonStatus(is_up=False, reason="no answer", is_silent=True), engine(*STUBS))
    one = course()
    assert one.decide(10.0, silent) == []
    assert not one.may_start
    one.decide(11.0, WELL)
    assert one.may_start
    assert one.decide(20.0, silent) == []
    assert one.decide(20.0 + SILENCE_TIMEOUT_S - 0.1, silent) == []
    assert kinds(one.decide(20.0 + SILENCE_TIMEOUT_S, silent)) == [EndClients, StartDaemon]


def test_server_that_was_killed_takes_its_clients_along_and_they_are_started_anew() -> None:
    """Seen by its clients, which are on no server's list any more, or already on a new one's."""
    for after in (DaemonStatus(is_up=True), daemon(FIRST, server=51)):
        one = course()
        (action,) = one.decide(10.0, Observation(after, engine(*STUBS)))
        assert isinstance(action, EndClients)
        assert action.is_lost


@pytest.mark.parametrize("ours", [{TRITON, SECOND}, {TRITON, FIRST, SECOND}], ids=["gone", "not reaped yet"])
def test_client_that_was_killed_is_reported_and_the_others_are_left_alone(ours: set[int]) -> None:
    """FAULTS 69: the killed client is gone and the other still runs; the engine may still list the ended process."""
    one = course()
    left = EngineObservation(TRITON, True, frozenset(ours), frozenset({SECOND}), serves=True)
    assert events(one.decide(10.0, Observation(daemon(SECOND), left))) == [RecoveryEvent.CLIENT_ENDED]
    assert one.may_start
    assert one.restarts == 0


def test_process_that_computes_beside_mps_from_the_start_is_refused_or_reported_once() -> None:
    """CUDA falls back silently; a process has time to attach in, and Triton's own is no proof against its models'."""
    beside = Observation(DaemonStatus(is_up=True), engine(*STUBS))
    one = RecoveryPolicy(owns_daemon=True, must_attach=True)
    assert one.decide(0.0, beside) == []
    assert one.decide(ATTACH_S - 0.1, beside) == []
    (action,) = one.decide(ATTACH_S, beside)
    assert isinstance(action, Refuse)
    assert "101, 102" in action.reason
    lenient = RecoveryPolicy(owns_daemon=True, must_attach=False)
    assert [events(lenient.decide(now, beside)) for now in (0.0, ATTACH_S, ATTACH_S + 1)] == [
        [],
        [RecoveryEvent.BESIDE],
        [],
    ]
    assert lenient.beside == STUBS


def test_processes_that_attach_one_by_one_are_all_waited_for() -> None:
    """Dozens that start together take longer than one: as long as there are new ones, none is refused."""
    many = frozenset(range(200, 240))
    one = RecoveryPolicy(owns_daemon=True, must_attach=True)
    for turn, count in enumerate(range(1, 40)):
        attached = sorted(many)[:count]
        seen = Observation(daemon(*attached), EngineObservation(TRITON, True, many, many))
        assert Refuse not in kinds(one.decide(turn * (ATTACH_S - 1.0), seen))
    assert one.attached < many


def test_tritons_own_process_beside_attached_models_is_no_trouble() -> None:
    """It may have asked CUDA for its cards only; alone, as with models on the CPU, it is reported, not refused.

    So is a model's process beside others that are attached: CUDA falls back for all or for none.
    """
    partly = course()
    seen = Observation(daemon(FIRST), engine(*STUBS))
    assert [events(partly.decide(now, seen)) for now in (1.0, 1.0 + ATTACH_S)] == [
        [RecoveryEvent.CLIENT_ENDED],
        [RecoveryEvent.BESIDE],
    ]
    one = course()
    seen = Observation(daemon(*STUBS), engine(TRITON, *STUBS))
    assert [one.decide(now, seen) for now in (1.0, 1.0 + 2 * ATTACH_S)] == [[], []]
    alone = RecoveryPolicy(owns_daemon=True, must_attach=True)
    seen = Observation(DaemonStatus(is_up=True), engine(TRITON))
    assert [events(alone.decide(now, seen)) for now in (0.0, ATTACH_S, 2 * ATTACH_S)] == [
        [],
        [RecoveryEvent.BESIDE],
        [],
    ]


def test_clients_that_attach_no_more_are_restarted_a_few_times_then_refused() -> None:
    """Not for ever: each time costs requests."""
    one = course()
    now, pid, seen_kinds = 10.0, TRITON, []
    for _ in range(MAX_RENEWALS + 1):
        beside = Observation(daemon(999), engine(*STUBS, pid=pid))  # the server lives, for other clients
        one.decide(now, beside)
        now += ATTACH_S
        seen_kinds += kinds(one.decide(now, beside))
        now, pid = now + 1.0, pid + 1
    assert [kind for kind in seen_kinds if kind is not LogEvent] == [EndClients] * MAX_RENEWALS + [Refuse]


def test_daemon_that_names_clients_by_other_ids_is_believed_by_their_number() -> None:
    """As in a container with ids of its own: as many clients as processes that hold the card are all of them."""
    one = RecoveryPolicy(owns_daemon=True, must_attach=True)
    for now in (0.0, 2 * ATTACH_S):
        one.decide(now, Observation(daemon(70001, 70002), engine(*STUBS), has_our_ids=False))
    assert (one.attached, one.beside) == (STUBS, frozenset())
    fewer = Observation(daemon(70001), engine(*STUBS), has_our_ids=False)
    one.decide(100.0, fewer)
    assert events(one.decide(100.0 + ATTACH_S, fewer)) == [RecoveryEvent.BESIDE]
    assert len(one.beside) == 1


def test_engine_that_still_starts_is_not_ended_by_a_fault() -> None:
    """It has no models yet; clients of others may have made the fault."""
    one = RecoveryPolicy(owns_daemon=True, must_attach=True)
    starting = EngineObservation(TRITON, False, frozenset({TRITON}))
    assert one.decide(0.0, Observation(daemon(7, state=ServerState.FAULT), starting)) == []
    assert not one.may_start
