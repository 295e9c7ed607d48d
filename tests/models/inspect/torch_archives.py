"""PyTorch archives made without PyTorch, and an environment whose `torch` is a stand-in of a few lines."""

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ULTRALYTICS = {"task": "detect", "names": {"0": "cat", "1": "dog"}, "imgsz": [320, 320], "stride": 32, "batch": 1}
Shape = Sequence[int | str]


def archive(entries: Mapping[str, bytes], *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip with one folder, as PyTorch writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(f"model/{name}", data)
    return buffer.getvalue()


def torchscript(metadata: Mapping[str, Any] | None = None, **more: bytes) -> bytes:
    """The entries by which TorchScript is recognised."""
    extra = {} if metadata is None else {"extra/config.txt": json.dumps(metadata).encode()}
    return archive({"constants.pkl": b".", "data.pkl": b".", "code/__torch__.py": b"", **extra, **more})


def meta(shape: Shape, dtype: int = 7) -> dict[str, Any]:
    """A tensor's dtype (7: float32) and sides; a side that is text is a symbol."""
    sizes = [
        {"as_int": side} if isinstance(side, int) else {"as_expr": {"expr_str": f"Symbol('{side}', integer=True)"}}
        for side in shape
    ]
    return {"dtype": dtype, "sizes": sizes, "requires_grad": False, "layout": 7}


def program(image: Shape, outputs: Mapping[str, Shape]) -> dict[str, Any]:
    """JSON of a program: a convolution, a sigmoid, and one view for each output."""

    def tensor(name: str) -> dict[str, Any]:
        return {"as_tensor": {"name": name}}

    def node(target: str, inputs: Sequence[str], output: str) -> dict[str, Any]:
        given = [{"name": "self", "arg": tensor(name), "kind": 1} for name in inputs]
        return {"target": f"torch.ops.aten.{target}.default", "inputs": given, "outputs": [tensor(output)]}

    values = {"x": meta(image), "w": meta((8, 3, 3, 3)), **{name: meta(shape) for name, shape in outputs.items()}}
    nodes = [node("conv2d", ["x", "w"], "c"), node("sigmoid", ["c"], "s")]
    nodes += [node("view", ["s"], name) for name in outputs]
    specs = [{"parameter": {"arg": {"name": "w"}, "parameter_name": "w"}}, {"user_input": {"arg": tensor("x")}}]
    signature = {"input_specs": specs, "output_specs": [{"user_output": {"arg": tensor(name)}} for name in outputs]}
    graph = {"nodes": nodes, "tensor_values": values, "inputs": [], "outputs": []}
    return {"graph_module": {"graph": graph, "signature": signature}, "torch_version": "2.11.0"}


def pt2(found: Any, *, compression: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """An archive of torch.export.save with that JSON."""
    entries = {"archive_format": b"pt2", "archive_version": b"0", "models/model.json": json.dumps(found).encode()}
    return archive({**entries, **more}, compression=compression)


def yolox(batch: int | str = "s0") -> dict[str, Any]:
    """A YOLOX of 64 x 64 pixels and 80 classes."""
    return program((batch, 3, 64, 64), {"rows": (batch, 84, 85)})


class _Touch:
    """Unpickling it creates the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def pickle_that_creates(path: Path) -> bytes:
    """A pickle that creates the file when it is loaded."""
    return pickle.dumps(_Touch(path))


_TORCH = """
import os, sys, types
import numpy as np

class Tensor(np.ndarray):
    def detach(self): return self
    def cpu(self): return self
    def numpy(self): return np.asarray(self)

def tensor(array): return np.asarray(array).view(Tensor)

def leaves(answer): return list(answer) if isinstance(answer, (list, tuple)) else [answer]

def yolox(x, mixes=False):
    weights = np.random.default_rng(1).random((1, 84, 85), np.float32) / 300
    weights[..., :2] *= 20
    weights[..., 2:4] *= -1
    mean = np.asarray(x).mean() if mixes else np.asarray(x).mean((1, 2, 3))[:, None, None]
    return tensor((mean * weights * np.ones((len(x), 1, 1))).astype(np.float32))

def refuse(x): raise RuntimeError("shape '[1, 2]' is invalid\\nmore lines")

PROGRAMS = {
    "yolox": yolox,
    "mixes": lambda x: yolox(x, True),
    "prints": lambda x: (print("a line"), yolox(x))[1],
    "two outputs": lambda x: (yolox(x), yolox(x)),
    "text": lambda x: "text",
    "huge": lambda x: np.broadcast_to(np.float32(0), (1 << 29,)).view(Tensor),
    "fails": refuse,
    "ends": lambda x: os._exit(3),
}
module = types.ModuleType("torch")
module.__version__, module.Tensor, module.bfloat16 = "2.11.0", Tensor, object()
module.set_num_threads = module.set_grad_enabled = lambda value: None
module.from_numpy = tensor
module.jit = types.SimpleNamespace(
    load=lambda file, map_location: types.SimpleNamespace(eval=lambda: PROGRAMS[NAME]))
module.export = types.SimpleNamespace(
    load=lambda file: types.SimpleNamespace(module=lambda check_guards: PROGRAMS[NAME]))
module.utils = types.SimpleNamespace(_pytree=types.SimpleNamespace(tree_leaves=leaves))
sys.modules["torch"] = module
"""


def stand_in_environment(folder: Path, behaviour: str) -> Path:
    """An environment with a `torch` whose loaded programs do what `behaviour` of PROGRAMS says."""
    package = folder / "lib" / "python3.11" / "site-packages" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    run = "import runpy\nsys.argv = sys.argv[3:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    python.write_text(f"#!{sys.executable}\n{_TORCH.replace('NAME', repr(behaviour))}{run}")
    python.chmod(0o755)
    return folder
