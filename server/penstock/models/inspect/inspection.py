"""Inspection of a model file: the result's types, and inspect_file, which reads the file in a bounded child process."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

import msgspec

from penstock.models.inspect.facts import ModelFacts, UnreadableModel

MIB = 1 << 20
_MESSAGE_BYTES = 16 * MIB  # of the child's answer; labels and metadata are bounded to less


@dataclass(frozen=True, slots=True)
class Hints:
    """The flags of `models inspect` and `models add`, or metadata of the same meaning. Empty or None: not given.

    mean, std: in units of the flags: 0 to 1, or 0 to 255 if a value is over 2. resize: letterbox, corner,
    squash, crop or keep. parameters: card parameters, which override what is inferred. labels_origin: where
    the labels are from, for display.
    """

    layout: str = ""
    input_size: tuple[int, int] | None = None  # (height, width)
    labels: tuple[str, ...] = ()
    labels_origin: str = ""
    color: str = ""  # rgb, bgr or gray
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: float | None = None  # the input is (pixel * scale - mean) / std
    resize: str = ""
    padding: float | None = None
    conf: float | None = None
    iou: float | None = None
    keypoint_names: tuple[str, ...] = ()
    skeleton: tuple[tuple[int, int], ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)


def merged(one: Hints, other: Hints) -> Hints:
    """`one`, completed by the fields of `other` that `one` does not give."""
    chosen = {
        field.name: getattr(one, field.name)
        if getattr(one, field.name) not in (None, "", (), {})
        else getattr(other, field.name)
        for field in fields(Hints)
    }
    return Hints(**{**chosen, "parameters": {**other.parameters, **one.parameters}})


@dataclass(frozen=True, slots=True)
class Question:
    """A fact that the file does not state. ambiguous: a sentence. choices: values of the flag, likeliest first.

    flag: the flag that answers it, such as --layout. is_blocking: the model cannot be served without an answer.
    """

    ambiguous: str
    flag: str
    choices: tuple[str, ...] = ()
    is_blocking: bool = True


@dataclass(frozen=True, slots=True)
class Recognition:
    """The proposed card. layout: "" if none was recognised. network_type: nvinfer's number.

    parameters: of config.pbtxt, labels included. input_size: (height, width), None if it follows the picture.
    input_shape: the image input's true shape where the file's is not, else (). output_shapes: of the outputs, then.
    rows_follow_batch: False if the outputs have no batch axis, so that one picture a call is served. evidence:
    sentences, the strongest first. assumptions: usual values that the file does not state, with the flags.
    """

    layout: str = ""
    network_type: int | None = None
    family: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    class_count: int = 0  # 0 if it is not known, or the network has no classes
    keypoint_names: tuple[str, ...] = ()
    input_name: str = ""
    input_size: tuple[int, int] | None = None
    input_shape: tuple[int, ...] = ()
    output_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    rows_follow_batch: bool = True
    evidence: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def blocking_questions(self) -> tuple[Question, ...]:
        """The questions without whose answer the model cannot be served."""
        return tuple(question for question in self.questions if question.is_blocking)


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one run per picture. evidence: sentences. failure: why it could not run, "" if it did.

    is_decoded: the layout decoded the outputs of all pictures. results: results for each picture.
    """

    pictures: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    failure: str = ""
    is_decoded: bool = False
    results: tuple[str, ...] = ()


class Verdict(StrEnum):
    """SERVABLE: the proposed card can be used. AMBIGUOUS: a blocking question is open. UNSERVABLE: no card is known."""

    SERVABLE = "servable"
    AMBIGUOUS = "ambiguous"
    UNSERVABLE = "unservable"


