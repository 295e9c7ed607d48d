"""The images of deploy/docker/Dockerfile: names, targets, and the locks whose packages each holds.

`python -m deploy.release.images --version 0.1.0` writes what release.yaml builds, as a matrix of GitHub's in JSON; with
`--triton-runner LABEL` Triton's images are among it, one for each of NVIDIA's releases.
"""

import argparse
import json
import sys
from dataclasses import dataclass

RUNNER = "ubuntu-24.04"
TRITON = "nvcr.io/nvidia/tritonserver"


@dataclass(frozen=True, slots=True)
class Image:
    """locks: files under requirements/ whose packages the target installs. optional_locks: only on some bases."""

    name: str
    target: str
    locks: tuple[str, ...]
    optional_locks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TritonRelease:
    """has_known_holes: what a scan finds is mended by no release for these cards, so it does not stop ours."""

    name: str
    has_known_holes: bool


IMAGES = (
    Image("penstock", "stack", ("base.txt", "triton.txt", "triton-server.txt")),
    Image("penstock-gateway", "gateway", ("base.txt",)),
    Image("penstock-video", "video", ("base.txt", "video.txt")),
    Image("penstock-load", "load", ("locust.txt",)),
    # All of triton.txt only where NVIDIA's image has no onnxruntime backend of its own.
    Image("penstock-triton", "triton", ("triton-models.txt",), optional_locks=("triton.txt",)),
)
# Pascal's last, Volta's last, and the oldest without known vulnerabilities (server/penstock/gpu/triton_images.py has
# the sources).
TRITON_RELEASES = (TritonRelease("24.04", True), TritonRelease("24.10", True), TritonRelease("26.07", False))


def build_matrix(version: str, triton_runner: str = "") -> list[dict[str, str | bool]]:
    """What to build, one entry an image; Triton's, of tens of gigabytes each, only where a runner for them is named."""
    ours = [_entry(image, version, runner=RUNNER) for image in IMAGES if image.target != "triton"]
    (triton,) = (image for image in IMAGES if image.target == "triton")
    theirs = [
        _entry(triton, f"{version}-{release.name}", runner=triton_runner)
        | {"build_args": f"TRITON_BASE={TRITON}:{release.name}-py3", "fail_on_findings": not release.has_known_holes}
        for release in TRITON_RELEASES
        if triton_runner
    ]
    return ours + theirs


def _entry(image: Image, tag: str, *, runner: str) -> dict[str, str | bool]:
    return {
        "name": image.name,
        "target": image.target,
        "tag": tag,
        "runner": runner,
        "build_args": "",
        "fail_on_findings": True,
    }


def main() -> None:
    """Writes the matrix on standard output."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--version", required=True)
    parser.add_argument("--triton-runner", default="", help="label of a runner with 60 GB of free disk")
    chosen = parser.parse_args()
    sys.stdout.write(json.dumps({"include": build_matrix(chosen.version, chosen.triton_runner)}) + "\n")


if __name__ == "__main__":
    main()
