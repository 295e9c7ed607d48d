"""Encoded pictures to a program's input on the CPU, where torch is installed; on the GPU: tests/gpu."""

import ctypes
import struct
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: `make gpu` builds the environment that has it")
pytest.importorskip("torchvision", reason="torchvision is not installed")

from torchvision.io import ImageReadMode, decode_jpeg  # noqa: E402  behind the skips

from penstock.engines.torch_serving import nvjpeg, pictures  # noqa: E402
from penstock.engines.torch_serving.picture_spec import PictureFit  # noqa: E402
from penstock.engines.torch_serving.pictures import PictureReader, pieces, value_table  # noqa: E402
from penstock.vision.decode import decode  # noqa: E402
from penstock.vision.preprocess import _tables, prepare  # noqa: E402
from tests.engines.kernel_on_cpu import compile_kernel, launch  # noqa: E402
from tests.engines.test_picture_kernel import IMAGENET, of_the_gateway  # noqa: E402
from tests.vision import images  # noqa: E402

PICTURE = images.picture(301, 217)
ENCODED = {
    "jpeg": images.jpeg(PICTURE),
    "420": images.jpeg(PICTURE, subsampling="420"),
    "turned jpeg": images.jpeg_with_exif(images.jpeg(PICTURE), images.exif(6)),
    "progressive": images.progressive_jpeg(PICTURE),
    "png": images.png(PICTURE, color_type=2),
    "webp": images.webp(PICTURE),
}


@pytest.mark.parametrize("fit", PictureFit)
@pytest.mark.parametrize("color", ["RGB", "BGR", "GRAY"])
@pytest.mark.parametrize("name", ENCODED)
def test_prepare_on_a_cpu_equals_the_gateways_path(name: str, color: str, fit: PictureFit) -> None:
    """Of every format, fit and colour order: the same numbers, as both decode by libjpeg-turbo and OpenCV."""
    spec = replace(IMAGENET, color=color, fit=fit, shorter_side=60 if fit is PictureFit.CROP else 0)
    if color == "GRAY":
        spec = replace(spec, offsets=spec.offsets[:1], channel_factors=spec.channel_factors[:1])
    out = torch.full((2, spec.channels, spec.height, spec.width), 7.0)
    assert PictureReader(spec, torch.device("cpu")).prepare([ENCODED[name]], out) == [None]
    gateway = of_the_gateway(spec)
    expected, _ = prepare(decode(ENCODED[name], gateway.color), gateway)
    np.testing.assert_array_equal(out[0].numpy(), expected)
    assert (out[1] == 7.0).all()


def test_prepare_one_of_three_is_no_picture_the_others_are_served() -> None:
    """Its row is black and its sentence says why; the rows of its batch-mates are their own."""
    out = torch.full((3, 3, 48, 56), 7.0).to(memory_format=torch.channels_last)
    reader = PictureReader(IMAGENET, torch.device("cpu"))
    errors = reader.prepare([ENCODED["jpeg"], b"GIF89a", ENCODED["png"]], out)
    assert (errors[0], errors[2]) == (None, None)
    assert errors[1] == "the picture is not a JPEG, PNG or WebP: its first bytes are 47 49 46 38 39 61"
    black = value_table(IMAGENET)[:, :1, None].expand(3, 48, 56)
    assert torch.equal(out[1], black)
    assert not torch.equal(out[0], black)
    assert not torch.equal(out[2], black)


def test_prepare_more_pixels_than_allowed_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header's size is enough to say no; the limit is the gateway's, by the environment of Triton."""
    monkeypatch.setenv("PENSTOCK_MAX_PIXELS", "1000")
    out = torch.empty((1, 3, 48, 56))
    reader = PictureReader(IMAGENET, torch.device("cpu"))
    assert reader.prepare([ENCODED["jpeg"]], out) == ["the picture has 301 x 217 = 65317 pixels (limit 1000)"]


def test_value_table_equals_the_gateways() -> None:
    """What each pixel value becomes, to the last bit."""
    gateway = of_the_gateway(IMAGENET)
    expected = _tables(gateway.scale, gateway.offsets, gateway.channel_factors)
    np.testing.assert_array_equal(value_table(IMAGENET).numpy(), expected)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([99], [(0, 1)]),
        ([4, 4, 4], [(0, 2), (2, 3)]),
        ([99, 1, 99], [(0, 1), (1, 2), (2, 3)]),
        ([0, 10, 0, 1], [(0, 3), (3, 4)]),
    ],
)
def test_pieces_hold_at_most_the_limit_or_one(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    """Consecutive, complete, and no larger than the memory they are meant for."""
    assert list(pieces(sizes, 10)) == expected


class Stream:
    """A CUDA stream whose work is always done."""

    cuda_stream = 0


class Event:
    """A CUDA event that has always happened."""

    def record(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        pass


class Rows:
    def on_device(self, rows: list[bytes]) -> Any:
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)


class Gpu:
    """A reader's way over the GPU, without one: torchvision decodes JPEGs on the CPU, the kernel is compiled as C++."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: ctypes.CDLL) -> None:
        self.batches: list[int] = []
        self.refused: bytes | None = None
        self.reader = PictureReader(IMAGENET, torch.device("cpu"))
        monkeypatch.setattr(self.reader, "_rows", Rows())
        monkeypatch.setattr(self.reader, "_kernels", {4: self.launch})
        monkeypatch.setattr(self.reader, "_jpegs", self)
        for name, fake in (
            ("device", lambda _: nullcontext()),
            ("current_stream", lambda _: Stream()),
            ("Event", Event),
        ):
            monkeypatch.setattr(pictures.torch.cuda, name, fake)
        self._kernel = kernel

    def launch(self, rows: Any, table: Any, out: Any, *, stream: int) -> None:
        assert stream == 0
        launch(self._kernel, rows.numpy().tobytes(), table.numpy(), out.numpy())

    def decode(self, encoded: list[bytes], sizes: list[tuple[int, int]]) -> list[nvjpeg.Planes | None]:
        self.batches.append(len(encoded))
        return [
            None if one == self.refused else self.planes(one, *size) for one, size in zip(encoded, sizes, strict=True)
        ]

    @staticmethod
    def planes(encoded: bytes, width: int, height: int) -> nvjpeg.Planes:
        """Not turned."""
        pixels = decode_jpeg(torch.frombuffer(encoded, dtype=torch.uint8), ImageReadMode.RGB).contiguous()
        assert tuple(pixels.shape) == (3, height, width)
        return nvjpeg.Planes(pixels.data_ptr(), width, height, pixels)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return Gpu(monkeypatch, compile_kernel(tmp_path))


