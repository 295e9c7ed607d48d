"""The benches run to their end against the real stack. How fast it is here is not judged: the machine is shared."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.models import opennmt
from deploy.models.opennmt_weights import Size
from tests.integration.pictures import frames, jpeg
from tests.support.http import post_json
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.long]


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One short round."""
    command = [sys.executable, "-m", f"loadtest.bench.{name}", "--rounds", "1", "--seconds", "0.25", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=100, check=False)


def test_image_endpoint_bench_prints_the_rate_against_its_limit(
    stack: RunningStack, shared_dir: Path, tmp_path: Path
) -> None:
    """Decode, resize and engine alone, the limit, the endpoint and their ratio, on real pictures."""
    photo, report = tmp_path / "street.jpg", tmp_path / "report.json"
    photo.write_bytes(jpeg(frames(shared_dir / "media" / "vtest.avi")[0]))
    where = ["--url", stack.http_url, "--engine-grpc", stack.engine_grpc_address]
    answer = bench(
        "gateway.image_endpoint", *where, "--model", "fastestdet", "--image", str(photo), "--json", str(report)
    )
    assert answer.returncode == 0, answer.stderr
    assert re.search(r"of the harmonic limit: \d", answer.stdout)
    (result,) = json.loads(report.read_text())["results"]
    rates = [result[f"{stage}_rate"]["median"] for stage in ("decode", "resize", "engine", "outputs")]
    assert result["limit_rate"]["median"] == pytest.approx(1 / sum(1 / rate for rate in rates))
    assert result["endpoint_rate"]["median"] > 0
    assert result["endpoint_gateway_cpu_ms"]["median"] > 0
    assert result["endpoint_triton_cpu_ms"]["median"] > 0


def test_relay_bench_compares_gateway_and_triton(stack: RunningStack, tmp_path: Path) -> None:
    """Both protocols, two sizes and a model of one shape, the same bytes to both ends, and what targets.toml wants."""
    report = tmp_path / "report.json"
    where = ["--url", stack.http_url, "--grpc", stack.grpc_address]
    engine = ["--engine", stack.engine_http_url, "--engine-grpc", stack.engine_grpc_address]
    models = ["--model", "identity_fp32", "street"]
    answer = bench("gateway.relay", *where, *engine, *models, "--concurrency", "4", "--json", str(report))
    assert answer.returncode == 0, answer.stderr
    results = json.loads(report.read_text())["results"]
    asked = {(result["model"], result["size"], result["floor"], result["goal"]) for result in results}
    assert asked == {
        ("identity_fp32", "64 B", 0.25, 0.5), ("identity_fp32", "602 kB", None, None), ("street", "1,769 kB", 0.8, 0.9)
    }  # fmt: skip
    assert sorted(result["protocol"] for result in results) == ["HTTP"] * 3 + ["gRPC"] * 3
    for result in results:
        assert result["ratio"]["median"] == pytest.approx(
            result["gateway_rate"]["median"] / result["direct_rate"]["median"]
        )
        assert result["gateway_cpu_ms"]["median"] > 0
        assert result["direct_cpu_ms"]["median"] > 0


def test_bench_of_a_model_without_vision_parameters_says_what_is_missing(stack: RunningStack) -> None:
    """One line, and no table."""
    where = ["--url", stack.http_url, "--engine-grpc", stack.engine_grpc_address]
    answer = bench("gateway.image_endpoint", *where, "--model", "identity_fp32")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert "network-type" in answer.stderr


def test_sentences_bench_finds_the_same_words_alone_and_in_the_gateways_batches(
    stack: RunningStack, tmp_path: Path
) -> None:
    """A narrow translator of the real one's vocabulary, loaded by the bench, asked in every way.

    It answers five words only: a round of a quarter of a second holds a dozen of its largest batches, not two.
    """
    report = tmp_path / "report.json"
    folder = opennmt.write(opennmt.Order(size=Size(width=8, target_length=5)), stack.home)
    try:
        answer = bench("gpu.sentences", "--url", stack.http_url, "--processes", "1", "--json", str(report))
    finally:
        post_json(f"{stack.http_url}/v2/repository/models/{folder.name}/unload", {})
        shutil.rmtree(folder)
    assert answer.returncode == 0, answer.stderr
    assert "541 sentences/s" in answer.stdout
    results = json.loads(report.read_text())
    assert results["agreement"] == [{"model": "opennmt-random", "together": 1.0, "with_first": 1.0}]
    rates = {(row["callers"], row["sentences"]): row["sentences_per_s"]["median"] for row in results["results"]}
    assert rates.keys() == {(1, 1), (1, 4), (64, 1), (2, 64)}
    assert all(rate > 0 for rate in rates.values())
