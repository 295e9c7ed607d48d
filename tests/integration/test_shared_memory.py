"""Clients that share memory with the engine: both engines, the real clients, and what would kill Triton."""

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.integration.living import triton_of
from tests.integration.shared_memory_clients import (
    FOUR,
    SIZE_BYTES,
    get,
    infer_shared,
    over_grpc,
    over_http,
    put,
    register_and_die,
    segment,
)
from tests.support.http import call, post_json
from tests.support.stack import ENGINE_PORTS, RunningStack, start_stack, stop_stack
from tests.support.tiny_models import CONFIG, IDENTITY, SHIPPED_IDENTITY, SLOW, write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("shared_memory")
SYSTEM = "/v2/systemsharedmemory"
ON = "--allow-client-shm"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack with the real Triton, on which clients may share memory; leases are short."""
    home = tmp_path_factory.mktemp("sharing")
    strings = CONFIG.format(max_batch_size=8, data_type="TYPE_STRING", count=1)
    write_model(home / "models", "identity_bytes", IDENTITY, strings)
    write_model(home / "models", "slow", SLOW, CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1))
    running = start_stack(
        *(home, ON, "--models", "identity_fp32,identity_bytes,slow", *ENGINE_PORTS),
        environ={"PENSTOCK_CLIENT_SHM_LEASE_S": "4"},
    )
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The same with the embedded engine."""
    running = start_stack(tmp_path_factory.mktemp("embedded"), ON, "--engine", "embedded", "--models", "identity_fp32")
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture(params=["triton", "embedded"])
def stack_of_each(request: pytest.FixtureRequest) -> RunningStack:
    """Each engine in turn."""
    found: RunningStack = request.getfixturevalue("sharing" if request.param == "triton" else "embedded")
    return found


def metric(stack: RunningStack, name: str) -> float:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return float(text.split(f"\npenstock_{name} ")[1].split("\n")[0])


def engines_regions(stack: RunningStack) -> list[str]:
    """Clients' regions that the engine itself has; the gateway's slab is no leak of a client."""
    rows = call("GET", f"{stack.engine_http_url}{SYSTEM}/status").json
    return [row["name"] for row in rows if not row["name"].endswith("_slab")]


def is_alive(stack: RunningStack) -> bool:
    """Whether the engine still is the one that it was at the start."""
    return (
        metric(stack, "engine_restarts_total") == 0 and call("GET", f"{stack.http_url}/v2/health/ready").status == 200
    )


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_client_infers_from_shared_memory_into_it(stack_of_each: RunningStack, protocol: str) -> None:
    """tritonclient, unmodified: registered, listed, used at offsets, unregistered."""
    stack = stack_of_each
    module: ModuleType = http_client if protocol == "http" else grpc_client
    with segment() as shared, (over_http if protocol == "http" else over_grpc)(stack) as client:
        client.unregister_system_shared_memory()
        client.register_system_shared_memory("r", f"/{shared.name}", SIZE_BYTES)
        status = client.get_system_shared_memory_status()
        assert [region["name"] for region in status] == ["r"] if protocol == "http" else list(status.regions) == ["r"]
        for offset in (0, 4096):
            put(shared, FOUR, offset)
            assert infer_shared(client, module, offset=offset) == [1, 4]
            assert get(shared, 4, offset + 64) == [1.0, 2.0, 3.0, 4.0]
        assert metric(stack, "shared_memory_bytes") == SIZE_BYTES
        client.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
            infer_shared(client, module)
    assert metric(stack, "shared_memory_regions") == 0


def test_clients_share_what_one_of_them_registered_and_clear_only_their_own(stack_of_each: RunningStack) -> None:
    """Connections of one address use each other's regions; unregister-all takes those of its own connection."""
    stack = stack_of_each
    with contextlib.ExitStack() as held:
        first, second, third = (held.enter_context(segment()) for _ in range(3))
        web, one, other = (held.enter_context(client(stack)) for client in (over_http, over_grpc, over_grpc))
        web.register_system_shared_memory("web", f"/{first.name}", SIZE_BYTES)
        one.register_system_shared_memory("one", f"/{second.name}", SIZE_BYTES)
        other.register_system_shared_memory("other", f"/{third.name}", SIZE_BYTES)
        put(second, FOUR)
        infer_shared(other, grpc_client, region="one")
        infer_shared(web, http_client, region="one")
        assert get(second, 4, 64) == [1.0, 2.0, 3.0, 4.0]
        one.unregister_system_shared_memory()
        assert sorted(other.get_system_shared_memory_status().regions) == ["other", "web"]
        web.unregister_system_shared_memory()
        assert sorted(other.get_system_shared_memory_status().regions) == ["other"]
        other.unregister_system_shared_memory()
    assert metric(stack, "shared_memory_regions") == 0


