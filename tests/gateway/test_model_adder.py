"""The process that adds a model, the load after it, and what stays when one of them fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway import model_command
from penstock.gateway.model_adder import AddRequest, ModelAdder
from penstock.gateway.model_command import ModelProcessLimits, ModelProcessOptions
from penstock.gateway.model_uploads import ModelUploads
from penstock.protocol.errors import EngineUnavailable, InferenceError, InvalidRequest, StorageFull
from penstock.protocol.identity import ANONYMOUS
from penstock.protocol.model_addition import ModelAdded
from tests.rest.harness import FakePlane
from tests.support.add_stub import STUB

CANNOT = InvalidRequest("the model is loaded but not served: its outputs cannot be decoded")


class Adding:
    """Adds models of one content to a home, with the stand-in for the command."""

    def __init__(self, home: Path, limits: ModelProcessLimits | None = None) -> None:
        self.home, self.plane = home, FakePlane()
        self.uploads = ModelUploads(home, (home / "shipped", home / "models"))
        plane: Any = self.plane
        self.adder = ModelAdder(
            plane, self.uploads, ModelProcessOptions(command=STUB, limits=limits or ModelProcessLimits())
        )

    async def add(
        self, name: str = "m", what: str = "", content: str = "new", *, may_replace: bool = False
    ) -> ModelAdded:
        flags = (("layout", what),) if what else ()
        with self.uploads.file(name) as file:
            file.write_text(content)
            asked = AddRequest(name, file, flags, may_replace, "here")
            async with self.adder.adding(asked, ANONYMOUS) as addition:
                await addition.prepare()
                return await addition.load()

    def content(self, name: str = "m") -> str:
        """Of the model's file in the repository; "" without the model."""
        path = self.home / "models" / name / "model.onnx"
        return path.read_text() if path.exists() else ""

    def left(self) -> list[str]:
        """What lies in the staging folder."""
        return [path.name for path in (self.home / "staging").iterdir()]


@pytest.fixture
def adding(tmp_path: Path) -> Adding:
    return Adding(tmp_path)


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("refuse", InvalidRequest, "the model was not added: the file is not an ONNX model"),
        ("taken", InvalidRequest, "the model was not added: there is a model 'm' in PENSTOCK_HOME/models"),
        (
            "ask",
            InvalidRequest,
            "the model was not added: it is open; choose another name with the name in the path; use color=rgb or bgr: "
            "the order of the colours is not in the file",
        ),
        ("code", InvalidRequest, "start the gateway with --allow-model-code"),
        ("usage", InvalidRequest, "the model was not added: Invalid value for 'conf': it is over 1"),
        ("die", InvalidRequest, "the process that inspects it was killed by signal 11; it may use 4096 MiB of memory"),
        ("full", StorageFull, "the disk of "),
    ],
)
async def test_refusal_is_the_commands_sentence_with_query_parameters(
    adding: Adding, what: str, kind: type[InferenceError], text: str
) -> None:
    """Nothing is loaded, and nothing is left."""
    with pytest.raises(kind) as refused:
        await adding.add(what=what)
    assert text in refused.value.message
    assert (adding.content(), adding.left(), adding.plane.taken_back) == ("", [], [])


async def test_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """With all that it had begun."""
    adding = Adding(tmp_path, ModelProcessLimits(wall_s=0.5))
    with pytest.raises(InvalidRequest, match=r"inspecting the file took longer than 0\.5 s and was stopped"):
        await adding.add(what="hang")
    assert (adding.content(), adding.left()) == ("", [])


