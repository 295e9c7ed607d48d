"""Small exported PyTorch programs in Triton's layout, for the tests of the backend `torch`: only where torch is."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

CONFIG = """backend: "torch"
max_batch_size: {max_batch_size}
input [ {{ name: "{input_name}" data_type: TYPE_{input_type} dims: {input_dims} }} ]
output [ {{ name: "{output_name}" data_type: TYPE_{output_type} dims: {output_dims} }} ]
instance_group [ {{ kind: KIND_{kind} count: {instances} }} ]
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}
{rest}
"""
IMAGE = (3, 32, 32)
CLASSES, WORDS = 10, 50
NUMBERS = {
    "input_name": "image",
    "input_type": "FP32",
    "input_dims": "[ 3, 32, 32 ]",
    "output_name": "logits",
    "output_type": "FP32",
    "output_dims": "[ 10 ]",
    "max_batch_size": 8,
    "kind": "CPU",
    "instances": 1,
    "rest": "",
}


class SmallResnet(nn.Module):  # type: ignore[misc]  # torch has no types where these are checked
    """Convolution, normalisation, ReLU; a block with a sum and one whose other branch is a convolution, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.first, self.first_norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)
        self.shortcut, self.shortcut_norm = nn.Conv2d(16, 32, 1, stride=2, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, image: Any) -> Any:
        x = torch.relu(self.stem_norm(self.stem(image)))
        x = nn.functional.relu(x.add_(self.first_norm(self.first(x))), inplace=True)
        x = torch.relu(self.second_norm(self.second(x)) + self.shortcut_norm(self.shortcut(x)))
        return self.head(x.mean((2, 3)))


class SmallDetector(nn.Module):  # type: ignore[misc]
    """SiLU, a sum after it, a depthwise convolution and a concatenation: rows (N, 64, 6), or the 20 best of them."""

    def __init__(self, *, has_top: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.deep, self.beside = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 16, 1)
        self.join, self.head = nn.Conv2d(48, 32, 3, stride=2, padding=1), nn.Conv2d(32, 6, 1)
        self.has_top = has_top

    def forward(self, image: Any) -> Any:
        silu = nn.functional.silu
        x = silu(self.norm(self.stem(image)))
        y = x + silu(self.deep(x))
        x = torch.cat([y, silu(self.beside(y)), nn.functional.max_pool2d(y, 3, 1, 1)], 1)
        rows = self.head(silu(self.join(x))).flatten(2).permute(0, 2, 1)
        if not self.has_top:
            return rows
        _, place = (rows[..., 4] + torch.arange(64, dtype=torch.float32) * 29 % 64).topk(
            20, 1
        )  # no two are nearly equal
        return rows.gather(1, place.unsqueeze(2).expand(-1, -1, 6))


class OfPixels(nn.Module):  # type: ignore[misc]
    """UINT8 pixels, cast by the program itself."""

    def __init__(self) -> None:
        super().__init__()
        self.network = small_resnet()

    def forward(self, image: Any) -> Any:
        return self.network(image.float() / 255)


class Lookup(nn.Module):  # type: ignore[misc]
    """A word's number to what stands there: a number that there is not is a fault of the device on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4)

    def forward(self, word: Any) -> Any:
        return self.words(word).squeeze(1)


def small_resnet(seed: int = 0) -> Any:
    """In evaluation mode; no number of its normalisations is 0 or 1."""
    torch.manual_seed(seed)
    network = SmallResnet().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.2, 0.2)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return network


def lookup() -> Any:
    """The same numbers each time."""
    torch.manual_seed(1)
    return Lookup()


def images(rows: int, seed: int = 0) -> Any:
    """(rows, 3, 32, 32) float32."""
    return torch.rand((rows, *IMAGE), generator=torch.Generator().manual_seed(seed))


def save(module: Any, sample: Any, path: Path, *, has_free_rows: bool = True) -> None:
    """The exported program, its first dimension free."""
    shapes = ({0: torch.export.Dim("rows", min=1, max=64)},) if has_free_rows else None
    with torch.no_grad():
        exported = torch.export.export(module.eval(), (sample,), dynamic_shapes=shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.export.save(exported, path)


def parameter(key: str, value: str) -> str:
    """A line of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def write_model(repository: Path, name: str, module: Any, sample: Any, **changed: Any) -> None:
    """A model's folder. changed: what differs from NUMBERS."""
    save(module, sample, repository / name / "1" / "model.pt2", has_free_rows=changed.get("max_batch_size", 8) > 0)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(**NUMBERS | changed))


