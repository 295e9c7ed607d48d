"""perf_analyzer, unmodified, against the gateway's ports: every way that it can send."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("client-stack")
PROGRAM = CHECKOUT / ".venv-clients" / "bin" / "perf_analyzer"
REQUESTS, TIMEOUT_S = 40, 60.0
# It is linked against these; Triton's wheel has them under names with a hash.
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
IDENTITY = ("-m", "identity_fp32", "--shape", "x:16")
STREAMED = ("-i", "grpc", "--streaming")
SYSTEM = ("--shared-memory", "system", "--output-shared-memory-size", "4096")
SEQUENCES = ("-m", "sums", "--sequence-length", "5", "--num-of-sequences", "2")
WAYS = {
    "http": (*IDENTITY, "-i", "http"),
    "http asynchronous": (*IDENTITY, "-i", "http", "-a"),
    "http json": (*IDENTITY, "-i", "http", "--input-tensor-format", "json", "--output-tensor-format", "json"),
    "http sequences": (*SEQUENCES, "-i", "http"),
    "http strings in batches": ("-m", "words", "--shape", "x:4", "-b", "2", "-i", "http"),
    "http system shared memory": (*IDENTITY, "-i", "http", *SYSTEM),
    "grpc": (*IDENTITY, "-i", "grpc"),
    "grpc asynchronous": (*IDENTITY, "-i", "grpc", "-a"),
    "grpc gzip": (*IDENTITY, "-i", "grpc", "--grpc-compression-algorithm", "gzip"),
    "grpc sequences": (*SEQUENCES, "-i", "grpc"),
    "grpc system shared memory": (*IDENTITY, "-i", "grpc", *SYSTEM),
    "streaming": (*IDENTITY, *STREAMED),
    "streaming system shared memory": (*IDENTITY, *STREAMED, *SYSTEM),
    "streaming sequences": (*SEQUENCES, *STREAMED),
}


@dataclass(frozen=True)
class PerfAnalyzer:
    """The program and the folder of the libraries that it wants."""

    libraries: Path

    def run(self, address: str, *arguments: str) -> str:
        """What it printed; it ended well."""
        counts = () if "--measurement-mode" in arguments else ("--request-count", str(REQUESTS))
        done = subprocess.run(
            [PROGRAM, "-u", address, *counts, "--concurrency-range", "2", "-s", "999", *arguments],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(self.libraries)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert not re.search(r"fail|error", done.stdout + done.stderr, re.IGNORECASE), done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def perf_analyzer(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> PerfAnalyzer:
    """The program, with its libraries under the names that it knows."""
    if not PROGRAM.is_file():
        pytest.skip("no perf_analyzer here: `make .venv-clients/.ready` fetches it on Linux x86-64")
    folder = tmp_path_factory.mktemp("libraries")
    for name, pattern in LIBRARIES.items():
        (found,) = triton_environment.glob(f"lib/*/site-packages/nvidia_pytriton.libs/{pattern}")
        (folder / name).symlink_to(found)
    return PerfAnalyzer(folder)


@pytest.mark.parametrize("way", WAYS)
def test_perf_analyzer_completes(client_stack: RunningStack, perf_analyzer: PerfAnalyzer, way: str) -> None:
    """It measures as many requests as configured, and finds some of them in the server's statistics, where it looks
    when the first are already under way."""
    printed = perf_analyzer.run(_address(client_stack, WAYS[way]), *WAYS[way])
    assert _counted(printed, "Request count") >= REQUESTS
    assert _counted(printed, "Successful request count") > 0


def test_perf_analyzer_counts_every_answer_of_a_decoupled_model(
    client_stack: RunningStack, perf_analyzer: PerfAnalyzer, tmp_path: Path
) -> None:
    """Three answers to a request: its response rate is three times its request rate."""
    (tmp_path / "three.json").write_text('{"data": [{"x": {"content": [3], "shape": [1]}}]}')
    printed = perf_analyzer.run(
        client_stack.grpc_address, "-m", "repeats", *STREAMED, "--input-data", str(tmp_path / "three.json")
    )
    rates = dict(re.findall(r"^ *(Throughput|Response Throughput): ([0-9.]+)", printed, re.MULTILINE))
    assert float(rates["Response Throughput"]) == pytest.approx(3 * float(rates["Throughput"]), rel=0.01)


def test_perf_analyzer_measures_windows_at_several_concurrencies(
    client_stack: RunningStack, perf_analyzer: PerfAnalyzer
) -> None:
    """Its usual way: windows until the numbers are stable, concurrency 1 and 2, connections opened and closed."""
    windows = ("--measurement-mode", "count_windows", "--measurement-request-count", "20", "-p", "300", "-r", "3")
    printed = perf_analyzer.run(
        client_stack.grpc_address, *IDENTITY, "-i", "grpc", *windows, "--concurrency-range", "1:2"
    )
    assert len(re.findall(r"^Concurrency: \d+, throughput", printed, re.MULTILINE)) == 2


def _address(stack: RunningStack, way: tuple[str, ...]) -> str:
    return stack.grpc_address if "grpc" in way else stack.http_url.removeprefix("http://")


def _counted(printed: str, name: str) -> int:
    found = re.search(rf"^ *{name}: (\d+)", printed, re.MULTILINE)
    assert found, printed
    return int(found[1])
