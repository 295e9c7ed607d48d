"""What is on its way to being a tensor."""

from penstock.vision.image_tasks import PreparationEstimator


def test_images_on_their_way_are_counted_by_model() -> None:
    """Those of another model are not in the way of this one's."""
    preparing = PreparationEstimator()
    preparing.began("street", "a")
    preparing.began("street", "a")
    preparing.began("people", "a")
    preparing.ended("street", "a", 0.01)
    assert [preparing.rows_with(model, "a", 1) for model in ("street", "people", "other")] == [2, 2, 1]


def test_images_of_one_client_are_not_all_before_anothers() -> None:
    """Decoders serve clients in turn: with two clients, equally many of each; one client's images stay in order."""
    preparing = PreparationEstimator()
    for _ in range(1000):
        preparing.began("street", "flood")
    assert preparing.rows_with("street", "other", 3) == 6
    preparing.began("street", "third")
    assert preparing.rows_with("street", "other", 3) == 9
    preparing.ended("street", "third", 0.01)
    assert preparing.rows_with("street", "other", 3) == 6
    assert preparing.rows_with("street", "flood", 3) == 1003


def test_time_that_images_take_follows_what_they_took_and_is_forgotten_when_none_is_on_its_way() -> None:
    """So that who was refused for a long wait is let in again when it is over."""
    preparing = PreparationEstimator()
    preparing.began("street", "a")
    for _ in range(60):
        preparing.began("street", "a")
        preparing.ended("street", "a", 0.5)
    assert 0.45 < preparing.takes_s("street", "a") <= 0.5
    preparing.ended("street", "a", 0.5)
    assert preparing.takes_s("street", "a") == 0.0


def test_time_that_images_take_is_each_clients_own() -> None:
    """One client's slow pictures do not cause another's to be refused."""
    preparing = PreparationEstimator()
    preparing.began("street", "slow")
    preparing.began("street", "quick")
    for _ in range(60):
        preparing.began("street", "slow")
        preparing.ended("street", "slow", 5.0)
    assert preparing.takes_s("street", "slow") > 4.0
    assert preparing.takes_s("street", "quick") == 0.0
