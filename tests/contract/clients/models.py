"""The models that real clients are tried with, as Triton's python backend runs them."""

from pathlib import Path

from tests.support.tiny_models import copy_identity, write_model

DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "BF16", "FP32",
    "FP64", "BYTES",
)  # fmt: skip
CONFIG = """backend: "python"
max_batch_size: {max_batch_size}
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
{rest}
"""
IN_AND_OUT = """input [ {{ name: "x" data_type: {datatype} dims: [ {size} ] }} ]
output [ {{ name: "y" data_type: {datatype} dims: [ {size} ] {labels} }} ]
"""
SEQUENCES = """sequence_batching {{
  max_sequence_idle_microseconds: 5000000
  control_input [ {{ name: "START" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }} ]
  {correlation}
}}
"""
CORRELATION = (
    'control_input [ { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] } ]'
)
PRIORITIES = """dynamic_batching {
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { timeout_action: REJECT allow_timeout_override: true default_timeout_microseconds: 0 }
}
"""
MODEL = '''"""{promise}"""
import numpy as np
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.totals = {{}}
        self.calls = 0

{methods}

def taken(request, name):
    return pb_utils.get_input_tensor_by_name(request, name)


def given(array, name="y"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])
'''
EACH = """    def execute(self, requests):
        return [self.answer(request) for request in requests]

"""
IDENTITY = (
    EACH
    + """    def answer(self, request):
        return given(taken(request, "x").as_numpy())
"""
)
SLEEPS = (
    EACH
    + """    def answer(self, request):
        array = taken(request, "x").as_numpy()
        time.sleep(float(array.ravel()[0]) / 1000)
        return given(array)
"""
)
TURNS = (
    EACH
    + """    def answer(self, request):
        array = taken(request, "x").as_numpy()
        time.sleep(float(array.ravel()[0]) / 1000)
        self.calls += 1
        return given(np.full_like(array, self.calls))
"""
)
TYPES = (
    EACH
    + """    def answer(self, request):
        outputs = []
        for tensor in request.inputs():
            name = tensor.name().replace("in_", "out_")
            if name == "out_BF16":
                outputs.append(pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack()))
            else:
                outputs.append(pb_utils.Tensor(name, tensor.as_numpy()))
        return pb_utils.InferenceResponse(outputs)
"""
)
SUMS = (
    EACH
    + """    def answer(self, request):
        correlation = taken(request, "CORRID")
        key = correlation.as_numpy().ravel()[0] if correlation else "the only one"
        before = 0 if taken(request, "START").as_numpy().ravel()[0] else self.totals[key]
        self.totals[key] = before + taken(request, "x").as_numpy()
        return given(self.totals[key])
"""
)
REPEATS = """    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = taken(request, "x").as_numpy().ravel()[0]
            if count < 0:
                sender.send(
                    pb_utils.InferenceResponse(error=pb_utils.TritonError("asked for %d answers" % count)),
                    flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
                )
                continue
            for number in range(count):
                sender.send(given(np.array([number], np.int32)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS = (
    EACH
    + """    def answer(self, request):
        values = taken(request, "x").as_numpy()
        if not values.any():
            return given(values)  # zeros, by which the gateway tries it: a model that fails for them is unavailable
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("this model fails: \\u00fc % \\n twice"))
"""
)


def write_models(repository: Path) -> None:
    """See each row; spare is for loads, broken cannot be loaded, identity_fp32 is the shipped one."""
    fp32, int32 = _in_and_out("TYPE_FP32"), _in_and_out("TYPE_INT32", size="1")
    labelled = _in_and_out("TYPE_FP32", size="3", labels='label_filename: "labels.txt"')
    decoupled = "model_transaction_policy { decoupled: true }\n"
    rows = [
        ("types", TYPES, 0, _every_datatype()),
        ("words", IDENTITY, 8, _in_and_out("TYPE_STRING")),
        ("labelled", IDENTITY, 8, labelled),
        ("sleeps", SLEEPS, 0, fp32),
        ("turns", TURNS, 1, _in_and_out("TYPE_FP32", size="1") + PRIORITIES),
        ("ranked", SLEEPS, 1, _in_and_out("TYPE_FP32", size="1") + PRIORITIES),
        ("sums", SUMS, 1, int32 + SEQUENCES.format(correlation=CORRELATION)),
        ("sums_by_word", SUMS, 1, int32 + SEQUENCES.format(correlation="")),
        ("repeats", REPEATS, 0, int32 + decoupled),
        ("fails", FAILS, 0, fp32),
        ("spare", IDENTITY, 8, fp32),
        ("counted", IDENTITY, 8, fp32),
    ]
    for name, methods, max_batch_size, rest in rows:
        config = CONFIG.format(max_batch_size=max_batch_size, rest=rest)
        write_model(repository, name, MODEL.format(promise=f"The model {name}.", methods=methods), config)
    (repository / "labelled" / "labels.txt").write_text("left\nmiddle\nright\n")
    cannot = CONFIG.format(max_batch_size=0, rest=fp32)
    write_model(repository, "broken", "raise ValueError('this model is broken on purpose')\n", cannot)
    copy_identity(repository)


def _in_and_out(datatype: str, *, size: str = "-1", labels: str = "") -> str:
    return IN_AND_OUT.format(datatype=datatype, size=size, labels=labels)


def _every_datatype() -> str:
    """in_… and out_…, a pair a datatype; an answer has the outputs whose inputs were sent."""
    lines = []
    for datatype in DATATYPES:
        written = "STRING" if datatype == "BYTES" else datatype
        lines.append(f'input [ {{ name: "in_{datatype}" data_type: TYPE_{written} dims: [ -1 ] optional: true }} ]')
        lines.append(f'output [ {{ name: "out_{datatype}" data_type: TYPE_{written} dims: [ -1 ] }} ]')
    return "\n".join(lines)
