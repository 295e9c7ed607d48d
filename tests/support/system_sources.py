"""Sources of reports on the system and the models that need no gateway."""

import sys
from pathlib import Path
from typing import Any

from penstock.engines.model_health import KnownModel
from penstock.engines.ort_serving.placement import EngineFacts
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.system.examination import Examination
from penstock.gateway.system.model_reports import ModelSources
from penstock.gateway.system.reports import SystemSources
from penstock.protocol.engine import ModelConfig, ModelState, TensorSpec
from penstock.protocol.inference import BatchOwner, Datatype
from penstock.protocol.system_reports import EngineSummary, SettingReport
from penstock.vision.card import card_from_config

FINDINGS = '{"findings": [{"id": "disk.room", "subject": "disk", "status": "warning", "found": "full", "advice": "x"}]}'


def doctor_that_prints(text: str, **options: Any) -> Examination:
    """A program in doctor's place that reads its input and prints this."""
    code = f"import sys; sys.stdin.read(); print({text!r})"
    return Examination(b"{}", (sys.executable, "-S", "-c", code), **options)


def plain_sources(**changes: Any) -> SystemSources:
    """An embedded engine with one model that serves and one that does not; the log and the audit log are empty."""
    models = {"street": KnownModel("street", True), "broken": KnownModel("broken", False, "its file is empty")}
    values: dict[str, Any] = {
        "workers": 1,
        "readiness": lambda: "",
        "in_flight": lambda: 0,
        "engine": lambda: EngineSummary("embedded", "ONNX Runtime", True, "", 0),
        "models": lambda: models,
        "is_left_out": lambda known: False,
        "queues": dict,
        "gpus": tuple,
        "lost_gpus": dict,
        "mps": lambda: None,
        "settings": lambda: [SettingReport("http_port", 8000, 8000, "default")],
        "examination": doctor_that_prints(FINDINGS),
        "log_folder": Path("/nonexistent"),
        "audit_log": Path(__file__),
    }
    return SystemSources(**values | changes)


def plain_model_sources(**changes: Any) -> ModelSources:
    """A detector that serves, without requests so far, and a model whose file is empty."""
    detector = ModelConfig(
        "street",
        "onnxruntime",
        8,
        (TensorSpec("images", Datatype.FP32, (3, 416, 640)),),
        (TensorSpec("output", Datatype.FP32, (5000, 7)),),
        {"network-type": "0", "layout": "yolox", "labels": "person;<b>car</b>", "maintain-aspect-ratio": "1"},
    )
    models = {
        "street": KnownModel("street", True, config=detector),
        "broken": KnownModel("broken", False, "its file is empty"),
    }

    async def index() -> list[ModelState]:
        return [ModelState("street", "1", "READY"), ModelState("broken", "1", "UNAVAILABLE", "its file is empty")]

    values: dict[str, Any] = {
        "models": lambda: models,
        "is_left_out": lambda known: False,
        "index": index,
        "card": card_from_config,
        "options": lambda name: BatchOptions(BatchOwner.GATEWAY, 8) if name == "street" else BatchOptions(),
        "queues": dict,
        "counts": dict,
        "counts_block": False,
        "is_removable": lambda name: name == "broken",
        "facts": lambda name: (EngineFacts("cuda", 0, "fp16", (1, 8), ("no FP8 here",)),) if name == "street" else (),
    }
    return ModelSources(**values | changes)
