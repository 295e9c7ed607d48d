"""Calls the gateway from commands with the Python client; flags and defaults that locate it."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from penstock.cli.terminal import fail, print_failure
from penstock.client import operations
from penstock.client.operations import EngineVersion, Operation
from penstock.client.replies import KEY_ADVICE, START_ADVICE
from penstock.gateway.settings import Settings
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.protocol.batch_reports import ModelBatchReport
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import InferenceError, ModelNotFound
from penstock.protocol.inference import InferRequest, Tensor

if TYPE_CHECKING:
    from penstock.client.client import Client
    from penstock.gateway.workers.running_stacks import RunningStack
    from penstock.protocol.image_answer import ImageAnswer

INDEX_TIMEOUT_S = 5.0
INFER_GRACE_S = 5.0  # time for the gateway to report an expired deadline itself
EMBEDDED_ENGINE = "penstock-embedded"
LIST_HINT = "; `penstock models list` shows what there is"
T = TypeVar("T")


class GatewayClient:
    """A gateway by its http:// address. Every call raises InferenceError, with advice for the command line.

    Nothing is sent again, since a person may call the command again.
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        """api_key: sent with every call; empty for none."""
        self.url = url
        self._api_key = api_key

    def infer_image(
        self,
        model_name: str,
        image: bytes,
        content_type: str,
        *,
        timeout_ms: int | None = None,
        with_explanation: bool = False,
        query: Mapping[str, Any] = MappingProxyType({}),
    ) -> "ImageAnswer":
        """The results of an encoded picture.

        timeout_ms: the request's deadline, None for the model's own. with_explanation: whether the response explains
        its batch. query: the endpoint's query parameters, such as conf.
        """
        operation = operations.post_picture(
            model_name, image, content_type=content_type, explain=with_explanation, **query
        )
        if timeout_ms is not None:
            headers = {**operation.headers, operations.TIMEOUT_HEADER: str(timeout_ms)}
            operation = replace(operation, headers=headers, max_wait_s=timeout_ms / 1000 + INFER_GRACE_S)
        return self._run(operation)

    def infer(self, request: InferRequest, timeout_s: float) -> tuple[Tensor, ...]:
        """All outputs of the model. Inputs and outputs are sent as binary tensors."""
        return self._run(replace(operations.infer_tensors(request), max_wait_s=timeout_s))

    def model_metadata(self, model_name: str) -> ModelMetadata:
        """Shapes include the batch dimension; -1 for variable dimensions."""
        return self._run(operations.model_metadata(model_name))

    def model_parameters(self, model_name: str) -> dict[str, str]:
        """The parameters of the model's config.pbtxt."""
        return self._run(operations.model_parameters(model_name))

    def explain_model(self, model_name: str) -> ModelBatchReport:
        """How the model's batches are formed, with statistics."""
        return self._run(operations.explain_model(model_name))

    def read(self, target: str, kind: type[T], timeout_s: float = INDEX_TIMEOUT_S) -> T:
        """The JSON response to a GET. target: path and query."""
        return self._run(operations.page(target, kind, max_wait_s=timeout_s))

    def engine(self) -> EngineVersion:
        """Name (`triton`, EMBEDDED_ENGINE, …) and version of the engine."""
        return self._run(operations.engine_version())

    def repository_index(self) -> tuple[ModelState, ...]:
        """Every model and version that the engine knows."""
        return self._run(operations.repository_index())

    def load(self, model_name: str) -> None:
        """Load or reload; returns when the model takes requests."""
        self._run(operations.load_model(model_name))

    def unload(self, model_name: str) -> None:
        """Take the model out of service."""
        self._run(operations.unload_model(model_name))

    @cached_property
    def _client(self) -> "Client":
        from penstock.client.client import Client  # takes 30 ms

        return Client(self.url, api_key=self._api_key, retries=0)

    def _run(self, operation: Operation[T]) -> T:
        try:
            return self._client.run(operation)
        except InferenceError as error:
            error.message = _for_command(error)
            error.args = (error.message,)
            raise


