"""A Triton whose APIs need a secret header, as an external engine: the gateway sends it from --engine-header-file."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.integration.living import fails_to_start
from tests.integration.replicas import BareTriton
from tests.support.http import call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

SECRET = "only-the-gateway-knows"
ALL_BUT_HEALTH = "metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging"
RESTRICTED = (
    *("--http-restricted-api", f"{ALL_BUT_HEALTH}:engine-key={SECRET}"),
    *("--grpc-restricted-protocol", f"{ALL_BUT_HEALTH}:engine-key={SECRET}"),
)
INFER = "/v2/models/brightness/infer"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [3.0] * 192}]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[BareTriton]:
    """Triton with all APIs except health restricted."""
    triton = BareTriton(tmp_path_factory.mktemp("restricted"), extra_args=RESTRICTED)
    triton.begin()
    yield triton
    triton.clean_up()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, engine: BareTriton) -> Iterator[RunningStack]:
    folder = tmp_path_factory.mktemp("gateway")
    headers = folder / "engine-headers"
    headers.write_text(f"engine-key: {SECRET}\n")
    url, address = engine.addresses
    flags = ("--engine", url, "--engine-grpc", address, "--engine-header-file", str(headers), "--models", "brightness")
    running = start_stack(folder / "home", *flags)
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def grpc_index(address: str, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
    with grpc.insecure_channel(address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=20, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_restricted_engine_serves_the_gateway_and_refuses_everyone_else(
    engine: BareTriton, gateway: RunningStack
) -> None:
    """With the header file the gateway serves every protocol; without the secret Triton only answers health."""
    url, address = engine.addresses
    wait_for(lambda: call("GET", f"{url}/v2/health/live").status == 200, 30, "Triton answers health without the secret")
    assert call("POST", f"{url}/v2/repository/index").status == 403
    assert call("POST", f"{url}{INFER}").status == 403
    assert grpc_index(address) is grpc.StatusCode.UNAVAILABLE  # Triton's code for a restricted protocol
    assert post_json(gateway.http_url + INFER, BODY).status == 200
    assert call("POST", f"{gateway.http_url}/v2/repository/index").status == 200
    assert grpc_index(gateway.grpc_address) is grpc.StatusCode.OK
    assert SECRET not in "".join(gateway.log)


def test_client_of_the_gateway_cannot_replace_the_secret(gateway: RunningStack) -> None:
    """The engine never gets a client's header of the same name."""
    assert call("POST", f"{gateway.http_url}/v2/repository/index", headers={"engine-key": "guess"}).status == 200
    assert grpc_index(gateway.grpc_address, (("triton-grpc-protocol-engine-key", "guess"),)) is grpc.StatusCode.OK


def test_header_file_that_is_not_valid_ends_the_start_in_one_sentence(tmp_path: Path) -> None:
    """The message names the flag, the file and the line, but not the secret."""
    file = tmp_path / "headers"
    file.write_text(SECRET)
    code, said = fails_to_start(tmp_path, "--engine", "http://127.0.0.1:9", "--engine-header-file", str(file))
    assert code == 2
    assert f"--engine-header-file: {file}:1: not a header" in said
    assert SECRET not in said
