"""Runs of models that never end."""

import signal
import threading
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from penstock.models.batch_axis import prove_rows, session_run
from penstock.models.inspect.trial_session import TrialFailed, run_within

ONE, TWO = ({"x": np.zeros((rows, 1), np.float32)} for rows in (1, 2))


@pytest.fixture
def session(tmp_path: Path) -> ort.InferenceSession:
    """A loop that ends at once for a batch of one row, and never for others."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["goes_on"], ["goes_on_too"]), helper.make_node("Add", ["v", "one"], ["w"])],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes_on_too", TensorProto.BOOL, []),
            helper.make_tensor_value_info("w", TensorProto.FLOAT, None),
        ],
        [numpy_helper.from_array(np.ones(1, np.float32), "one")],
    )
    nodes = [
        helper.make_node("Shape", ["x"], ["sides"], start=0, end=1),
        helper.make_node("Squeeze", ["sides"], ["rows"]),
        helper.make_node("Greater", ["rows", "least"], ["begins"]),
        helper.make_node("Loop", ["", "begins", "x"], ["y"], body=body),
    ]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in "xy")
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(np.array(1), "least")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])


def test_run_that_never_ends_is_ended(session: ort.InferenceSession) -> None:
    """The session can be used afterwards; a run that ends in time is not touched."""
    with pytest.raises(TrialFailed, match=r"it did not end within 0\.1 s"):
        run_within(0.1, lambda options: prove_rows(session_run(session, options), [ONE, ONE], is_quantised=False))
    assert run_within(60, lambda options: session_run(session, options)(ONE))["y"].shape == (1, 1)


def test_interrupt_ends_a_run_that_never_ends(session: ort.InferenceSession) -> None:
    """Ctrl-C stops `models add` while ONNX Runtime computes."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_within(60, lambda options: session_run(session, options)(TWO))
    timer.join()
