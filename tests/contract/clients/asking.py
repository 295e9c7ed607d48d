"""tritonclient's four clients under one hand: the same call through each, and what each tells, made comparable."""

import asyncio
import gc
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.utils import InferenceServerException

Reply: TypeAlias = Any
KINDS = ("http", "grpc", "http.aio", "grpc.aio")
CLIENT_TIMEOUT_S = 30


@dataclass(frozen=True)
class Asker:
    """One client, connected. Calls of the asynchronous ones are waited for."""

    kind: str
    client: Any
    runner: asyncio.Runner | None

    @property
    def is_http(self) -> bool:
        return self.kind.startswith("http")

    @property
    def module(self) -> ModuleType:
        """Where its InferInput and InferRequestedOutput are."""
        return importlib.import_module("tritonclient.http" if self.is_http else "tritonclient.grpc")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the client, whose result is waited for."""

        def ask(*arguments: Any, **options: Any) -> Any:
            result = getattr(self.client, name)(*arguments, **options)
            return self.runner.run(result) if self.runner and asyncio.iscoroutine(result) else result

        return ask

    def tensor(self, array: np.ndarray[Any, Any], datatype: str, name: str = "x", **options: Any) -> Any:
        """An input; options as set_data_from_numpy takes them, where the client is an HTTP one."""
        made = self.module.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array, **(options if self.is_http else {}))
        return made

    def output(self, name: str = "y", *, class_count: int = 0, **options: Any) -> Any:
        """A requested output; options are those of the HTTP clients."""
        return self.module.InferRequestedOutput(name, class_count=class_count, **(options if self.is_http else {}))

    @staticmethod
    def reply(value: Any) -> Reply:
        """A message or a dict, as plain values."""
        return plain(value)

    def infer(self, model: str, inputs: list[Any], *, is_read: bool = True, **options: Any) -> Reply:
        """The answer as it stood on the wire, and every output as an array's bytes or items."""
        result = self.__getattr__("infer")(model, inputs, **options)
        return reported_by_result(result, is_read=is_read)


@contextmanager
def asking(kind: str, address: str) -> Iterator[Asker]:
    """A client of this kind, connected to host:port."""
    module = importlib.import_module(f"tritonclient.{kind}")
    if not kind.endswith("aio"):
        with module.InferenceServerClient(address) as client:
            yield Asker(kind, client, None)
        return
    with asyncio.Runner() as runner:

        async def connect() -> Any:
            return module.InferenceServerClient(address)

        client = runner.run(connect())
        yield Asker(kind, client, runner)
        runner.run(client.close())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # tritonclient.http.aio leaves the body of health unread
        del client
        gc.collect(1)


def reported_by_result(result: Any, *, is_read: bool = True) -> Reply:
    """An InferResult's answer: its head, and the outputs' contents by name, unless they are in shared memory."""
    response = plain(result.get_response())
    response.pop("raw_output_contents", None)
    outputs = response.get("outputs", [])
    names = [output["name"] for output in outputs if is_read]
    outputs.sort(key=lambda output: output["name"])
    return response, {name: _contents(result.as_numpy(name)) for name in sorted(names)}


def reply(ask: Callable[[Asker], Reply], asker: Asker) -> Reply:
    """What the call tells: its result as plain values, or the client's error with status, text and details."""
    try:
        return plain(ask(asker))
    except InferenceServerException as error:
        return {"status": error.status(), "error": error.message()}


def plain(value: Any) -> Any:
    """Messages as dicts, at any depth."""
    if isinstance(value, Message):
        return json_format.MessageToDict(value, preserving_proto_field_name=True)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _contents(array: np.ndarray[Any, Any] | None) -> Reply:
    if array is None:
        return None
    return array.dtype.str, list(array.shape), array.tolist() if array.dtype == np.object_ else array.tobytes()
