"""The video program's error tree. One camera is one fault domain: an error names its source and stops no other."""


class PipelineError(Exception):
    """A part of the pipeline failed. The text names the source or sink, and never holds a URI's user or password."""

    reason = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SourceUnavailable(PipelineError):
    """A source cannot be reached, refuses, or went silent. By decode. The source reconnects with back-off."""

    reason = "source_unavailable"


class SourceRefused(SourceUnavailable):
    """The source wants another user or password (401, 403). By decode. It is asked again slowly."""

    reason = "auth_failed"


class SourceNotAllowed(PipelineError):
    """The URI names a protocol, format or file that is not read, or its id can be none. It is not tried again."""

    reason = "not_allowed"


class DecodeError(PipelineError):
    """Bytes of a source that no decoder can read. By decode. The frame is dropped and counted."""

    reason = "decode_error"


class NeedsCpu(PipelineError):
    """A stream that a GPU's decoder does not take: its codec, colours, size or lines. By decode; the text says which.

    The source is decoded on the CPU.
    """

    reason = "needs_cpu"


class StreamEnded(PipelineError):
    """A file or playlist is over, or a camera hung up in order. By decode. No fault."""

    reason = "stream_ended"


class InferFailed(PipelineError):
    """A batch got no result. By infer. Its frames go on without detections and are counted."""

    reason = "infer_failed"


class InferRefused(InferFailed):
    """The gate, or the gateway, could not answer in time and said so. By infer."""

    reason = "refused"


class ModelUnusable(PipelineError):
    """The model is not there, or does not say how it sees images. By infer, at the start."""

    reason = "model"


class GpuUnavailable(PipelineError):
    """No card that can be used: the package, the driver or the card is missing. By gpu; the text says which."""

    reason = "no_gpu"


class GpuFailed(PipelineError):
    """A call of the card's driver failed. By gpu; the text holds CUDA's name for it and what was being done."""

    reason = "gpu_failed"


class GpuFull(GpuFailed):
    """The card has no room for more now: of memory, or of decoders. By gpu and decode; it says nothing of the stream,
    nor that the card is lost.

    The source is decoded on the CPU, where it may be, and else tried again.
    """

    reason = "gpu_full"


class SinkFailed(PipelineError):
    """A sink takes nothing more: disk full, broker gone. By sinks. The other sinks and the inference go on."""

    reason = "sink_failed"


class RuleRefused(PipelineError):
    """An analytics section that cannot be meant. By analytics; the text names the key, its value and the fix."""

    reason = "bad_rule"


class RecordingUnreadable(PipelineError):
    """A line of recorded objects that is none. By replay; the text names the line's number."""

    reason = "bad_recording"


class NotSetUp(PipelineError):
    """What was asked for needs something that the settings leave out. By the runner; the text names it."""

    reason = "not_set_up"


class SourceNotOpen(PipelineError):
    """What was asked for needs a source that is open now. By the runner; the text says how it is, and what to do."""

    reason = "not_open"


class SourceNotRecordable(PipelineError):
    """A recording of a source whose packets fit into no MP4. By the runner; the text names the codec."""

    reason = "not_recordable"


class UnknownSource(PipelineError):
    """No source of that id. By the runner."""

    reason = "unknown_source"


class SourceExists(PipelineError):
    """There is a source of that id already. By the runner."""

    reason = "source_exists"


class TooManySources(PipelineError):
    """The program takes no more sources. By the runner."""

    reason = "too_many_sources"
