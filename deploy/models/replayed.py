"""A model that computes nothing and takes as long as a known one: alpha + beta * rows milliseconds, asleep.

It is a real model of Triton's python backend, one instance, so that queues, batches and refusals can be tried on the
real gateway against arithmetic. The default is ResNet-50 on a V100 (batch 1: 481/s, 256: 6,444/s) slowed ten times.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.models.model_folder import disk_sentence, new_model_folder
from penstock.protocol.inference import BatchOwner

NAME, DEFAULT_HOME = "replayed-v100-x10", "~/.penstock"
ALPHA_MS, BETA_MS, MAX_BATCH_SIZE = 19.8, 1.475, 256

_MODEL = '''"""Answers what it is given, after alpha + beta * rows milliseconds."""
import time

import triton_python_backend_utils as pb_utils

ALPHA_MS, BETA_MS = {alpha_ms}, {beta_ms}


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        time.sleep((ALPHA_MS + BETA_MS * sum(len(array) for array in arrays)) / 1000)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in arrays]
'''

_CONFIG = """\
# Takes {alpha_ms} ms + {beta_ms} ms a row, asleep: see MODEL.md.
name: "{name}"
backend: "python"
max_batch_size: {max_batch_size}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "batch_owner" value {{ string_value: "{owner}" }} }}
parameters {{ key: "slo_p99_ms" value {{ string_value: "{slo_ms:g}" }} }}
"""

_FACTS = """\
# {name}: a replayed engine

Nothing is computed: a call of b rows takes {alpha_ms} + {beta_ms} * b ms of sleep and answers its input. Made by
`python -m deploy.models.replayed`; Apache-2.0, as the project.
"""


def write(given: argparse.Namespace) -> Path:
    """The complete folder in the home's repository, at once. Raises OSError."""
    home = given.home.expanduser()
    facts = dict(vars(given), max_batch_size=MAX_BATCH_SIZE)
    with new_model_folder(home, given.name) as staged:
        (staged / "1").mkdir()
        (staged / "1" / "model.py").write_text(_MODEL.format(**facts), encoding="utf-8")
        (staged / "config.pbtxt").write_text(_config(facts), encoding="utf-8")
        (staged / "MODEL.md").write_text(_FACTS.format(**facts), encoding="utf-8")
    folder: Path = home / "models" / given.name
    return folder


def _config(facts: dict[str, object]) -> str:
    text = _CONFIG.format(**facts)
    return text + "dynamic_batching { }\n" if facts["owner"] is BatchOwner.TRITON else text


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.models.replayed", description=__doc__)
    home = os.environ.get("PENSTOCK_HOME", DEFAULT_HOME)
    parser.add_argument("--home", type=Path, default=Path(home), help=f"its models/ gets the folder [{home}]")
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--alpha-ms", type=float, default=ALPHA_MS, help="of every call")
    parser.add_argument("--beta-ms", type=float, default=BETA_MS, help="of every row")
    parser.add_argument("--slo-ms", type=float, default=70.0, help="the deadline of a request that brings none")
    parser.add_argument(
        "--owner", type=BatchOwner, choices=list(BatchOwner), default=BatchOwner.GATEWAY, help="of its batches"
    )
    given = parser.parse_args(arguments)
    try:
        folder = write(given)
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: {disk_sentence(error, given.home)}\n")
        raise SystemExit(1) from error
    sys.stdout.write(
        f"{given.name} is in {folder}; a stack that runs serves it after: penstock models load {given.name}\n"
    )


if __name__ == "__main__":
    run(sys.argv[1:])
