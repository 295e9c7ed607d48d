"""The real CUDA driver by the calls that TensorRT's engines are fed with; tests/optimize/tensorrt has its stand-in."""

import numpy as np
import pytest

from server.gpu.nvml import read_cards
from server.optimize.errors import OptimizeError
from server.optimize.tensorrt.cuda import open_cuda
from server.optimize.tensorrt.errors import NoEngineHereError

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def a_card() -> None:
    """Skips where CUDA sees none."""
    try:
        open_cuda()
    except NoEngineHereError as error:
        pytest.skip(str(error))


def test_cuda_names_the_card_as_nvml_does() -> None:
    """Name and compute capability of card 0."""
    cuda, card = open_cuda(), read_cards().cards[0]
    assert (cuda.name, cuda.capability) == (card.name, card.capability)
    assert cuda.stream


def test_cuda_brings_back_what_was_copied_in() -> None:
    """Byte for byte, in two buffers at once, and after one was given back."""
    cuda = open_cuda()
    arrays = [np.random.default_rng(seed).normal(size=(64, 3, 224, 224)).astype(np.float32) for seed in (1, 2)]
    addresses = [cuda.allocate(array.nbytes) for array in arrays]
    for address, array in zip(addresses, arrays, strict=True):
        cuda.copy_in(address, array)
    cuda.wait()
    for address, array in zip(addresses, arrays, strict=True):
        back = np.zeros_like(array)
        cuda.copy_out(address, back)
        assert np.array_equal(back, array)
        cuda.free(address)


def test_cuda_without_memory_says_so_and_goes_on() -> None:
    """An allocation beyond the card fails in one sentence; the next one works."""
    cuda = open_cuda()
    with pytest.raises(OptimizeError, match="cuMemAlloc_v2 failed: out of memory"):
        cuda.allocate(1 << 50)
    cuda.free(cuda.allocate(16))
