"""What a model's config.pbtxt and the operator's settings say of its batches, read and checked."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from server.batching.options import (
    DEFAULT_EXECUTION_TIMEOUT_S,
    DEFAULT_MAX_QUEUE_BYTES,
    DEFAULT_MAX_QUEUE_SIZE,
    BatchOptions,
)
from server.core.batching import Owner
from server.core.errors import InvalidRequest

if TYPE_CHECKING:  # it brings numpy, which whoever reads settings need not wait for
    from server.core.model import ModelConfig

OWNER = "batch_owner"
SLO = "slo_p99_ms"
EXECUTION_TIMEOUT = "execution_timeout_ms"
MAX_BATCH_SIZE = "max_batch_size"
MAX_QUEUE_DELAY = "max_queue_delay_us"
MAX_QUEUE_SIZE = "max_queue_size"
MAX_QUEUE_BYTES = "max_queue_bytes"
NETWORK_TYPE = "network-type"  # parameter of a model that takes pictures
ROWS_FOLLOW_BATCH = "rows_follow_batch"  # parameter in config.pbtxt only; read by server.backends.row_trial
NAMES = (OWNER, SLO, EXECUTION_TIMEOUT, MAX_BATCH_SIZE, MAX_QUEUE_DELAY, MAX_QUEUE_SIZE, MAX_QUEUE_BYTES)
CLOSE = 0.88  # share of letters: 0.86 would take another's min_batch_size for ours

Said = Mapping[str, str]  # option's name -> what was said of it, as in config.pbtxt's parameters
NOTHING_SAID: Said = {}
UNTRIED = "the trial with a batch of two rows has not ended yet"
SLOS_OF_EXECUTION = 10.0  # a model's execution time-out is at least this multiple of its slo_p99_ms


def read_options(
    config: "ModelConfig", said: Said = NOTHING_SAID, *, execution_timeout_s: float = DEFAULT_EXECUTION_TIMEOUT_S
) -> BatchOptions:
    """How the model's batches are formed: by what the operator said, else by config.pbtxt's parameters.

    Raises InvalidRequest, one sentence, where a value is malformed or cannot go with the rest of config.pbtxt.
    """
    words = _Words(config.name, config.parameters, said)
    slo_ms = words.number(SLO, _above_zero, "a number of milliseconds above 0")
    timeout_ms = words.number(EXECUTION_TIMEOUT, _above_zero, "a number of milliseconds above 0")
    slo_s = None if slo_ms is None else slo_ms / 1e3
    usual_timeout_s = max(execution_timeout_s, SLOS_OF_EXECUTION * (slo_s or 0.0))
    delay_us = words.number(MAX_QUEUE_DELAY, _not_below_zero, "a number of microseconds, 0 or more")
    return BatchOptions(
        owner=_owner(config, words),
        max_batch_size=_max_batch_size(config, words),
        instances=config.instance_count,
        slo_s=slo_s,
        execution_timeout_s=usual_timeout_s if timeout_ms is None else timeout_ms / 1e3,
        max_queue_delay_s=(delay_us or 0.0) / 1e6,
        max_queue_size=words.count(MAX_QUEUE_SIZE) or DEFAULT_MAX_QUEUE_SIZE,
        max_queue_bytes=words.count(MAX_QUEUE_BYTES) or DEFAULT_MAX_QUEUE_BYTES,
    )


def check_said(model_name: str, said: Said) -> None:
    """Raises InvalidRequest where an option is unknown or malformed, whatever the model's config.pbtxt says."""
    words = _Words(model_name, NOTHING_SAID, said)
    for name in said:
        if name not in NAMES:
            raise InvalidRequest(f"model {model_name!r} has no batching option {name!r}; there are {', '.join(NAMES)}")
    words.owner()
    for name in (SLO, EXECUTION_TIMEOUT):
        words.number(name, _above_zero, "a number of milliseconds above 0")
    words.number(MAX_QUEUE_DELAY, _not_below_zero, "a number of microseconds, 0 or more")
    for name in (MAX_BATCH_SIZE, MAX_QUEUE_SIZE, MAX_QUEUE_BYTES):
        words.count(name)


def misspelt(config: "ModelConfig") -> dict[str, str]:
    """Parameters of the config that nobody reads and that look like one of the options: which one is meant."""
    known = (*NAMES, ROWS_FOLLOW_BATCH)
    others = [name for name in config.parameters if name not in known]
    close = {name: get_close_matches(name.lower(), known, n=1, cutoff=CLOSE) for name in others}
    return {name: meant for name, found in close.items() for meant in found}


