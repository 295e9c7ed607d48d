"""The catalogue's model folders hold together: config, labels, card and parser, around files of their tensors."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

from penstock.engines.config_pbtxt import read_config
from penstock.engines.ort_serving.batch import BatchRunner, OrtRequest
from penstock.engines.ort_serving.config import Config, complete, read_signature, validate
from penstock.engines.ort_serving.session import OrtModel, open_for_reading
from penstock.models.catalogue import CatalogueEntry, read_catalogue
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Detections, Embedding, SegmentationMap, TextLines, VisionResult
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import DecodedImage, decode
from penstock.vision.image_tasks import size_tensors
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse
from penstock.vision.spec import NetworkType
from tests.models.stand_in import write_stand_in
from tests.vision import images

ENTRIES = list(read_catalogue().values())
RESULTS = {
    NetworkType.DETECTOR: Detections,
    NetworkType.CLASSIFIER: Classes,
    NetworkType.SEGMENTATION: SegmentationMap,
    NetworkType.OTHER: (Embedding, TextLines),
}


def card_of(folder: Path) -> VisionCard:
    card = card_from_config(read_config(folder / "config.pbtxt"))
    assert card is not None
    return card


def served(folder: Path, picture: DecodedImage) -> list[VisionResult]:
    """What a stand-in of the model answers to the picture, asked as the onnxruntime backend is; twice where it batches.

    The configuration reaches it as it reaches Triton's backend, and is held against the file by the same rules.
    """
    proto = text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    config: Config = json_format.MessageToDict(
        proto, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    session = open_for_reading(write_stand_in(folder), config)
    signature = read_signature(session)
    complete(config, signature)
    validate(config, signature)
    card, is_batching = card_of(folder), config["max_batch_size"] > 0
    array, geometry = prepare(picture, card.prepare_spec)
    sizes = {size.name: size.to_numpy() for size in size_tensors(card, [geometry], has_batch_axis=True)}
    ask = OrtRequest({card.input_name: array[np.newaxis], **sizes}, card.layout_options.output_names)
    outcomes = BatchRunner(OrtModel(session, signature, config).run, is_batching=is_batching).answer(
        [ask, ask] if is_batching else [ask]
    )
    row = 0 if is_batching else None
    results = []
    for outcome in outcomes:
        assert isinstance(outcome, dict), outcome
        outputs = tuple(tensor_from_numpy(name, rows) for name, rows in outcome.items())
        results.append(parse(card, InferResponse(folder.name, "1", outputs), row, geometry))
    return results


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_folder_serves_a_file_of_its_tensors(entry: CatalogueEntry, tmp_path: Path) -> None:
    """Config, card and parser agree: a file with the declared tensors loads and its answer becomes labelled results.

    The file's weights are random or constant: real ones are in test_real_models.py.
    """
    folder = tmp_path / entry.name
    shutil.copytree(entry.folder, folder)
    card = card_of(folder)
    results = served(folder, decode(images.jpeg(images.picture(120, 90)), card.prepare_spec.color))
    assert len(results) == (2 if read_config(folder / "config.pbtxt").max_batch_size else 1)
    for result in results:
        assert isinstance(result, RESULTS[card.network_type])
        if isinstance(result, Classes):
            assert np.isfinite(result.score).all()
            assert len(result.class_id) == card.layout_options.topk == 5
            assert 0.0 < result.score.sum() <= 1.0 + 1e-5, "scores are shares: softmax exactly once"
            assert result.class_id.max() < len(card.labels)


def test_folders_of_imagenet_have_the_same_labels() -> None:
    """A thousand names in synset order; these places are in every published list."""
    lists = {card_of(entry.folder).labels for entry in ENTRIES if "ImageNet" in entry.about}
    (labels,) = lists
    assert len(labels) == 1000
    places = {
        0: "tench",
        207: "golden retriever",
        281: "tabby",
        504: "coffee mug",
        817: "sports car",
        999: "toilet tissue",
    }
    assert {place: labels[place] for place in places} == places


def test_folders_of_coco_have_the_same_labels() -> None:
    """Eighty names in COCO's order; RF-DETR's are the same ones by COCO's ids, which have gaps."""
    lists = {entry.name: card_of(entry.folder).labels for entry in ENTRIES if "80 COCO" in entry.about}
    by_id = lists.pop("rfdetr-nano")
    (labels,) = set(lists.values())
    assert (len(lists), len(labels), labels[0], labels[79]) == (10, 80, "person", "toothbrush")
    assert (len(by_id), by_id[1], by_id[90]) == (91, "person", "toothbrush")
    assert tuple(label for label in by_id if label != "-") == labels


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_folder_tells_tritons_own_classification_its_labels_too(entry: CatalogueEntry) -> None:
    """A classifier's output names labels.txt, as Triton's classification extension wants it."""
    proto = text_format.Parse((entry.folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    is_classifier = proto.parameters["network-type"].string_value == "1"
    assert {output.label_filename for output in proto.output} == ({"labels.txt"} if is_classifier else {""})
