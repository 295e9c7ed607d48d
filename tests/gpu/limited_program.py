"""One program in a process of its own: `python -m tests.gpu.limited_program FILE CONFIG`. What it is limited to, the
environment says (MPS). A line of JSON out: how many SMs it has; how far the program's answer to one row is off that of
FP32 on the CPU, as a share of its largest number, as it is loaded and as it is without the look at load; or why it was
refused.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from penstock.engines.torch_serving.config import engine_spec
from penstock.engines.torch_serving.parameters import TorchLoadError
from penstock.engines.torch_serving.program import load_program, prepared_module
from penstock.engines.torch_serving.trial import drawn_rows, sample_of


def off(expected: Any, answer: Any) -> float:
    """Of an answer, which is a tensor or a tuple of one; far off where there is NaN in it."""
    one, other = (said[0] if isinstance(said, (tuple, list)) else said for said in (expected, answer))
    difference = float((one - other.float().cpu()).abs().max() / one.abs().max())
    return 1e9 if math.isnan(difference) else difference


def main() -> None:
    path, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    torch.set_num_threads(2)
    said: dict[str, Any] = {"sms": torch.cuda.get_device_properties(card).multi_processor_count}
    with torch.inference_mode():
        spec = engine_spec(config, is_gpu=False)
        expected = prepared_module(path, spec, cpu)(*sample_of(spec, cpu, drawn_rows(spec, 1), 1))
        spec = engine_spec(config, is_gpu=True)
        sample = sample_of(spec, card, drawn_rows(spec, 1), 1)
        said["unchecked"] = off(expected, prepared_module(path, spec, card)(*sample))
    try:
        loaded = load_program(path, spec, card)
    except TorchLoadError as error:
        said["refused"] = str(error)
    else:
        with torch.inference_mode():
            said |= {"off": off(expected, loaded.program(sample)), "fused": loaded.fused}
        said |= {"note": loaded.note, "trial": loaded.trial}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
