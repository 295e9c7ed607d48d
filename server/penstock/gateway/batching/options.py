"""Batching options of a model, from the settings, else from config.pbtxt's parameters. Must not import numpy."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import BatchOwner

if TYPE_CHECKING:
    from penstock.protocol.engine import ModelConfig


DEFAULT_EXECUTION_TIMEOUT_S = 30.0
DEFAULT_MAX_QUEUE_SIZE = 1024
DEFAULT_MAX_QUEUE_BYTES = 512 << 20
PRIORITY_LEVELS = 3  # 1 is the highest; requests without one have the middle one


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of a model's queue.

    instances: concurrent engine calls; one more may wait at the engine. slo_s: deadline of requests without one.
    max_queue_delay_s: wait for more rows while a slot is free, never past a deadline. execution_timeout_s: the model
    hangs if it answers no call for this long. unmerged: why requests are not merged; empty if they may be. reads_slab:
    our backend decodes its pictures, and reads references to the slab. is_queued_again: the engine has a queue of its
    own, which gets each call's last deadline.
    """

    owner: BatchOwner = BatchOwner.OFF
    max_batch_size: int = 1
    instances: int = 1
    slo_s: float | None = None
    max_queue_delay_s: float = 0.0
    max_queue_size: int = DEFAULT_MAX_QUEUE_SIZE
    max_queue_bytes: int = DEFAULT_MAX_QUEUE_BYTES
    execution_timeout_s: float = DEFAULT_EXECUTION_TIMEOUT_S
    unmerged: str = ""
    reads_slab: bool = False
    is_queued_again: bool = False

    @property
    def slots(self) -> int:
        """Maximum engine calls in flight: one per instance, and one that waits at the engine."""
        return self.instances + 1


OWNER = "batch_owner"
SLO = "slo_p99_ms"
EXECUTION_TIMEOUT = "execution_timeout_ms"
MAX_BATCH_SIZE = "max_batch_size"
MAX_QUEUE_DELAY = "max_queue_delay_us"
MAX_QUEUE_SIZE = "max_queue_size"
MAX_QUEUE_BYTES = "max_queue_bytes"
NETWORK_TYPE = "network-type"  # parameter of a model that takes pictures
MEASURED_ON = "max_batch_size_measured_on"  # parameter in config.pbtxt only; cpu: its max_batch_size is not for a GPU
ROWS_FOLLOW_BATCH = "rows_follow_batch"  # parameter in config.pbtxt only; read by penstock.engines.row_trial
_MILLISECONDS, _COUNT = "a number of milliseconds above 0", "a whole number, 1 or more"
_ALLOWED = {
    OWNER: f"one of {', '.join(BatchOwner)}",
    SLO: _MILLISECONDS,
    EXECUTION_TIMEOUT: _MILLISECONDS,
    MAX_BATCH_SIZE: _COUNT,
    MAX_QUEUE_DELAY: "a number of microseconds, 0 or more",
    MAX_QUEUE_SIZE: _COUNT,
    MAX_QUEUE_BYTES: _COUNT,
}
OPTION_NAMES = tuple(_ALLOWED)
SLAB_READER = "torch"  # the backend of ours that decodes pictures
IMAGE_DECODER = "image-decoder"  # parameter of a model that takes pictures
_ENGINE = ("engine", "1")
SPELLING_CUTOFF = 0.88  # similarity; at 0.86 another option's min_batch_size would match

OptionTexts = Mapping[str, str]  # option's name -> its text, as in config.pbtxt's parameters
NO_OPTIONS: OptionTexts = {}
UNTRIED = "the trial with a batch of two rows has not ended yet"
SLOS_OF_EXECUTION = 10.0  # the default execution time-out is at least this multiple of slo_p99_ms


def read_options(
    config: "ModelConfig",
    settings_texts: OptionTexts = NO_OPTIONS,
    *,
    execution_timeout_s: float = DEFAULT_EXECUTION_TIMEOUT_S,
) -> BatchOptions:
    """The model's options. Raises InvalidRequest for a value that is malformed or conflicts with config.pbtxt."""
    reader = _OptionReader(config.name, config.parameters, settings_texts)
    slo_ms, timeout_ms = reader.number(SLO), reader.number(EXECUTION_TIMEOUT)
    slo_s = None if slo_ms is None else slo_ms / 1e3
    usual_timeout_s = max(execution_timeout_s, SLOS_OF_EXECUTION * (slo_s or 0.0))
    return BatchOptions(
        owner=_owner(config, reader),
        max_batch_size=_max_batch_size(config, reader),
        instances=config.instance_count,
        slo_s=slo_s,
        execution_timeout_s=usual_timeout_s if timeout_ms is None else timeout_ms / 1e3,
        max_queue_delay_s=(reader.number(MAX_QUEUE_DELAY) or 0.0) / 1e6,
        max_queue_size=int(reader.number(MAX_QUEUE_SIZE) or DEFAULT_MAX_QUEUE_SIZE),
        max_queue_bytes=int(reader.number(MAX_QUEUE_BYTES) or DEFAULT_MAX_QUEUE_BYTES),
        reads_slab=_reads_slab(config),
    )


