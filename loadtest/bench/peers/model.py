"""The model that all serve: from its folder's config.pbtxt to the card that the peers get as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bench.peers.servers.detector import Card
from server.backends.config_pbtxt import read_config
from server.core.errors import InvalidRequest
from server.core.model import ModelConfig
from server.core.tensor import Datatype
from server.vision.card import NetworkType, VisionCard, card_from_config
from server.vision.spec import ColorFormat, Fit, Layout, PrepareSpec, ScalingFilter

CHECKOUT = Path(__file__).resolve().parents[3]
REPOSITORY = CHECKOUT / "model_repository"
PARSERS = ("center-heatmap", "fastestdet")
_COLORS = (ColorFormat.BGR, ColorFormat.RGB)
_FITS = (Fit.STRETCH, Fit.PAD_RIGHT_BOTTOM)
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
    if card is None or card.network_type is not NetworkType.DETECTOR or card.parser_name not in PARSERS:
        raise BadModel(f"{folder}: not a detector with parse-bbox-func-name {' or '.join(PARSERS)}")
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
    spec, options = card.prepare_spec, card.parser_options
    _refuse_unknown(config.name, spec)
    return Card(
        file=str(file),
        input_name=card.input_name,
        outputs=_IN_OUTPUT_ORDER.get(card.parser_name, options.output_names),
        width=spec.width,
        height=spec.height,
        is_bgr=spec.color is ColorFormat.BGR,
        keeps_aspect=spec.fit is Fit.PAD_RIGHT_BOTTOM,
        scale=spec.scale,
        parser=card.parser_name,
        score_threshold=options.pre_cluster_threshold,
        iou_threshold=options.nms_iou_threshold,
        labels=card.labels,
        has_batch_axis=config.max_batch_size > 0,
        threads=int(config.parameters.get("intra_op_thread_count", "1")),
    )


def _refuse_unknown(name: str, spec: PrepareSpec) -> None:
    is_known = (
        spec.color in _COLORS
        and spec.fit in _FITS
        and spec.layout is Layout.NCHW
        and spec.filter is ScalingFilter.BILINEAR
        and spec.datatype is Datatype.FP32
        and spec.offsets == (0.0, 0.0, 0.0)
        and spec.channel_factors == (1.0, 1.0, 1.0)
        and not spec.has_scaled_decode
    )
    if not is_known:
        raise BadModel(f"model {name!r} wants its pictures as the peers' detector.py cannot prepare them: {spec}")
