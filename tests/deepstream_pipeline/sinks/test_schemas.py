"""The two JSON schemas, to the letter."""

import json
import math
from dataclasses import replace

import numpy as np
from pycocotools import mask as coco

from penstock.protocol.vision_results import Mask
from penstock_video.sinks.schemas import Schema, event_lines, objects_line, read_objects_line
from penstock_video.types import NO_CLASS, ClassScore, CrossingDirection
from tests.deepstream_pipeline.sinks.results import crossing, result


def test_full_objects_line_says_everything_that_is_known() -> None:
    """A frame's line has every documented field, in units and roundings that are written down."""
    line = objects_line(result(3, objects=1))
    assert b"\n" not in line
    assert json.loads(line) == {
        "source_id": "cam",
        "frame_num": 3,
        "pts_s": 0.3,
        "time": "2027-01-15T08:00:00.800Z",
        "width": 320,
        "height": 240,
        "segment": 0,
        "is_inferred": True,
        "is_corrupt": False,
        "objects": [
            {
                "track_id": 1,
                "age_frames": 4,
                "class_id": 0,
                "label": "person",
                "score": 0.875,
                "xyxy": [3.0, 60.0, 38.556, 160.0],
                "rules": ["Yard"],
                "attributes": [{"model": "colour", "class_id": 3, "label": "blue", "score": 0.75}],
            }
        ],
        "classes": [],
        "counts": {"line-crossing/Entry": 3},
    }


def test_full_objects_line_without_objects_is_a_line() -> None:
    """A frame in which nothing is seen has its line, too."""
    assert json.loads(objects_line(result(0, objects=0)))["objects"] == []


def test_full_objects_line_read_back_is_the_result() -> None:
    """What is read back is what was written, so that rules can be replayed on it."""
    frame_result = result(7, objects=3)
    read = read_objects_line(objects_line(frame_result))
    assert np.allclose(read.tracks.detections.xyxy, frame_result.tracks.detections.xyxy, atol=0.001)
    assert read.tracks.track_id.tolist() == [1, 2, 3]
    assert read.tracks.age_frames.tolist() == frame_result.tracks.age_frames.tolist()
    assert [read.label(one) for one in read.tracks.detections.class_id.tolist()] == ["person", "car", "person"]
    assert (read.attributes, read.analytics.counts) == (frame_result.attributes, frame_result.analytics.counts)
    assert (read.frame.frame_num, read.frame.pts_s, read.frame.width) == (7, 0.7, 320)
    assert math.isclose(read.frame.captured_unix_s, frame_result.frame.captured_unix_s, abs_tol=0.001)
    assert objects_line(read) == objects_line(frame_result)


def test_full_objects_line_has_shapes_texts_and_vectors() -> None:
    """Masks are COCO's run lengths; texts and vectors are attributes. All but masks are read back."""
    plain = result(3, objects=1)
    detections = replace(
        plain.tracks.detections,
        masks=(Mask(240, 320, 10, 60, np.ones((2, 1), np.bool_)),),
        keypoints=np.array([[[20, 70.1234, 0.9], [0, 0, 0]]], np.float32),
        xywhr=np.array([[20, 110, 30, 100, -0.5]], np.float32),
    )
    said = (ClassScore("plates", NO_CLASS, "B AB 12", 0.9), ClassScore("reid", NO_CLASS, "", 1.0, (0.25, -0.5)))
    whole = replace(plain, tracks=replace(plain.tracks, detections=detections), attributes=(said,))
    line = objects_line(whole)
    (written,) = json.loads(line)["objects"]
    pixels = np.zeros((240, 320), np.uint8, order="F")
    pixels[60:62, 10] = 1
    assert written["mask"] == {"size": [240, 320], "counts": coco.encode(pixels)["counts"].decode()}
    assert written["keypoints"] == [[20.0, 70.123, 0.9], [0.0, 0.0, 0.0]]
    assert written["xywhr"] == [20.0, 110.0, 30.0, 100.0, -0.5]
    assert written["attributes"] == [
        {"model": "plates", "class_id": -1, "label": "B AB 12", "score": 0.9},
        {"model": "reid", "class_id": -1, "label": "", "score": 1.0, "vector": [0.25, -0.5]},
    ]
    without = replace(whole, tracks=replace(plain.tracks, detections=replace(detections, masks=None)))
    assert objects_line(read_objects_line(line)) == objects_line(without)
    assert json.loads(objects_line(whole, Schema.MINIMAL))["objects"][0].split("|")[6:] == ["#", "B AB 12", "0.875"]


