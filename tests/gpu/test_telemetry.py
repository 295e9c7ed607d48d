"""What is read of the cards, over a fake NVML and a dcgm-exporter's page: figures, their source, and what is lost."""

import json
import sys
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from penstock.gpu.telemetry.__main__ import TelemetrySource
from penstock.gpu.telemetry.cards import NOT_PERMITTED, NOT_SUPPORTED, Cards, command_name, process_name
from penstock.gpu.telemetry.dcgm import DcgmUnavailable, cards_of, read_dcgm, with_dcgm_activity
from penstock.gpu.telemetry.messages import Activity, ActivitySource, CardLoad, ProcessLoad, TelemetryMessage, Xid
from penstock.gpu.telemetry.sampler import Sampler, TelemetryUnavailable, mean_loads, sample

FAKE = Path(__file__).parent / "fake_nvml"
SPINNING = {"1": 100.0, "2": 0.76, "3": 0.02, "5": 0.0, "10": 0.0, "30": 10.0, "31": 30.0, "40": 0.0}
PAGE = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",modelName="Tesla V100",Hostname="node"} 100
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",device="nvidia0",modelName="Tesla V100",Hostname="node"} 0.0125
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-a",GPU_I_ID="3",modelName="Tesla V100",Hostname="node"} 0.9
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-a",device="nvidia0",modelName="Tesla V100",Hostname="node"} 0.5
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",device="nvidia0",modelName="Tesla V100",Hostname="node"} 1024
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",device="nvidia0",modelName="Tesla V100",Hostname="node"} 15360
"""

Change = Callable[..., None]


def card(uuid: str = "GPU-a", **said: Any) -> dict[str, Any]:
    """A card of the fake NVML."""
    return {"uuid": uuid, "util": 100, "gpm": SPINNING, **said}


def fake_binding() -> Any:
    spec = util.spec_from_file_location("pynvml", FAKE / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Says what the fake NVML answers from now on, here and in processes that are started."""
    state = tmp_path / "nvml.json"
    monkeypatch.setitem(sys.modules, "pynvml", fake_binding())
    monkeypatch.setenv("FAKE_NVML", str(state))
    monkeypatch.setenv("PYTHONPATH", str(FAKE))

    def change(*cards: dict[str, Any], **said: Any) -> None:
        new = state.with_suffix(".new")
        new.write_text(json.dumps({"cards": cards, **said}))
        new.replace(state)

    return change


def test_card_with_gpm_is_read_with_its_source(nvml: Change) -> None:
    """One SM of 132 that never rests: `util` 100 %, SM activity below one in a hundred; what a card lacks is None."""
    nvml(card(used=7 << 30, total=140 << 30))
    (read,) = Cards().read().cards
    assert read.kernel_running == 1.0
    assert read.source is ActivitySource.GPM
    assert read.activity == Activity(0.0076, 0.0002, 0.0, 0.0, 0.2, 0.0, 1.0)
    assert (read.memory_used_bytes, read.memory_bytes, read.lost) == (7 << 30, 140 << 30, "")


def test_second_reading_is_of_the_time_since_the_first(nvml: Change) -> None:
    """Samples change places: the fake NVML refuses two that do not follow each other."""
    nvml(card())
    cards = Cards()
    cards.read()
    nvml(card(gpm={"2": 50.0}))
    assert cards.read().cards[0].activity == Activity(sm=0.5)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"gpm_error": 4}, NOT_PERMITTED),
        ({"gpm_error": 13}, NOT_SUPPORTED),
        ({"gpm_error": 3}, NOT_SUPPORTED),
        ({"gpm_error": 999}, "Unknown Error"),
    ],
)
def test_card_without_gpm_says_why_and_keeps_its_other_figures(nvml: Change, said: dict[str, int], why: str) -> None:
    """Util and memory are there; activity is None, and never nought."""
    nvml(card(**said), {"uuid": "GPU-v100", "util": 3})
    read, before_hopper = Cards().read().cards
    assert before_hopper.why_no_activity == NOT_SUPPORTED
    assert (read.source, read.activity, read.why_no_activity) == (None, Activity(), why)
    assert read.kernel_running == 1.0


@pytest.mark.parametrize("error", [15, 16])
def test_card_that_falls_off_the_bus_is_lost(nvml: Change, error: int) -> None:
    """The other card is read on."""
    nvml(card(), card("GPU-b"))
    cards = Cards()
    assert [read.lost for read in cards.read().cards] == ["", ""]
    nvml(card(error=error), card("GPU-b"))
    for _ in range(2):
        lost, well = cards.read().cards
        assert (bool(lost.lost), lost.uuid, well.lost) == (True, "GPU-a", "")
        assert well.activity.sm == 0.0076


