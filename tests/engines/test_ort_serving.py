"""What the onnxruntime backend decides without Triton: groups, configurations, threads, options."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from penstock.engines.ort_serving.batch import BatchRunner, OrtRequest
from penstock.engines.ort_serving.config import (
    OnnxTensorSpec,
    OrtLoadError,
    OrtRequestError,
    Signature,
    complete,
    read_signature,
    refuse_numpy_2,
    validate,
)
from penstock.engines.ort_serving.session import OrtModel, model_path, open_for_reading, ort_error_text, session_options
from penstock.engines.ort_serving.threads import ThreadBudget, available_cores, cgroup_quota, thread_budget
from tests.engines import onnx_models

ALONE, SHARED = ThreadBudget(cores=8, instances=1), ThreadBudget(cores=8, instances=2)


class Doubler:
    """Stands for a session: y = 2 x, a negative x fails the whole run, `runs` counts the rows of each."""

    def __init__(self, *, rows_answered: int | None = None) -> None:
        self.runs: list[int] = []
        self._rows_answered = rows_answered

    def run(self, names: Sequence[str], inputs: Mapping[str, Any]) -> list[Any]:
        """One array for each name."""
        x = inputs["x"]
        self.runs.append(len(x))
        if (x < 0).any():
            raise OrtRequestError("negative", is_client_error=True)
        return [2 * x[: self._rows_answered] for _ in names]


def ask(*values: float, columns: int = 1) -> OrtRequest:
    """A request of one row per value."""
    return OrtRequest({"x": np.repeat(np.array(values, np.float32)[:, None], columns, axis=1)}, ("y",))


def answer(model: Doubler, asks: list[OrtRequest], *, is_batching: bool = True) -> list[Any]:
    """The outcomes as plain lists; an error as its text."""
    outcomes = BatchRunner(model.run, is_batching=is_batching).answer(asks)
    return [str(o) if isinstance(o, OrtRequestError) else o["y"][:, 0].tolist() for o in outcomes]


def test_answer_requests_of_one_shape_share_a_run() -> None:
    """Rows go in together and come out to whom they belong, in the order asked."""
    model = Doubler()
    assert answer(model, [ask(1), ask(2, 3), ask(4)]) == [[2], [4, 6], [8]]
    assert model.runs == [4]


def test_answer_requests_of_other_shapes_run_in_groups() -> None:
    """One run for each shape, and no answer in the wrong place."""
    model = Doubler()
    asks = [ask(1), ask(2, columns=2), ask(3), ask(4, columns=2)]
    assert answer(model, asks) == [[2], [4], [6], [8]]
    assert model.runs == [2, 2]


def test_answer_without_batching_runs_each_alone() -> None:
    """max_batch_size 0: nothing is ever concatenated."""
    model = Doubler()
    assert answer(model, [ask(1), ask(2)], is_batching=False) == [[2], [4]]
    assert model.runs == [1, 1]


def test_answer_one_bad_request_is_found_by_halving() -> None:
    """Seven good ones are answered; the bad one costs three halvings, not eight single runs."""
    model = Doubler()
    asks = [ask(value) for value in (0, 1, 2, 3, 4, -5, 6, 7)]
    assert answer(model, asks) == [[0], [2], [4], [6], [8], "negative", [12], [14]]
    assert model.runs == [8, 4, 4, 2, 1, 1, 2]


def test_answer_inputs_that_disagree_in_rows_fail_alone() -> None:
    """A request with two rows of one input and three of another never joins a batch."""

    def run(names: Sequence[str], inputs: Mapping[str, Any]) -> list[Any]:
        if len({len(array) for array in inputs.values()}) > 1:
            raise OrtRequestError("rows disagree", is_client_error=True)
        return [inputs["a"] + inputs["b"]]

    bad = OrtRequest({"a": np.ones((2, 1)), "b": np.ones((3, 1))}, ("y",))
    good = [OrtRequest({"a": np.full((1, 1), n), "b": np.ones((1, 1))}, ("y",)) for n in (1, 2)]
    outcomes = BatchRunner(run, is_batching=True).answer([good[0], bad, good[1]])
    assert [outcome["y"].item() for outcome in (outcomes[0], outcomes[2])] == [2, 3]
    assert str(outcomes[1]) == "rows disagree"


def test_answer_model_with_other_rows_than_asked_runs_alone_for_good() -> None:
    """An output that does not have the batch's rows cannot be split: from then on each runs alone."""
    model = Doubler(rows_answered=1)
    runner = BatchRunner(model.run, is_batching=True)
    for _ in range(2):
        assert [outcome["y"].tolist() for outcome in runner.answer([ask(1), ask(2)])] == [[[2]], [[4]]]
    assert model.runs == [2, 1, 1, 1, 1]


