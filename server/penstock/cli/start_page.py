"""The output of `penstock` without arguments: first commands for the current situation."""

import os
import sys
from enum import Enum

from penstock.cli.gateway_client import API_KEY_VARIABLE, GATEWAY_VARIABLE, GatewayClient, local_url
from penstock.cli.terminal import one_line
from penstock.gateway.settings import SHIPPED_MODELS
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.protocol.engine import ModelState
from penstock.protocol.errors import GatewayUnreachable, InferenceError

Commands = tuple[tuple[str, str], ...]


class Situation(Enum):
    """The state of this machine: a first line, and commands with their purpose. {url}, {model} are replaced."""

    NOTHING = (
        "No stack is running.",
        ("penstock serve best.onnx", "add your model and start the stack"),
        ("penstock up", "start the stack with all models in the repository"),
        ("penstock models pull yolox-nano", "download a detector with 80 classes"),
        ("penstock doctor", "check this machine and show fixes"),
    )
    NO_MODELS = (
        "A stack is running at {url}. It serves the example models only.",
        ("penstock models add best.onnx", "add your model"),
        ("penstock models pull yolox-nano", "download a detector with 80 classes"),
        ("penstock status", "show the state of the stack"),
    )
    RUNNING = (
        "A stack is running at {url}.",
        ("penstock infer {model} photo.jpg --draw out.jpg", "try a picture"),
        ("penstock video run --source video.mp4 --model {model}", "process a video file or a camera"),
        ("penstock status", "show the state of the stack"),
        ("penstock logs --follow", "show its log"),
    )
    REFUSED = (
        "The gateway at {url} returned an error: {reason}",
        ("export PENSTOCK_API_KEY=KEY", "set the API key for all commands"),
        ("penstock status", "show the state of the stack"),
        ("penstock doctor", "check this machine and show fixes"),
    )
    INVALID = (
        "The settings are not valid: {reason}",
        ("penstock doctor", "check this machine and show fixes"),
        ("penstock up --help", "list all settings, their variables and flags"),
    )


def print_start_page() -> None:
    """Prints the page. Queries the gateway, if one is running."""
    sys.stdout.write(start_page(*_look()))


def _look() -> tuple[Situation, dict[str, str]]:
    try:
        url = os.environ.get(GATEWAY_VARIABLE) or local_url(read_settings({}))
        index = GatewayClient(url, os.environ.get(API_KEY_VARIABLE, "")).repository_index()
    except GatewayUnreachable:
        return Situation.NOTHING, {}
    except InferenceError as error:
        return Situation.REFUSED, {"url": url, "reason": str(error)}
    except SettingsError as error:
        return Situation.INVALID, {"reason": str(error)}
    model = model_to_try(index)
    return (Situation.RUNNING if model else Situation.NO_MODELS), {"url": url, "model": model}


def model_to_try(index: tuple[ModelState, ...]) -> str:
    """A ready model that is not shipped with Penstock; empty if there is none."""
    shipped = {path.name for path in SHIPPED_MODELS.iterdir()}
    return next((row.name for row in index if row.state == "READY" and row.name not in shipped), "")


def start_page(situation: Situation, words: dict[str, str]) -> str:
    """The text. words: values of the placeholders."""
    first, *commands = situation.value
    known = {name: one_line(text) for name, text in words.items()}
    rows = [(command.format(**known), purpose) for command, purpose in commands]
    width = max(len(command) for command, _ in rows)
    lines = [f"    {command:<{width}}  {purpose}" for command, purpose in rows]
    return "\n".join([first.format(**known), "", *lines, "", "`penstock --help` lists all commands.", ""])