def _reads_slab(config: "ModelConfig") -> bool:
    return config.backend == SLAB_READER and config.parameters.get(IMAGE_DECODER, "").strip().lower() in _ENGINE


def check_options(model_name: str, settings_texts: OptionTexts) -> None:
    """Raises InvalidRequest for an unknown or malformed option, without reading config.pbtxt."""
    reader = _OptionReader(model_name, NO_OPTIONS, settings_texts)
    for name in settings_texts:
        if name not in OPTION_NAMES:
            raise InvalidRequest(
                f"model {model_name!r} has no batching option {name!r}; there are {', '.join(OPTION_NAMES)}"
            )
    reader.owner()
    for name in OPTION_NAMES:
        if name != OWNER:
            reader.number(name)


def misspelt_parameters(config: "ModelConfig") -> dict[str, str]:
    """Unknown parameters that look like an option, with the option probably meant."""
    known = (*OPTION_NAMES, ROWS_FOLLOW_BATCH, MEASURED_ON)
    others = [name for name in config.parameters if name not in known]
    close = {name: get_close_matches(name.lower(), known, n=1, cutoff=SPELLING_CUTOFF) for name in others}
    return {name: meant for name, found in close.items() for meant in found}


class DeclaredOptions:
    """Options of all models, computed once per config."""

    def __init__(
        self,
        settings_texts: Mapping[str, OptionTexts] | None = None,
        *,
        engine_batches: bool = True,
        execution_timeout_s: float = DEFAULT_EXECUTION_TIMEOUT_S,
        merging_backends: Collection[str] | None = None,
    ) -> None:
        """engine_batches: the engine uses dynamic_batching. merging_backends: ours that merge; None for no trial."""
        self._settings_texts = settings_texts if settings_texts is not None else {}
        self._engine_batches = engine_batches
        self._execution_timeout_s = execution_timeout_s
        self._merging_backends = merging_backends
        self._read: dict[str, tuple[ModelConfig, BatchOptions]] = {}

    def of(self, config: "ModelConfig") -> BatchOptions:
        """The model's options. Raises InvalidRequest as read_options does."""
        known = self._read.get(config.name)
        if known is not None and known[0] is config:
            return known[1]
        settings_texts = self._settings_texts.get(config.name, NO_OPTIONS)
        options = read_options(config, settings_texts, execution_timeout_s=self._execution_timeout_s)
        if options.owner is BatchOwner.TRITON and not self._engine_batches:
            options = replace(options, owner=BatchOwner.OFF)
        if self._is_merged_by_us(config, options):
            options = replace(options, unmerged=UNTRIED if config.unmerged is None else config.unmerged)
        self._read[config.name] = (config, options)
        return options

    def wants_trial(self, config: "ModelConfig") -> bool:
        """Whether its rows are merged only if a trial passes. Raises InvalidRequest like read_options."""
        return self._is_merged_by_us(config, self.of(config))

    def _is_merged_by_us(self, config: "ModelConfig", options: BatchOptions) -> bool:
        """Whether we merge its requests, the pictures of one request, or frames of several cameras."""
        if self._merging_backends is None or config.max_batch_size < 2:
            return False
        if NETWORK_TYPE in config.parameters:
            return True
        if options.max_batch_size < 2:
            return False
        is_of_backend = options.owner is BatchOwner.TRITON and config.backend in self._merging_backends
        return options.owner is BatchOwner.GATEWAY or (is_of_backend and config.has_dynamic_batching)

    def refusal(self, config: "ModelConfig") -> str:
        """Why the model cannot be served as declared; empty if it can."""
        try:
            self.of(config)
        except InvalidRequest as error:
            return error.message
        return ""


def _owner(config: "ModelConfig", reader: "_OptionReader") -> BatchOwner:
    """Without a declaration: Triton if config.pbtxt has a batcher, else OFF."""
    owner, has_batcher = reader.owner(), config.has_dynamic_batching or config.has_sequence_batching
    if owner is None:
        return BatchOwner.TRITON if has_batcher else BatchOwner.OFF
    obstacle = ""
    if owner is BatchOwner.TRITON and not has_batcher:
        obstacle = "but config.pbtxt has no dynamic_batching; add it, or name another owner"
    elif owner is BatchOwner.OFF and config.has_dynamic_batching:
        obstacle = "but config.pbtxt has dynamic_batching; remove it, or name triton"
    elif owner is BatchOwner.GATEWAY:
        obstacle = _why_unmergeable(config)
    if obstacle:
        raise reader.refusal(OWNER, obstacle)
    return owner


