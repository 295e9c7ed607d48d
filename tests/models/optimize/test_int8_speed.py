"""What INT8 is for: ResNet-50 on a CPU with instructions for 8-bit products, measured in turns with float."""

import os
from pathlib import Path

import pytest

from deploy.models import resnet50
from deploy.models.graph_folder import write
from penstock.models.optimize.optimize import optimize
from penstock.models.optimize.profile import int8_instructions
from penstock.models.optimize.source import Progress, read_source
from tests.models.optimize.conftest import write_pictures

LEAST_RATIO = 1.6

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_int8_resnet50_is_faster_than_float(tmp_path: Path, silent: Progress) -> None:
    """At least 1.6 times as fast at batch 1 and 8, the median of five rounds, whatever else runs on the machine."""
    if not int8_instructions():
        pytest.skip(f"this CPU has no instructions for 8-bit products that we know ({os.uname().machine})")
    source = read_source(write(resnet50.MODEL, tmp_path / "home", seed=0))
    staged = tmp_path / "staged"
    staged.mkdir()
    report = optimize(source, write_pictures(tmp_path / "pictures", 16), {}, staged, silent)
    ratios = {item.batch_size: item.ratio for item in report.comparisons}
    assert set(ratios) == {1, 8}
    assert min(ratios.values()) >= LEAST_RATIO, report.comparisons
    engine = report.fusion.int8_levels[-1].counts
    assert (engine["QLinearConv"], engine["QLinearAdd"]) == (53, 16)
    assert not {"Conv", "Add", "Relu"} & set(engine)
