"""What a model's load tells the log."""

import structlog

from server.batching.declared import DeclaredOptions
from server.batching.verdict import judged
from server.core.model import ModelConfig


def test_load_of_a_model_with_a_misspelt_option_warns_once_for_each() -> None:
    """With the model, the word and what was meant; the model is served, or refused for what is read."""
    config = ModelConfig("street", "onnxruntime", 16, (), (), {"slo_p99ms": "7", "max_que_size": "9", "topk": "5"})
    with structlog.testing.capture_logs() as logged:
        assert judged(DeclaredOptions(), config) == ""
    told = [(line["log_level"], line["model"], line["parameter"], line["did_you_mean"]) for line in logged]
    assert told == [
        ("warning", "street", "slo_p99ms", "slo_p99_ms"),
        ("warning", "street", "max_que_size", "max_queue_size"),
    ]


def test_load_of_a_model_that_is_declared_well_tells_nothing() -> None:
    """And one that cannot be is refused with the sentence that everybody else is told."""
    with structlog.testing.capture_logs() as logged:
        assert judged(DeclaredOptions(), ModelConfig("street", "onnxruntime", 16, (), (), {"slo_p99_ms": "7"})) == ""
        odd = ModelConfig("street", "onnxruntime", 16, (), (), {"slo_p99_ms": "fast"})
        assert "slo_p99_ms is 'fast'" in judged(DeclaredOptions(), odd)
    assert logged == []
