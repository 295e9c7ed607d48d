"""Sessions of the console."""

from penstock.console.sessions import IDLE_S, MAX_SESSIONS, Sessions


def test_key_of_a_session_is_found_by_its_token_only() -> None:
    """A session's key belongs to its token; any other token has none."""
    sessions = Sessions()
    token = sessions.begin("secret", 0.0)
    assert sessions.key_of(token, 1.0) == "secret"
    assert sessions.key_of(token[:-1], 1.0) == ""
    assert sessions.key_of("", 1.0) == ""


def test_session_ends_after_it_was_not_used_for_the_idle_time() -> None:
    """Each use restarts the idle time."""
    sessions = Sessions()
    token = sessions.begin("secret", 0.0)
    assert sessions.key_of(token, IDLE_S) == "secret"
    assert sessions.key_of(token, 2 * IDLE_S) == "secret"
    assert sessions.key_of(token, 3 * IDLE_S + 1.0) == ""
    assert len(sessions) == 0


def test_number_of_sessions_is_bounded_and_the_longest_unused_goes_first() -> None:
    """A flood of logins cannot fill the memory."""
    sessions = Sessions()
    first, second = sessions.begin("first", 0.0), sessions.begin("second", 1.0)
    assert sessions.key_of(first, 2.0) == "first"
    for _ in range(MAX_SESSIONS - 1):
        sessions.begin("other", 3.0)
    assert len(sessions) == MAX_SESSIONS
    assert sessions.key_of(first, 4.0) == "first"
    assert sessions.key_of(second, 4.0) == ""


def test_log_out_forgets_the_key() -> None:
    """After `end` the token has no key."""
    sessions = Sessions()
    token = sessions.begin("secret", 0.0)
    sessions.end(token)
    assert sessions.key_of(token, 0.0) == ""
