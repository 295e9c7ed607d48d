"""The kernels through NVIDIA's own compiler, which needs no card: where `make gpu` has installed it."""

from pathlib import Path

import pytest

from penstock_video.errors import GpuUnavailable
from penstock_video.preprocess.kernels import cubin_for


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (9, 0)])
def test_kernels_compile_for_every_kind_of_card(capability: tuple[int, int], tmp_path: Path) -> None:
    """By the NVRTC that is here; of CUDA 12 or 13."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings: make gpu")
    try:
        cubin = cubin_for(capability, tmp_path)
    except GpuUnavailable as error:
        pytest.skip(error.message)
    assert cubin[:4] == b"\x7fELF"