def expected_of(encoded: bytes) -> Any:
    gateway = of_the_gateway(IMAGENET)
    return prepare(decode(encoded, gateway.color), gateway)[0]


def test_prepare_on_a_gpu_mixed_batch_fills_each_row_in_order(gpu: Gpu) -> None:
    """nvJPEG gets the baseline JPEGs in one call, OpenCV the rest, and no row is another's."""
    names = ["png", "turned jpeg", "progressive", "420", "webp"]
    batch = [ENCODED[name] for name in names]
    out = torch.full((6, 3, 48, 56), 7.0).to(memory_format=torch.channels_last)
    errors = gpu.reader._on_gpu([*batch[:3], b"GIF89a", *batch[3:]], out)
    assert gpu.batches == [2]
    assert [error is None for error in errors] == [True, True, True, False, True, True]
    for row, encoded in zip((0, 1, 2, 4, 5), batch, strict=True):
        np.testing.assert_array_equal(out[row].numpy(), expected_of(encoded))
    assert torch.equal(out[3], value_table(IMAGENET)[:, :1, None].expand(3, 48, 56))


def test_prepare_on_a_gpu_what_nvjpeg_refuses_is_decoded_by_opencv(gpu: Gpu) -> None:
    """And what OpenCV refuses, too, is that picture's error alone."""
    gpu.refused = ENCODED["jpeg"]
    broken = ENCODED["png"].replace(b"IDAT", b"IDAX")
    out = torch.empty((3, 3, 48, 56))
    errors = gpu.reader._on_gpu([ENCODED["jpeg"], broken, ENCODED["420"]], out)
    assert (errors[0], errors[2]) == (None, None)
    assert errors[1] is not None
    assert "wrong checksum of its chunk b'IDAX'" in errors[1]
    np.testing.assert_array_equal(out[0].numpy(), expected_of(ENCODED["jpeg"]))
    np.testing.assert_array_equal(out[2].numpy(), expected_of(ENCODED["420"]))


