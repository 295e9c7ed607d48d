"""The frameworks that are compared: their environments, their commands, and how their answers are read."""

import functools
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.child import CHECKOUT
from loadtest.bench.peers.servers.detector import Card
from loadtest.bench.wire import BenchRequest
from penstock.engines.config_pbtxt import read_config
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import Datatype
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.spec import ColorFormat, InputOrder, NetworkType, PrepareSpec, ResizeMode, ScalingFilter

REPOSITORY = CHECKOUT / "model_repository"
PARSERS = ("center-heatmap", "fastestdet", "yolox")
_COLORS = (ColorFormat.BGR, ColorFormat.RGB)
_FITS = (ResizeMode.STRETCH, ResizeMode.PAD_RIGHT_BOTTOM)
_IN_OUTPUT_ORDER = {"center-heatmap": ("heatmap", "distances")}


class BadModel(Exception):
    """The peers cannot serve this model; the message is a sentence."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """folder: in Triton's layout. instances: sessions of ours, workers of theirs."""

    folder: Path
    name: str
    card: Card
    instances: int

    @property
    def card_json(self) -> str:
        """What the peers read from their environment."""
        return json.dumps(asdict(self.card))


def read_model(name_or_folder: str) -> ServedModel:
    """A model of model_repository by its name, or any folder in Triton's layout. Raises BadModel."""
    folder = _folder(name_or_folder)
    try:
        config = read_config(folder / "config.pbtxt")
        card = card_from_config(config)
    except InvalidRequest as error:
        raise BadModel(error.message) from error
    if card is None or card.network_type is not NetworkType.DETECTOR or card.layout.name not in PARSERS:
        raise BadModel(f"{folder}: not a detector with layout {' or '.join(PARSERS)}")
    file = folder / "1" / "model.onnx"
    if not file.is_file():
        raise BadModel(f"{file} is not there: the peers serve ONNX models only")
    return ServedModel(folder, config.name, _card(file, config, card), config.instance_count)


def _folder(name_or_folder: str) -> Path:
    for folder in (REPOSITORY / name_or_folder, Path(name_or_folder).expanduser()):
        if (folder / "config.pbtxt").is_file():
            return folder.resolve()
    raise BadModel(
        f"{name_or_folder!r} is no model of {REPOSITORY.name} and no folder with a config.pbtxt: give one of them"
    )


def _card(file: Path, config: ModelConfig, card: VisionCard) -> Card:
    spec, options = card.prepare_spec, card.layout_options
    _refuse_unknown(config.name, spec)
    return Card(
        file=str(file),
        input_name=card.input_name,
        outputs=_IN_OUTPUT_ORDER.get(card.layout.name, options.output_names),
        width=spec.width,
        height=spec.height,
        is_bgr=spec.color is ColorFormat.BGR,
        keeps_aspect=spec.fit is ResizeMode.PAD_RIGHT_BOTTOM,
        scale=spec.scale,
        parser=card.layout.name,
        score_threshold=options.pre_cluster_threshold,
        iou_threshold=options.nms_iou_threshold,
        labels=card.labels,
        has_batch_axis=config.max_batch_size > 0,
        threads=int(config.parameters.get("intra_op_thread_count", "1")),
        padding=int(spec.pad_value),
    )


def _refuse_unknown(name: str, spec: PrepareSpec) -> None:
    is_known = (
        spec.color in _COLORS
        and spec.fit in _FITS
        and spec.layout is InputOrder.NCHW
        and spec.filter is ScalingFilter.BILINEAR
        and spec.datatype is Datatype.FP32
        and spec.offsets == (0.0, 0.0, 0.0)
        and spec.channel_factors == (1.0, 1.0, 1.0)
        and not spec.has_scaled_decode
    )
    if not is_known:
        raise BadModel(f"model {name!r} wants its pictures as the peers' detector.py cannot prepare them: {spec}")


LOCKS = CHECKOUT / "requirements" / "peers"
ENVIRONMENTS = CHECKOUT / ".venv-peers"
UV = Path(sys.executable).parent / "uv"
BUILD_TIMEOUT_S = 900.0


class NotPrepared(Exception):
    """An environment is not there, or could not be built; the message is a sentence."""


def python_of(name: str) -> Path:
    """The environment's python. Raises NotPrepared where it was not built from today's lock."""
    if not _is_ready(name):
        raise NotPrepared(
            f"{name} has no environment yet, or its lock has changed: python -m loadtest.bench.peers prepare {name}"
        )
    return ENVIRONMENTS / name / "bin" / "python"


