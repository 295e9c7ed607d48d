"""Error tree of the video program. An error names its source; other sources are not affected."""

from collections.abc import Mapping


class PipelineError(Exception):
    """A part of the pipeline failed. The text names the source or sink, without a URI's user or password."""

    reason = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class SourceUnavailable(PipelineError):
    """A source is unreachable, refuses, or went silent. Raised by decode. The source reconnects with backoff."""

    reason = "source_unavailable"


class SourceRefused(SourceUnavailable):
    """The source rejected the user or password (401, 403). Raised by decode. It is retried slowly."""

    reason = "auth_failed"


class SourceNotAllowed(PipelineError):
    """The URI has an unsupported protocol, format or file, or the ID is invalid. It is not retried."""

    reason = "not_allowed"


class DecodeError(PipelineError):
    """Undecodable data of a source. Raised by decode. The frame is dropped and counted."""

    reason = "decode_error"


class NeedsCpu(PipelineError):
    """The GPU cannot decode the stream's codec, format, size or fields. Raised by decode; the CPU decodes instead."""

    reason = "needs_cpu"


class StreamEnded(PipelineError):
    """A file or playlist ended, or a camera hung up. Raised by decode. No failure."""

    reason = "stream_ended"


class InferFailed(PipelineError):
    """A batch got no result. Raised by infer. Its frames continue without detections and are counted."""

    reason = "infer_failed"


class InferRefused(InferFailed):
    """The limit in front of the engine, or the gateway, rejected the deadline. Raised by infer."""

    reason = "refused"


class ModelUnusable(PipelineError):
    """The model does not exist, or does not describe its input. Raised by infer at the start."""

    reason = "model"


class GpuUnavailable(PipelineError):
    """The package, the driver or the GPU is missing. Raised by gpu; the text says which."""

    reason = "no_gpu"


class GpuFailed(PipelineError):
    """A driver call failed. Raised by gpu; the text has CUDA's error name and the action."""

    reason = "gpu_failed"


class GpuFull(GpuFailed):
    """The GPU has no memory or decoders left. Raised by gpu and decode; the CPU decodes, or it is retried."""

    reason = "gpu_full"


class SinkFailed(PipelineError):
    """A sink cannot write: disk full, broker gone. Raised by sinks. Other sinks and the inference continue."""

    reason = "sink_failed"


class RuleRefused(PipelineError):
    """An invalid analytics section. Raised by analytics; the text names the key, its value and the fix."""

    reason = "bad_rule"


class RecordingUnreadable(PipelineError):
    """An invalid line of recorded objects. Raised by replay; the text has the line's number."""

    reason = "bad_recording"


class NotSetUp(PipelineError):
    """The request needs a missing setting. Raised by the runner; the text names it."""

    reason = "not_set_up"


class SourceNotOpen(PipelineError):
    """The request needs an open source. Raised by the runner; the text has its state and the fix."""

    reason = "not_open"


class SourceNotRecordable(PipelineError):
    """The source's packets do not fit into MP4. Raised by the runner; the text names the codec."""

    reason = "not_recordable"


class UnknownSource(PipelineError):
    """There is no source with this ID. Raised by the runner."""

    reason = "unknown_source"


class SourceStuck(PipelineError):
    """A source that is changed does not end. Raised by the runner; the text has the fix."""

    reason = "source_stuck"


class ChangeNotSaved(PipelineError):
    """A change cannot be written to the settings file, and was not made. Raised by settings."""

    reason = "not_saved"


class SourceExists(PipelineError):
    """There is already a source with this ID. Raised by the runner."""

    reason = "source_exists"


class TooManySources(PipelineError):
    """The program is at its limit of sources. Raised by the runner."""

    reason = "too_many_sources"


Schema = Mapping[str, object]


def resolved_schema(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """A field's JSON schema without references, and without null as an alternative."""
    alternatives, items, reference = schema.get("anyOf"), schema.get("items"), str(schema.get("$ref", ""))
    if isinstance(alternatives, list):
        schema = {**schema, **resolved_schema(alternatives[0], definitions)}
    if reference:
        schema = {**schema, **definitions[reference.rpartition("/")[2]]}
    if isinstance(items, Mapping) and "$ref" in items:
        schema = {**schema, "items": resolved_schema(items, definitions)}
    return schema


def needed_value(schema: Schema) -> str:
    """The allowed values of a field, from its resolved JSON schema."""
    words, kind = schema.get("enum"), str(schema.get("type"))
    if isinstance(words, list):
        return f"one of {', '.join(words)} is needed"
    if "pattern" in schema:
        return str(schema.get("description", f"a text of the form {schema['pattern']} is needed"))
    numbers = {"number": "a number", "integer": "a whole number"}
    kinds = {"boolean": "true or false is needed", "string": _text_needed(schema)}
    return (
        f"{numbers[kind]}{_range(schema)} is needed" if kind in numbers else kinds.get(kind, "a JSON object is needed")
    )


def _text_needed(schema: Schema) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is None:
        return "a text is needed"
    return f"a text of {f'{least} to' if least else 'at most'} {most} characters is needed"


def _range(schema: Schema) -> str:
    words = {"exclusiveMinimum": " above", "minimum": " from", "maximum": " to"}
    if "exclusiveMinimum" in schema:
        words["maximum"] = " and at most"
    return "".join(f"{word} {schema[key]:.10g}" for key, word in words.items() if key in schema)
