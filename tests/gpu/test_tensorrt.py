"""Which TensorRT takes a GPU: by compute capability."""

import pytest

from penstock.gpu.tensorrt import ARCHITECTURES, advise_tensorrt, why_not_built


@pytest.mark.parametrize(
    ("capability", "is_built", "is_served", "words"),
    [
        ((5, 2), False, False, "the CPU"),
        (
            (6, 1),
            False,
            False,
            "ONNX Runtime built for CUDA 12, or TensorRT in Triton's image nvcr.io/nvidia/tritonserver:24.04",
        ),
        ((7, 0), False, False, "tritonserver:24.10-py3 (penstock models add --accelerator tensorrt)"),
        ((7, 5), True, False, "CUDA (backend torch, or ONNX Runtime's CUDA provider)"),
        ((8, 0), True, False, "ONNX Runtime's plug-in 0.5 runs engines of 8.6, 8.9 and 12.x only"),
        ((8, 6), True, True, "TensorRT-RTX (penstock models build NAME --for 8.6; driver 580 or newer"),
        ((8, 7), False, False, "CUDA"),
        ((8, 9), True, True, "Penstock never ran it on such a GPU"),
        ((9, 0), False, False, "CUDA (backend torch"),
        ((10, 0), False, False, "CUDA (backend torch"),
        ((12, 0), True, True, "--for 12.0"),
        ((12, 1), True, True, "--for 12.1"),
        ((13, 0), False, False, "CUDA"),
    ],
)
def test_card_takes_what_its_architecture_allows(
    capability: tuple[int, int], is_built: bool, is_served: bool, words: str
) -> None:
    """TensorRT-RTX where the library and the plug-in both have the architecture, else CUDA or an image of NGC."""
    advice = advise_tensorrt(capability)
    assert (advice.is_built, advice.is_served) == (is_built, is_served)
    assert words in advice.sentence
    assert bool(why_not_built(capability)) is not is_built


def test_refusal_names_the_card_and_what_it_takes() -> None:
    """An H200's owner reads what to use instead."""
    why = why_not_built((9, 0))
    assert why.startswith(
        "TensorRT-RTX builds no engine for 9.0 (Hopper: H100, H200), only for 7.5, 8.0, 8.6, 8.9, 12.0"
    )
    assert "for such a GPU use CUDA" in why
    assert all(why_not_built(capability) == "" for capability in ARCHITECTURES)
