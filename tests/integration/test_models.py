"""`penstock models` against a stack that runs here, and the catalogue's folders in the real Triton."""

import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import tritonclient.http as triton
from typer.testing import CliRunner

from penstock.cli import models as models_command
from penstock.cli.gateway_client import GatewayClient
from penstock.models.catalogue import CatalogueEntry, read_catalogue
from tests.models.stand_in import write_stand_in
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")


def penstock(stack: RunningStack, *words: str) -> str:
    """What `penstock models WORDS…` prints; its exit code must be 0."""
    done = CliRunner().invoke(
        models_command.app, [*words, "--url", stack.http_url], env={"PENSTOCK_HOME": str(stack.home)}
    )
    assert done.exit_code == 0, done.output
    return done.output


def state_of(stack: RunningStack, model_name: str) -> str:
    rows = json.loads(penstock(stack, "list", "--json"))
    return next(str(row["state"]) for row in rows if row["name"] == model_name)


def test_pull_loads_the_model_into_the_running_stack(stack: RunningStack, shared_dir: Path) -> None:
    """A model that is pulled while the stack runs serves at once."""
    penstock(stack, "unload", "fastestdet")
    assert state_of(stack, "fastestdet") != "READY"
    output = penstock(stack, "pull", "fastestdet", "--from", str(shared_dir / "models"))
    assert "loaded" in output
    assert state_of(stack, "fastestdet") == "READY"


def test_list_shows_the_broken_model_with_its_reason(stack: RunningStack) -> None:
    """Who asks what is served also sees what is not, and why."""
    rows = json.loads(penstock(stack, "list", "--json"))
    (broken,) = [row for row in rows if row["name"] == "broken"]
    assert broken["state"] != "READY"
    assert "broken on purpose" in broken["reason"]


CLASSIFIERS = [entry for entry in read_catalogue().values() if entry.layout == "classification"]


@pytest.mark.parametrize("entry", CLASSIFIERS, ids=lambda entry: entry.name)
def test_catalogue_folder_around_a_stand_in_serves_pictures(entry: CatalogueEntry, stack: RunningStack) -> None:
    """Triton loads each folder as it is, the gateway takes pictures for it, and both know its labels.

    The file is a stand-in of the declared tensors with random weights: what it answers means nothing.
    """
    folder = stack.home / "models" / entry.name
    shutil.copytree(entry.folder, folder)
    write_stand_in(folder)
    labels = (folder / "labels.txt").read_text().splitlines()
    with triton.InferenceServerClient(stack.http_url.removeprefix("http://")) as client:
        try:
            client.load_model(entry.name)
            picture = bytes(cv2.imencode(".jpg", np.full((60, 90, 3), (200, 40, 90), np.uint8))[1])
            (result,) = GatewayClient(stack.http_url).infer_image(entry.name, picture, "image/jpeg").results
            assert result.classes is not None
            assert [labels[item.class_id] for item in result.classes] == [item.label for item in result.classes]
            assert len(result.classes) == 5
            assert labels_of_triton(client, entry.name) <= set(labels)
        finally:
            client.unload_model(entry.name)
            shutil.rmtree(folder)


def labels_of_triton(client: triton.InferenceServerClient, name: str) -> set[str]:
    """The labels that Triton's own classification extension gives the three best classes of a grey tensor."""
    config = client.get_model_config(name)
    batch = [1] if config["max_batch_size"] else []
    shape = batch + [int(dim) for dim in config["input"][0]["dims"]]
    image = triton.InferInput(config["input"][0]["name"], shape, "FP32")
    image.set_data_from_numpy(np.full(shape, 0.5, np.float32))
    wanted = triton.InferRequestedOutput(config["output"][0]["name"], class_count=3)
    answer = client.infer(name, [image], outputs=[wanted]).as_numpy(config["output"][0]["name"])
    return {row.decode().split(":", 2)[2] for row in answer.flat}
