"""A real Prometheus answers every panel, from the real stack, and from a made-up page for what cannot run here."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from penstock.metric_table import METRICS
from penstock_video.metrics import VideoMetrics
from penstock_video.types import AnalyticsKind, CloseReason, DecoderSharing, DropReason, SourceState
from tests.deploy.metric_tables import MONITORING, external_rows
from tests.deploy.promql import metrics_of, substituted
from tests.deploy.test_dashboards import shown_panels
from tests.integration.pictures import jpeg
from tests.integration.prometheus_server import Prometheus, prometheus, scrape
from tests.support.http import call, post_json
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")


def video_page() -> bytes:
    """What the video program shows after a second of each thing that it counts."""
    metrics = VideoMetrics()
    metrics.state("gate", SourceState.RUNNING)
    metrics.state("yard", SourceState.STALLED)
    metrics.sharing("yard", DecoderSharing.MISMATCH)
    for source in ("gate", "yard"):
        metrics.decoded(source, 25)
        metrics.inferred(source, 20)
        metrics.dropped(source, DropReason.TOO_OLD, 5)
        metrics.restarted(source)
        metrics.event(source, next(iter(AnalyticsKind)))
        metrics.recording(source, "ok")
        metrics.unrecorded(source, "cool_down", 1)
        metrics.decode_s(source, 0.004, 25)
        metrics.prepare_s(source, 0.002, 25)
        metrics.glass_to_event(source, 0.05)
    metrics.cards({"GPU 0": 0.75}, 1)
    metrics.mux_wait(0.01)
    metrics.batch(2, CloseReason.FULL)
    metrics.infer("street", 0.02)
    metrics.sink_depth("mqtt", 3, 1000)
    metrics.sink_dropped("mqtt")
    metrics.sink_errors("mqtt")
    return metrics.page()


def page_of(*exporters: str) -> bytes:
    """A card, and a pod of each component, in the words that the tables have of these exporters."""
    values = {"resource": "memory", "reason": "OOMKilled", "gpu": "0", "namespace": "ml", "container": "main"}
    rows = [row for row in external_rows() if row["exporter"] in exporters]
    lines = []
    for row in rows:
        for component in ("gateway", "video"):
            names = {*row["labels"], "namespace", "pod", "container"}
            labels = {name: values.get(name, "x") for name in names} | {"pod": f"shop-{component}-0"}
            pairs = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
            lines.append(f"{row['name']}{{{pairs}}} 1\n")
    return "".join(lines).encode()


@pytest.fixture(scope="module")
def pages() -> Iterator[str]:
    """host:port of a server that has a page of each program that cannot run here, and the video program's."""
    texts = {"/video": video_page(), "/gpu": page_of("dcgm"), "/cluster": page_of("kube-state-metrics", "cadvisor")}

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # Prometheus ends, and its scrapes with it
                self.wfile.write(texts[self.path])

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _ask(stack: RunningStack) -> None:
    """A tensor, a picture, an unknown model, and a malformed request."""
    one = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}
    picture, headers = jpeg(np.zeros((240, 320, 3), np.uint8)), {"content-type": "image/jpeg"}
    assert post_json(f"{stack.http_url}/v2/models/identity_fp32/infer", one).status == 200
    assert post_json(f"{stack.http_url}/v2/models/stranger/infer", one).status == 404
    assert post_json(f"{stack.http_url}/v2/models/identity_fp32/infer", {"inputs": 1}).status == 400
    assert call("POST", f"{stack.http_url}/v2/models/street/image", picture, headers).status == 200


