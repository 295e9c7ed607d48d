"""The limit of a process's memory: what the machine or its container has left, and models that return memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engines.ort_serving.memory import is_out_of_memory, machine_bytes

GIB = 1 << 30


def proc_of(folder: Path, total: int, available: int) -> Path:
    """A /proc with that memory, in bytes."""
    folder.mkdir()
    (folder / "meminfo").write_text(
        f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\nHugePages: 0\n"
    )
    return folder


def cgroup_of(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """The mount of cgroups with those files in its root, and /proc/self/cgroup."""
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "own").write_text("0::/\n")
    return folder / "cgroup", folder / "own"


def test_machine_without_cgroups_has_the_memory_of_the_kernel(tmp_path: Path) -> None:
    """MemTotal and MemAvailable, in bytes."""
    proc = proc_of(tmp_path / "proc", 8 * GIB, 3 * GIB)
    assert machine_bytes(proc, *cgroup_of(tmp_path, {})) == (8 * GIB, 3 * GIB)


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": f"{2 * GIB}\n",
            "memory.current": f"{GIB}\n",
            "memory.stat": f"anon 7\ninactive_file {GIB // 2}\n",
        },
        {
            "memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/memory.usage_in_bytes": f"{GIB}\n",
            "memory/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\n",
        },
    ],
    ids=["v2", "v1"],
)
def test_container_has_what_its_cgroup_leaves(tmp_path: Path, files: dict[str, str]) -> None:
    """Its limit, less its use, plus the page cache that the kernel drops first."""
    proc = proc_of(tmp_path / "proc", 8 * GIB, 7 * GIB)
    assert machine_bytes(proc, *cgroup_of(tmp_path, files)) == (2 * GIB, GIB + GIB // 2)


@pytest.mark.parametrize("files", [{"memory.max": "max\n", "memory.current": "5\n"}, {"memory.max": f"{GIB}\n"}])
def test_cgroup_without_a_limit_or_its_use_changes_nothing(tmp_path: Path, files: dict[str, str]) -> None:
    """The machine's memory then."""
    proc = proc_of(tmp_path / "proc", 8 * GIB, 3 * GIB)
    assert machine_bytes(proc, *cgroup_of(tmp_path, files)) == (8 * GIB, 3 * GIB)


def test_system_without_meminfo_has_no_known_memory(tmp_path: Path) -> None:
    """No limit is set there."""
    assert machine_bytes(tmp_path, *cgroup_of(tmp_path, {})) is None


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [(MemoryError(), True), (RuntimeError("std::bad_alloc"), True), (RuntimeError("memory layout NCHW"), False)],
)
def test_errors_of_too_little_memory_are_recognised(error: Exception, is_memory: bool) -> None:
    """ONNX Runtime's and Python's."""
    assert is_out_of_memory(error) is is_memory


LIMITED = """
import resource
from penstock.engines.ort_serving import memory

released = []
class Model:
    def release_memory(self):
        released.append(1)

GIB = 1 << 30
limit, model = memory.MemoryLimit(), Model()
memory.machine_bytes = lambda: (4 * GIB, 2 * GIB)
limit.add(model)
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
assert hard == resource.RLIM_INFINITY and 1.5 * GIB < soft < 2.5 * GIB, soft
try:
    bytearray(3 * GIB)
except MemoryError:
    print("refused")
limit.check(60.0)
assert not released
held = bytearray(GIB + GIB // 2)
memory.machine_bytes = lambda: (4 * GIB, GIB // 2)
limit.check()
print("released", len(released))
limit.check()
print("released", len(released))
del model
memory.machine_bytes = lambda: None
limit.check()
limit.release()
print("released", len(released))
"""


def test_limit_follows_available_memory_and_models_give_back_theirs() -> None:
    """More than is available fails; with little room models return memory, at most once a second."""
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    lines = ["refused", "released 1", "released 1", "released 1"]
    assert done.stdout.splitlines() == lines, done.stderr
