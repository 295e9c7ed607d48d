"""KServe's Python client asks servers everything it can; run in its own environment, it writes what it received.

python kserve_calls.py HTTP_URL GRPC_ADDRESS …    a JSON list, an object a server: the call's name → result or error
"""

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput

ARRAYS = {
    "FP32": np.arange(6, dtype=np.float32).reshape(2, 3),
    "INT64": np.array([-1, 2**62], np.int64),
    "BOOL": np.array([True, False]),
    "FP16": np.array([1.5, -2], np.float16),
    "BYTES": np.array([b"", "é".encode()], np.object_),
}
Ask = Callable[[], Awaitable[Any]]


def request(
    model: str, datatype: str = "FP32", *, name: str = "x", is_binary: bool = True, **options: Any
) -> InferRequest:
    """With one input."""
    tensor = InferInput(name, list(ARRAYS[datatype].shape), datatype)
    tensor.set_data_from_numpy(ARRAYS[datatype], binary_data=is_binary)
    return InferRequest(model_name=model, infer_inputs=[tensor], request_id="7", **options)


def requests() -> dict[str, InferRequest]:
    """The inferences that both clients ask."""
    as_json, as_bytes = ([RequestedOutput("y", parameters={"binary_data": is_binary})] for is_binary in (False, True))
    table = {
        "binary": request("identity_fp32"),
        "json": request("identity_fp32", is_binary=False),
        "json answer": request("identity_fp32", request_outputs=as_json),
        "binary answer": request("identity_fp32", request_outputs=as_bytes),
        "unknown model": request("unknown"),
        "unknown input": request("identity_fp32", name="wrong"),
    }
    for datatype in set(ARRAYS) - {"FP32"}:
        output = RequestedOutput(f"out_{datatype}", parameters={"binary_data": True})
        table[datatype] = request("types", datatype, name=f"in_{datatype}", request_outputs=[output])
    return table


def over_http(client: InferenceRESTClient, url: str) -> dict[str, Ask]:
    """Every method of the REST client."""
    calls: dict[str, Ask] = {
        "live": lambda: client.is_server_live(url),
        "ready": lambda: client.is_server_ready(url),
        "model ready": lambda: client.is_model_ready(url, "identity_fp32"),
        "unknown model ready": lambda: client.is_model_ready(url, "unknown"),
    }
    for name, asked in requests().items():
        calls[name] = lambda asked=asked: client.infer(url, asked, model_name=asked.model_name)
    return calls


def over_grpc(client: InferenceGRPCClient) -> dict[str, Ask]:
    """Every method of the gRPC client."""
    calls: dict[str, Ask] = {
        "live": client.is_server_live,
        "ready": client.is_server_ready,
        "model ready": lambda: client.is_model_ready("identity_fp32"),
        "unknown model ready": lambda: client.is_model_ready("unknown"),
    }
    for name, asked in requests().items():
        calls[name] = lambda asked=asked: client.infer(asked)
    return calls


async def reply(ask: Ask, address: str) -> Any:
    """The result, or the error's text without the server's address."""
    try:
        answer = await ask()
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        return [type(error).__name__, str(error).replace(address, "")]
    if not hasattr(answer, "outputs"):
        return answer
    outputs = {output.name: [output.datatype, list(output.shape), repr(output.as_numpy())] for output in answer.outputs}
    return [answer.id, answer.model_name, answer.model_version, outputs]


async def ask_everything(url: str, address: str) -> dict[str, Any]:
    """Both clients, one call after the other."""
    over_rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    answers = {f"rest {name}": await reply(ask, url) for name, ask in over_http(over_rest, url).items()}
    async with InferenceGRPCClient(address) as client:
        answers |= {f"grpc {name}": await reply(ask, address) for name, ask in over_grpc(client).items()}
    return answers


if __name__ == "__main__":
    logging.disable()
    servers = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    json.dump([asyncio.run(ask_everything(url, address)) for url, address in servers], sys.stdout)
