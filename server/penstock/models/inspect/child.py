"""The process that parses a file for inspect_file: limits itself, reads a request, writes a reply."""

import os
import signal
import sys
import traceback
from pathlib import Path

import msgspec

from penstock.models.inspect.facts import FileFormat, UnreadableModel
from penstock.models.inspect.inspection import (
    Inspection,
    InspectionReply,
    InspectionRequest,
    Recognition,
    Trial,
    Verdict,
    checked_size,
    memory_limit_bytes,
)
from penstock.process_limits import end_with_parent, limit_process

_MAX_REASON = 300  # characters of an unforeseen error

_MOST_CHOICES = 4  # in a reason; `models inspect` shows all


def main(arguments: list[str]) -> None:
    """Answers one request of standard input on standard output."""
    end_with_parent(int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reply_file = os.dup(1)
    os.dup2(2, 1)  # output of libraries must not mix with the reply
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=InspectionRequest)
    try:
        size_bytes = checked_size(Path(request.path), request.limits)
        limits = request.limits
        limit_process(memory_limit_bytes(limits, size_bytes), cpu_s=limits.cpu_s, file_bytes=0)
        reply = InspectionReply(inspection=run(request))
    except UnreadableModel as error:
        reply = InspectionReply(problem=str(error))
    except (MemoryError, RecursionError):
        reply = InspectionReply(problem=f"{request.path} needs more memory to be read than an inspection may use")
    except Exception as error:  # noqa: BLE001 - the process's root
        traceback.print_exc()
        what = " ".join(str(error).split())[:_MAX_REASON]
        reply = InspectionReply(problem=f"{request.path} cannot be inspected: {type(error).__name__}: {what}")
    with os.fdopen(reply_file, "wb") as file:
        file.write(msgspec.msgpack.encode(reply))


def run(request: InspectionRequest) -> Inspection:
    """The inspection, in this process. Raises UnreadableModel."""
    from penstock.models.inspect.onnx_file import read_facts  # after the limits, as onnx itself is large
    from penstock.models.inspect.recognition import recognise
    from penstock.models.inspect.sidecar_files import read_sidecar_files
    from penstock.models.inspect.torch_session import NOT_SERVED, why_not_run
    from penstock.models.inspect.trial import try_model

    facts, sidecar = read_facts(Path(request.path)), read_sidecar_files(Path(request.path))
    if why := why_not_run(facts, allows_code=request.allows_code):
        return Inspection(facts, recognise(facts, request.hints, sidecar), Trial(), Verdict.UNSERVABLE, why)
    facts, recognition, trial = try_model(facts, request.hints, sidecar, request.pictures)
    verdict, reason = _verdict(recognition, trial)
    if facts.file_format is FileFormat.TORCHSCRIPT and verdict is Verdict.SERVABLE:
        verdict, reason = Verdict.UNSERVABLE, f"{reason}, but {NOT_SERVED}"
    return Inspection(facts, recognition, trial, verdict, reason)


def _verdict(recognition: Recognition, trial: Trial) -> tuple[Verdict, str]:
    open_questions = recognition.blocking_questions
    if not recognition.layout and not open_questions:
        return Verdict.UNSERVABLE, "; ".join(recognition.warnings) or "its layout is not known"
    if open_questions:
        first = open_questions[0]
        choices = f" {' or '.join(first.choices)}" if 0 < len(first.choices) <= _MOST_CHOICES else ""
        return Verdict.AMBIGUOUS, f"{first.ambiguous}; use {first.flag}{choices}"
    if trial.failure:
        return Verdict.UNSERVABLE, f"the trial run failed: {trial.failure}"
    return Verdict.SERVABLE, f"its layout is {recognition.layout}"


if __name__ == "__main__":
    main(sys.argv[1:])
