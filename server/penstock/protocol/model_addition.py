"""The JSON of `penstock models add --json`, which the gateway reads, and of POST /v1/inspect."""

import msgspec


class ModelAdded(msgspec.Struct, kw_only=True):
    """Report on the added model. max_batch_size: 0 for one picture per call. state: READY if it serves, or why not.

    placement_reason: where it runs and why, `runs on the GPU in FP16: …`; empty if only the engine decides.
    """

    name: str
    layout: str
    max_batch_size: int
    batches: str
    evidence: tuple[str, ...]
    warnings: tuple[str, ...]
    state: str
    placement_reason: str = ""


class OpenQuestion(msgspec.Struct, frozen=True):
    """A fact that the file does not state. flag: states it. choices: its values, likeliest first; may be empty."""

    flag: str
    choices: tuple[str, ...]
    ambiguous: str


class AddFailure(msgspec.Struct, frozen=True):
    """A model that was not added. is_disk_full: the disk is full; the file may be valid."""

    name: str
    error: str
    questions: tuple[OpenQuestion, ...] = ()
    is_disk_full: bool = False


class ModelQuestion(msgspec.Struct, frozen=True):
    """A property that the file does not contain. parameter: sets it. choices: values, likeliest first; may be empty.

    is_blocking: the model cannot be added without it.
    """

    parameter: str
    choices: tuple[str, ...]
    ambiguous: str
    is_blocking: bool


class InspectedTensor(msgspec.Struct, frozen=True):
    """A declared input or output. datatype: null for an unsupported type. shape: -1 for a variable dimension."""

    name: str
    datatype: str | None
    shape: tuple[int, ...]


class InspectedModel(msgspec.Struct, frozen=True):
    """Properties of a model file that was inspected, not added.

    upload: the file's token; `upload=TOKEN` adds or inspects it without sending it again, for expires_s seconds.
    verdict: servable, ambiguous (a question must be answered) or unservable; reason: why. layout: empty if none was
    recognised. width, height: of the network's input; null if they follow the picture. card: parameters of config.pbtxt
    but labels. evidence, assumptions, warnings: sentences. trial: results of a run per picture; trial_failure: why it
    could not run.
    """

    upload: str
    expires_s: float
    verdict: str
    reason: str
    size_bytes: int
    sha256: str
    file_format: str
    producer: str
    opset: int
    node_count: int
    is_quantised: bool
    inputs: tuple[InspectedTensor, ...]
    outputs: tuple[InspectedTensor, ...]
    layout: str
    width: int | None
    height: int | None
    label_count: int
    labels: tuple[str, ...]
    card: dict[str, str]
    evidence: tuple[str, ...]
    assumptions: tuple[str, ...]
    questions: tuple[ModelQuestion, ...]
    warnings: tuple[str, ...]
    trial: tuple[str, ...]
    trial_failure: str
