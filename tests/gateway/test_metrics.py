"""The metrics are one table, and Prometheus' own linter finds nothing wrong with them."""

import re
import shutil
import subprocess
import time
from dataclasses import replace
from functools import partial

import pytest

from penstock.gateway.batching.batch_report import queue_readers
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.metrics import PROCESS_METRICS, Metrics
from penstock.metric_table import METRICS
from penstock.protocol.inference import CloseReason, Timings

QUEUE = QueueStatistics(
    depth=3,
    rows=4,
    size_bytes=512,
    in_flight=1,
    max_rows=8,
    fit=None,
    wait_s=0.25,
    closed_by={CloseReason.FULL: 6},
    dropped={"queue_full": 2},
)


def filled() -> Metrics:
    metrics = Metrics()
    metrics.request_done(model="m", protocol="http", code="200", seconds=0.01)
    metrics.stages("m", Timings(decode=0.001, preprocess=0.002, queue=0.0, infer=0.003, postprocess=0.0001))
    metrics.batch("m", 3)
    metrics.relayed("m", 0.002)
    metrics.rejected("full")
    metrics.decode_error("jpeg", "undecodable_image")
    metrics.cancelled("http")
    gauges = {"inflight_requests": 2, "inflight_bytes": 20, "max_inflight_requests": 1024, "receiving_bytes": 30}
    for name, number in (gauges | {"http_connections": 4, "grpc_connections": 5}).items():
        metrics.read(name, partial(float, number))
    metrics.read("max_inflight_bytes", lambda: 1 << 30)
    metrics.read("queue_depth", lambda: {("decode",): 1.0})
    metrics.inference_accepted()
    metrics.inference_answered()
    metrics.inference_failed("deadline")
    metrics.inference_cancelled("queue")
    for name, reader in queue_readers(lambda: {"m": QUEUE}).items():
        metrics.read(name, reader)
    metrics.read("decoder_restarts_total", lambda: 4)
    metrics.read("engine_up", lambda: 1)
    metrics.read("engine_restarts_total", lambda: 5)
    metrics.read("engine_stalls_total", lambda: 1)
    metrics.read("engine_retries_total", lambda: 7)
    metrics.read("replica_up", lambda: {("http://h:1",): 1.0})
    metrics.read("replica_ejections_total", lambda: {("http://h:1",): 2.0})
    metrics.read("gateway_restarts_total", lambda: 0)
    metrics.read("fronts", lambda: 2)
    metrics.read("access_keys", lambda: 2)
    for name in ("tls_certificate_expires_timestamp_seconds", "tls_failed_reads_total", "access_failed_reads_total"):
        metrics.read(name, lambda: 1)
    for name in ("guests", "front_restarts_total"):  # plain-english: ok
        metrics.read(name, lambda: 1)
    metrics.read("key_inflight_requests", lambda: {("camera",): 3.0})
    metrics.read("shared_memory_regions", lambda: 2)
    metrics.read("shared_memory_bytes", lambda: 4096)
    metrics.read("shared_memory_expired_total", lambda: {("lease",): 1.0})
    metrics.read("spans_dropped_total", lambda: 6)
    metrics.read("slab_leased_bytes", lambda: 7)
    metrics.read("ready", lambda: 1)
    metrics.read("model_ready", lambda: {("m",): 1.0, ("broken",): 0.0})
    metrics.read("model_unavailable", lambda: {("broken", "hang"): 1.0})
    metrics.read("mps_up", lambda: True)
    for name in ("sm_activity", "sm_occupancy", "tensor_activity", "memory_bandwidth_activity"):
        metrics.read(f"gpu_{name}", lambda: {("0", "gpm"): 0.5})
    for name in ("nvdec_activity", "nvjpg_activity"):
        metrics.read(f"gpu_{name}", lambda: {("0", "dcgm"): 0.25})
    for name in ("process_memory_bytes", "process_time_share"):
        metrics.read(f"gpu_{name}", lambda: {("0", "resnet50_0_0"): 1.0})
    for name in ("model_hangs_total", "gpu_up", "gpu_kernel_running_share"):
        metrics.read(name, lambda: {("0",): 1.0})
    metrics.read("gpu_info", lambda: {("0", "GPU-a"): 1.0})
    metrics.read("gpu_xid_errors_total", lambda: {("0", "79"): 1.0})
    for name in ("clients", "unattached_processes", "restarts_total", "recovery_seconds"):
        metrics.read(f"mps_{name}", lambda: 1)
    metrics.read("build_info", lambda: {("1.2.3",): 1.0})
    return metrics


def test_metrics_text_holds_every_row_of_the_table() -> None:
    """Nothing is declared that is not served."""
    text = filled().text().decode()
    for row in METRICS:
        assert f"# HELP penstock_{row.name.removesuffix('_total')}" in text, row.name
    assert 'penstock_requests_total{code="200",model="m",protocol="http"} 1.0' in text
    assert "penstock_engine_restarts_total 5.0" in text
    assert 'penstock_model_ready{model="broken"} 0.0' in text
    assert 'penstock_batch_size_bucket{le="4.0",model="m"} 1.0' in text
    assert 'penstock_batch_queue_requests{model="m"} 3.0' in text
    assert 'penstock_batch_wait_seconds{model="m"} 0.25' in text
    assert 'penstock_batches_total{model="m",reason="full"} 6.0' in text
    assert 'penstock_batch_refused_total{model="m",reason="queue_full"} 2.0' in text
    assert 'penstock_inferences_cancelled_total{stage="queue"} 1.0' in text
    assert "penstock_mps_up 1.0" in text
    assert 'penstock_build_info{version="1.2.3"} 1.0' in text


def test_metrics_text_has_the_process_that_serves_it() -> None:
    """Memory, descriptors, CPU time and start of the process are there, under the names that every program has."""
    lines = dict(line.split() for line in filled().text().decode().splitlines() if line.startswith("process_"))
    assert set(lines) == set(PROCESS_METRICS)
    assert float(lines["process_resident_memory_bytes"]) > 1 << 20
    assert 0 < float(lines["process_open_fds"]) < float(lines["process_max_fds"])
    assert abs(time.time() - float(lines["process_start_time_seconds"])) < 86_400


def test_wait_that_is_not_known_is_no_number() -> None:
    """A queue without a fit predicts nothing."""
    readers = queue_readers(lambda: {"m": replace(QUEUE, wait_s=None)})
    assert readers["batch_wait_seconds"]() == {}


def test_metrics_pass_promtool() -> None:
    """`promtool check metrics` has no word to say."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: Debian's package prometheus has it")
    done = subprocess.run([promtool, "check", "metrics"], input=filled().text(), capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")


def test_metrics_have_no_series_that_the_table_does_not_declare() -> None:
    """A person who reads the page finds our names, the process's, and nothing else of the library's."""
    declared = {f"penstock_{row.name}" for row in METRICS} | set(PROCESS_METRICS)
    lines = [line for line in filled().text().decode().splitlines() if not line.startswith("#")]
    names = {re.sub(r"_(bucket|sum|count)$", "", re.split(r"[ {]", line)[0]) for line in lines}
    assert names <= declared
