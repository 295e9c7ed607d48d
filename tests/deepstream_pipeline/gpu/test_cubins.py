"""Compiled kernels are kept for the next process, and only ours are taken: tried with a stand-in for NVRTC."""

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from penstock_video.errors import GpuFailed, GpuUnavailable
from penstock_video.preprocess.kernels import SOURCE, cache_folder, cubin_for


class nvrtcResult(IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_INVALID_OPTION = 5
    NVRTC_ERROR_COMPILATION = 6


class FakeNvrtc(ModuleType):
    """Counts what it compiles; `error` and `log` are what it says of the next source."""

    nvrtcResult = nvrtcResult

    def __init__(self) -> None:
        super().__init__("cuda.bindings.nvrtc")
        self.compiled = 0
        self.version = (12, 9)
        self.error = nvrtcResult.NVRTC_SUCCESS
        self.log = b""
        self.options: list[bytes] = []
        self.programs = 0

    def nvrtcVersion(self) -> tuple[Any, ...]:
        return (nvrtcResult.NVRTC_SUCCESS, *self.version)

    def nvrtcCreateProgram(self, source: bytes, name: bytes, *headers: object) -> tuple[Any, ...]:
        assert source == SOURCE.encode()
        self.programs += 1
        return (nvrtcResult.NVRTC_SUCCESS, "a program")

    def nvrtcCompileProgram(self, program: str, count: int, options: list[bytes]) -> tuple[Any, ...]:
        self.compiled += 1
        self.options = options
        return (self.error,)

    def nvrtcGetProgramLogSize(self, program: str) -> tuple[Any, ...]:
        return (nvrtcResult.NVRTC_SUCCESS, len(self.log) + 1)

    def nvrtcGetProgramLog(self, program: str, log: bytearray) -> tuple[Any, ...]:
        log[:-1] = self.log
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcGetCUBINSize(self, program: str) -> tuple[Any, ...]:
        return (nvrtcResult.NVRTC_SUCCESS, 8)

    def nvrtcGetCUBIN(self, program: str, cubin: bytearray) -> tuple[Any, ...]:
        cubin[:] = b"cubin %02d" % (self.compiled % 100)
        return (nvrtcResult.NVRTC_SUCCESS,)

    def nvrtcDestroyProgram(self, program: str) -> tuple[Any, ...]:
        self.programs -= 1
        return (nvrtcResult.NVRTC_SUCCESS,)


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    fake, package, bindings = FakeNvrtc(), ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.nvrtc = fake  # type: ignore[attr-defined]
    for name, module in (("cuda", package), ("cuda.bindings", bindings), ("cuda.bindings.nvrtc", fake)):
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_cubin_is_compiled_once_for_a_card_and_a_compiler(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    """Another card, or another NVRTC, has its own; sums are rounded as the CPU rounds them."""
    folder = tmp_path / "a" / "kernels"
    first = cubin_for((9, 0), folder)
    assert cubin_for((9, 0), folder) == first
    assert nvrtc.compiled == 1
    assert nvrtc.options[0] == b"--gpu-architecture=sm_90"
    assert b"--fmad=false" in nvrtc.options
    assert cubin_for((8, 9), folder) != first
    nvrtc.version = (13, 0)
    assert cubin_for((9, 0), folder) != first
    assert nvrtc.compiled == 3
    assert nvrtc.programs == 0
    assert folder.stat().st_mode & 0o777 == 0o700


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def open_to_others(path: Path) -> None:
    path.chmod(0o666)


def open_the_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def link(path: Path) -> None:
    kept = path.rename(path.with_suffix(".other"))
    path.symlink_to(kept)


@pytest.mark.parametrize("spoil", [damage, empty, open_to_others, open_the_folder, link])
def test_kept_file_that_another_could_have_written_is_not_taken(
    nvrtc: FakeNvrtc, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """Damaged, writable by others, a link, or in a folder that others write to: it is compiled anew."""
    folder = tmp_path / "kernels"
    first = cubin_for((9, 0), folder)
    (kept,) = folder.iterdir()
    spoil(kept)
    assert cubin_for((9, 0), folder) != first
    assert nvrtc.compiled == 2


def test_kept_files_are_a_handful(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    """Years of versions of the program do not fill a disk."""
    for minor in range(30):
        nvrtc.version = (12, minor)
        cubin_for((9, 0), tmp_path)
    assert len(list(tmp_path.iterdir())) == 16


def test_cubin_where_nothing_can_be_kept_is_compiled_each_time(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    """A home that cannot be written costs a start some time, no more."""
    (tmp_path / "file").write_text("")
    for _ in range(2):
        assert cubin_for((9, 0), tmp_path / "file" / "kernels").startswith(b"cubin")
    assert nvrtc.compiled == 2


def test_card_that_nvrtc_does_not_know_is_unavailable(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    """A card newer or older than the compiler: the sentence says which compiler, which card, and what to do."""
    nvrtc.error, nvrtc.log = nvrtcResult.NVRTC_ERROR_INVALID_OPTION, b"invalid value for --gpu-architecture\n"
    with pytest.raises(GpuUnavailable, match=r"NVRTC 12\.9 cannot compile for sm_42: invalid value .*use the CPU"):
        cubin_for((4, 2), tmp_path)
    assert nvrtc.programs == 0


def test_source_that_nvrtc_refuses_fails_with_its_words(nvrtc: FakeNvrtc, tmp_path: Path) -> None:
    """A fault of ours, in the compiler's words."""
    nvrtc.error, nvrtc.log = nvrtcResult.NVRTC_ERROR_COMPILATION, b"error: expected\na ;"
    with pytest.raises(GpuFailed, match=r"NVRTC 12\.9 refuses the kernels for sm_90: error: expected a ;"):
        cubin_for((9, 0), tmp_path)


def test_without_the_compiler_the_sentence_says_how_to_get_it(
    nvrtc: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuda-bindings raises a RuntimeError where there is no libnvrtc."""

    def not_found() -> None:
        raise RuntimeError("libnvrtc.so.12 not found")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    with pytest.raises(GpuUnavailable, match=r"\(libnvrtc\) is not here: run make gpu"):
        cubin_for((9, 0), tmp_path)


@pytest.mark.parametrize(
    ("folder", "version"), [("cuda_nvrtc/lib", "12"), ("cu13/lib", "13")], ids=["of CUDA 12", "of CUDA 13"]
)
def test_compiler_is_found_wherever_packages_are(
    nvrtc: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, version: str
) -> None:
    """Not in the interpreter's own folder alone; first its builtins: NVRTC 13 does not look beside itself for them."""
    place = tmp_path / "nvidia" / folder
    place.mkdir(parents=True)
    names = [f"libnvrtc{part}.so.{version}{minor}" for part, minor in (("-builtins", ".0"), ("", ""), (".alt", ""))]
    for name in names:
        (place / name).write_text("")
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    monkeypatch.setattr(
        "penstock_video.preprocess.kernels.find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path / "other"), str(tmp_path / name)]),
    )
    cubin_for((9, 0), tmp_path / "kernels")
    assert loaded == [str(place / name) for name in names[:2]]


def test_compiler_that_does_not_load_is_left_to_cuda_bindings(
    nvrtc: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another machine's architecture, say; where the linker looks there may be one."""
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "cu13" / "lib" / "libnvrtc.so.13").write_text("none")
    monkeypatch.setattr(
        "penstock_video.preprocess.kernels.find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]),
    )
    assert cubin_for((9, 0), tmp_path / "kernels").startswith(b"cubin")


def test_cache_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$XDG_CACHE_HOME where it is an absolute path, else ~/.cache, and nowhere without a home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "penstock" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "penstock" / "kernels"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user without a home
    assert cache_folder() is None