@dataclass(frozen=True, slots=True)
class Inspection:
    """All that is known of a file. reason: a sentence on the verdict. recognition: after the trial's corrections."""

    facts: ModelFacts
    recognition: Recognition
    trial: Trial
    verdict: Verdict
    reason: str

    @property
    def is_servable(self) -> bool:
        """Whether `models add` may write the proposed card."""
        return self.verdict is Verdict.SERVABLE


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the child process. memory_bytes: of its private memory, beside eight times the file's size."""

    memory_bytes: int = 3 << 30
    cpu_s: int = 240
    wall_s: float = 180.0
    file_bytes: int = (2 << 30) - 1  # protobuf's own


@dataclass(frozen=True, slots=True)
class InspectionRequest:
    """The message to the child process. pictures: paths of encoded pictures for the trial; empty for the packaged.

    allows_code: a PyTorch program, which can run any code, is run.
    """

    path: str
    hints: Hints
    limits: Limits
    pictures: tuple[str, ...] = ()
    allows_code: bool = False


@dataclass(frozen=True, slots=True)
class InspectionReply:
    """The message of the child process: one of the two is set."""

    inspection: Inspection | None = None
    problem: str = ""


def inspect_file(
    path: Path,
    hints: Hints | None = None,
    limits: Limits | None = None,
    *,
    pictures: Sequence[Path] = (),
    allows_code: bool = False,
) -> Inspection:
    """Inspects the file in a bounded child process; this process never parses it. Blocks for limits.wall_s at most.

    allows_code: run a PyTorch program, which can run any code. Raises UnreadableModel with one sentence if the file is
    bad, or if the child dies or exceeds a limit.
    """
    limits = limits or Limits()
    size_bytes = checked_size(path, limits)
    request = InspectionRequest(_text_of(path), hints or Hints(), limits, tuple(map(_text_of, pictures)), allows_code)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "penstock.models.inspect.child", str(os.getpid())],
            input=msgspec.msgpack.encode(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limits.wall_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreadableModel(f"{path} was not inspected in {limits.wall_s:g} s; it was stopped") from None
    if done.returncode or not 0 < len(done.stdout) <= _MESSAGE_BYTES:
        raise UnreadableModel(f"{path} cannot be inspected: {_death(done.returncode, limits, size_bytes)}")
    try:
        reply = msgspec.msgpack.decode(done.stdout, type=InspectionReply)
    except msgspec.DecodeError:
        raise UnreadableModel(f"{path} cannot be inspected: its process's answer is malformed") from None
    if reply.inspection is None:
        raise UnreadableModel(reply.problem)
    return reply.inspection


def _text_of(path: Path) -> str:
    """Raises UnreadableModel for a name that is not UTF-8."""
    text = str(path)
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise UnreadableModel(f"the name {text!a} is not UTF-8 text; rename the file")
    return text


def checked_size(path: Path, limits: Limits) -> int:
    """Bytes of the regular file. Raises UnreadableModel, also if it is empty or over the limit."""
    try:
        size_bytes = path.stat().st_size
        if not path.is_file():
            raise UnreadableModel(f"{path} is not a file; name a model file")
    except OSError as error:
        raise UnreadableModel(f"{path} cannot be read: {error.strerror}") from None
    if not size_bytes:
        raise UnreadableModel(f"{path} is empty: download or export it again")
    if size_bytes > limits.file_bytes:
        raise UnreadableModel(f"{path} has {size_bytes} bytes (limit {limits.file_bytes})")
    return size_bytes


def memory_limit_bytes(limits: Limits, size_bytes: int) -> int:
    """Private memory that the child may have for a file of that size."""
    return limits.memory_bytes + 8 * size_bytes


def _death(returncode: int, limits: Limits, size_bytes: int) -> str:
    memory_mib = memory_limit_bytes(limits, size_bytes) // MIB
    if returncode == -signal.SIGXCPU:
        return f"it needs more than {limits.cpu_s} s of CPU time"
    how = f"was ended by signal {-returncode}" if returncode < 0 else f"ended with {returncode}"
    return f"the process that read it {how}, perhaps for memory: it may use {memory_mib} MiB"
