"""ResNet-50 v1.5 with seeded random weights as an exported PyTorch program, for Triton's backend `torch`.

    python -m deploy.models.resnet50_torch                     resnet50-torch-random: FP32 tensors
    python -m deploy.models.resnet50_torch --input uint8       resnet50-torch-uint8-random: pixels, a quarter the bytes
    python -m deploy.models.resnet50_torch --pictures          resnet50-jpeg-random: encoded pictures, read on the GPU

It needs PyTorch (`make gpu`). The program is exported on the CPU and runs on either. The weights are those of
deploy.models.resnet50 of the same seed: two engines can be compared.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deploy.models.torch_folder import BATCHING, Form, RandomProgram, classifier_card, save_program

_PAPER = "He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, CVPR 2016; stride in the 3×3 (v1.5)"
NAMES = {"fp32": "resnet50-torch-random", "uint8": "resnet50-torch-uint8-random", "pictures": "resnet50-jpeg-random"}
_NORMALISING = """\
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "offsets" value { string_value: "123.675;116.28;103.53" } }
parameters {
  key: "channel-scale-factors" value { string_value: "4.366812227074235;4.464285714285714;4.444444444444445" }
}
"""
_PICTURES = """\
# The instance decodes and resizes encoded pictures by itself.
parameters { key: "image-decoder" value { string_value: "engine" } }
parameters { key: "infer-dims" value { string_value: "3;224;224" } }
"""
_INPUTS = {
    "fp32": '{ name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }',
    "uint8": '{ name: "image" data_type: TYPE_UINT8 dims: [ 3, 224, 224 ] }',
    "pictures": '{ name: "image" data_type: TYPE_STRING dims: [ 1 ] }',
}
_SHAPES = {
    "fp32": "FP32 [N, 3, 224, 224]: RGB, (x / 255 - mean) / deviation of ImageNet",
    "uint8": "UINT8 [N, 3, 224, 224]: RGB pixels; the program normalises",
    "pictures": "BYTES [N, 1]: encoded pictures (JPEG, PNG, WebP); the instance decodes, resizes, normalises",
}


def classifier(wire: str) -> RandomProgram:
    """ResNet-50 of that input."""
    normalising = "" if wire == "uint8" else _NORMALISING
    return RandomProgram(
        title="ResNet-50",
        subtitle=" v1.5",
        program="python -m deploy.models.resnet50_torch",
        paper=_PAPER,
        onnx_name="resnet50-random",
        output="logits",
        input=_INPUTS[wire],
        card=classifier_card(
            'parameters { key: "resize-shorter-side" value { string_value: "256" } }\n'
            f"{normalising}{_PICTURES if wire == 'pictures' else ''}"
            'parameters { key: "apply-softmax" value { string_value: "1" } }\n'
        ),
        shape_in=_SHAPES[wire],
        shape_out="; the gateway applies the softmax",
    )


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = classifier("fp32").parser(tuple(BATCHING))
    parser.add_argument("--input", choices=("fp32", "uint8"), default="fp32", help="type of the input tensor [fp32]")
    parser.add_argument("--pictures", action="store_true", help="take encoded pictures, which the instance decodes")
    parser.add_argument("--name", help="name of the model, with -random")
    given = parser.parse_args(arguments)
    wire = "pictures" if given.pictures else given.input
    form = Form(given.name or NAMES[wire], wire, given.seed, given.instances, given.batching, given.max_batch)
    classifier(wire).write(form, given.home, partial(export, form))


def export(form: Form, path: Path) -> None:
    """The program, its first dimension free."""
    import torch  # here, so that --help needs none

    from deploy.models.resnet50_network import OfPixels, Resnet50

    network = Resnet50(form.seed)
    pixels = torch.zeros((2, 3, 224, 224), dtype=torch.uint8)
    is_of_pixels = form.wire == "uint8"
    module, sample = (OfPixels(network), pixels) if is_of_pixels else (network, pixels.float())
    save_program(module, sample, path)


if __name__ == "__main__":
    run(sys.argv[1:])
