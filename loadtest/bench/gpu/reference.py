"""Stores results of models in FP32 on a CPU, so that a GPU that is available for minutes only runs its own part.

The file says where and with what it was made, and of which pictures and models: others are not compared with it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench.wire import BadAnswer
from penstock.engines.config_pbtxt import read_proto
from penstock.models.check.answers import Rivals
from penstock.protocol.vision_results import Classes, Detections, Embedding, VisionResult

BEST_CLASSES = 5  # of each picture; the comparison reads two
_FACTS = "facts"
_FORMAT = 1

Arrays = dict[str, Any]


@dataclass(slots=True)
class Answers:
    """Results of one model in the pictures' order, and how long its runs took. rivals: of boxes in FP32 on the CPU."""

    results: list[VisionResult] = field(default_factory=list)
    rivals: list[Rivals] = field(default_factory=list)
    run_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelReference:
    """One model's results. digest: of `model_digest`. extra: other arrays that belong to the model."""

    digest: str
    answers: Answers
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reference:
    """Results by model. pictures: their digest. made: machine, versions, time. digests: of the models."""

    pictures: str
    made: Mapping[str, str]
    models: Mapping[str, ModelReference]

    def find(self, folder: Path) -> ModelReference | None:
        """Of that model, if its file and its configuration are those of the reference."""
        found = self.models.get(folder.name)
        return found if found is not None and found.digest == model_digest(folder) else None

    @property
    def origin(self) -> str:
        """Where and with what it was made, in one line."""
        return "; ".join(f"{name} {value}" for name, value in self.made.items())


def model_digest(folder: Path) -> str:
    """SHA-256 of the model's files and its configuration, without where it runs."""
    config = read_proto(folder / "config.pbtxt")
    del config.instance_group[:]
    found = hashlib.sha256(config.SerializeToString(deterministic=True))
    for file in sorted(folder.glob("*/*.onnx*")):
        found.update(file.read_bytes())
    return found.hexdigest()


def write_reference(path: Path, reference: Reference) -> None:
    """Raises OSError; BadAnswer for results of a kind that is not stored."""
    facts: dict[str, Any] = {"format": _FORMAT, "pictures": reference.pictures, "made": dict(reference.made)}
    facts["models"] = {name: one.digest for name, one in reference.models.items()}
    arrays: Arrays = {_FACTS: np.array(json.dumps(facts))}
    for name, one in reference.models.items():
        for key, array in {**_packed(name, one.answers), **one.extra}.items():
            arrays[f"{name}/{key}"] = array
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_reference(path: Path) -> Reference:
    """Raises BadAnswer for a file that write_reference did not write."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            facts = json.loads(str(stored[_FACTS]))
            if facts["format"] != _FORMAT:
                raise ValueError(f"its format is {facts['format']}, this bench reads {_FORMAT}")
            models = {name: _model_of(stored, name, digest) for name, digest in facts["models"].items()}
            return Reference(facts["pictures"], facts["made"], models)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadAnswer(f"{path} is no reference of this bench: {error!r}; write it with --write-reference") from error


def _model_of(stored: Mapping[str, Any], name: str, digest: str) -> ModelReference:
    own = {key.removeprefix(f"{name}/"): stored[key] for key in stored if key.startswith(f"{name}/")}
    extra = {key: array for key, array in own.items() if key.startswith("logit_")}
    return ModelReference(digest, _unpacked(own), extra)


def _packed(name: str, answers: Answers) -> Arrays:
    """Boxes and scores in FP32; vectors in FP16, which changes a cosine by less than 1e-6."""
    results, first = answers.results, answers.results[0]
    if isinstance(first, Embedding):
        return {"vectors": np.stack([one.vector for one in results if isinstance(one, Embedding)]).astype(np.float16)}
    if isinstance(first, Classes):
        best = [one for one in results if isinstance(one, Classes)]
        return {
            "class_id": np.stack([one.class_id[:BEST_CLASSES] for one in best]).astype(np.int32),
            "score": np.stack([one.score[:BEST_CLASSES] for one in best]),
        }
    if isinstance(first, Detections) and first.masks is None:
        boxes, near = [one for one in results if isinstance(one, Detections)], answers.rivals
        return {
            "count": np.array([len(one.score) for one in boxes], np.int32),
            "xyxy": np.concatenate([one.xyxy for one in boxes]),
            "score": np.concatenate([one.score for one in boxes]),
            "class_id": np.concatenate([one.class_id for one in boxes]).astype(np.int32),
            "rival_count": np.array([len(one.box) for one in near], np.int32),
            "rival_box": np.concatenate([one.box for one in near]).astype(np.int32),
            "rival_xyxy": np.concatenate([one.xyxy for one in near]),
        }
    raise BadAnswer(f"results of {name} ({type(first).__name__}) are not stored in a reference")


def _unpacked(arrays: Arrays) -> Answers:
    if "vectors" in arrays:
        return Answers([Embedding(vector) for vector in arrays["vectors"].astype(np.float32)])
    if "count" not in arrays:
        rows = zip(arrays["score"], arrays["class_id"].astype(np.int64), strict=True)
        return Answers([Classes(score, class_id) for score, class_id in rows])
    parts = [_split(arrays[key], arrays["count"]) for key in ("xyxy", "score")]
    class_ids = _split(arrays["class_id"].astype(np.int64), arrays["count"])
    near = [_split(arrays[key], arrays["rival_count"]) for key in ("rival_box", "rival_xyxy")]
    return Answers(
        [Detections(*one) for one in zip(*parts, class_ids, strict=True)],
        [Rivals(box.astype(np.int64), xyxy) for box, xyxy in zip(*near, strict=True)],
    )


def _split(rows: Any, counts: Any) -> Sequence[Any]:
    """The rows of each picture."""
    return np.split(rows, np.cumsum(counts)[:-1])
