"""Every operation of the HTTP API for the OpenAPI document: bodies, headers, responses, errors."""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from penstock.gateway.batching.batch_report import ModelBatchReport
from penstock.gateway.rest import schemas as engine
from penstock.gateway.rest import schemas as images
from penstock.gateway.rest import schemas as models
from penstock.gateway.rest import schemas as tensors
from penstock.gateway.rest.models import ServerMetadata
from penstock.protocol.identity import Role

JSON, BINARY, TEXT = "application/json", "application/octet-stream", "text/plain"
MULTIPART = "multipart/form-data"


class Tag(StrEnum):
    """What an operation is about."""

    HEALTH = "health"
    INFERENCE = "inference"
    MODELS = "models"
    REPOSITORY = "repository"
    SHARED_MEMORY = "shared memory"
    SETTINGS = "trace and log settings"
    DESCRIPTION = "description"


class Header(StrEnum):
    """Request headers that mean something here."""

    TIMEOUT = "x-request-timeout-ms"
    JSON_LENGTH = "Inference-Header-Content-Length"
    ENCODING = "Content-Encoding"
    REQUEST_ID = "x-request-id"
    EXPLAIN = "x-penstock-explain"


@dataclass(frozen=True, slots=True)
class Content:
    """A body. schema: a struct or a type of structs, None for bytes as they are. named: structs that it refers to."""

    media_type: str
    schema: object | None = None
    named: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    path: a template of the table of routes; what stands in [] may be left out, which makes two operations.
    role: what its caller must be allowed to do, None for everybody. answers: the bodies of a 200, none for an empty
    one. refusals: its statuses besides those that everything has. extension: the engine's word that it can do it.
    summary: in a few words, as the table of routes has it. or_role: a role that does as well.
    """

    method: str
    path: str
    name: str
    tag: Tag
    role: Role | None
    details: str
    answers: tuple[Content, ...] = ()
    bodies: tuple[Content, ...] = ()
    needs_body: bool = False
    headers: tuple[Header, ...] = ()
    refusals: tuple[int, ...] = ()
    extension: str = ""
    summary: str = ""
    or_role: Role | None = None


_MODEL = "/v2/models/{model}[/versions/{version}]"
_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
_TIMEOUT = (Header.TIMEOUT,)
_INFER_HEADERS = (Header.TIMEOUT, Header.JSON_LENGTH, Header.ENCODING, Header.EXPLAIN)
_IMAGE_HEADERS = (Header.TIMEOUT, Header.REQUEST_ID, Header.ENCODING, Header.EXPLAIN)
_RECEIVES = (408, 413)
_GENERATE = (Content(JSON, dict[str, msgspec.Raw]),)
_PICTURES = tuple(Content(media_type) for media_type in ("image/jpeg", "image/png", "image/webp", BINARY))


def _json(schema: object) -> tuple[Content, ...]:
    return (Content(JSON, schema),)


_HEALTH = (
    Operation("GET", "/v2/health/live", "live", Tag.HEALTH, None, "200 as long as it can say so.", _json(models.Live)),
    Operation(
        "GET",
        "/v2/health/ready",
        "ready",
        Tag.HEALTH,
        None,
        "503 with the reason while the engine is not up, and from the start of this gateway's shutdown.",
        _json(models.Ready),
        refusals=(503,),
    ),
)
_INFERENCE = (
    Operation(
        "POST",
        f"{_MODEL}/infer",
        "infer",
        Tag.INFERENCE,
        Role.INFER,
        "JSON, or JSON and after it the tensors that have a `binary_data_size`, in the inputs' order; the header "
        "Inference-Header-Content-Length then says how long the JSON is. 0 there: the whole body is the model's one "
        "input. Triton's classification, sequence and parameter extensions are passed on.",
        (Content(JSON, tensors.InferenceResponse), Content(BINARY)),
        (Content(JSON, tensors.InferenceRequest), Content(BINARY)),
        True,
        _INFER_HEADERS,
        _RECEIVES,
    ),
    Operation(
        "POST",
        f"{_MODEL}/image",
        "inferImage",
        Tag.INFERENCE,
        Role.INFER,
        "An encoded image as the body, or several as the parts of a form. The first bytes of an image decide its "
        "format. Query parameters are refused.",
        (Content(JSON, images.ImageAnswer, images.RESULTS),),
        (*_PICTURES, Content(MULTIPART)),
        True,
        _IMAGE_HEADERS,
        (*_RECEIVES, 415),
    ),
    Operation(
        "POST",
        f"{_MODEL}/generate",
        "generate",
        Tag.INFERENCE,
        Role.INFER,
        "The inputs as members, each by its name; the rest and `parameters` go to the model as parameters. "
        "One answer: a model that gives several needs generate_stream.",
        _json(tensors.GenerateResponse),
        _GENERATE,
        True,
        _TIMEOUT,
        _RECEIVES,
    ),
    Operation(
        "POST",
        f"{_MODEL}/generate_stream",
        "generateStream",
        Tag.INFERENCE,
        Role.INFER,
        "As generate; each answer is an event of the stream, as it comes. An error after the first is an event, too.",
        (Content("text/event-stream"),),
        _GENERATE,
        True,
        _TIMEOUT,
        _RECEIVES,
    ),
)
_MODELS = (
    Operation(
        "GET",
        "/v2",
        "serverMetadata",
        Tag.MODELS,
        Role.READ,
        "The engine's name and version, and the extensions that are served here.",
        _json(ServerMetadata),
        headers=_TIMEOUT,
    ),
    Operation(
        "GET",
        "/v2/models/stats",
        "allStatistics",
        Tag.MODELS,
        Role.READ,
        "Of every version that is or was loaded.",
        _json(models.ModelStatistics),
        headers=_TIMEOUT,
    ),
    Operation(
        "GET",
        _MODEL,
        "modelMetadata",
        Tag.MODELS,
        Role.READ,
        "Names, datatypes and shapes of its inputs and outputs.",
        _json(models.ModelMetadata),
        headers=_TIMEOUT,
    ),
    Operation(
        "GET",
        f"{_MODEL}/ready",
        "modelReady",
        Tag.MODELS,
        Role.READ,
        "200 without a body, or 400. The infer role is enough.",
        headers=_TIMEOUT,
        or_role=Role.INFER,
    ),
    Operation(
        "GET",
        f"{_MODEL}/config",
        "modelConfig",
        Tag.MODELS,
        Role.READ,
        "config.pbtxt, completed by the engine.",
        _json(models.ModelConfig),
        headers=_TIMEOUT,
    ),
    Operation(
        "GET",
        f"{_MODEL}/stats",
        "modelStatistics",
        Tag.MODELS,
        Role.READ,
        "Of its version, or of all its versions.",
        _json(models.ModelStatistics),
        headers=_TIMEOUT,
    ),
    Operation(
        "GET",
        "/v2/models/{model}/explain",
        "explainModel",
        Tag.MODELS,
        Role.READ,
        "Who forms its batches, and how; how many there were of each size, why they closed, how long the engine takes; "
        "and a config.pbtxt with which Triton would form them. Of a model whose batches the gateway does not form, by "
        "the engine's own statistics.",
        _json(ModelBatchReport),
    ),
)
_IN_REPOSITORY = (
    Operation(
        "POST",
        "/v2/repository[/{repository}]/index",
        "repositoryIndex",
        Tag.REPOSITORY,
        Role.READ,
        "Every model of the repository, with the state of its versions and, where one is not ready, the reason.",
        _json(list[models.IndexEntry]),
        _json(models.IndexRequest),
        headers=_TIMEOUT,
        refusals=_RECEIVES,
    ),
    Operation(
        "POST",
        "/v2/repository/models/{model}/load",
        "loadModel",
        Tag.REPOSITORY,
        Role.ADMIN,
        "Loads a model, or loads it anew; answers when it serves. 400 with the reason where it cannot be loaded.",
        bodies=_json(models.LoadRequest),
        headers=_TIMEOUT,
        refusals=_RECEIVES,
    ),
    Operation(
        "POST",
        "/v2/repository/models/{model}/unload",
        "unloadModel",
        Tag.REPOSITORY,
        Role.ADMIN,
        "Answers at once; running requests of the model end first.",
        bodies=_json(models.UnloadRequest),
        headers=_TIMEOUT,
        refusals=_RECEIVES,
    ),
)


def _shared_memory(kind: str, path: str, region: object, register: object) -> tuple[Operation, ...]:
    """Status, register, unregister of one kind of memory. A client sees and unregisters its own regions only."""
    tag, extension = Tag.SHARED_MEMORY, f"{kind.lower()}_shared_memory"
    return (
        Operation(
            "GET",
            f"{path}[/region/{{region}}]/status",
            f"{kind.lower()}RegionStatus",
            tag,
            Role.READ,
            "The caller's own regions.",
            _json(list[region]),  # type: ignore[valid-type]
            extension=extension,
        ),
        Operation(
            "POST",
            f"{path}/region/{{region}}/register",
            f"{kind.lower()}RegionRegister",
            tag,
            Role.ADMIN,
            "Registers a region under a name, for the inputs and outputs of the caller's requests.",
            bodies=_json(register),
            needs_body=True,
            refusals=_RECEIVES,
            extension=extension,
        ),
        Operation(
            "POST",
            f"{path}[/region/{{region}}]/unregister",
            f"{kind.lower()}RegionUnregister",
            tag,
            Role.ADMIN,
            "One of the caller's regions, or all of them. Other clients' regions are not affected.",
            refusals=_RECEIVES,
            extension=extension,
        ),
    )


def _settings(path: str, name: str, answer: object, change: object, extension: str) -> tuple[Operation, ...]:
    """Reading and changing settings of the engine; both answer with those that now hold."""
    return (
        Operation(
            "GET", path, name, Tag.SETTINGS, Role.READ, "The settings that hold.", _json(answer), extension=extension
        ),
        Operation(
            "POST",
            path,
            f"change{name[0].upper()}{name[1:]}",
            Tag.SETTINGS,
            Role.ADMIN,
            "Changes what is given; answers with the settings that hold then. Where the engine writes its files is "
            "said where it is started.",
            _json(answer),
            _json(change),
            True,
            refusals=_RECEIVES,
            extension=extension,
        ),
    )


_DESCRIPTION = Operation(
    "GET",
    "/openapi.json",
    "description",
    Tag.DESCRIPTION,
    Role.READ,
    "What this gateway serves with the engine that is behind it.",
    _json(dict[str, msgspec.Raw]),
)

OPERATIONS = (
    *_HEALTH,
    *_INFERENCE,
    *_MODELS,
    *_IN_REPOSITORY,
    *_shared_memory("System", _SYSTEM, engine.SystemRegion, engine.SystemRegister),
    *_shared_memory("Cuda", _CUDA, engine.CudaRegion, engine.CudaRegister),
    *_settings("/v2/trace/setting", "traceSetting", engine.TraceSetting, engine.TraceChange, "trace"),
    *_settings(
        "/v2/models/{model}/trace/setting", "modelTraceSetting", engine.TraceSetting, engine.TraceChange, "trace"
    ),
    *_settings("/v2/logging", "logSettings", engine.LogSettings, engine.LogChange, "logging"),
    _DESCRIPTION,
)
