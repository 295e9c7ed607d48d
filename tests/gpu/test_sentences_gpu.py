"""OpenNMT's translator on a GPU, in CUDA graphs and served: the CPU's words, and more of them than a V100 in 2017."""

import os
import subprocess
from pathlib import Path

import pytest

from deploy.models.opennmt_weights import Size
from loadtest.bench.gpu import sentence_program, sentences
from tests.support.stack import TRITON_ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch.export.load says that its buffers are read-only
]
V100_2017_PER_S = 541  # FP32, batch 64
SAME_FP32, SAME_FP16 = 0.95, 0.7  # of the words: a rounding error in one word changes all that come after it


def test_translator_in_cuda_graphs_answers_the_cpus_words_and_passes_the_v100() -> None:
    """At batch 1 and 64, in half and single precision; the figure of 2017 is a floor for a batch on today's cards."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    options = sentence_program.parse_arguments(["--batch", "1", "64", "--rounds", "1", "--seconds", "0.3"])
    results = {(one.precision, one.batch): one for one in sentence_program.measure(torch, Size(), options)}
    for (precision, batch), result in results.items():
        assert result.agreement >= (SAME_FP32 if precision == "fp32" else SAME_FP16), (precision, batch, result)
    for precision in ("fp16", "fp32"):
        assert results[precision, 64].sentences_per_s.median > V100_2017_PER_S


def test_translator_served_on_a_card_answers_alike_alone_and_batched() -> None:
    """Through gateway, Triton and the torch backend; 64 callers of one sentence each get more than a lone one."""
    environment = Path(os.environ.get("PENSTOCK_ENGINE_ENVIRONMENT") or TRITON_ENVIRONMENT)
    python = environment / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip(f"no PyTorch in {environment}: make gpu")
    where = ["--engine-environment", str(environment), "--up", "fp16"]
    _, results, (alike,) = sentences.run(sentences.parse_arguments([*where, "--rounds", "1", "--seconds", "0.5"]))
    rates = {(one.callers, one.sentences): one.sentences_per_s.median for one in results}
    assert alike.together >= SAME_FP16
    assert rates[64, 1] > 2 * rates[1, 1]
    assert max(rates.values()) > V100_2017_PER_S
