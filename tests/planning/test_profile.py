"""What an engine takes for so many rows: built in, measured, refused."""

import json
from pathlib import Path

import pytest

from penstock.planning.profile import H200, V100, EngineProfile, ProfileError, find_profile, linear_profile


def test_built_in_profiles_say_what_was_measured() -> None:
    """The V100's line is 1.98 + 0.1475 b ms; the H200's points are met, and between them it is linear."""
    assert V100.seconds(10) == pytest.approx(3.455e-3)
    assert [H200.seconds(rows) for rows in (1, 8, 64)] == pytest.approx([0.90e-3, 1.16e-3, 4.23e-3])
    assert H200.seconds(36) == pytest.approx((1.16e-3 + 4.23e-3) / 2)


def test_a_profile_goes_on_with_its_last_line() -> None:
    """Sizes beyond the last point, and before the first one, lie on the nearest line; one point is flat."""
    measured = EngineProfile("measured", ((2, 0.002), (4, 0.003)), 8)
    assert [measured.seconds(rows) for rows in (1, 3, 8)] == pytest.approx([0.0015, 0.0025, 0.005])
    assert EngineProfile("flat", ((4, 0.003),), 8).seconds(8) == 0.003


def test_the_largest_batch_within_a_time_is_found() -> None:
    """Exactly the size whose call just ends in time; 0 where not even one row does."""
    plain = linear_profile("plain", alpha_s=0.001, beta_s=0.001, max_batch_size=4)
    assert [plain.largest_within(seconds) for seconds in (0.001, 0.002, 0.0035, 1.0)] == [0, 1, 2, 4]


@pytest.mark.parametrize("points", [(), ((0, 0.1),), ((2, 0.1), (1, 0.2)), ((1, 0.2), (2, 0.1)), ((1, -0.1),)])
def test_points_that_no_engine_has_are_refused(points: tuple[tuple[int, float], ...]) -> None:
    """No points, rows below 1 or out of order, times that fall or are not above 0: the message says which."""
    with pytest.raises(ValueError, match="profile 'odd' has"):
        EngineProfile("odd", points, 4)


def test_a_measured_profile_is_read_from_toml_and_json(tmp_path: Path) -> None:
    """Points in ms, or a line; where it says none, the name is the file's and the largest batch the last point's."""
    (tmp_path / "mine.toml").write_text("points = [[1, 2.0], [16, 5.0]]\n", encoding="utf-8")
    (tmp_path / "line.json").write_text(json.dumps({"name": "l", "alpha_ms": 1, "beta_ms": 0.5, "max_batch_size": 4}))
    mine, other = find_profile(str(tmp_path / "mine.toml")), find_profile(str(tmp_path / "line.json"))
    assert (mine.name, mine.max_batch_size, mine.seconds(16)) == ("mine", 16, pytest.approx(0.005))
    assert (other.name, other.max_batch_size, other.seconds(4)) == ("l", 4, pytest.approx(0.003))
    assert find_profile("V100") is V100


@pytest.mark.parametrize(
    "text",
    [
        "points = [[1, 2.0]]\nalpha_ms = 1.0",
        "alpha_ms = 1.0",
        "points = [[1]]",
        "pionts = []",
        "points = [[1, -2]]",
        "[",
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    """The message names the file, what is wrong and what is needed."""
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=r"bad\.toml is no profile: .+; it needs points"):
        find_profile(str(path))
    with pytest.raises(ProfileError, match="there is no profile 'p100'"):
        find_profile("p100")