def test_detection_without_a_track_is_a_line_of_objects_with_a_null_identity() -> None:
    """After the tracks, with the age 0 and no rules; a replay reads it as untracked, and DeepStream's form has none."""
    others = replace(result(3, objects=1).tracks.detections, score=np.array([0.3], np.float32))
    plain = result(3)
    shown = replace(plain, tracks=replace(plain.tracks, untracked=others))
    *tracked, last = json.loads(objects_line(shown))["objects"]
    assert tracked == json.loads(objects_line(plain))["objects"]
    assert last == {
        "track_id": None, "age_frames": 0, "class_id": 0, "label": "person", "score": 0.3,
        "xyxy": [3.0, 60.0, 38.556, 160.0], "rules": [], "attributes": [],
    }  # fmt: skip
    read = read_objects_line(objects_line(shown))
    assert (len(read.tracks), len(read.tracks.untracked), len(read.attributes)) == (2, 1, 2)
    assert objects_line(read) == objects_line(shown)
    assert objects_line(shown, Schema.MINIMAL) == objects_line(plain, Schema.MINIMAL)


def test_speed_of_an_object_is_written_where_there_is_a_scale() -> None:
    """null while it is not known; a detection without a track has none; a replay reads the same."""
    plain = result(3)
    analytics = replace(plain.analytics, speeds_mps=(1.23456, None))
    shown = replace(plain, analytics=analytics, tracks=replace(plain.tracks, untracked=plain.tracks.detections))
    speeds = [one.get("speed_mps", "absent") for one in json.loads(objects_line(shown))["objects"]]
    assert speeds == [1.235, None, "absent", "absent"]
    assert read_objects_line(objects_line(shown)).analytics.speeds_mps == (1.235, None)
    assert read_objects_line(objects_line(plain)).analytics.speeds_mps == ()


def test_full_event_line_names_rule_and_object() -> None:
    """An event's line says what came true, where, when and of whom; null where it is of no one."""
    inward = replace(crossing(3), direction=CrossingDirection.IN, xyxy=(3.0, 60.0, 38.556, 160.0), score=0.875)
    lines = event_lines(result(3, events=(inward, crossing(3, track_id=None))))
    assert json.loads(lines[0]) == {
        "kind": "line-crossing",
        "rule": "Entry",
        "value": 1.0,
        "source_id": "cam",
        "frame_num": 3,
        "pts_s": 0.3,
        "time": "2027-01-15T08:00:00.800Z",
        "track_id": 1,
        "class_id": 0,
        "label": "person",
        "direction": "in",
        "score": 0.875,
        "xyxy": [3.0, 60.0, 38.556, 160.0],
    }
    second = json.loads(lines[1])
    assert (second["kind"], second["track_id"], second["class_id"], second["label"]) == (
        "overcrowding",
        None,
        None,
        None,
    )


def test_minimal_objects_line_is_nvmsgconvs() -> None:
    """The payload has DeepStream's keys and no other; classifiers and the confidence stand behind the "#"."""
    assert objects_line(result(3), Schema.MINIMAL) == (
        b'{"version":"4.0","id":3,"@timestamp":"2027-01-15T08:00:00.800Z","sensorId":"cam","objects":'
        b'["1|3|60|38.5556|160|person|#|blue|0.875","2|131|60|166.556|160|car|#|blue|0.875"]}'
    )


def test_minimal_object_without_attributes_ends_with_its_label() -> None:
    """Without classifiers there is neither "#" nor a confidence, as in DeepStream."""
    line = objects_line(replace(result(3, objects=1), attributes=()), Schema.MINIMAL)
    assert json.loads(line)["objects"] == ["1|3|60|38.5556|160|person"]


def test_minimal_event_is_the_payload_of_its_object() -> None:
    """An event is a payload with the object that it is of, and a customMessage that names the rule."""
    lines = event_lines(result(3, events=(crossing(3), crossing(3, track_id=None))), Schema.MINIMAL)
    of_one, of_all = (json.loads(line) for line in lines)
    assert [text.partition("|")[0] for text in of_one["objects"]] == ["1"]
    assert of_one["customMessage"] == ["line-crossing|Entry|1"]
    inward = result(3, events=(replace(crossing(3), direction=CrossingDirection.IN),))
    assert json.loads(event_lines(inward, Schema.MINIMAL)[0])["customMessage"] == ["line-crossing|Entry.in|1"]
    assert len(of_all["objects"]) == 2
    assert of_all["customMessage"] == ["overcrowding|Entry|1"]


def test_minimal_label_with_the_separator_keeps_the_columns() -> None:
    """A label that holds the separator does not shift the columns behind it."""
    frame_result = replace(result(0, objects=1), labels=("a|b",), attributes=())
    assert json.loads(objects_line(frame_result, Schema.MINIMAL))["objects"][0].split("|")[5:] == ["a/b"]
