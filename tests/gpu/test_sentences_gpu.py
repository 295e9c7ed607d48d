"""OpenNMT's translator on a GPU, alone and served: the CPU's words, and more of them than a V100 in 2017."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from deploy.models.opennmt_weights import Size, draw
from loadtest.bench.gpu import sentences
from tests.support.stack import TRITON_ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch.export.load says that its buffers are read-only
]
V100_2017_PER_S = 541  # FP32, batch 64
SAME_FP32, SAME_FP16 = 0.95, 0.7  # share of the words


def test_translator_on_a_gpu_answers_the_cpus_words(tmp_path: Path) -> None:
    """In half and single precision; a rounding error in one word changes all that come after it."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from deploy.models.opennmt_torch import export

    size = Size()
    export(size, draw(size, 0), tmp_path / "model.pt2", max_batch_size=8)
    words = torch.from_numpy(np.random.default_rng(1).integers(4, size.vocabulary, (8, size.source_length)))
    program = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad():
        expected = program(words)
        for cast, floor in ((torch.float32, SAME_FP32), (torch.float16, SAME_FP16)):
            found = torch.export.load(tmp_path / "model.pt2").module().to(cast).cuda()(words.cuda()).cpu()
            assert float((found == expected).float().mean()) >= floor, cast


def test_translator_served_on_a_card_answers_alike_alone_and_batched() -> None:
    """Through gateway, Triton and the torch backend; 64 callers of one sentence each get more than a lone one."""
    environment = Path(os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or TRITON_ENVIRONMENT)
    python = environment / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip(f"no PyTorch in {environment}: make gpu")
    where = ["--engine-environment", str(environment), "--up", "fp16"]
    results, (alike,) = sentences.run(sentences.parse_arguments([*where, "--rounds", "1", "--seconds", "0.5"]))
    rates = {(one["callers"], one["sentences"]): one["sentences_per_s"].median for one in results}
    assert alike["together"] >= SAME_FP16
    assert rates[64, 1] > 2 * rates[1, 1]
    assert max(rates.values()) > V100_2017_PER_S