def write_lookup(repository: Path, name: str, **changed: Any) -> None:
    """The folder of a Lookup: INT64 `word` [1] to FP32 `vector` [4]."""
    shape = {"input_name": "word", "input_type": "INT64", "input_dims": "[ 1 ]"}
    shape |= {"output_name": "vector", "output_dims": "[ 4 ]"}
    write_model(repository, name, lookup(), torch.zeros((2, 1), dtype=torch.int64), **shape | changed)


class AnySize(nn.Module):  # type: ignore[misc]
    """The mean of each row, however long."""

    def forward(self, numbers: Any) -> Any:
        return numbers.mean(1, keepdim=True)


def write_repository(root: Path) -> None:
    """Models on the CPU, and `ROOT/expected/NAME.npy`: what each answers to `ROOT/asked/NAME.npy`."""
    import numpy as np

    models, network = root / "models", small_resnet()
    pixels, words = (images(5) * 255).byte(), torch.tensor([[3], [0], [49]])
    batching = "dynamic_batching { max_queue_delay_microseconds: 20000 }"
    write_model(models, "batched", network, images(2), rest=batching)
    write_model(models, "pixels", OfPixels(), pixels[:2], input_type="UINT8", rest=parameter("precision", "bf16"))
    write_lookup(models, "lookup")
    two = parameter("batches-in-flight", "2")
    write_model(models, "two-in-flight", network, images(2), rest=batching + "\n" + two)
    write_lookup(models, "lookup-two", rest=two)
    shared = batching + "\n" + parameter("program-process", "shared")
    write_model(models, "shared", network, images(2), instances=2, rest=shared)
    free = {"input_name": "numbers", "input_dims": "[ -1 ]", "output_name": "mean", "output_dims": "[ 1 ]"}
    write_model(models, "one-row", network, images(1), max_batch_size=0, input_dims="[ 1, 3, 32, 32 ]",
                output_dims="[ 1, 10 ]")  # fmt: skip
    rows = torch.export.Dim("rows", min=1, max=64)
    columns = torch.export.Dim("columns", min=1, max=1024)
    write_model(models, "any-size", AnySize(), torch.zeros(2, 7), **free)
    exported = torch.export.export(AnySize(), (torch.zeros(2, 7),), dynamic_shapes=({0: rows, 1: columns},))
    torch.export.save(exported, models / "any-size" / "1" / "model.pt2")
    write_model(models, "broken-dims", network, images(2), output_dims="[ 9 ]")
    write_model(models, "broken-word", network, images(2), rest=parameter("precision", "int4"))
    write_model(models, "broken-file", network, images(2))
    (models / "broken-file" / "1" / "model.pt2").write_bytes(b"no archive")
    asked = {
        "batched": (images(5), network),
        "pixels": (pixels, OfPixels()),
        "two-in-flight": (images(5), network),
        "shared": (images(5), network),
        "lookup": (words, lookup()),
        "lookup-two": (words, lookup()),
        "one-row": (images(1), network),
        "any-size": (torch.arange(26.0).reshape(2, 13), AnySize()),
    }
    for folder in ("asked", "expected"):
        (root / folder).mkdir()
    for name, (batch, module) in asked.items():
        np.save(root / "asked" / f"{name}.npy", batch.numpy())
        with torch.no_grad():
            np.save(root / "expected" / f"{name}.npy", module.eval()(batch).numpy())


if __name__ == "__main__":
    write_repository(Path(sys.argv[1]))
