"""OpenNMT's translator on a GPU: captured in CUDA graphs, its words those of the CPU, faster than the V100's figure."""

import pytest

from deploy.models.opennmt_weights import Size
from loadtest.bench.gpu.sentence_program import measure, parse_arguments

pytestmark = pytest.mark.gpu
V100_2017_PER_S = 541  # FP32, batch 64
SAME_FP32, SAME_FP16 = 0.95, 0.7  # of the words: a rounding error in one word changes all that come after it


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch.export.load says that its buffers are read-only
def test_translator_in_cuda_graphs_answers_the_cpus_words_and_passes_the_v100() -> None:
    """At batch 1 and 64, in half and single precision; the figure of 2017 is a floor for a batch on today's cards."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    options = parse_arguments(["--batch", "1", "64", "--rounds", "1", "--seconds", "0.3"])
    results = {(one.precision, one.batch): one for one in measure(torch, Size(), options)}
    for (precision, batch), result in results.items():
        assert result.agreement >= (SAME_FP32 if precision == "fp32" else SAME_FP16), (precision, batch, result)
    for precision in ("fp16", "fp32"):
        assert results[precision, 64].sentences_per_s.median > V100_2017_PER_S