def signature(model: Any) -> Signature:
    """The tensors of an ONNX model, as the backend reads them."""
    return read_signature(ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]))


def config(*, max_batch_size: int = 8, **changes: Any) -> dict[str, Any]:
    """A configuration that fits identity() [N, 3]."""
    x, y = ({"name": name, "data_type": "TYPE_FP32", "dims": [3]} for name in "xy")
    return {"name": "m", "max_batch_size": max_batch_size, "input": [x], "output": [y]} | changes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"input": []}, r"requires input 'x' \(TYPE_FP32 \[-1,3\]\), which the configuration does not name"),
        ({"output": [{"name": "z"}]}, r"names output 'z', the ONNX file's outputs are 'y'"),
        (
            {"output": [{"name": "y", "data_type": "TYPE_FP16", "dims": [3]}]},
            r"output 'y' is TYPE_FP32 in the ONNX file, TYPE_FP16 in the configuration",
        ),
        (
            {"output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}]},
            r"output 'y' is \[-1,3\] in the ONNX file, \[-1,-1\] in the configuration",
        ),
        (
            {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3], "optional": True}]},
            "'x' is optional in the configuration, required by the ONNX file",
        ),
        ({"batch_input": [{"kind": "BATCH_ELEMENT_COUNT"}]}, "does not have batch_input"),
        ({"model_transaction_policy": {"decoupled": True}}, "does not have the decoupled transaction policy"),
        ({"sequence_batching": {"state": [{}]}}, "does not have the implicit state"),
        (
            {"sequence_batching": {"control_input": [{"name": "go"}]}},
            "control input 'go', which the ONNX file does not",
        ),
        ({"max_batch_size": 0}, r"input 'x' is \[-1,3\] in the ONNX file, \[3\] in the configuration"),
    ],
)
def test_validate_disagreement_names_tensor_expected_and_given(changes: dict[str, Any], sentence: str) -> None:
    """Whatever the file and the configuration disagree on is said in one sentence."""
    with pytest.raises(OrtLoadError, match=sentence):
        validate(config(**changes), signature(onnx_models.identity()))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (onnx_models.identity(), {}),
        (onnx_models.identity((1, 3)), {"max_batch_size": 0, "input": [], "output": []}),
        (
            onnx_models.identity(("N", 3)),
            {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1, 3], "reshape": {"shape": [3]}}]},
        ),
    ],
)
def test_validate_agreement_passes(model: Any, changes: dict[str, Any]) -> None:
    """Also after a completion, and with a reshape in between."""
    wanted = config(**changes)
    complete(wanted, signature(model))
    validate(wanted, signature(model))


def test_validate_dynamic_input_may_be_configured_fixed() -> None:
    """As in NGC's backend: the configuration may narrow an input of the file, not an output."""
    spec = OnnxTensorSpec("x", "tensor(float)", "TYPE_FP32", (-1, -1))
    validate(config(output=[]), Signature(inputs=(spec,), outputs=(), overridable=()))


def test_complete_config_with_inputs_and_outputs_is_left_alone() -> None:
    """max_batch_size 0 stays 0, though the file could batch: completion is all or nothing."""
    given = config(max_batch_size=0)
    complete(given, signature(onnx_models.identity()))
    assert given == config(max_batch_size=0)


def test_read_signature_of_a_sequence_is_refused() -> None:
    """ONNX's sequences and maps are no tensors."""
    with pytest.raises(OrtLoadError, match=r"'y' is a seq\(tensor\(float\)\), and Triton carries tensors only"):
        signature(onnx_models.sequence_output())


def parameters(**values: str) -> dict[str, Any]:
    """The configuration's parameters."""
    return {"parameters": {key.replace("__", "."): {"string_value": value} for key, value in values.items()}}


def test_session_options_under_ngcs_names_reach_onnxruntime() -> None:
    """Thread counts, execution mode, arena, graph level and any session entry."""
    chosen = parameters(
        intra_op_thread_count="3",
        inter_op_thread_count="2",
        execution_mode="1",
        enable_mem_arena="0",
        session__intra_op__allow_spinning="1",
        cudnn_conv_algo_search="0",
    )
    options = session_options(chosen | {"optimization": {"graph": {"level": 1}}}, SHARED)
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL
    assert options.graph_optimization_level == ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    assert not options.enable_cpu_mem_arena
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "1"


