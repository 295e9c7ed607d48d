"""What the values of a trial run say about a layout."""

import numpy as np

from penstock.models.inspect.output_checks import check_outputs
from penstock.models.inspect.trial_outputs import TrialOutputs


def test_text_detector_is_judged_by_maps_of_two_sizes() -> None:
    """Pictures keep their sizes, so the maps differ; their values still tell that they are probabilities."""
    maps = [np.full((1, 32, 64), 0.25, np.float32), np.full((1, 64, 32), 0.75, np.float32)]
    outputs = TrialOutputs({"maps": maps}, ("maps",), frozenset(), (64, 64), ((32, 64), (64, 32)), {})
    found = check_outputs("db", outputs)
    assert found.fault == ""
    assert found.evidence == ("values are from 0.25 to 0.75: probabilities",)
