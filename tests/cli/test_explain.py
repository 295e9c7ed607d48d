"""`penstock infer --explain` and `penstock models explain`: why a batch was what it was."""

import io
import json
from pathlib import Path

import msgspec
import pytest
from google.protobuf import text_format
from rich.console import Console
from tritonclient.grpc import model_config_pb2

from penstock.cli.models import print_page
from penstock.gateway.batching.batch_report import EngineBatches, explain_engine, explain_queue
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import QueueStatistics
from penstock.protocol.batch_reports import ModelBatchReport, RequestExplanation
from penstock.protocol.inference import BatchOwner, CloseReason, EngineTimeFit
from tests.cli.conftest import Call, StandIn, jpeg

OPTIONS = BatchOptions(BatchOwner.GATEWAY, max_batch_size=16, instances=2, slo_s=0.05)
FIT = EngineTimeFit(1.98e-3, 0.1475e-3, 0.2e-3, 1000)
STATISTICS = QueueStatistics(
    depth=3,
    rows=4,
    size_bytes=100,
    in_flight=1,
    max_rows=16,
    fit=FIT,
    wait_s=0.0123,
    batches_by_rows={1: 10, 4: 40, 16: 1},
    closed_by={CloseReason.SLOT_FREE: 50, CloseReason.FULL: 1},
    dropped={"cannot_meet": 2},
)


def shown_by(stand_in: StandIn, penstock: Call, page: ModelBatchReport) -> str:
    stand_in.page = msgspec.to_builtins(page)
    answer = penstock("models", "explain", "street", "--url", stand_in.url)
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert stand_in.asked[-1].path == "/v2/models/street/explain"
    return answer.stdout


def test_models_explain_shows_queue_fit_histogram_and_a_config_for_triton(penstock: Call, stand_in: StandIn) -> None:
    """In plain lines for a person, the bars in proportion, and what follows is a piece of config.pbtxt."""
    shown = shown_by(stand_in, penstock, explain_queue("street", OPTIONS, STATISTICS))
    assert "street: the gateway forms its batches" in shown
    assert "declared  max_batch_size 16, 2 instances, " in shown
    assert "2 instances, slo_p99_ms 50, max_queue_delay_us 0, max_queue_size 1024, max_queue_bytes 512 MiB" in shown
    assert (
        "3 requests of 4 rows waiting, 1 of 3 calls at the engine, at most 16 rows a batch now; one row more" in shown
    )
    assert "t(b) = 1.980 + 0.1475 b ms, 0.20 ms more at times, by 1000 calls" in shown
    assert (
        "closed    50 because the engine was free and nothing more waited\n          1 because it was full\n" in shown
    )
    assert "refused   cannot_meet 2" in shown
    bars = [line.count("█") for line in shown.splitlines() if "█" in line]
    assert bars == [10, 40, 1]
    config = text_format.Parse(shown[shown.index("# For batches") :], model_config_pb2.ModelConfig())
    assert list(config.dynamic_batching.preferred_batch_size) == [16]


@pytest.mark.parametrize("width", [80, 120])
def test_models_explain_breaks_its_lines_at_words_on_a_terminal(width: int) -> None:
    """None is wider than the terminal, and every word of the page stands there whole; numbers stand under numbers."""
    page = explain_queue("street", OPTIONS, STATISTICS)
    terminal = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    piped = Console(file=io.StringIO(), width=width, force_terminal=False)
    print_page(page, terminal)
    print_page(page, piped)
    shown, whole = (console.file.getvalue() for console in (terminal, piped) if isinstance(console.file, io.StringIO))
    assert max(map(len, shown.splitlines())) <= width
    assert max(map(len, whole.splitlines())) > width
    assert shown.split() == whole.split()
    assert [line[10:].rstrip() for line in shown.splitlines() if line.startswith(10 * " ")][
        -1
    ] == "1 because it was full"


def test_models_explain_of_a_model_that_triton_batches_says_whose_count_it_is(
    penstock: Call, stand_in: StandIn
) -> None:
    """And of one that was never asked, that there is nothing to tell yet."""
    options = BatchOptions(BatchOwner.TRITON, max_batch_size=16)
    shown = shown_by(stand_in, penstock, explain_engine("street", options, EngineBatches()))
    assert "street: Triton forms its batches; the counts are Triton's statistics" in shown
    assert "fit       none yet" in shown
    assert "no batches yet" in shown
    assert "queue  " not in shown
    assert "max_queue" not in shown.split("\n\n")[0]


def test_models_explain_proposes_no_batches_for_requests_that_run_alone(penstock: Call, stand_in: StandIn) -> None:
    """Only the reason is displayed."""
    options = BatchOptions(BatchOwner.TRITON, max_batch_size=16, unmerged="output 'y' has the shape [4, 2]")
    shown = shown_by(stand_in, penstock, explain_engine("filters", options, EngineBatches()))
    assert "merged    no, each request and picture goes to the engine alone: output 'y' has the shape [4, 2]" in shown
    assert "dynamic_batching" not in shown


def test_models_explain_names_parameters_that_are_not_read(penstock: Call, stand_in: StandIn) -> None:
    """With the option that was meant."""
    page = msgspec.structs.replace(explain_queue("street", OPTIONS, STATISTICS), misspelt={"slo_p99ms": "slo_p99_ms"})
    assert "unread    slo_p99ms (did you mean slo_p99_ms?)\n" in shown_by(stand_in, penstock, page)


def test_models_explain_as_json_is_the_gateways_page(penstock: Call, stand_in: StandIn) -> None:
    """For programs, whole."""
    page = explain_queue("street", OPTIONS, STATISTICS)
    stand_in.page = msgspec.to_builtins(page)
    answer = penstock("models", "explain", "street", "--json", "--url", stand_in.url)
    assert msgspec.json.decode(answer.stdout, type=ModelBatchReport) == page


def test_models_explain_of_an_unknown_model_ends_with_the_gateways_word(penstock: Call, stand_in: StandIn) -> None:
    """One sentence, and exit code 1."""
    stand_in.refusals["/explain"] = (404, json.dumps({"error": "no model 'street'"}), {})
    answer = penstock("models", "explain", "street", "--url", stand_in.url)
    assert answer.exit_code == 1
    assert answer.stderr.startswith("penstock: no model 'street'; `penstock models list` shows what there is")


def test_infer_explain_asks_and_prints_the_sentence_of_every_batch(
    penstock: Call, stand_in: StandIn, tmp_path: Path
) -> None:
    """Without the flag no explanation is requested or printed."""
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(jpeg())
    silent = penstock("infer", "street", photo, "--url", stand_in.url)
    assert "x-penstock-explain" not in stand_in.asked[-1].headers
    assert "batch:" not in silent.stdout
    assert "explain" not in json.loads(penstock("infer", "street", photo, "--json", "--url", stand_in.url).stdout)
    stand_in.explain = [
        msgspec.to_builtins(RequestExplanation("street", BatchOwner.GATEWAY, "waited 0.4 ms", queue_ms=0.4))
    ]
    answer = penstock("infer", "street", photo, "--explain", "--url", stand_in.url)
    assert stand_in.asked[-1].headers["x-penstock-explain"] == "1"
    assert answer.stdout.splitlines()[-1] == "batch: waited 0.4 ms"
    answer = penstock("infer", "street", photo, "--explain", "--json", "--url", stand_in.url)
    assert json.loads(answer.stdout)["explain"] == stand_in.explain
