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


def test_map_whose_classes_sum_to_one_has_one_class_per_pixel() -> None:
    """Probabilities after a softmax are not independent classes; others of 0 to 1 are."""
    values = np.random.default_rng(0).uniform(0.05, 1, (3, 8, 8)).astype(np.float32)
    for array, layout in ((values / values.sum(axis=0), ""), (values, "semantic-multilabel")):
        outputs = TrialOutputs({"a": [array]}, ("a",), frozenset(), (8, 8), ((8, 8),), {}, class_count=3)
        correction = check_outputs("semantic", outputs).correction
        assert (correction.layout if correction else "") == layout
