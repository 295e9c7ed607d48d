"""GoogLeNet with seeded random weights as an exported PyTorch program of pixels, for Triton's backend `torch`.

    python -m deploy.models.googlenet_torch                    googlenet-torch-uint8-random

It needs PyTorch (`make gpu`). The program is exported on the CPU and runs on either. The weights are those of
deploy.models.googlenet of the same seed, and so are its answers: within 1e-4 of a share on a CPU.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deploy.models.torch_folder import Form, RandomProgram, classifier_card, save_program

NAME = "googlenet-torch-uint8-random"
GOOGLENET = RandomProgram(
    title="GoogLeNet",
    subtitle=" (Inception v1)",
    program="python -m deploy.models.googlenet_torch",
    paper="Szegedy et al., *Going Deeper with Convolutions*, CVPR 2015, without the auxiliary heads, with LRN",
    onnx_name="googlenet-random",
    output="prob",
    input='{ name: "image" data_type: TYPE_UINT8 dims: [ 3, 224, 224 ] }',
    card=classifier_card('parameters { key: "apply-softmax" value { string_value: "0" } }\n'),
    shape_in="UINT8 [N, 3, 224, 224]: RGB pixels; the program normalises",
    shape_out=": shares that add up to 1",
)


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = GOOGLENET.parser(("off", "triton"))
    parser.add_argument("--name", default=NAME, help=f"name of the model, with -random [{NAME}]")
    given = parser.parse_args(arguments)
    form = Form(given.name, "uint8", given.seed, given.instances, given.batching, given.max_batch)
    GOOGLENET.write(form, given.home, partial(export, given.seed))


def export(seed: int, path: Path) -> None:
    """The program, its first dimension free."""
    import torch  # here, so that --help needs none

    from deploy.models.googlenet_network import GoogLeNet
    from deploy.models.resnet50_network import OfPixels

    save_program(OfPixels(GoogLeNet(seed)), torch.zeros((2, 3, 224, 224), dtype=torch.uint8), path)


if __name__ == "__main__":
    run(sys.argv[1:])
