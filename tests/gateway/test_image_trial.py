"""The trial picture that is sent through the path of /image when a model is loaded."""

from dataclasses import replace

import pytest

from server.core.errors import BackendUnavailable
from server.core.model import ModelConfig
from server.testing import FakeMode
from tests.gateway.rig import CLASSIFIER, DETECTOR, TENSORS_ONLY, Rig


def counts(rig: Rig) -> list[str]:
    return [
        line
        for line in rig.metrics.text().decode().splitlines()
        if line.startswith("penstock_") and ("_count" in line or "_total" in line)
    ]


@pytest.mark.parametrize("config", [DETECTOR, CLASSIFIER])
async def test_model_that_answers_pictures_passes_and_nothing_is_counted(rig: Rig, config: ModelConfig) -> None:
    """The trial does not count as a client's request."""
    before = counts(rig)
    assert await rig.images.trial(config, 30.0) == ""
    assert counts(rig) == before


@pytest.mark.parametrize("config", [DETECTOR, CLASSIFIER])
@pytest.mark.parametrize("mode", [FakeMode.GARBAGE, FakeMode.NAN, FakeMode.ERROR])
async def test_model_whose_answer_cannot_be_read_fails_with_the_reason(
    rig: Rig, config: ModelConfig, mode: FakeMode
) -> None:
    """Wrong outputs, shapes or datatypes, NaN or infinity, and errors fail."""
    rig.backend.mode = mode
    why = await rig.images.trial(config, 30.0)
    assert why.startswith("a picture through /image: ")


async def test_model_without_a_card_takes_no_picture(rig: Rig) -> None:
    """A model whose config describes pictures wrongly takes none either; /image reports it."""
    rig.backend.mode = FakeMode.ERROR
    assert await rig.images.trial(TENSORS_ONLY, 30.0) == ""
    wrong = replace(CLASSIFIER, name="wrong", parameters={**CLASSIFIER.parameters, "network-type": "nonsense"})
    assert await rig.images.trial(wrong, 30.0) == ""


async def test_engine_that_is_down_is_no_verdict(rig: Rig) -> None:
    """The model is tried when the engine is up again."""
    rig.backend.mode = FakeMode.UNAVAILABLE
    with pytest.raises(BackendUnavailable):
        await rig.images.trial(DETECTOR, 30.0)
    rig.backend.mode = FakeMode.NORMAL