@pytest.mark.parametrize("how", ["killed", "left"])
def test_client_that_dies_leaks_nothing(sharing: RunningStack, how: str) -> None:
    """Its connection is gone, and so are its regions seconds later; its name can be taken at once."""
    with segment() as shared:
        for _ in range(2):
            register_and_die(sharing.grpc_address, "mine", f"/{shared.name}", how)
            assert metric(sharing, "shared_memory_regions") == 1
        took_s = wait_for(lambda: metric(sharing, "shared_memory_regions") == 0, 15, "the region is gone")
    assert took_s < 15
    assert engines_regions(sharing) == []


def test_unused_region_goes_with_its_lease(sharing: RunningStack) -> None:
    """Over HTTP it is not known whether the client lives: its lease ends unless it is used."""
    with segment() as shared, over_http(sharing) as client:
        put(shared, FOUR)
        client.register_system_shared_memory("r", f"/{shared.name}", SIZE_BYTES)
        until = time.monotonic() + 6
        while time.monotonic() < until:
            infer_shared(client, http_client)
            time.sleep(0.5)
        wait_for(lambda: metric(sharing, "shared_memory_regions") == 0, 15, "the region is gone")
    assert engines_regions(sharing) == []


DEADLY = {
    "a size that wraps around, of an input": (
        "identity_bytes",
        {"name": "x", "shape": [1, 1], "datatype": "BYTES"},
        {"shared_memory_offset": 16, "shared_memory_byte_size": 2**64 - 1},
        None,
    ),
    "a size that wraps around, of an output": (
        "identity_fp32",
        {"name": "x", "shape": [1, 4096], "datatype": "FP32", "data": [1.0] * 4096},
        None,
        {"shared_memory_offset": 4000, "shared_memory_byte_size": 2**64 - 1},
    ),
}


@pytest.mark.parametrize("name", DEADLY)
def test_request_that_ends_a_bare_triton_is_refused(sharing: RunningStack, name: str) -> None:
    """400 in Triton's words; the engine lives on."""
    model, tensor, of_input, of_output = DEADLY[name]
    with segment(4096) as shared, over_http(sharing) as client:
        shared.buf[16:20] = struct.pack("<I", 0x700000)
        client.register_system_shared_memory("r", f"/{shared.name}", 4096)
        where = {"shared_memory_region": "r"}
        given = tensor if of_input is None else tensor | {"parameters": where | of_input}
        body: dict[str, object] = {"inputs": [given]}
        if of_output is not None:
            body["outputs"] = [{"name": "y", "parameters": where | of_output}]
        answer = post_json(f"{sharing.http_url}/v2/models/{model}/infer", body)
        client.unregister_system_shared_memory()
    assert (answer.status, answer.json) == (400, {"error": "Invalid offset + byte size for shared memory region: 'r'"})
    assert is_alive(sharing)


def test_segment_that_was_cut_is_refused_before_the_engine_dies_of_it(stack_of_each: RunningStack) -> None:
    """A mapping beyond a file's end is SIGBUS."""
    with segment() as shared, over_http(stack_of_each) as client:
        client.register_system_shared_memory("r", f"/{shared.name}", SIZE_BYTES)
        with Path("/dev/shm", shared.name).open("r+b") as file:
            file.truncate(0)
        with pytest.raises(InferenceServerException, match="its segment was cut to 0"):
            infer_shared(client, http_client)
        client.unregister_system_shared_memory()
    assert is_alive(stack_of_each)


def test_register_of_what_is_not_the_clients_is_refused(sharing: RunningStack) -> None:
    """The engine's own memory, paths, more than there is, and an offset that 2.51 would add twice."""
    theirs = next(path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("penstock_"))
    with segment() as shared, over_http(sharing) as client:
        for key, size_bytes, offset, words in (
            (f"/{theirs}", 64, 0, "belongs to the engine"),
            ("/../../etc/passwd", 64, 0, "takes no '/'"),
            (f"/{shared.name}", SIZE_BYTES + 1, 0, "invalid args"),
            (f"/{shared.name}", 64, 4096, "begins at offset 4096"),
            ("/there_is_no_such_segment", 64, 0, "Unable to open shared memory region"),
        ):
            with pytest.raises(InferenceServerException, match=words) as refusal:
                client.register_system_shared_memory("r", key, size_bytes, offset)
            assert refusal.value.status() == "400"
        assert client.get_system_shared_memory_status() == []