def test_prepare_on_a_gpu_large_pictures_are_decoded_in_pieces(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded pixels on the GPU are bounded; the rows are the same."""
    monkeypatch.setattr(pictures, "MAX_DECODED_BYTES", 2 * 3 * 301 * 217)
    out = torch.empty((5, 3, 48, 56))
    assert gpu.reader._on_gpu([ENCODED["420"]] * 5, out) == [None] * 5
    assert gpu.batches == [2, 2, 1]
    for row in out:
        np.testing.assert_array_equal(row.numpy(), expected_of(ENCODED["420"]))


def test_decode_jpegs_one_bad_of_a_batch_is_found_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvJPEG names none: only the one that fails alone is None, after two calls for each halving at most."""
    calls: list[int] = []

    def decode_jpeg(encoded: list[Any], **_: Any) -> list[Any]:
        calls.append(len(encoded))
        if any(bytes(one.tolist()) == b"bad" for one in encoded):
            raise RuntimeError("Error while decoding JPEG images: Failed to decode batch: 3")
        return list(encoded)

    monkeypatch.setattr(nvjpeg, "decode_jpeg", decode_jpeg)
    batch = [b"bad" if i == 11 else b"good" for i in range(16)]
    found = nvjpeg.decode_jpegs(batch, torch.device("cpu"), is_grey=False)
    assert [one is None for one in found] == [i == 11 for i in range(16)]
    assert len(calls) == 9


class FakeNvjpeg:
    """libnvjpeg as nvjpeg.py calls it: says a size, and writes a number of its own into each plane."""

    def __init__(self, *, create: int = 0, decode: int = 0, size: tuple[int, int] = (40, 30)) -> None:
        self.create, self.answer, self.size = create, decode, size
        self.initialised: list[tuple[int, int, int]] = []

    def nvjpegCreateEx(self, backend: int, allocator: None, pinned: None, flags: Any, handle: Any) -> int:
        assert (backend, allocator, pinned, flags.value) == (3, None, None, 32)
        return self.create

    def nvjpegJpegStateCreate(self, handle: Any, state: Any) -> int:
        return 0

    def nvjpegGetImageInfo(self, handle: Any, *given: Any) -> int:
        encoded, length, _, _, widths, heights = given
        assert length.value == len(encoded)
        widths[0], heights[0] = self.size
        return 0

    def nvjpegDecodeBatchedInitialize(self, handle: Any, state: Any, *asked: int) -> int:
        self.initialised.append(asked)  # type: ignore[arg-type]
        return 0

    def nvjpegDecodeBatched(self, handle: Any, state: Any, *given: Any) -> int:
        sources, lengths, destinations, _ = given
        for i, (source, length) in enumerate(zip(sources, lengths, strict=True)):
            assert source[:length] == b"jpeg %d" % i
            *planes, width, _, _, _ = struct.unpack_from("<4Q4Q", destinations, 64 * i)
            for channel, plane in enumerate(planes):
                if plane:
                    ctypes.memset(plane, 10 * i + channel, width * self.size[1])
        return self.answer


@pytest.mark.parametrize(("is_grey", "format_number"), [(False, 3), (True, 2)])
def test_hardware_decode_gives_every_picture_planes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, is_grey: bool, format_number: int
) -> None:
    """One call a batch, one piece of memory, and no plane over another."""
    monkeypatch.setattr(nvjpeg.torch.cuda, "current_stream", lambda _: Stream())
    library = FakeNvjpeg()
    jpegs = nvjpeg.HardwareJpegs(is_grey=is_grey, library=library)
    answer = jpegs.decode([b"jpeg %d" % i for i in range(3)], [(40, 30)] * 3, torch.device("cpu"))
    assert answer is not None
    memory, addresses = answer
    assert library.initialised == [(3, 1, format_number)]
    for i, address in enumerate(addresses):
        begin = address - memory.data_ptr()
        assert begin % 256 == 0
        for channel in range(1 if is_grey else 3):
            plane = memory[begin + 1200 * channel : begin + 1200 * (channel + 1)]
            assert (plane == 10 * i + channel).all()


@pytest.mark.parametrize("library", [FakeNvjpeg(decode=3), FakeNvjpeg(size=(41, 30))])
def test_hardware_decode_refused_or_of_another_size_is_none(
    monkeypatch: pytest.MonkeyPatch, library: FakeNvjpeg
) -> None:
    """A frame that is not of the header's size is never written: there would be no room for it."""
    monkeypatch.setattr(nvjpeg.torch.cuda, "current_stream", lambda _: Stream())
    jpegs = nvjpeg.HardwareJpegs(is_grey=False, library=library)
    assert jpegs.decode([b"jpeg 0"], [(40, 30)], torch.device("cpu")) is None
    assert len(library.initialised) == (library.size == (40, 30))


def test_hardware_decoder_absent_says_what_nvjpeg_answered() -> None:
    """A card without one is no error of its own: torchvision's way stands behind it."""
    with pytest.raises(nvjpeg.NoHardwareDecoder, match="answers 7"):
        nvjpeg.HardwareJpegs(is_grey=False, library=FakeNvjpeg(create=7))


class TriedHardware:
    """In place of HardwareJpegs: decodes by torchvision on the CPU, with an error of that many levels."""

    error = 0
    answers = True

    def __init__(self, *, is_grey: bool) -> None:
        self.mode = ImageReadMode.GRAY if is_grey else ImageReadMode.RGB

    def decode(self, encoded: list[bytes], sizes: list[tuple[int, int]], device: Any) -> Any:
        pixels = decode_jpeg(torch.frombuffer(encoded[0], dtype=torch.uint8), self.mode).contiguous().reshape(-1)
        found = pixels.int().add(self.error).clamp(0, 255).byte()
        return (torch.cat([found, found[:100]]), [found.data_ptr()]) if self.answers else None


@pytest.mark.parametrize("is_grey", [True, False])
@pytest.mark.parametrize(
    ("error", "answers", "name"), [(0, True, "nvjpeg-hardware"), (40, True, "nvjpeg"), (0, False, "nvjpeg")]
)
def test_gpu_jpegs_hardware_that_decodes_otherwise_is_not_used(
    monkeypatch: pytest.MonkeyPatch, is_grey: bool, error: int, answers: bool, name: str
) -> None:
    """Its first picture is held against the CPU's: a decoder that gives other pixels, or none, is left alone."""
    monkeypatch.setattr(nvjpeg, "HardwareJpegs", TriedHardware)
    monkeypatch.setattr(TriedHardware, "error", error)
    monkeypatch.setattr(TriedHardware, "answers", answers)
    assert nvjpeg.GpuJpegs(torch.device("cpu"), is_grey=is_grey).name == name