@pytest.mark.parametrize(
    ("budget", "threads", "entry", "value"),
    [(ALONE, 8, "session.force_spinning_stop", "1"), (SHARED, 4, "session.intra_op.allow_spinning", "0")],
)
def test_session_options_without_parameters_follow_the_budget(
    budget: ThreadBudget, threads: int, entry: str, value: str
) -> None:
    """A thread count of 0, NGC's way to say "choose", is the budget's; several instances do not spin."""
    options = session_options(parameters(intra_op_thread_count="0"), budget)
    assert options.intra_op_num_threads == threads
    assert options.get_session_config_entry(entry) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("intra_op_thread_count", "two"),
        ("inter_op_thread_count", "1025"),
        ("intra_op_thread_count", "9" * 50),
        ("execution_mode", "2"),
        ("enable_mem_arena", "maybe"),
    ],
)
def test_session_options_impossible_value_is_refused(key: str, value: str) -> None:
    """The sentence names the parameter and the value."""
    with pytest.raises(OrtLoadError, match=f"parameter {key} is '?{value}"):
        session_options(parameters(**{key: value}), ALONE)


def test_session_options_absent_operator_library_is_refused() -> None:
    """Custom operators come from libraries that the configuration names."""
    with pytest.raises(OrtLoadError, match=r"operator library /nowhere/ops\.so cannot be loaded"):
        session_options({"model_operations": {"op_library_filename": ["/nowhere/ops.so"]}}, ALONE)


@pytest.mark.parametrize("filename", ["/etc/passwd", "../../other/1/model.onnx", "a/../../../x.onnx"])
def test_model_path_outside_the_models_folder_is_refused(tmp_path: Path, filename: str) -> None:
    """It is refused in config.pbtxt, too; a file of another version is inside the folder."""
    with pytest.raises(OrtLoadError, match="must name a file inside the model's folder"):
        model_path(tmp_path / "1", {"default_model_filename": filename})
    (tmp_path / "shared").mkdir()
    (tmp_path / "1").mkdir()
    (tmp_path / "shared" / "model.onnx").write_bytes(b"")
    assert model_path(tmp_path / "1", {"default_model_filename": "../shared/model.onnx"}).is_file()


@pytest.mark.parametrize("filename", ["model.onnx", "net.onnx"])
def test_model_path_is_the_configured_file_or_a_folder_of_its_name(tmp_path: Path, filename: str) -> None:
    """A folder holds a model.onnx, for files with weights beside them."""
    wanted = {"default_model_filename": filename}
    (tmp_path / filename).write_bytes(b"")
    assert model_path(tmp_path, wanted) == tmp_path / filename
    (tmp_path / filename).unlink()
    (tmp_path / filename).mkdir()
    with pytest.raises(OrtLoadError, match="there is no file"):
        model_path(tmp_path, wanted)
    (tmp_path / filename / "model.onnx").write_bytes(b"")
    assert model_path(tmp_path, wanted) == tmp_path / filename / "model.onnx"


def test_numpy_2_is_refused_with_the_fix() -> None:
    """Triton's Python backend would answer empty outputs without an error."""
    refuse_numpy_2("1.26.4")
    with pytest.raises(OrtLoadError, match=r"empty outputs with numpy 2\.1\.0: install numpy 1\.26\.4 into"):
        refuse_numpy_2("2.1.0")


def test_run_with_arena_shrinkage_still_answers(tmp_path: Path) -> None:
    """The one run option that NGC's backend knows is handed on."""
    onnx_models.save(onnx_models.identity(), tmp_path, "m")
    session = open_for_reading(tmp_path / "m" / "1" / "model.onnx", {})
    wanted = config() | parameters(memory__enable_memory_arena_shrinkage="cpu:0")
    x = np.ones((2, 3), np.float32)
    assert OrtModel(session, read_signature(session), wanted).run(["y"], {"x": x})[0].tolist() == x.tolist()


def test_thread_budget_counts_all_instances_of_the_model() -> None:
    """Groups add up; a GPU group has its count on each GPU."""
    groups = [{"count": 2, "gpus": []}, {"count": 1, "gpus": [0, 1]}]
    budget = thread_budget({"instance_group": groups})
    assert budget.instances == 4
    assert budget.threads == max(1, available_cores() // 4)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cgroup_quota_of_either_version_is_found(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    """The limit may be this group's or a parent's."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = tmp_path / "cgroup"
    own.write_text("0::/a/b\n")
    assert cgroup_quota(tmp_path, own) == quota


def test_ort_sentence_drops_prefix_lines_and_source_files() -> None:
    """What reaches the client is the reason."""
    error = RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running MatMul node. Name:'mm' "
        "Status Message: /onnxruntime_src/core/matmul_helper.h:60 left_dim == right_dim was false.\n Sorry\n"
    )
    assert ort_error_text(error) == "MatMul node 'mm': left_dim == right_dim was false. Sorry"
