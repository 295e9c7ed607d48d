"""Which copy of a model is loaded next, by what was measured."""

import pytest

from penstock.gpu.model_copies import ModelCopies, NewCopy, card_loads
from penstock.gpu.placement import ModelNeed
from tests.gpu.test_placement import card, need

TWO = [card(0, 10), card(1, 10)]


def copy_of(
    models: list[ModelNeed], homes: dict[str, tuple[int, ...]], cards: object = TWO, **more: object
) -> tuple[str, int, tuple[str, ...]] | None:
    """The next copy: its model, GPU and removed copies, without the reason."""
    found = ModelCopies(cards, models, homes, **more).next_copy()  # type: ignore[arg-type]
    return found and (found.model, found.card, found.removed)


def test_load_of_a_model_with_several_cards_makes_them_equally_busy() -> None:
    """Models with one card count first; what is left fills the least busy cards."""
    models = [need("one", 1, load=0.6), need("all", 1, load=0.9), need("none", 1, load=0.3)]
    homes = {"one": (1,), "all": (0, 1, 2), "none": (3,)}
    assert card_loads(models, homes, [0, 1, 2]) == pytest.approx({0: 0.45, 1: 0.6, 2: 0.45})
    assert sum(card_loads(models, homes, [0, 1]).values()) == pytest.approx(1.5)


def test_busy_card_shares_its_model_with_one_that_has_memory() -> None:
    """The reason has both cards' loads, before and with the copy."""
    models = [need("hot", 6, load=0.9), need("cold", 3, load=0.1)]
    found = ModelCopies(TWO, models, {"hot": (0,), "cold": (1,)}).next_copy()
    why = "GPU 0 is busy 90% of the time and GPU 1 10%; with the copy 50% and 50%"
    assert found == NewCopy("hot", 1, (), why)


def test_copies_of_less_busy_models_make_room_if_they_have_another_card() -> None:
    """The least busy first. A model's only copy stays."""
    models = [need("hot", 6, load=0.9), need("cold", 4, load=0.1), need("warm", 4, load=0.2)]
    assert copy_of(models, {"hot": (0,), "warm": (1,)}) == ("hot", 1, ("cold",))
    assert copy_of(models, {"hot": (0,), "cold": (1,), "warm": (1,)}) is None


@pytest.mark.parametrize(
    ("hot", "reason"),
    [
        ({"load": 0.4}, "the card is not busy"),
        ({"load": 0.9, "cards": (0,)}, "its config.pbtxt names its card"),
        ({"load": 0.9, "is_stateful": True}, "a sequence stays where it is"),
    ],
)
def test_placement_stays_if_a_copy_is_of_no_use(hot: dict[str, object], reason: str) -> None:
    """Also if the other card is as busy: the load of a minute is no forecast."""
    models = [need("hot", 6, **hot), need("cold", 3)]
    assert copy_of(models, {"hot": (0,), "cold": (1,)}) is None, reason
    even = [need("a", 6, load=0.9), need("b", 3, load=0.7)]
    assert copy_of(even, {"a": (0,), "b": (1,)}) is None


def test_copy_that_could_not_be_loaded_is_not_tried_again() -> None:
    """Another GPU is tried instead, if there is one."""
    models = [need("hot", 6, load=0.9)]
    assert copy_of(models, {"hot": (0,)}, refused={("hot", 1)}) is None
    three = [*TWO, card(2, 10)]
    assert copy_of(models, {"hot": (0,)}, three, refused={("hot", 1)}) == ("hot", 2, ())


def test_model_whose_cards_are_all_lost_gets_another() -> None:
    """Also one on the CPU, whose engine is stopped with its card; not one that names its card."""
    lost = [card(0, 10, lost="gone"), card(1, 10)]
    models = [need("cpu", 0, is_on_cpu=True), need("alone", 6), need("both", 5), need("named", 1, cards=(0,))]
    homes = {"cpu": (0,), "alone": (0,), "named": (0,)}
    assert copy_of(models, homes, lost) == ("cpu", 1, ())
    assert copy_of(models, homes | {"cpu": (0, 1)}, lost) is None, "the other copy of `both` is lost, too"
    third = [*lost, card(2, 5)]
    assert copy_of(models, homes | {"cpu": (0, 1)}, third) == ("alone", 1, ("both",))
    assert copy_of(models, homes, [card(0, lost="gone")]) is None
