"""Chooses the cards of the stack before anything starts, and places the models on them."""

import os
from dataclasses import replace

from penstock.gateway.model_needs import read_needs
from penstock.gateway.stack.mps import Machine, this_machine
from penstock.gateway.stack.startup import CannotStart, EngineChoice
from penstock.gpu.cards import ALL, Card, GpusRefused, choose_cards
from penstock.gpu.mps.control import VISIBLE_CARDS
from penstock.gpu.nvml import NvmlOutcome, NvmlReading
from penstock.gpu.placement import CardState, place
from penstock.gpu.telemetry.reader import has_driver
from penstock.logs import get_logger

log = get_logger("stack")
_NO_CARDS = NvmlReading(NvmlOutcome.NO_DRIVER)
MAX_PORT = 65535


def with_cards(choice: EngineChoice, machine: Machine | None = None) -> EngineChoice:
    """The choice with the cards of the setting `gpus`, and with the models placed on them. Raises CannotStart.

    machine: None for this one, whose NVML is read only if a driver is here or `gpus` names cards.
    """
    settings = choice.settings
    has_wish = settings.gpus != ALL
    if settings.engine_is_external:
        if has_wish:
            raise CannotStart("--gpus is for an engine that is started here, and --engine is a URL; leave it out")
        return choice
    if machine is None:
        has_cards = has_wish or has_driver()
        machine = this_machine() if has_cards else Machine(_NO_CARDS, "", os.environ, os.geteuid())
    try:
        cards = choose_cards(settings.gpus, machine.reading, machine.environ.get(VISIBLE_CARDS))
    except GpusRefused as error:
        raise CannotStart(str(error)) from error
    if not cards and "gpus" in settings.model_fields_set:
        log.warning("gpus is all and no NVIDIA GPU is here: models run on the CPU", see="penstock doctor")
    if len(cards) > 1 and choice.triton is not None:
        return _placed(choice, cards)
    if len(cards) > 1 and has_wish:
        raise CannotStart(
            f"gpus is {settings.gpus!r}, and the embedded engine uses one GPU; name one, or use --engine triton"
        )
    return replace(choice, cards=cards if has_wish else ())


def show_cards(choice: EngineChoice) -> None:
    """Shows CUDA the cards that `gpus` names, in this process and all that it starts."""
    if choice.settings.gpus != ALL:
        os.environ[VISIBLE_CARDS] = ",".join(card.uuid for card in choice.cards)


def _placed(choice: EngineChoice, cards: tuple[Card, ...]) -> EngineChoice:
    """The choice with a Triton for each card, and each model's cards. Raises CannotStart."""
    settings = choice.settings
    highest = max(port or 0 for port in settings.engine_ports_of(len(cards) - 1))
    if highest > MAX_PORT:
        raise CannotStart(
            f"the Triton of the last of {len(cards)} GPUs would listen on port {highest}, and {MAX_PORT} is the "
            "highest; choose a lower port with --engine-http-port, --engine-grpc-port or --engine-metrics-port"
        )
    placement = place([CardState(card) for card in cards], read_needs(settings.repositories, settings.models))
    log.info("an engine process for each GPU", cards=", ".join(f"{card.label} ({card.name})" for card in cards))
    for name, reason in sorted(placement.reasons.items()):
        log.info("model is placed", model=name, cards=reason)
    homes = {
        name: tuple(cards[at].label for at in places)
        for name, places in placement.models.items()
        if len(places) < len(cards)
    }
    return replace(choice, cards=cards, homes=homes, placements=placement.reasons)
