"""Builds deploy/docker's images with buildah and runs their file systems as a container engine would, without one.

A container here: an image's files, read-only; /proc, /dev, /tmp and a volume of its own; its own process namespace
with tini first; the image's user, without capabilities, not to be gained again. Several share a network (loopback
only) and a /dev/shm, as those of a pod do. There is no engine, no cgroup, no seccomp filter, and no image registry.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

CHECKOUT = Path(__file__).resolve().parents[2]
LOCAL_BASE = Path(__file__).with_name("local_base.sh")
BASES = {"BASE": "localhost/penstock-base", "TRITON_BASE": "localhost/penstock-tritonserver"}
USER = 10001
_NEEDED = ("buildah", "debootstrap", "unshare", "nsenter", "setpriv", "ip")
_START = r"""
set -e
root=$1 shm=$2 home=$3 folder=$4; shift 4
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777,size=256m tmp "$root/tmp"
mount -t tmpfs -o mode=755,size=1m dev "$root/dev"
for name in null zero full random urandom; do : >"$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount --bind "$shm" "$root/dev/shm"
mount --bind "$home" "$root/var/lib/penstock"
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


def missing() -> str:
    """What keeps images from being built here; empty where nothing does."""
    if os.geteuid() != 0:
        return "images are built and run as root only"
    absent = [name for name in _NEEDED if not any(Path(p, name).exists() for p in os.environ["PATH"].split(":"))]
    return f"not installed: {', '.join(absent)}" if absent else ""


@dataclass(frozen=True)
class ImageStore:
    """buildah's storage in one folder: remove it, and nothing is left."""

    folder: Path
    driver: str = "vfs"

    def buildah(self, *words: str, timeout_s: float = 900.0) -> str:
        """What the command says on standard output."""
        command = ["buildah", "--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run"]
        done = subprocess.run(
            [*command, "--storage-driver", self.driver, *words],
            cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def make_bases(self, triton_environment: Path) -> None:
        """The local stand-ins for python:3.12-slim-bookworm and NVIDIA's Triton image; see local_base.sh."""
        environ = {**os.environ, "STORE": str(self.folder), "STORAGE_DRIVER": self.driver}
        environ["TRITON_WHEEL"] = str(triton_environment)
        done = subprocess.run([LOCAL_BASE], env=environ, cwd=CHECKOUT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]

    def build(self, target: str, image: str) -> None:
        """That target of deploy/docker/Dockerfile on the local bases."""
        indexes = [name for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX") if os.environ.get(name)]
        arguments = {**BASES, **{name: os.environ[name] for name in indexes}, "REVISION": "a-test"}
        self.buildah(
            *("build", "--isolation", "chroot", "--format", "docker", "--target", target, "-t", image),
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *("-f", "deploy/docker/Dockerfile", "."),
        )

    def config(self, image: str) -> dict[str, Any]:
        """Entrypoint, Cmd, Env, User, Labels, Healthcheck as the image has them."""
        inspected = json.loads(self.buildah("inspect", "--type", "image", image))
        config: dict[str, Any] = inspected["Docker"]["config"]
        return config

    def size_mb(self, image: str) -> float:
        """Of all its files, layers together, not compressed."""
        manifest = json.loads(json.loads(self.buildah("inspect", "--type", "image", image))["Manifest"])
        return sum(float(layer["size"]) for layer in manifest["layers"]) / 1e6

    def remove(self) -> None:
        """All of it. The driver `overlay` mounts its folder onto itself."""
        subprocess.run(["umount", "--quiet", self.folder / "root" / "overlay"], check=False)
        shutil.rmtree(self.folder)

    def mounted(self, image: str) -> Path:
        """The file system of a new container of it."""
        return Path(self.buildah("mount", self.buildah("from", image)))


@dataclass
class Container:
    """One that runs. process: `unshare`, whose child is tini; log: what it wrote; home: its volume."""

    process: subprocess.Popen[bytes]
    log: Path
    home: Path
    environ: Mapping[str, str]

    @property
    def first(self) -> psutil.Process:
        """The container's process 1."""
        return psutil.Process(self.process.pid).children()[0]

    def enter(self, *command: str, timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
        """The command inside, as the container's user: what an engine does for a health check, or `exec`."""
        place = ["nsenter", "-t", str(self.first.pid), "-m", "-p", "-n", "-r", "-w"]
        return subprocess.run(
            [*place, "-S", str(USER), "-G", str(USER), *command],
            env=dict(self.environ), capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    def stop(self, grace_s: float = 45.0) -> int:
        """SIGTERM to process 1; its exit code."""
        self.first.send_signal(signal.SIGTERM)
        return self.process.wait(grace_s)

    def kill(self) -> None:
        """With its process 1 all of them go. They outlive `unshare`: who changes his user sheds its --kill-child."""
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            self.first.kill()
        self.process.kill()
        self.process.wait()

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Pod:
    """A network with loopback alone, and a /dev/shm, for containers to share. Leave it through close()."""

    folder: Path
    store: ImageStore
    containers: list[Container] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shm = self.folder / "shm"
        self.shm.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777,size=1g", "shm", str(self.shm)], check=True)
        up = ["unshare", "--net", "--", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]
        self._holder = subprocess.Popen(up, stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        with self._holder.stdout as said:
            assert said.readline() == b"up\n"

    def start(
        self,
        image: str,
        *,
        name: str,
        command: Sequence[str] | None = None,
        environ: Mapping[str, str] | None = None,
        volume: str = "",
    ) -> Container:
        """The image's own entry point with its own arguments, or these. volume: whose it has, its own by default."""
        config = self.store.config(image)
        whole = {**dict(pair.split("=", 1) for pair in config["Env"]), **(environ or {})}
        home = self.home(volume or name)
        user, group = config["User"].split(":")
        limited = ["setpriv", "--reuid", user, "--regid", group, "--clear-groups", "--no-new-privs"]
        inside = [*limited, "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all", "env", "-i"]
        inside += [f"{key}={value}" for key, value in whole.items()]
        inside += [*config["Entrypoint"], *(config["Cmd"] or [] if command is None else command)]
        places = [str(self.store.mounted(image)), str(self.shm), str(home), config["WorkingDir"] or "/"]
        log = self.folder / f"{name}.log"
        self.containers.append(Container(self._launched([*places, *inside], log.open("wb")), log, home, whole))
        return self.containers[-1]

    def home(self, name: str) -> Path:
        """The volume of the container of that name, at /var/lib/penstock; files may be put there before it starts."""
        home = self.folder / f"{name}-home"
        (home / "models").mkdir(parents=True, exist_ok=True)
        for folder in (home, home / "models"):
            os.chown(folder, USER, USER)
        return home

    def _launched(self, words: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        net = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
        with log:
            return subprocess.Popen([*net, *own, "sh", "-c", _START, "sh", *words], stdout=log, stderr=log)

    def curl(self, *words: str, timeout_s: float = 30.0) -> str:
        """What the host's curl is answered in this network; empty where it fails."""
        command = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--", "curl", "-sS", "--fail-with-body", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False).stdout

    def close(self) -> None:
        """Ends what is left of it."""
        for container in self.containers:
            container.kill()
        self._holder.kill()
        self._holder.wait()
        subprocess.run(["umount", str(self.shm)], check=True)
        self.store.buildah("rm", "--all")
