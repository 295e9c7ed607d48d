"""The Triton that the stack started, as an engine. Corrects plain model loads by sending the config from disk.

Triton 2.51 would otherwise serve something else:
* after a load with a config override, a plain load keeps that override;
* a folder `2.bak` is read as version 2, without a model file;
* a label file's byte order mark and carriage returns become part of the labels.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.call_options import CallTimeouts, RetryBudget
from penstock.engines.embedded.repository import ModelFolder, chosen_versions, read_config, scan
from penstock.engines.relayed_calls import load_over_grpc, to_http_answer
from penstock.engines.triton.client import TritonEngine
from penstock.protocol.call import GrpcCall, HttpAnswer, HttpCall
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.request_checks import is_version

MAX_LABEL_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class DiskLoads:
    """The models in our repositories. label_folder: for cleaned label files."""

    def __init__(self, repositories: Sequence[Path], label_folder: Path) -> None:
        self._repositories = repositories
        self._label_folder = label_folder

    def config_for(self, model_name: str, *, is_overridden: bool) -> str:
        """The config (JSON) for a plain load; empty if not needed. is_overridden: by an earlier load."""
        folder = scan(self._repositories).get(model_name)
        if folder is None:
            return ""
        try:
            config = read_config(folder)
        except InvalidRequest:
            return ""
        is_corrected = self._clean_labels(folder, config)
        versions = chosen_versions(folder, config)
        if versions and _has_lookalike(folder.path):
            config.version_policy.specific.versions[:] = versions
            is_corrected = True
        if not (is_corrected or is_overridden):
            return ""
        config.name = config.name or model_name
        return json_format.MessageToJson(config, preserving_proto_field_name=True, indent=None)

    def _clean_labels(self, folder: ModelFolder, config: model_config_pb2.ModelConfig) -> bool:
        """Points the config to clean copies of its label files. Paths are relative to the model's folder."""
        is_corrected = False
        for output in config.output:
            if not output.label_filename:
                continue
            labels = _read(folder.path / output.label_filename)
            if not labels.startswith(_BYTE_ORDER_MARK) and b"\r" not in labels:
                continue
            copy = self._label_folder / folder.name / f"{output.name}.txt"
            copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy.write_bytes(b"\n".join(labels.removeprefix(_BYTE_ORDER_MARK).splitlines()) + b"\n")
            output.label_filename = os.path.relpath(copy.resolve(), folder.path.resolve())
            is_corrected = True
        return is_corrected


def _has_lookalike(path: Path) -> bool:
    """Whether a folder that is not a version starts with digits: Triton would read it as a version."""
    return any(
        not is_version(entry.name) and entry.name[:1].isdecimal() and entry.is_dir() for entry in os.scandir(path)
    )


def _read(path: Path) -> bytes:
    """Empty if it cannot be read or is too large; Triton then reports the error."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_LABEL_BYTES + 1)
    except OSError:
        return b""
    return content if len(content) <= MAX_LABEL_BYTES else b""


class SupervisedTriton(TritonEngine):
    """The Triton that the stack started. HTTP loads go over gRPC, too; plain loads serve the files on disk."""

    def __init__(  # noqa: PLR0913 - TritonEngine's, and the disk
        self,
        *,
        http_url: str,
        grpc_address: str,
        max_connections: int,
        metrics_url: str | None = None,
        timeouts: CallTimeouts | None = None,
        budget: RetryBudget | None = None,
        disk: DiskLoads | None = None,  # None: send every load unchanged
    ) -> None:
        super().__init__(
            http_url=http_url,
            grpc_address=grpc_address,
            max_connections=max_connections,
            metrics_url=metrics_url,
            timeouts=timeouts,
            budget=budget,
        )
        self._disk = disk
        self._overridden: set[str] = set()

    async def _send_http(self, call: HttpCall, deadline: float | None) -> HttpAnswer:
        if (load := load_over_grpc(call)) is not None:
            return to_http_answer(await self._send_grpc(load, deadline))
        return await super()._send_http(call, deadline)

    async def _load_call(self, call: GrpcCall) -> GrpcCall:
        question = service_pb2.RepositoryModelLoadRequest.FromString(call.message)
        if "config" in question.parameters:
            self._overridden.add(question.model_name)
        if question.parameters:
            return call
        question = await self._load_question(question.model_name)
        return GrpcCall(call.method, question.SerializeToString(), call.metadata)

    async def _load_question(self, model_name: str) -> "service_pb2.RepositoryModelLoadRequest":
        question = await super()._load_question(model_name)
        if self._disk is None:
            return question
        is_overridden = model_name in self._overridden
        if config := await asyncio.to_thread(self._disk.config_for, model_name, is_overridden=is_overridden):
            question.parameters["config"].string_param = config
        return question
