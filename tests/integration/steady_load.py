"""Clients that never pause for long and never try again: each answer is checked, each failure is kept.

Plain ones, on kept-alive connections: `http.client`, and gRPC channels without a retry policy. (What gRPC itself sends
again is a call that no server has seen. With `grpc.enable_retries=0` it does not, and then one call in a hundred ages
of a connection is lost to its GOAWAY.) A request is a picture in one colour; as a tensor it is the request's number,
which no picture's colour reaches.
"""

import http.client
import itertools
import json
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import cv2
import grpc
import numpy as np
from tritonclient.grpc import service_pb2

PAUSE_S = 0.08
TIMEOUT_S = 60.0
SERVICE = "inference.GRPCInferenceService"
# The health check keeps calls away from a replica that listens and is not ready: one that starts, or drains.
ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": SERVICE}})
INFER = f"/{SERVICE}/ModelInfer"
GRPC_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    *(("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)),
]
MODEL, SHAPE, SIZE = "brightness", [1, 3, 8, 8], 192

Ask = Callable[[int], str]  # of a request's number; "" where it was answered rightly


@dataclass
class Client:
    """One caller. answered: the numbers of its requests, in order. failed: what went wrong, and when."""

    name: str
    answered: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def note(self, number: int, ask: Ask) -> None:
        """What becomes of the request of that number."""
        try:
            wrong = ask(number)
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            wrong = repr(error)
        if wrong:
            self.failed.append(f"{time.monotonic():.3f} request {number}: {wrong}")
        else:
            self.answered.append(number)


class SteadyLoad:
    """Runs from `with` to its end. numbers: of all requests, each used once."""

    def __init__(self) -> None:
        self.clients: list[Client] = []
        self._numbers = itertools.count(2)
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(32)

    def __enter__(self) -> "SteadyLoad":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Every client ends with the answer that it waits for."""
        self._is_over.set()
        self._threads.shutdown()

    @property
    def failures(self) -> list[str]:
        """Of all clients."""
        return [f"{client.name}: {failure}" for client in self.clients for failure in client.failed]

    def answered(self, prefix: str) -> list[int]:
        """The numbers of the answered requests of the clients so named."""
        return [number for client in self.clients if client.name.startswith(prefix) for number in client.answered]

    def tensors_over_http(self, address: str) -> None:
        """A caller of /infer."""
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)

        def ask(number: int) -> str:
            tensor = {"name": "x", "shape": SHAPE, "datatype": "FP32", "data": [number] * SIZE}
            body = json.dumps({"inputs": [tensor]}).encode()
            status, answer = _post(connection, f"/v2/models/{MODEL}/infer", body, "application/json")
            if status != 200 or json.loads(answer)["outputs"][0]["data"][0] != number:
                return f"{status}: {answer[:200]!r}"
            return ""

        self._begin("tensors over HTTP", ask, connection.close)

    def pictures(self, address: str, grey: int) -> None:
        """A caller of /image, whose pictures are all of one grey."""
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        is_written, encoded = cv2.imencode(".png", np.full((8, 8, 3), grey, np.uint8))
        assert is_written

        def ask(_: int) -> str:
            status, answer = _post(connection, f"/v2/models/{MODEL}/image", encoded.tobytes(), "image/png")
            if status != 200:
                return f"{status}: {answer[:200]!r}"
            scores = {found["label"]: found["score"] for found in json.loads(answer)["results"][0]["classes"]}
            return "" if abs(scores["bright"] - grey / 255) < 0.01 else f"another picture's answer: {scores}"

        self._begin("pictures", ask, connection.close)

    def unary_over_grpc(self, address: str) -> None:
        """A caller behind one address."""
        channel = grpc.insecure_channel(address, GRPC_OPTIONS)
        self._begin("unary over gRPC", _grpc_asker(channel), channel.close)

    def unary_to_each(self, addresses: list[str]) -> None:
        """A caller that balances by itself, as over a headless Service: round robin over the addresses."""
        options = [*GRPC_OPTIONS, ("grpc.service_config", ROUND_ROBIN)]
        channel = grpc.insecure_channel(f"ipv4:{','.join(addresses)}", options)
        self._begin("unary to each", _grpc_asker(channel), channel.close)

    def _begin(self, name: str, ask: Ask, close: Callable[[], None]) -> None:
        client = Client(name)
        self.clients.append(client)
        self._threads.submit(self._run, client, ask, close)

    def _run(self, client: Client, ask: Ask, close: Callable[[], None]) -> None:
        try:
            while not self._is_over.is_set():
                client.note(next(self._numbers), ask)
                time.sleep(PAUSE_S)
        finally:
            close()


def _post(connection: http.client.HTTPConnection, target: str, body: bytes, content_type: str) -> tuple[int, bytes]:
    """Status and body. A connection that failed is closed, and made anew for the next request."""
    try:
        connection.request("POST", target, body, {"content-type": content_type})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        raise


def _grpc_asker(channel: grpc.Channel) -> Ask:
    encode, decode = service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
    infer = channel.unary_unary(INFER, encode, decode)

    def ask(number: int) -> str:
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="x", datatype="FP32", shape=SHAPE)
        request.raw_input_contents.append(struct.pack("<f", number) * SIZE)
        answered, _ = struct.unpack("<2f", infer(request, timeout=TIMEOUT_S).raw_output_contents[0])
        return "" if answered == number else f"another request's answer: {answered}"

    return ask