class DeclaredOptions:
    """The options of every model, each read once a config: `of` costs two look-ups."""

    def __init__(
        self,
        said: Mapping[str, Said] | None = None,
        *,
        engine_batches: bool = True,
        execution_timeout_s: float = DEFAULT_EXECUTION_TIMEOUT_S,
        merging_backends: Collection[str] | None = None,
    ) -> None:
        """said: the operator's options by model. engine_batches: whether the engine uses a config's dynamic batcher.

        execution_timeout_s: default for models without one. merging_backends: those of our backends that merge the
        requests that Triton passes together; None if there are no trials, and requests are merged without one.
        """
        self._said = said if said is not None else {}
        self._engine_batches = engine_batches
        self._execution_timeout_s = execution_timeout_s
        self._merging_backends = merging_backends
        self._read: dict[str, tuple[ModelConfig, BatchOptions]] = {}

    def of(self, config: "ModelConfig") -> BatchOptions:
        """The model's options. Raises InvalidRequest as read_options does."""
        known = self._read.get(config.name)
        if known is not None and known[0] is config:
            return known[1]
        said = self._said.get(config.name, NOTHING_SAID)
        options = read_options(config, said, execution_timeout_s=self._execution_timeout_s)
        if options.owner is Owner.TRITON and not self._engine_batches:
            options = replace(options, owner=Owner.OFF)
        if self._is_merged_by_us(config, options):
            options = replace(options, unmerged=UNTRIED if config.unmerged is None else config.unmerged)
        self._read[config.name] = (config, options)
        return options

    def wants_trial(self, config: "ModelConfig") -> bool:
        """Whether its rows are merged if its trial passes. Raises InvalidRequest like read_options."""
        return self._is_merged_by_us(config, self.of(config))

    def _is_merged_by_us(self, config: "ModelConfig", options: BatchOptions) -> bool:
        """Whether we merge its requests, the pictures of one request, or frames of several cameras."""
        if self._merging_backends is None or config.max_batch_size < 2:
            return False
        if NETWORK_TYPE in config.parameters:
            return True
        if options.max_batch_size < 2:
            return False
        is_of_backend = options.owner is Owner.TRITON and config.backend in self._merging_backends
        return options.owner is Owner.GATEWAY or (is_of_backend and config.has_dynamic_batching)

    def refusal(self, config: "ModelConfig") -> str:
        """Why the model cannot be served as it is declared; empty where it can."""
        try:
            self.of(config)
        except InvalidRequest as error:
            return error.message
        return ""


def default_owner(config: "ModelConfig") -> Owner:
    """Of a model of which nothing is said: Triton's where its config has a batcher, else nobody's."""
    return Owner.TRITON if config.has_dynamic_batching or config.has_sequence_batching else Owner.OFF


def _owner(config: "ModelConfig", words: "_Words") -> Owner:
    owner = words.owner()
    if owner is None:
        return default_owner(config)
    obstacle = _obstacle(config, owner)
    if obstacle:
        raise words.refusal(OWNER, obstacle)
    return owner


def _obstacle(config: "ModelConfig", owner: Owner) -> str:
    """Why that owner cannot be; empty where it can."""
    has_batcher = config.has_dynamic_batching or config.has_sequence_batching
    if owner is Owner.TRITON:
        return "" if has_batcher else "but config.pbtxt has no dynamic_batching; add it, or name another owner"
    if owner is Owner.OFF:
        return "but config.pbtxt has dynamic_batching; remove it, or name triton" if config.has_dynamic_batching else ""
    if config.has_dynamic_batching:
        why = "but config.pbtxt has dynamic_batching, and two batchers in series add two delays"
        return f"{why}; remove it, or name triton"
    kind = next((kind for kind, is_so in _unmergeable(config) if is_so), "")
    return f"but {kind}; name triton or off" if kind else ""


def _unmergeable(config: "ModelConfig") -> tuple[tuple[str, bool], ...]:
    return (
        ("requests of a sequence cannot share a batch (sequence_batching)", config.has_sequence_batching),
        ("a decoupled model answers any number of times", config.is_decoupled),
        ("an ensemble's batches are formed by the models in it (ensemble_scheduling)", config.is_ensemble),
        ("its max_batch_size is 0: it has no batch dimension", config.max_batch_size == 0),
    )


def _max_batch_size(config: "ModelConfig", words: "_Words") -> int:
    cap = words.count(MAX_BATCH_SIZE)
    if cap is not None and cap > max(1, config.max_batch_size):
        raise words.refusal(
            MAX_BATCH_SIZE, f"but config.pbtxt allows {config.max_batch_size}; raise that, or name less"
        )
    return cap if cap is not None else max(1, config.max_batch_size)


@dataclass(frozen=True, slots=True)
class _Words:
    """The options as they were said; what the operator said wins."""

    model_name: str
    parameters: Mapping[str, str]
    said: Said

    def refusal(self, name: str, what: str) -> InvalidRequest:
        """what: the rest of the sentence."""
        place = "in the settings" if name in self.said else "in config.pbtxt"
        return InvalidRequest(f"model {self.model_name!r}: {name} is {self._find(name)!r} {place}, {what}")

    def owner(self) -> Owner | None:
        word = self._find(OWNER)
        if word is None:
            return None
        try:
            return Owner(word.lower())
        except ValueError:
            raise self.refusal(OWNER, f"and must be one of {', '.join(Owner)}") from None

    def number(self, name: str, is_allowed: Callable[[float], bool], allowed: str) -> float | None:
        word = self._find(name)
        if word is None:
            return None
        try:
            number = float(word)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or not is_allowed(number):
            raise self.refusal(name, f"and must be {allowed}")
        return number

    def count(self, name: str) -> int | None:
        word = self._find(name)
        if word is None:
            return None
        if not (word.isascii() and word.isdecimal() and len(word) < 19) or int(word) == 0:
            raise self.refusal(name, "and must be a whole number, 1 or more")
        return int(word)

    def _find(self, name: str) -> str | None:
        word = self.said.get(name, self.parameters.get(name))
        return None if word is None else word.strip()


def _above_zero(number: float) -> bool:
    return number > 0


def _not_below_zero(number: float) -> bool:
    return number >= 0