async def test_process_has_no_secrets_and_numbers_as_limits(adding: Adding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment it has the paths alone; HOME is a folder that is removed."""
    for name in ("PENSTOCK_API_KEYS", "AWS_SECRET_ACCESS_KEY", "PENSTOCK_CONFIG"):
        monkeypatch.setenv(name, "secret")
    await adding.add()
    folder = adding.home / "models" / "m"
    environment = json.loads((folder / "environment.json").read_text())
    assert "secret" not in environment.values()
    assert environment["PENSTOCK_MODEL_REPOSITORY"] == f"{adding.home / 'shipped'}:{adding.home / 'models'}"
    assert Path(environment["HOME"]).parent == adding.home / "staging"
    numbers = json.loads((folder / "arguments.json").read_text())[1:4]
    assert numbers == [str((4 << 30) + 8 * 3), "600", str((64 << 20) + 2 * 3)]


async def test_model_that_cannot_be_served_is_removed_again(adding: Adding) -> None:
    """400 with the engine's reason; the engine forgets it."""
    adding.plane.load_error = CANNOT
    with pytest.raises(InvalidRequest, match=r"cannot be served: .* cannot be decoded; its folder is removed"):
        await adding.add()
    assert (adding.content(), adding.left(), adding.plane.taken_back) == ("", [], [("m", False)])


async def test_replaced_model_is_back_if_the_new_one_cannot_be_served(adding: Adding) -> None:
    """With its files, and loaded again."""
    await adding.add(content="old")
    adding.plane.load_error = CANNOT
    with pytest.raises(InvalidRequest, match="the previous model is restored"):
        await adding.add(may_replace=True)
    assert (adding.content(), adding.left(), adding.plane.taken_back) == ("old", [], [("m", True)])


async def test_replaced_model_stays_if_the_command_refuses(adding: Adding) -> None:
    """Its folder is the very same."""
    await adding.add(content="old")
    inode = (adding.home / "models" / "m").stat().st_ino
    with pytest.raises(InvalidRequest):
        await adding.add(what="refuse", may_replace=True)
    assert (adding.content(), (adding.home / "models" / "m").stat().st_ino) == ("old", inode)


@pytest.mark.parametrize("content", ["", "old"])
async def test_process_that_is_ended_after_its_work_leaves_the_repository_as_it_was(
    tmp_path: Path, content: str
) -> None:
    """The new model is in its place already, and nothing was reported."""
    if content:
        await Adding(tmp_path).add(content=content)
    adding = Adding(tmp_path, ModelProcessLimits(wall_s=0.5))
    with pytest.raises(InvalidRequest, match="inspecting the file took longer than"):
        await adding.add(what="hang-late", may_replace=True)
    assert (adding.content(), adding.left()) == (content, [])


async def test_model_that_a_command_adds_meanwhile_is_left_alone(adding: Adding) -> None:
    """It has the name, so the upload is refused, and only what the upload made is removed."""

    def command_adds() -> None:
        theirs = adding.home / "models" / "m"
        theirs.mkdir(parents=True)
        (theirs / "model.onnx").write_text("theirs")
        (theirs / "MODEL.md").write_text("added by a command")

    async def upload_is_refused(file: Path) -> None:
        asked = AddRequest("m", file, (("layout", "refuse"),))
        async with adding.adder.adding(asked, ANONYMOUS) as addition:
            running = asyncio.create_task(addition.prepare())
            await asyncio.sleep(0)  # it has looked for a previous model
            command_adds()
            await running

    with adding.uploads.file("m") as file:
        file.write_text("new")
        with pytest.raises(InvalidRequest):
            await upload_is_refused(file)
    assert adding.content() == "theirs"


async def test_engine_that_dies_during_the_load_leaves_the_repository_as_it_was(adding: Adding) -> None:
    """503 for the client; the restarted engine must not load what killed it."""
    await adding.add(content="old")
    adding.plane.load_error = EngineUnavailable("the engine died")
    with pytest.raises(EngineUnavailable):
        await adding.add(may_replace=True)
    with pytest.raises(EngineUnavailable):
        await adding.add("other")
    assert (adding.content(), adding.content("other"), adding.left()) == ("old", "", [])


async def test_shutdown_during_the_load_leaves_the_repository_as_it_was(adding: Adding) -> None:
    """The client has no answer, so the model is not there."""
    adding.plane.holds = True
    running = asyncio.create_task(adding.add())
    await adding.plane.entered.wait()
    assert adding.content() == "new"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (adding.content(), adding.left()) == ("", [])


async def test_models_are_added_one_after_the_other(adding: Adding) -> None:
    """The second process starts when the first model is loaded."""
    adding.plane.holds = True
    running = [asyncio.create_task(adding.add(name)) for name in ("one", "two")]
    await adding.plane.entered.wait()
    for _ in range(50):
        await asyncio.sleep(0.002)
    assert [bool(adding.content(name)) for name in ("one", "two")] == [True, False]
    adding.plane.released.set()
    await asyncio.gather(*running)
    assert [bool(adding.content(name)) for name in ("one", "two")] == [True, True]


async def test_command_that_begins_the_same_model_beside_is_left_alone(adding: Adding, tmp_path: Path) -> None:
    """Of what a killed process left, only the folders of its own model go."""
    for name in ("m.v2.abcdefgh", "mm.abcdefgh", "m.ABC"):
        (tmp_path / "staging" / name).mkdir(parents=True)
    slow = Adding(tmp_path, ModelProcessLimits(wall_s=0.5))
    with pytest.raises(InvalidRequest):
        await slow.add(what="hang")
    assert sorted(slow.left()) == ["m.ABC", "m.v2.abcdefgh", "mm.abcdefgh"]


@pytest.mark.parametrize(("has_driver", "gib"), [(False, 4), (True, 12)])
def test_process_on_a_gpu_may_use_the_memory_that_cuda_takes(
    monkeypatch: pytest.MonkeyPatch, *, has_driver: bool, gib: int
) -> None:
    """With an NVIDIA driver the limit leaves room for CUDA's libraries and contexts."""
    monkeypatch.setattr(model_command, "has_nvidia_driver", lambda: has_driver)
    assert ModelProcessLimits().memory_bytes == gib << 30