def _why_unmergeable(config: "ModelConfig") -> str:
    if config.has_dynamic_batching:
        why = "but config.pbtxt has dynamic_batching, and two batchers in series add two delays"
        return f"{why}; remove it, or name triton"
    kinds = (
        ("requests of a sequence cannot share a batch (sequence_batching)", config.has_sequence_batching),
        ("a decoupled model answers any number of times", config.is_decoupled),
        ("an ensemble's batches are formed by the models in it (ensemble_scheduling)", config.is_ensemble),
        ("its max_batch_size is 0: it has no batch dimension", config.max_batch_size == 0),
    )
    return next((f"but {kind}; name triton or off" for kind, is_so in kinds if is_so), "")


def _max_batch_size(config: "ModelConfig", reader: "_OptionReader") -> int:
    """A limit of config.pbtxt that was measured on a CPU does not apply on a GPU; one of the settings does."""
    cap = reader.number(MAX_BATCH_SIZE)
    is_of_cpu = config.parameters.get(MEASURED_ON, "").strip().lower() == "cpu"
    if is_of_cpu and config.is_on_gpu and MAX_BATCH_SIZE not in reader.settings_texts:
        cap = None
    if cap is not None and cap > max(1, config.max_batch_size):
        raise reader.refusal(
            MAX_BATCH_SIZE, f"but config.pbtxt allows {config.max_batch_size}; raise that, or name less"
        )
    return int(cap) if cap is not None else max(1, config.max_batch_size)


@dataclass(frozen=True, slots=True)
class _OptionReader:
    """Reads option texts; the settings win over config.pbtxt."""

    model_name: str
    parameters: Mapping[str, str]
    settings_texts: OptionTexts

    def refusal(self, name: str, what: str) -> InvalidRequest:
        """what: the rest of the message."""
        origin = "in the settings" if name in self.settings_texts else "in config.pbtxt"
        return InvalidRequest(f"model {self.model_name!r}: {name} is {self._find(name)!r} {origin}, {what}")

    def owner(self) -> BatchOwner | None:
        text = self._find(OWNER)
        if text is None:
            return None
        try:
            return BatchOwner(text.lower())
        except ValueError:
            raise self.refusal(OWNER, f"and must be {_ALLOWED[OWNER]}") from None

    def number(self, name: str) -> float | None:
        """The option, None if it is not declared. Raises InvalidRequest."""
        text = self._find(name)
        number = None if text is None else _number(name, text)
        if number is None and text is not None:
            raise self.refusal(name, f"and must be {_ALLOWED[name]}")
        return number

    def _find(self, name: str) -> str | None:
        text = self.settings_texts.get(name, self.parameters.get(name))
        return None if text is None else text.strip()


def _number(name: str, text: str) -> float | None:
    """The text as a number; None if it is none that the option may have."""
    if _ALLOWED[name] == _COUNT:
        is_count = text.isascii() and text.isdecimal() and len(text) < 19
        return int(text) or None if is_count else None
    try:
        number = float(text)
    except ValueError:
        return None
    is_allowed = number >= 0 if name == MAX_QUEUE_DELAY else number > 0
    return number if is_allowed and math.isfinite(number) else None


BATCHING_SYNTAX = "MODEL=OWNER[,NAME=VALUE…], such as street=gateway,slo_p99_ms=50"


def read_batching_settings(given: object) -> dict[str, dict[str, str]]:
    """Options by model, as text. given: {model: {name: value}}, or texts (BATCHING_SYNTAX). Raises InvalidRequest."""
    if isinstance(given, Mapping):
        settings_texts = {str(model): _option_texts(str(model), options) for model, options in given.items()}
    elif isinstance(given, (tuple, list)):
        settings_texts = dict(map(_model_and_options, given))
    else:
        raise InvalidRequest(f"batching is {given!r}; write a table a model, [batching.MODEL], or {BATCHING_SYNTAX}")
    for model, options in settings_texts.items():
        check_options(model, options)
    return settings_texts


def merge_batching_settings(
    below: Mapping[str, OptionTexts], above: Mapping[str, OptionTexts]
) -> dict[str, dict[str, str]]:
    """The union; `above` wins."""
    return {model: {**below.get(model, {}), **above.get(model, {})} for model in (*below, *above)}


def _option_texts(model: str, options: object) -> dict[str, str]:
    if not isinstance(options, Mapping):
        raise InvalidRequest(f"batching of model {model!r} is {options!r}; write a table, [batching.{model}]")
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InvalidRequest(f"batching of model {model!r}: {name} is {value!r}; it must be a word or a number")
    return {str(name): str(value) for name, value in options.items()}


def _model_and_options(text: object) -> tuple[str, dict[str, str]]:
    model, equals, rest = str(text).partition("=")
    owner, *others = rest.split(",")
    pairs = [other.partition("=") for other in others]
    if not model or not equals or not owner or not all(name and value for name, _, value in pairs):
        raise InvalidRequest(f"batching is {text!r}; write {BATCHING_SYNTAX}")
    return model, {OWNER: owner, **{name: value for name, _, value in pairs}}
