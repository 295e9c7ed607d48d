"""What tritonclient's clients ask besides inference."""

import json
import time
from collections.abc import Callable

from tests.contract.clients.asking import Asker, Reply
from tests.contract.clients.infer_calls import F6, fp32
from tests.integration.living import COUNTED_WITHIN_S

Calls = dict[str, Callable[[Asker], Reply]]
SPARE = {
    "backend": "python",
    "max_batch_size": 2,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}],
}
DOUBLES = b"""import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array * np.float32(2))]) for array in arrays]
"""


def loaded(model: str, **options: object) -> Callable[[Asker], Reply]:
    """A load; then what the model says it is and answers."""

    def ask(asker: Asker) -> Reply:
        asker.load_model(model, **options)
        return [
            asker.is_model_ready(model),
            asker.get_model_config(model),
            asker.get_model_metadata(model),
            asker.infer(model, fp32(asker)),
        ]

    return ask


def unloaded(asker: Asker) -> Reply:
    """An unload, which both clients see; then the model is there again."""
    asker.load_model("spare")
    asker.unload_model("spare")
    reply = [(row["name"], row.get("state")) for row in _index(asker) if row["name"] != "spare"]
    asker.load_model("spare")
    return reply, asker.is_model_ready("spare")


def statistics(asker: Asker) -> Reply:
    """Of a model that no one else asks but the canary: what three requests of two rows added at least, by name.

    Triton counts a request a moment after it answered it.
    """
    before = _counts(asker)
    for _ in range(3):
        asker.infer("counted", fp32(asker, F6))
    wanted = {name: 6 if name == "inference_count" else 0 if name == "fail count" else 3 for name in before}
    until = time.monotonic() + COUNTED_WITHIN_S
    while time.monotonic() < until:
        after = _counts(asker)
        added = {name: after[name] - before[name] for name in wanted}
        if all(added[name] >= count for name, count in wanted.items() if not name.startswith("cache")):
            return sorted(added), added["fail count"]
    return added


def _index(asker: Asker) -> list[dict[str, str]]:
    reply = asker.reply(asker.get_model_repository_index())
    return reply["models"] if isinstance(reply, dict) else reply


def _counts(asker: Asker) -> dict[str, int]:
    reply = asker.reply(asker.get_inference_statistics("counted"))["model_stats"][0]
    counts = {name: int(reply[name]) for name in ("inference_count", "execution_count")}
    for name, value in reply["inference_stats"].items():
        counts[f"{name} count"] = int(value.get("count", 0))
    return counts


def _ask(method: str, *arguments: object, **options: object) -> Callable[[Asker], Reply]:
    return lambda asker: getattr(asker, method)(*arguments, **options)


CALLS: Calls = {
    "live": _ask("is_server_live"),
    "ready": _ask("is_server_ready"),
    "model ready": _ask("is_model_ready", "identity_fp32"),
    "version ready": _ask("is_model_ready", "identity_fp32", "1"),
    "unknown model ready": _ask("is_model_ready", "unknown"),
    "unknown version ready": _ask("is_model_ready", "identity_fp32", "9"),
    "server metadata": _ask("get_server_metadata"),
    "model metadata": _ask("get_model_metadata", "types"),
    "metadata of a version": _ask("get_model_metadata", "labelled", "1"),
    "unknown model metadata": _ask("get_model_metadata", "unknown"),
    "model config": _ask("get_model_config", "sums"),
    "unknown model config": _ask("get_model_config", "unknown"),
    "repository index": _ask("get_model_repository_index"),
    "statistics": statistics,
    "statistics of an unknown model": _ask("get_inference_statistics", "unknown"),
    "load": loaded("spare"),
    "load with a config": loaded("spare", config=json.dumps(SPARE)),
    "load with a file": loaded("spare", config=json.dumps(SPARE), files={"file:1/model.py": DOUBLES}),
    "load with a file alone": loaded("spare", files={"file:1/model.py": DOUBLES}),
    "load of a new model": loaded("brought", config=json.dumps(SPARE), files={"file:1/model.py": DOUBLES}),
    "load of an unknown model": loaded("unknown"),
    "load of a broken model": loaded("broken"),
    "unload": unloaded,
    "unload of an unknown model": _ask("unload_model", "unknown"),
    "unload with dependents": lambda asker: [
        asker.load_model("spare"),
        asker.unload_model("spare", unload_dependents=True),
        asker.load_model("spare"),
    ],
    "trace settings": _ask("get_trace_settings"),
    "trace settings of a model": _ask("get_trace_settings", "counted"),
    "trace settings of an unknown model": _ask("get_trace_settings", "unknown"),
    "trace rate": lambda asker: [
        asker.update_trace_settings("counted", {"trace_rate": "500", "trace_level": ["TIMESTAMPS"]}),
        asker.update_trace_settings("counted", {"trace_rate": None, "trace_level": None}),
    ],
    "a trace setting that is none": _ask("update_trace_settings", None, {"nothing": "1"}),
    "a trace rate that is none": _ask("update_trace_settings", None, {"trace_rate": "often"}),
    "a trace file": _ask("update_trace_settings", None, {"trace_file": "/tmp/penstock-client-trace"}),
    "a log file": _ask("update_log_settings", {"log_file": "/tmp/penstock-client-log"}),
    "log settings": _ask("get_log_settings"),
    "log verbosity": lambda asker: [
        asker.update_log_settings({"log_verbose_level": 1}),
        asker.update_log_settings({"log_verbose_level": 0}),
    ],
    "a log setting that is none": _ask("update_log_settings", {"nothing": 1}),
    "a log format that is none": _ask("update_log_settings", {"log_format": "nice"}),
}
