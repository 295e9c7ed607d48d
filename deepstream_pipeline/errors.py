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


class DecodeError(PipelineError):
    """Bytes of a source that no decoder can read. By decode. The frame is dropped and counted."""

    reason = "decode_error"


class StreamEnded(PipelineError):
    """A file or playlist is over, or a camera hung up in order. By decode. No fault."""

    reason = "stream_ended"


class InferFailed(PipelineError):
    """A batch got no result. By infer. Its frames go on without detections and are counted."""

    reason = "infer_failed"


class SinkFailed(PipelineError):
    """A sink takes nothing more: disk full, broker gone. By sinks. The other sinks and the inference go on."""

    reason = "sink_failed"
