"""Stands in for `penstock models add`, `inspect` and `check` under limits: what it does is its --layout. A program."""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

STUB = (sys.executable, "-I", "-S", __file__)
QUESTION = {"flag": "--color", "choices": ["rgb", "bgr"], "ambiguous": "the order of the colours is not in the file"}


def inspect(file: Path, flags: dict[str, str]) -> int:
    """As `penstock models inspect --json`; without --color there is a question."""
    if not file.read_bytes().startswith(b"the bytes of a model"):
        sys.stdout.write(json.dumps({"problem": f"{file} is not an ONNX model"}))
        return 1
    tensor = {"name": "images", "datatype": "FP32", "shape": [-1, 3, 416, 640], "axes": ["batch", "", "", ""]}
    facts = {"path": str(file), "size_bytes": file.stat().st_size, "sha256": "ab", "producer": "pytorch", "opset": 17}
    facts |= {"ir_version": 8, "inputs": [tensor], "outputs": [tensor | {"name": "output", "datatype": None}]}
    facts |= {"file_format": "onnx", "is_quantised": False, "node_count": 3}
    is_open = "color" not in flags
    recognition = {"layout": "yolox", "labels": ["person", "<b>car</b>"], "input_size": [416, 640], "family": "yolox"}
    recognition |= {"parameters": {"labels": "person;<b>car</b>", "network-type": "0"}, "warnings": [f"{file} is odd"]}
    recognition |= {"evidence": ["2 labels, by --labels"], "assumptions": ["the usual --scale"]}
    recognition |= {"questions": [QUESTION | {"is_blocking": True}] if is_open else []}
    trial = {"pictures": ["street.jpg"], "results": ["1 person"], "evidence": [], "warnings": [], "failure": ""}
    verdict = {"verdict": "ambiguous" if is_open else "servable", "reason": QUESTION["ambiguous"] if is_open else ""}
    sys.stdout.write(json.dumps({"facts": facts, "recognition": recognition, "trial": trial, **verdict}))
    return 1 if is_open else 0


def check(model: str, flags: dict[str, str]) -> int:
    """As `penstock models check --json`; the notes have its URL and its key."""
    key = os.environ.get("PENSTOCK_API_KEY", "")
    if model == "broken":
        sys.stderr.write("penstock: no model was checked, since a check wants a key with the roles infer and read\n")
        return 1
    row = {"name": model, "repository": "/r", "verdict": "differs", "ran": "gateway", "outputs": [], "took_s": 0.5}
    row |= {"compared_with": ["golden.json"], "reasons": ["output 'x' is wrong"], "notes": [flags["url"], key]}
    sys.stdout.write(json.dumps([row]))
    return 1


def main() -> int:
    """Its arguments are those of add_process."""
    flags = dict(each.removeprefix("--").partition("=")[::2] for each in sys.argv[6:-1])
    if sys.argv[5] == "check":
        return check(sys.argv[-1], flags)
    if sys.argv[5] == "inspect":
        return inspect(Path(sys.argv[-1]), flags)
    home, name, file = Path(flags["home"]), flags["name"], Path(sys.argv[-1])
    what = flags.get("layout", "")
    refusal = {
        "refuse": {"error": f"{file} is not an ONNX model", "questions": []},
        "taken": {"error": f"there is a model 'm' in {home / 'models'}", "questions": []},
        "ask": {"error": "it is open; choose another name with --name", "questions": [QUESTION]},
        "code": {"error": "it has a custom operator; start the gateway with --allow-model-code", "questions": []},
        "full": {"error": f"the disk of {home} is full", "questions": [], "is_disk_full": True},
    }.get(what)
    if refusal is not None:
        sys.stdout.write(json.dumps({"name": name, **refusal}))
        return 1
    if what == "usage":
        sys.stderr.write("Usage: …\n\nError: Invalid value for '--conf': it is over 1\n")
        return 2
    (home / "staging").mkdir(parents=True, exist_ok=True)
    (home / "downloads").mkdir(exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=home / "staging"))
    shutil.copyfile(file, staged / "model.onnx")
    (staged / "arguments.json").write_text(json.dumps(sys.argv[1:]))
    (staged / "environment.json").write_text(json.dumps(dict(os.environ)))
    (staged / "beside.json").write_text(json.dumps(sorted(path.name for path in file.parent.iterdir())))
    (staged / "MODEL.md").write_text(flags["origin"])
    if what == "hang":
        signal.pause()
    if what == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    target = home / "models" / name
    target.parent.mkdir(exist_ok=True)
    if target.exists():
        target.rename(staged.with_suffix(".old"))
        shutil.rmtree(staged.with_suffix(".old"))
    staged.rename(target)
    if what == "hang-late":
        signal.pause()
    report = {"name": name, "folder": str(target), "layout": "yolox", "max_batch_size": 8, "batches": "proven"}
    sys.stdout.write(
        json.dumps(
            report | {"evidence": ["2 labels, by --labels"], "warnings": [f"{file} is odd"], "state": "not loaded"}
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
