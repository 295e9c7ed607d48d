"""What `penstock` without arguments prints: commands to begin with, for what runs here."""

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
    """What runs here: a first line, and commands with their purpose. {url}, {model}: replaced."""

    NOTHING = (
        "Nothing runs here.",
        ("penstock serve best.onnx", "add a model of yours, and start the stack with it"),
        ("penstock up", "start the stack with the models that are here"),
        ("penstock models pull yolox-nano", "fetch a detector of 80 classes"),
        ("penstock doctor", "what this machine has, what is missing, what to do"),
    )
    NO_MODELS = (
        "A stack runs at {url}, without a model of yours.",
        ("penstock models add best.onnx", "add a model of yours"),
        ("penstock models pull yolox-nano", "fetch a detector of 80 classes"),
        ("penstock status", "the stack on one screen"),
    )
    RUNNING = (
        "A stack runs at {url}.",
        ("penstock infer {model} photo.jpg --draw out.jpg", "try a picture"),
        ("penstock video run --source video.mp4 --model {model}", "watch a film or a camera"),
        ("penstock status", "the stack on one screen"),
        ("penstock logs --follow", "its log"),
    )
    REFUSED = (
        "A gateway at {url} answers, but not to this question: {reason}",
        ("export PENSTOCK_API_KEY=KEY", "the key for all commands"),
        ("penstock status", "the stack on one screen"),
        ("penstock doctor", "what this machine has, what is missing, what to do"),
    )
    INVALID = (
        "The settings are not valid: {reason}",
        ("penstock doctor", "what this machine has, what is missing, what to do"),
        ("penstock up --help", "the settings, their variables and flags"),
    )


def print_start_page() -> None:
    """Prints the page. Asks the gateway, if there is one."""
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
    """A model of the user's that serves; empty if only shipped ones do."""
    shipped = {path.name for path in SHIPPED_MODELS.iterdir()}
    return next((row.name for row in index if row.state == "READY" and row.name not in shipped), "")


def start_page(situation: Situation, words: dict[str, str]) -> str:
    """The text. words: for the braces."""
    first, *commands = situation.value
    known = {name: one_line(text) for name, text in words.items()}
    rows = [(command.format(**known), purpose) for command, purpose in commands]
    width = max(len(command) for command, _ in rows)
    lines = [f"    {command:<{width}}  {purpose}" for command, purpose in rows]
    return "\n".join([first.format(**known), "", *lines, "", "`penstock --help` lists all commands.", ""])