def test_region_in_use_cannot_be_unregistered(sharing: RunningStack) -> None:
    """As in Triton, with Triton's message; when the inference is done, it can."""
    with segment() as shared, over_grpc(sharing) as client, over_http(sharing) as other:
        put(shared, FOUR * 300)
        client.register_system_shared_memory("r", f"/{shared.name}", SIZE_BYTES)
        taken, given = grpc_client.InferInput("x", [1, 4], "FP32"), grpc_client.InferRequestedOutput("y")
        taken.set_shared_memory("r", 16)
        given.set_shared_memory("r", 16, 64)
        outcomes: list[object] = []
        client.async_infer("slow", [taken], lambda result, error: outcomes.append(error or result), outputs=[given])
        wait_for(lambda: metric(sharing, "inflight_requests") == 1, 10, "the request runs")
        with pytest.raises(InferenceServerException, match="Cannot unregister shared memory region 'r', it is curr"):
            other.unregister_system_shared_memory("r")
        wait_for(lambda: bool(outcomes), 20, "the request ends")
        assert isinstance(outcomes[0], grpc_client.InferResult)
        assert get(shared, 4, 64) == [300.0, 600.0, 900.0, 1200.0]
        other.unregister_system_shared_memory("r")
    assert metric(sharing, "shared_memory_regions") == 0
    assert is_alive(sharing)


def test_embedded_engine_shares_no_gpu_memory(embedded: RunningStack) -> None:
    """It says so, advertises system memory only, and takes a region that begins inside its segment."""
    extensions = call("GET", f"{embedded.http_url}/v2").json["extensions"]
    assert ("system_shared_memory" in extensions, "cuda_shared_memory" in extensions) == (True, False)
    answer = call("GET", f"{embedded.http_url}/v2/cudasharedmemory/status")
    assert (answer.status, "shares no GPU memory" in answer.json["error"]) == (501, True)
    with segment() as shared, over_http(embedded) as client:
        put(shared, FOUR, 4000)
        client.register_system_shared_memory("r", f"/{shared.name}", 128, 4000)
        infer_shared(client, http_client)
        assert get(shared, 4, 4064) == [1.0, 2.0, 3.0, 4.0]
        client.unregister_system_shared_memory()


def test_regions_end_with_the_engine(tmp_path: Path, triton_environment: Path) -> None:
    """After a crash of Triton a client registers again, the same name too; before that the region is unknown."""
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / SHIPPED_IDENTITY.name).symlink_to(SHIPPED_IDENTITY)
    stack = start_stack(tmp_path / "home", ON, "--model-repository", str(repository))
    try:
        with segment() as shared, over_http(stack) as client:
            put(shared, FOUR)
            client.register_system_shared_memory("r", f"/{shared.name}", SIZE_BYTES)
            triton_of(stack).kill()
            wait_for(lambda: metric(stack, "engine_restarts_total") == 1, 30, "the engine is restarted")
            wait_for(lambda: call("GET", f"{stack.http_url}/v2/health/ready").status == 200, 60, "it is ready")
            with pytest.raises(InferenceServerException, match="Unable to find shared memory region: 'r'"):
                infer_shared(client, http_client)
            assert client.get_system_shared_memory_status() == []
            client.register_system_shared_memory("r", f"/{shared.name}", SIZE_BYTES)
            infer_shared(client, http_client)
            assert get(shared, 4, 64) == [1.0, 2.0, 3.0, 4.0]
    finally:
        assert stop_stack(stack) == 0


def test_engine_on_another_host_shares_nothing(tmp_path: Path) -> None:
    """501 at once, though that engine does not answer either."""
    stack = start_stack(tmp_path / "home", ON, "--engine", "http://192.0.2.1:8000", wait=False)
    try:
        port = stack.wait_for_log(r": listening ").partition(" http=")[2].split()[0]
        started = time.monotonic()
        answer = call("GET", f"http://127.0.0.1:{port}{SYSTEM}/status")
        assert (answer.status, time.monotonic() - started < 5) == (501, True)
        assert "on another host" in answer.json["error"]
    finally:
        stop_stack(stack)
