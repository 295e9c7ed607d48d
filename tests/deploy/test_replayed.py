"""The model that takes as long as another: what is written is what Triton's python backend runs."""

from pathlib import Path

from deploy.models import replayed
from penstock.engines.config_pbtxt import read_config


def test_replayed_model_says_who_owns_its_batches_and_its_slo(tmp_path: Path) -> None:
    """The folder holds a config that reads as it was asked for, and a model that is Python."""
    replayed.run(["--home", str(tmp_path), "--name", "slow", "--alpha-ms", "5", "--beta-ms", "0.5", "--slo-ms", "40"])
    folder = tmp_path / "models" / "slow"
    config = read_config(folder / "config.pbtxt")
    assert (config.name, config.max_batch_size, config.has_dynamic_batching) == ("slow", 256, False)
    assert dict(config.parameters) == {"batch_owner": "gateway", "slo_p99_ms": "40"}
    model = (folder / "1" / "model.py").read_text()
    compile(model, "model.py", "exec")
    assert "ALPHA_MS, BETA_MS = 5.0, 0.5" in model


def test_replayed_model_of_tritons_has_its_dynamic_batching(tmp_path: Path) -> None:
    """The same engine can be owned by Triton, to compare."""
    replayed.run(["--home", str(tmp_path), "--owner", "triton"])
    assert read_config(tmp_path / "models" / replayed.NAME / "config.pbtxt").has_dynamic_batching
