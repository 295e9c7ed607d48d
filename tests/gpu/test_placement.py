"""Where models and cameras go, by what is known of cards, models and cameras."""

from penstock.gpu.cards import Card
from penstock.gpu.placement import GIB, PIXELS_PER_DECODER_S, CameraNeed, CardState, ModelNeed, place


def card(index: int, gib: int = 80, *, decoders: int = 7, sm_count: int = 132, lost: str = "") -> CardState:
    return CardState(Card(f"GPU-{index}", index, "H100", gib * GIB, sm_count), decoders, lost)


def need(name: str, gib: float, **more: object) -> ModelNeed:
    return ModelNeed(name, int(gib * GIB), **more)  # type: ignore[arg-type]


def test_models_that_fit_are_on_every_card() -> None:
    """So the loss of one stops none of them; the reason says how much each takes."""
    placed = place([card(0), card(1)], [need("a", 10), need("b", 2)])
    assert placed.models == {"a": (0, 1), "b": (0, 1)}
    assert placed.reasons["a"] == "GPU 0, GPU 1: it fits (10.0 GiB each)"


def test_models_too_large_for_all_cards_are_spread_and_the_busiest_is_copied_first() -> None:
    """Each is served somewhere before one is served twice."""
    placed = place([card(0), card(1)], [need("a", 50), need("b", 50), need("c", 20, load=0.5), need("d", 20)])
    assert {placed.models["a"], placed.models["b"]} == {(0,), (1,)}
    assert placed.models["c"] != placed.models["d"]
    assert "GPU 1 has 10.0 GiB free, 50.0 GiB needed" in placed.reasons["a"]
    more = place([card(0, 20), card(1, 20), card(2, 12)], [need("c", 12, load=0.5), need("d", 12)])
    assert more.models == {"c": (0, 2), "d": (1,)}


def test_first_copies_go_where_load_and_memory_leave_most() -> None:
    """Load counts in relation to the card's SMs."""
    placed = place(
        [card(0, 30, sm_count=60), card(1, 30, sm_count=132)], [need("a", 20, load=0.5), need("b", 20, load=0.4)]
    )
    assert placed.models == {"a": (0,), "b": (1,)}


def test_model_that_names_cards_is_there_only() -> None:
    """As its config.pbtxt says; on none if they are lost or not used."""
    placed = place([card(0), card(1, lost="gone")], [need("a", 1, cards=(0,)), need("b", 1, cards=(1,)), need("c", 1)])
    assert placed.models == {"a": (0,), "b": (), "c": (0,)}
    assert placed.reasons["b"] == "no GPU that this stack uses: its config.pbtxt names 1"


def test_model_that_fits_nowhere_is_tried_on_the_freest_card() -> None:
    """An estimate is no reason not to try."""
    placed = place([card(0, 8), card(1, 16)], [need("a", 20)])
    assert placed.models == {"a": (1,)}
    assert "no GPU has 20.0 GiB free" in placed.reasons["a"]


def test_without_a_card_nothing_is_placed() -> None:
    """All are lost."""
    placed = place([card(0, lost="gone")], [need("a", 1)], [CameraNeed("door", 1e6)])
    assert (placed.models, placed.cameras) == ({"a": ()}, {})


def test_cameras_of_a_lost_card_move_up_to_the_others_capacity() -> None:
    """Those that have a card stay; what exceeds the decoders is refused with the reason."""
    half = 0.5 * PIXELS_PER_DECODER_S
    cards = [card(0, decoders=1), card(1, decoders=1)]
    before = place(cards, [], [CameraNeed(name, half) for name in "abc"])
    assert before.cameras == {"a": 0, "b": 1, "c": 0}
    after = place(
        [card(0, decoders=1, lost="gone"), cards[1]],
        [],
        [CameraNeed(name, half, before.cameras[name]) for name in "abc"],
    )
    assert after.cameras == {"a": 1, "b": 1}
    assert after.reasons == {
        "b": "GPU 1: it stays (50% used)",
        "a": "GPU 1: its decoders have the most free time (100% used)",
        "c": "no GPU: the decoders of every GPU are full",
    }


def test_model_on_the_cpu_is_loaded_once() -> None:
    """By the first engine that has a card, so that such models can call each other."""
    placed = place([card(0, lost="gone"), card(1), card(2)], [need("a", 0, is_on_cpu=True), need("b", 0)])
    assert placed.models == {"a": (1,), "b": (1, 2)}
    assert placed.reasons["a"] == "GPU 1: it runs on the CPU, so one engine loads it"