def prepare(name: str, say: Callable[[str], None]) -> None:
    """Builds the environment where it is missing or older than its lock. Raises NotPrepared."""
    if _is_ready(name):
        say(f"{name}: ready")
        return
    say(f"{name}: building {ENVIRONMENTS.name}/{name} from {_lock(name).relative_to(CHECKOUT)}")
    folder = ENVIRONMENTS / name
    _run(name, [UV, "venv", "--quiet", "--clear", "--python", sys.executable, folder])
    install: list[str | Path] = [UV, "pip", "install", "--quiet", "--require-hashes", "-r", _lock(name)]
    _run(name, [*install, "--python", folder / "bin" / "python"])
    _mark(name).write_text(_digest(name))
    say(f"{name}: ready")


def version_of(name: str, package: str) -> str:
    """The package's version in the environment, or ? if unknown."""
    found = sorted((ENVIRONMENTS / name).glob(f"lib/python3*/site-packages/{package}-*.dist-info"))
    return found[0].name.removeprefix(f"{package}-").removesuffix(".dist-info") if found else "?"


def _is_ready(name: str) -> bool:
    mark = _mark(name)
    return mark.is_file() and mark.read_text() == _digest(name)


def _run(name: str, command: list[str | Path]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except OSError as error:
        raise NotPrepared(f"{name}: {UV} cannot be run ({error.strerror}): make check builds {UV.parent}") from error
    except subprocess.TimeoutExpired as error:
        raise NotPrepared(f"{name}: {command[1]} did not end within {BUILD_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        reason = " ".join(done.stderr.split())[-600:]
        raise NotPrepared(f"{name}: its environment cannot be built here: {reason}")


def _lock(name: str) -> Path:
    return LOCKS / f"{name}.txt"


def _mark(name: str) -> Path:
    return ENVIRONMENTS / name / ".ready"


def _digest(name: str) -> str:
    return hashlib.sha256(_lock(name).read_bytes()).hexdigest()


LEAST_IOU = 0.99
SCORE_SLACK = 0.01

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class FoundObject:
    """A box in the picture's pixels."""

    xyxy: Box
    class_id: int
    score: float


def difference(ours: Sequence[FoundObject], theirs: Sequence[FoundObject], *, score_threshold: float) -> str:
    """What is not the same, as a sentence; empty where all is.

    Every box of one side has a twin of its class on the other at an IoU of 0.99 or more and a score within 0.01; only
    a box whose score lies within 0.01 of the model's threshold may be alone.
    """
    left = list(theirs)
    for box in ours:
        twins = [other for other in left if _is_twin(box, other)]
        if twins:
            left.remove(max(twins, key=lambda other: intersection_over_union(box.xyxy, other.xyxy)))
        elif box.score > score_threshold + SCORE_SLACK:
            return f"it does not find {box}, which we do (it has {len(theirs)} boxes, we have {len(ours)})"
    for box in left:
        if box.score > score_threshold + SCORE_SLACK:
            return f"it finds {box}, which we do not (it has {len(theirs)} boxes, we have {len(ours)})"
    return ""


def intersection_over_union(a: Box, b: Box) -> float:
    """Of two boxes; 0 where they do not touch."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def _is_twin(a: FoundObject, b: FoundObject) -> bool:
    return (
        a.class_id == b.class_id
        and abs(a.score - b.score) <= SCORE_SLACK
        and intersection_over_union(a.xyxy, b.xyxy) >= LEAST_IOU
    )


SERVERS = Path(__file__).resolve().parent / "servers"
_BOUNDARY = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a contender runs. folder: its own, empty, removed afterwards."""

    port: int
    folder: Path
    model: ServedModel


@dataclass(frozen=True, slots=True)
class Contender:
    """One server. package: gives its version. environment: of .venv-peers, or empty for our own.

    write: a picture as a request; read: the body of a 200 as boxes.
    """

    name: str
    command: Callable[[ServerAddress], list[str]]
    write: Callable[[bytes, ServedModel], BenchRequest]
    read: Callable[[bytes], list[FoundObject]]
    environment: str = ""
    package: str = ""
    is_ours: bool = False
    variables: Callable[[ServerAddress], Mapping[str, str]] = field(default=lambda place: {})


def _penstock(engine: str, place: ServerAddress) -> list[str]:
    ports = ["grpc", "metrics", "engine-http", "engine-grpc", "engine-metrics"]
    free = [argument for port in ports for argument in (f"--{port}-port", "0")]
    models = ["--model-repository", str(place.model.folder.parent), "--models", place.model.name]
    command = [sys.executable, "-m", "penstock.cli.main", "up", "--engine", engine, "--http-port", str(place.port)]
    return [*command, *free, *models, "--console", "off", "--home", str(place.folder / "home")]


def _script(file: str, place: ServerAddress, *, environment: str = "") -> list[str]:
    python = str(python_of(environment)) if environment else sys.executable
    return [python, str(SERVERS / file), str(place.port), str(place.model.instances)]


def _ray(place: ServerAddress) -> list[str]:
    return [*_script("ray_server.py", place, environment="ray"), str(place.folder / "ray")]


def _ray_variables(place: ServerAddress) -> Mapping[str, str]:
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(place.folder / "haproxy" / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(place.folder / "haproxy" / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(place.folder / "haproxy" / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(place.folder / "haproxy"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(place.folder / "haproxy" / "server-state"),
    }


def _bentoml(place: ServerAddress) -> list[str]:
    serve = ["-m", "bentoml", "serve", "bentoml_server:DetectorService", "--host", "127.0.0.1"]
    return [str(python_of("bentoml")), *serve, "--port", str(place.port), "--working-dir", str(SERVERS)]


def _bentoml_variables(place: ServerAddress) -> Mapping[str, str]:
    return {"BENTOML_DO_NOT_TRACK": "true", "BENTOML_HOME": str(place.folder / "bentoml")}


def _mlserver(place: ServerAddress) -> list[str]:
    program = python_of("mlserver").with_name("mlserver")
    return [str(program), "start", str(SERVERS / "mlserver_settings")]


def _mlserver_variables(place: ServerAddress) -> Mapping[str, str]:
    return {
        "MLSERVER_HTTP_PORT": str(place.port),
        "MLSERVER_GRPC_PORT": "0",
        "MLSERVER_PARALLEL_WORKERS": str(place.model.instances),
    }


def _as_body(path: str, jpeg: bytes, model: ServedModel) -> BenchRequest:
    return BenchRequest(path.format(model=model.name), {"content-type": "image/jpeg"}, jpeg)


def _as_form(jpeg: bytes, model: ServedModel) -> BenchRequest:
    head = 'Content-Disposition: form-data; name="pictures"; filename="picture.jpg"\r\nContent-Type: image/jpeg'
    body = f"--{_BOUNDARY}\r\n{head}\r\n\r\n".encode() + jpeg + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return BenchRequest("/detect", {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}, body)


def _found(detections: list[dict[str, Any]]) -> list[FoundObject]:
    return [FoundObject(tuple(one["xyxy"]), one["class_id"], one["score"]) for one in detections]


def _read_ours(body: bytes) -> list[FoundObject]:
    return _found(json.loads(body)["results"][0]["detections"])


def _read_one(body: bytes) -> list[FoundObject]:
    return _found(json.loads(body)["detections"])


def _read_list(body: bytes) -> list[FoundObject]:
    return _found(json.loads(body)[0]["detections"])


_body_to_ours = functools.partial(_as_body, "/v2/models/{model}/image")
_body = functools.partial(_as_body, "/detect")

CONTENDERS = (
    Contender("penstock-triton", functools.partial(_penstock, "triton"), _body_to_ours, _read_ours, is_ours=True),
    Contender("penstock-embedded", functools.partial(_penstock, "embedded"), _body_to_ours, _read_ours, is_ours=True),
    Contender("fastapi", functools.partial(_script, "fastapi_server.py"), _body, _read_one, package="fastapi"),
    Contender(
        "litserve",
        functools.partial(_script, "litserve_server.py", environment="litserve"),
        _body,
        _read_one,
        environment="litserve",
        package="litserve",
    ),
    Contender("ray", _ray, _body, _read_one, environment="ray", package="ray", variables=_ray_variables),
    Contender(
        "bentoml",
        _bentoml,
        _as_form,
        _read_list,
        environment="bentoml",
        package="bentoml",
        variables=_bentoml_variables,
    ),
    Contender(
        "mlserver",
        _mlserver,
        _body,
        _read_one,
        environment="mlserver",
        package="mlserver",
        variables=_mlserver_variables,
    ),
)