def test_card_that_fails_and_is_found_again_is_not_lost(nvml: Change) -> None:
    """Unknown Error of one reading: the next one has figures again. One that is not found again is lost."""
    nvml(card())
    cards = Cards()
    nvml(card(error=999))
    (silent,) = cards.read().cards
    assert (silent.lost, silent.why_no_activity) == ("", "Unknown Error")
    nvml(card())
    (again,) = cards.read().cards
    assert (again.activity.sm, again.why_no_activity) == (0.0076, "")
    nvml(card(error=999, open_error=999))
    assert cards.read().cards[0].lost == "Unknown Error"


def test_card_that_may_not_be_opened_is_not_lost(nvml: Change) -> None:
    """It belongs to another user."""
    nvml(card(open_error=4))
    (read,) = Cards().read().cards
    assert (read.lost, read.why_no_activity) == ("", "Insufficient Permissions")


def test_xid_is_reported_once(nvml: Change) -> None:
    """With the card that it is of."""
    nvml(card(), card("GPU-b"), xids=[[1, 31]])
    cards = Cards()
    assert cards.read().xids == (Xid(1, 31),)
    assert cards.read().xids == ()


def test_processes_have_memory_time_and_a_name(nvml: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS clients among them; idle ones have no time, samples of rubbish and of before do not count."""
    monkeypatch.setattr("penstock.gpu.telemetry.cards.process_name", lambda pid: {7: "resnet50_0_0"}.get(pid, "other"))
    shares = [[7, 1000, 40], [7, 2000, 60], [8, 2000, 4_000_000_000]]
    nvml(card(processes=[[8, 1 << 20], [9, None]], mps_processes=[[7, 2 << 20]], shares=shares))
    cards = Cards()
    reported = {one.pid: (one.name, one.memory_bytes, one.time_share, one.is_mps_client) for one in _processes(cards)}
    assert reported == {
        7: ("resnet50_0_0", 2 << 20, 0.5, True),
        8: ("other", 1 << 20, None, False),
        9: ("other", None, None, False),
    }
    assert {one.time_share for one in _processes(cards)} == {None}


def _processes(cards: Cards) -> tuple[Any, ...]:
    return cards.read().cards[0].processes


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("/b/python/triton_python_backend_stub /m/1/model.py region 1 2 3 /lib 4 resnet50_0_3 /m", "resnet50_0_3"),
        ("/b/python/triton_python_backend_stub /m/1/model.py", "triton_python_backend_stub"),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/m", "tritonserver"),
        ("nvidia-cuda-mps-server", "nvidia-cuda-mps-server"),
        ("", ""),
    ],
)
def test_process_is_named_by_its_model_instance_or_its_program(words: str, name: str) -> None:
    """What stays the same when it is started again, and no id."""
    assert command_name(words.split(" ")) == name


def test_process_that_cannot_be_seen_has_a_name_all_the_same(tmp_path: Path) -> None:
    """A host's id in a container; and a kernel thread, which has no command line."""
    assert process_name(7, tmp_path) == "unknown"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes(b"")
    (tmp_path / "7" / "comm").write_text("kworker\n")
    assert process_name(7, tmp_path) == "kworker"


def test_dcgm_page_is_read_in_shares_and_bytes() -> None:
    """Percent and MiB are turned; a MIG instance's figure is not the card's."""
    (read,) = cards_of(PAGE)
    assert (read.index, read.uuid, read.name, read.kernel_running) == (0, "GPU-a", "Tesla V100", 1.0)
    assert read.source is ActivitySource.DCGM
    assert read.activity == Activity(sm=0.0125, tensor=0.5)
    assert (read.memory_used_bytes, read.memory_bytes) == (1 << 30, 16 << 30)


def test_dcgm_without_profiling_figures_says_what_to_give_it() -> None:
    """Its default has no SM activity."""
    (read,) = cards_of(PAGE.replace("PROF_SM_ACTIVE", "PROF_OTHER"))
    assert read.activity.sm is None
    assert "dcgm-counters.csv" in read.why_no_activity


def test_dcgm_activity_joins_nvmls_card_by_uuid() -> None:
    """Whatever their indexes are; where NVML has no card, the exporter's own."""
    reported = cards_of(PAGE)
    ours = CardLoad(4, "GPU-a", kernel_running=0.5), CardLoad(0, "GPU-b", lost="gone"), CardLoad(1, "GPU-c")
    first, lost, unreported = with_dcgm_activity(ours, reported)
    assert (first.index, first.source, first.activity.sm, first.kernel_running) == (4, ActivitySource.DCGM, 0.0125, 0.5)
    assert lost == ours[1]
    assert "does not report" in unreported.why_no_activity
    assert with_dcgm_activity((), reported) == reported


def test_dcgm_that_does_not_answer_or_sends_rubbish_is_reported(tmp_path: Path) -> None:
    """By its address; the process that asks goes on."""
    (tmp_path / "page").write_text("this is { no page")
    for url in ("http://127.0.0.1:9/metrics", f"file://{tmp_path}/page"):
        with pytest.raises(DcgmUnavailable, match=url):
            read_dcgm(url)


def test_with_dcgm_gpm_is_left_alone(nvml: Change, tmp_path: Path) -> None:
    """Both read the same counters of the hardware. Without the exporter's page the card keeps its other figures."""
    page = tmp_path / "page"
    page.write_text(PAGE)
    nvml(card(util=50))
    asker = TelemetrySource(f"file://{page}")
    (read,) = asker.read().cards
    assert (read.source, read.activity.sm, read.kernel_running) == (ActivitySource.DCGM, 0.0125, 0.5)
    page.unlink()
    (read,) = asker.read().cards
    assert (read.source, read.kernel_running) == (None, 0.5)
    assert "No such file" in read.why_no_activity


def test_with_dcgm_no_card_is_needed_here(nvml: Change, tmp_path: Path) -> None:
    """The engine and its exporter are on another machine."""
    page = tmp_path / "page"
    page.write_text(PAGE)
    nvml(init_error=9)
    asker = TelemetrySource(f"file://{page}")
    line = asker.read()
    assert (line.why, line.cards[0].activity.sm) == ("", 0.0125)
    page.unlink()
    assert "No such file" in asker.read().why


def test_sampler_reads_the_process_that_asks(nvml: Change) -> None:
    """Real pipes and a real process, over the fake NVML: the means of the time that was asked for."""
    nvml(card())
    with Sampler(interval_s=0.02) as sampler:
        begin_s = time.monotonic()
        (read,) = sampler.mean(begin_s, begin_s + 0.05)
        assert read.activity.sm == pytest.approx(0.0076)
        assert read.source is ActivitySource.GPM


def test_sample_where_there_is_no_card_says_why(nvml: Change) -> None:
    """In NVML's words, at once."""
    nvml(init_error=9)
    with pytest.raises(TelemetryUnavailable, match="NVML: Driver Not Loaded"):
        sample(5.0)


def test_sampler_whose_process_dies_or_says_nothing_ends() -> None:
    """A library that ends its process; one whose card is lost ends too, and means of later times cannot be had."""
    with pytest.raises(TelemetryUnavailable, match="ended"), Sampler(program=(sys.executable, "-I", "-c", "")):
        pass
    line = 'import sys; print(\'{"at_s": 1.0, "seconds": 0.5}\')'
    with (
        Sampler(program=(sys.executable, "-I", "-c", line)) as sampler,
        pytest.raises(TelemetryUnavailable, match="ended"),
    ):
        sampler.mean(0.0, 2.0)


def test_mean_weighs_lines_by_the_part_that_lies_inside() -> None:
    """A second at 0.2 and half of one at 0.8; a figure that one line lacks is the others' mean."""
    lines = [
        TelemetryMessage(11.0, 1.0, (CardLoad(0, activity=Activity(sm=1.0)),)),
        TelemetryMessage(12.0, 1.0, (CardLoad(0, kernel_running=1.0, activity=Activity(sm=0.2, nvdec=0.5)),)),
        TelemetryMessage(13.0, 1.0, (CardLoad(0, kernel_running=0.4, activity=Activity(sm=0.8)),)),
    ]
    (read,) = mean_loads(lines, 11.0, 12.5)
    assert (read.activity.sm, read.activity.nvdec) == (pytest.approx(0.4), 0.5)
    assert read.kernel_running == pytest.approx(0.8)
    with pytest.raises(TelemetryUnavailable):
        mean_loads(lines, 20.0, 21.0)


def test_mean_of_a_process_is_of_the_lines_that_tell_its_time() -> None:
    """NVML does so now and then; one that has ended is not there any more, one that is never reported has none."""

    def line(at_s: float, *processes: ProcessLoad) -> TelemetryMessage:
        return TelemetryMessage(at_s, 1.0, (CardLoad(0, processes=processes),))

    lines = [
        line(1.0, ProcessLoad(7, "a", 10, 0.2), ProcessLoad(8, "gone", 10, 1.0)),
        line(2.0, ProcessLoad(7, "a", 10), ProcessLoad(9, "b", 10)),
        line(3.0, ProcessLoad(7, "a", 30, 0.4), ProcessLoad(9, "b", 10)),
        line(4.0, ProcessLoad(7, "a", 20), ProcessLoad(9, "b", 10)),
    ]
    (card,) = mean_loads(lines, 0.0, 4.0)
    assert [(one.name, one.memory_bytes, one.time_share) for one in card.processes] == [
        ("a", 20, pytest.approx(0.3)),
        ("b", 10, None),
    ]


def test_fake_nvml_says_what_the_real_binding_says() -> None:
    """Its numbers are nvidia-ml-py's, and it has no call that nvidia-ml-py has not."""
    real, fake = pytest.importorskip("pynvml"), fake_binding()
    names = [name for name in vars(fake) if name.lower().startswith(("nvml", "c_nvml"))]
    assert len(names) > 20
    for name in names:
        assert hasattr(real, name), name
        if isinstance(getattr(fake, name), int):
            assert getattr(fake, name) == getattr(real, name), name