@pytest.fixture(scope="module")
def answering(stack: RunningStack, pages: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has seen the stack at work, and has reckoned the rules."""
    exporter = {"namespace": "gpu-operator", "pod": "dcgm-exporter-7", "container": "exporter"}  # no honorLabels
    with prometheus(
        tmp_path_factory.mktemp("prometheus"),
        scrape("penstock", re.sub(r"^http://|/metrics$", "", stack.metrics_url)),
        scrape("penstock-video", pages, "/video"),
        scrape("dcgm", pages, "/gpu", **exporter),
        scrape("cluster", pages, "/cluster"),
    ) as server:
        server.wait_for('up{job="penstock"} == 1')
        _ask(stack)
        server.wait_for('penstock_postprocess_seconds_count{model="street"} >= 1')  # the last of a picture's figures
        _ask(stack)
        server.wait_for('penstock:batch_size:mean_5m{model="street"} > 0 and on () penstock:errors:ratio_rate5m >= 0')
        server.wait_for("penstock:gpu_sm_active:ratio")
        server.wait_for("penstock:video_glass_to_event_seconds:p90_5m")  # each group at its own time
        yield server


# Metrics that have no series in a stack to which none of this happened.
NOT_HERE = {
    "penstock_mps_up": "no MPS daemon is named to the gateway",
    **dict.fromkeys((f"penstock_{row.name}" for row in METRICS if row.name.startswith("gpu_")), "there is no GPU"),
    **{f"penstock_mps_{what}": "no --mps" for what in ("clients", "unattached_processes", "restarts_total")},
    "penstock_mps_recovery_seconds": "no --mps",
    "penstock_replica_up": "one engine has no replicas",
    "penstock_replica_ejections_total": "one engine has no replicas",
    "penstock_key_inflight_requests": "there are no keys",
    "penstock_access_keys": "there are no keys",
    "penstock_access_failed_reads_total": "there are no keys",
    "penstock_tls_failed_reads_total": "there is no TLS",
    "penstock_tls_certificate_expires_timestamp_seconds": "there is no TLS",
    "penstock_model_unavailable": "every model serves",
    "penstock_model_hangs_total": "no model hung",
    "penstock_spans_dropped_total": "no traces are sent",
    "penstock_shared_memory_bytes": "clients may not share memory",
    "penstock_shared_memory_regions": "clients may not share memory",
    "penstock_shared_memory_expired_total": "clients may not share memory",
    "penstock_batch_wait_seconds": "too few calls for a fit",
    "penstock_batch_refused_total": "the queue gave nothing up",
    "penstock:batch_refused:rate5m": "the queue gave nothing up",
    "penstock_inferences_failed_total": "nothing failed",
    "penstock_inferences_cancelled_total": "no client disconnected",
    "penstock_cancelled_total": "no client disconnected",
    "penstock_decode_errors_total": "every picture was one",
    "penstock:video_dropped:ratio_rate5m": "its page stands still",
}
# What is left of a metric's series may be none: no restarts, no card's pod where Prometheus calls it exported_pod.
FILTER = r'> 0$|exported_pod=""'


def queries() -> Iterator[tuple[str, str, str]]:
    """Dashboard, panel and query of every target."""
    for path in sorted((MONITORING / "dashboards").glob("*.json")):
        for panel in shown_panels(json.loads(path.read_text())):
            for target in panel.get("targets", ()):
                yield path.stem, panel["title"], substituted(target["expr"])


def test_panels_are_each_answered(answering: Prometheus) -> None:
    """No query is refused, and each has data, but where a metric has no series here, or a filter leaves nothing."""
    silent = []
    for board, panel, query in queries():
        found = answering.query(query)
        absent = {name for name in metrics_of(query) if not answering.query(f"count({name})")}
        for name in absent.difference(NOT_HERE):  # a rule whose group was not evaluated yet
            answering.wait_for(f"count({name})")
        if not found and absent.isdisjoint(NOT_HERE) and not re.search(FILTER, query):
            silent.append((board, panel, query))
    for _, _, query in silent:  # rates need two samples
        answering.wait_for(query)


def test_tritons_metrics_are_on_the_page_of_the_running_stack(answering: Prometheus) -> None:
    """Each nv_… of the tables has series, with the labels that the tables say, of the job penstock."""
    for row in external_rows():
        if row["exporter"] == "triton":
            series = answering.query(f"{row['name']}{{job='penstock'}}")
            assert series, row["name"]
            assert set(series[0]["metric"]) - {"__name__", "job", "instance"} == set(row["labels"]), row["name"]
