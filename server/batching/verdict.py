"""What the gateway finds in a model's config as the model is loaded: the log is told what nobody reads."""

from typing import TYPE_CHECKING

from server.batching.declared import DeclaredOptions, misspelt
from server.logs import get_logger

if TYPE_CHECKING:
    from server.core.model import ModelConfig

log = get_logger("batching")


def judged(options: DeclaredOptions, config: "ModelConfig") -> str:
    """Why the model cannot be served as it is declared; empty where it can. Called once a load."""
    for name, meant in misspelt(config).items():
        log.warning("parameter is not read", model=config.name, parameter=name, did_you_mean=meant)
    return options.refusal(config)
