"""YOLOX-S with seeded random weights as an exported PyTorch program, for Triton's backend `torch`.

    python -m deploy.models.yolox_torch                      yolox-s-torch-random: 640x640 pixels, rows [8400, 85]
    python -m deploy.models.yolox_torch --top 300            yolox-s-top-torch-random: the 300 best rows, [300, 6]
    python -m deploy.models.yolox_torch --input fp32         FP32 tensors instead of pixels

It needs PyTorch (`make gpu`). The program is exported on the CPU and runs on either. 8400 x 85 floats are 2.9 MB a
picture; with --top the program chooses the best rows by itself. The gateway does NMS in both forms.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from deploy.models.torch_folder import BATCHING, Form, RandomProgram, at_least_one, save_program

NAME, TOP_NAME = "yolox-s-torch-random", "yolox-s-top-torch-random"
ROWS, COLUMNS, TOP_COLUMNS, CLASSES = 8400, 85, 6, 80
_CARD = """\
parameters {{ key: "network-type" value {{ string_value: "0" }} }}
parameters {{ key: "layout" value {{ string_value: "{layout}" }} }}
parameters {{ key: "model-color-format" value {{ string_value: "1" }} }}
parameters {{ key: "maintain-aspect-ratio" value {{ string_value: "1" }} }}
parameters {{ key: "padding-value" value {{ string_value: "114" }} }}
parameters {{ key: "pre-cluster-threshold" value {{ string_value: "0.25" }} }}
parameters {{ key: "nms-iou-threshold" value {{ string_value: "0.45" }} }}
"""


def detector(wire: str, top: int) -> RandomProgram:
    """YOLOX-S of that input. top: rows of the output; 0 for all."""
    return RandomProgram(
        title="YOLOX-S",
        subtitle="",
        program="python -m deploy.models.yolox_torch",
        paper="Ge et al., *YOLOX: Exceeding YOLO Series in 2021*, arXiv 2107.08430; Focus as the equal 6×6 convolution",
        onnx_name="",
        output="output",
        input=f'{{ name: "image" data_type: TYPE_{wire.upper()} dims: [ 3, 640, 640 ] }}',
        card=_CARD.format(layout="deepstream-yolo" if top else "yolox"),
        shape_in=f"{wire.upper()} [N, 3, 640, 640]: BGR, 0 to 255; 26.7 GFLOPs a picture",
        shape_out=(
            ": x0, y0, x1, y1 in pixels, score, class; before NMS"
            if top
            else ": boxes relative to their cells, objectness, a score per class; before NMS"
        ),
        output_dims=(top, TOP_COLUMNS) if top else (ROWS, COLUMNS),
        class_count=CLASSES,
    )


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = detector("uint8", 0).parser(tuple(BATCHING))
    parser.add_argument("--input", choices=("fp32", "uint8"), default="uint8", help="type of the input tensor [uint8]")
    parser.add_argument("--top", type=at_least_one, default=0, metavar="N", help="rows of the output [all 8400]")
    parser.add_argument("--name", help=f"name of the model, with -random [{NAME}, with --top {TOP_NAME}]")
    given = parser.parse_args(arguments)
    if given.top > ROWS:
        parser.error(f"--top {given.top} is more than the {ROWS} rows that there are")
    name = given.name or (TOP_NAME if given.top else NAME)
    form = Form(name, given.input, given.seed, given.instances, given.batching, given.max_batch)
    detector(given.input, given.top).write(form, given.home, partial(export, form, given.top))


def export(form: Form, top: int, path: Path) -> None:
    """The program, its first dimension free."""
    import torch  # here, so that --help needs none

    from deploy.models.yolox_network import SIDE, AsFloats, TopRows, YoloxS

    network = YoloxS(form.seed)
    module = AsFloats(TopRows(network, top) if top else network)
    pixels = torch.zeros((2, 3, SIDE, SIDE), dtype=torch.uint8)
    save_program(module, pixels if form.wire == "uint8" else pixels.float(), path)


if __name__ == "__main__":
    run(sys.argv[1:])