def _for_command(error: InferenceError) -> str:
    """The client's error message, with flags instead of arguments."""
    text = error.message.replace(KEY_ADVICE, f"give a valid key with --api-key or {API_KEY_VARIABLE}")
    text = text.replace(START_ADVICE, "start it with `penstock up`, or give its address with --url")
    if isinstance(error, ModelNotFound):
        return f"{text}{LIST_HINT}"
    return f"{text} (retry after {error.retry_after_s:g} s)" if error.retry_after_s is not None else text


DEFAULT_HTTP_PORT = 8000
API_KEY_VARIABLE = "PENSTOCK_API_KEY"
GATEWAY_VARIABLE = "PENSTOCK_GATEWAY_URL"

Url = Annotated[
    str | None,
    typer.Option(
        envvar=GATEWAY_VARIABLE,
        show_default=False,
        help="gateway URL [the stack on this machine, else http://127.0.0.1:8000]",
    ),
]
VideoUrl = Annotated[
    str, typer.Option("--video-url", envvar="PENSTOCK_VIDEO_URL", help="the video program's control API")
]
ApiKey = Annotated[
    str, typer.Option("--api-key", envvar=API_KEY_VARIABLE, show_default=False, help="of a gateway that asks for one")
]


def settings_or_fail(home: Path | None = None) -> Settings:
    """The settings that `penstock up` would start with here; one sentence and exit code 2 where they are wrong."""
    try:
        return read_settings({"home": home})
    except SettingsError as error:
        fail(str(error))


def gateway_url(given: str | None) -> str:
    """The given URL, else that in PENSTOCK_GATEWAY_URL, else that of a gateway on this machine."""
    return given or os.environ.get(GATEWAY_VARIABLE) or local_url(settings_or_fail())


def local_url(settings: Settings) -> str:
    """The address of a running stack of this user; without one, the address that `penstock up` would use.

    The settings' port selects it. Without a port, the newest of this command's home or checkout is used, else the
    newest; a line on standard error names the stacks where that is not clear.
    """
    from penstock.gateway.workers.running_stacks import ambiguity  # takes 60 ms, which --url saves

    stacks = candidate_stacks(settings)
    if not stacks:
        return url_of(settings)
    if not named_port(settings) and (why := ambiguity(stacks, stacks[0], settings.home_path)):
        print_failure(f"{why}. --url or PENSTOCK_HTTP_PORT selects one")
    return stacks[0].http_url


def candidate_stacks(settings: Settings) -> "tuple[RunningStack, ...]":
    """Running stacks that a command with these settings may use, the newest first, no video program's own engine.

    Those on the settings' port, if one is given, else those of this home or checkout, if there are any, else all.
    """
    from penstock.gateway.workers.running_stacks import closest_stacks, is_bound, running_stacks

    stacks = [stack for stack in running_stacks() if not is_bound(stack)]
    if port := named_port(settings):
        return tuple(stack for stack in stacks if urlsplit(stack.http_url).port == port)
    return closest_stacks(stacks, settings.home_path)


def named_port(settings: Settings) -> int:
    """The HTTP port that the settings give; 0 if they give none."""
    return settings.http_port or 0 if "http_port" in settings.model_fields_set else 0


def url_of(settings: Settings) -> str:
    """The address of the gateway that `penstock up` starts with these settings."""
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{host}:{settings.http_port or DEFAULT_HTTP_PORT}"


def gateway_of(url: str | None, api_key: str) -> GatewayClient:
    """The gateway at that address, else that of this machine."""
    if not api_key.isascii() or not api_key.isprintable():
        fail(f"--api-key (or {API_KEY_VARIABLE}) has characters that HTTP headers do not allow: give it as issued")
    return GatewayClient(gateway_url(url), api_key)
