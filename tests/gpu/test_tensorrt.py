"""Which TensorRT takes a GPU: by compute capability."""

import pytest

from penstock.gpu.tensorrt import (
    ARCHITECTURES,
    GPU_NAMES,
    advise_tensorrt,
    capability_of,
    capability_text,
    why_not_built,
)


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
        ((7, 5), True, False, "CUDA (run make gpu, then penstock models add FILE)"),
        ((8, 0), True, False, "ONNX Runtime's plug-in 0.5 runs engines of 8.6, 8.9 and 12.x only"),
        ((8, 6), True, True, "TensorRT-RTX (penstock models build NAME --for 8.6; driver 580 or newer"),
        ((8, 7), False, False, "CUDA"),
        ((8, 9), True, True, "Penstock never ran it on such a GPU"),
        ((9, 0), False, False, "CUDA (run make gpu"),
        ((10, 0), False, False, "CUDA (run make gpu"),
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
    assert why.startswith("TensorRT-RTX builds no engine for 9.0 (Hopper: H100, H200), and nothing was built; ")
    assert "for such a GPU use CUDA" in why
    assert all(why_not_built(capability) == "" for capability in ARCHITECTURES)


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("8.9", (8, 9)),
        ("L4", (8, 9)),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9)),
        ("Tesla T4", (7, 5)),
        ("a10g", (8, 6)),
        ("P4", (6, 1)),
        ("H100", (9, 0)),
        ("rtx-5090", (12, 0)),
        ("L44", None),
        ("8", None),
        ("8.x", None),
        ("", None),
    ],
)
def test_gpu_is_found_by_name_or_capability(text: str, capability: tuple[int, int] | None) -> None:
    """As NVIDIA lists them; an unknown name is refused, not guessed."""
    assert capability_of(text) == capability


def test_message_names_a_gpu_of_every_architecture() -> None:
    """Each one for which an engine can be built."""
    assert [part.split()[0] for part in GPU_NAMES.split("; ")] == [capability_text(one) for one in ARCHITECTURES]
