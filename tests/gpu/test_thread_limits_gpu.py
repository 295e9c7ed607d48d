"""On a real card: ResNet-50 in processes that MPS limits to a part of its threads answers right, or is not loaded.

python -m pytest -p no:randomly -s tests/gpu/test_thread_limits_gpu.py        half a minute; -s shows what was found
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import json_format

from loadtest.bench.gpu.programs import MpsDaemon
from loadtest.bench.gpu.tritons import read_config
from tests.engines.test_torch_settings import config
from tests.support.stack import CHECKOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PERCENTAGES = os.environ.get("PENSTOCK_TEST_PERCENTAGES", "12 18 25 100").split()
MOST_OFF = 0.02


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, object]]]:
    """What each limited process said, all at once under one daemon."""
    home = tmp_path_factory.mktemp("limits")
    export = [sys.executable, "-m", "deploy.models.resnet50_torch", "--home", home, "--input", "uint8"]
    subprocess.run(export, cwd=CHECKOUT, check=True, timeout=120)
    (folder,) = (home / "models").iterdir()
    model = json_format.MessageToDict(read_config(folder), preserving_proto_field_name=True)
    for tensor in model["input"] + model["output"]:
        tensor["dims"] = [int(dim) for dim in tensor["dims"]]  # JSON of protobuf has int64 as text
    with MpsDaemon(home / "p") as daemon, ThreadPoolExecutor(len(PERCENTAGES)) as pool:

        def ask(percentage: str) -> dict[str, object]:
            limit = daemon.environ | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage}
            command = [sys.executable, "-m", "tests.gpu.limited_program", folder / "1" / "model.pt2", _one_row(model)]
            done = subprocess.run(
                command, cwd=CHECKOUT, env=os.environ | limit, capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, done.stderr
            said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
            return said

        yield dict(zip(PERCENTAGES, pool.map(ask, PERCENTAGES), strict=True))


def _one_row(model: dict[str, object]) -> str:
    return json.dumps(model | {"max_batch_size": 1})


@pytest.mark.parametrize("percentage", PERCENTAGES)
def test_limited_program_answers_right_or_is_refused(found: dict[str, dict[str, object]], percentage: str) -> None:
    """cuDNN errs with some numbers of SMs: a program that would answer wrong is not served."""
    said = found[percentage]
    sys.stdout.write(f"\n{percentage} %: {said}\n")
    assert "refused" in said or float(str(said["off"])) <= MOST_OFF


@pytest.mark.parametrize("percentage", [one for one in PERCENTAGES if one in ("12", "25", "100")])
def test_limit_that_is_known_to_do_is_served(found: dict[str, dict[str, object]], percentage: str) -> None:
    """On an H200, and by cuDNN's fused calls."""
    assert found[percentage].get("fused") == "cudnn"


OWN_LIMIT = """
import json, sys, torch
from penstock.engines.torch_serving.config import engine_spec
from penstock.engines.torch_serving.device import InstanceDevice, _device
_device(InstanceDevice(True, 0, {}), engine_spec(json.loads(sys.argv[1]), is_gpu=True))
print(torch.cuda.get_device_properties(0).multi_processor_count)
"""


def test_models_own_limit_is_set_before_its_process_uses_cuda(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A quarter of the SMs by the model's parameter, or by what the stack chose for it; others have all."""
    pytest.importorskip("torch", reason="needs torch: make gpu")

    def sms(daemon: MpsDaemon, environ: dict[str, str], **parameters: str) -> int:
        model = json.dumps(config({name.replace("_", "-"): value for name, value in parameters.items()}))
        command = [sys.executable, "-c", OWN_LIMIT, model]
        done = subprocess.run(
            command, cwd=CHECKOUT, env=os.environ | daemon.environ | environ, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    with MpsDaemon(tmp_path_factory.mktemp("own") / "p") as daemon:
        every = sms(daemon, {})
        assert sms(daemon, {}, active_thread_percentage="25") == pytest.approx(every / 4, abs=2)
        assert sms(daemon, {"PENSTOCK_MPS_THREADS": "small=25"}) == pytest.approx(every / 4, abs=2)
        assert sms(daemon, {"PENSTOCK_MPS_THREADS": "other=25"}) == every
