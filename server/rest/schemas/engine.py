"""Shared memory, tracing and logging: what is asked of the engine besides inference."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

Bytes = Annotated[int, Meta(ge=0)]


class SystemRegion(msgspec.Struct):
    """A registered region. key: of the POSIX shared memory object, offset and byte_size within it."""

    name: str
    key: str
    offset: Bytes
    byte_size: Bytes


class SystemRegister(msgspec.Struct):
    """key: of a POSIX shared memory object of this host, as shm_open takes it."""

    key: str
    byte_size: Bytes
    offset: Bytes | UnsetType = UNSET


class CudaHandle(msgspec.Struct):
    """b64: a cudaIpcMemHandle_t in base64."""

    b64: str


class CudaRegion(msgspec.Struct):
    """A registered region of a GPU's memory."""

    name: str
    device_id: int
    byte_size: Bytes


class CudaRegister(msgspec.Struct):
    """A region of a GPU's memory, by its handle."""

    raw_handle: CudaHandle
    device_id: Annotated[int, Meta(ge=0)]
    byte_size: Bytes


class TraceSetting(msgspec.Struct):
    """Triton's, numbers as strings."""

    trace_level: list[str] | UnsetType = UNSET
    trace_rate: str | UnsetType = UNSET
    trace_count: str | UnsetType = UNSET
    log_frequency: str | UnsetType = UNSET
    trace_file: str | UnsetType = UNSET
    trace_mode: str | UnsetType = UNSET


class TraceChange(msgspec.Struct):
    """What is to change; null goes back to what stands above: the model's to the global one, that to the start's."""

    trace_level: list[str] | UnsetType | None = UNSET
    trace_rate: str | UnsetType | None = UNSET
    trace_count: str | UnsetType | None = UNSET
    log_frequency: str | UnsetType | None = UNSET


class LogSettings(msgspec.Struct):
    """Triton's."""

    log_file: str | UnsetType = UNSET
    log_info: bool | UnsetType = UNSET
    log_warning: bool | UnsetType = UNSET
    log_error: bool | UnsetType = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    log_format: str | UnsetType = UNSET


class LogChange(msgspec.Struct):
    """What is to change; null leaves a setting as it is."""

    log_info: bool | UnsetType | None = UNSET
    log_warning: bool | UnsetType | None = UNSET
    log_error: bool | UnsetType | None = UNSET
    log_verbose_level: Annotated[int, Meta(ge=0)] | UnsetType | None = UNSET
    log_format: str | UnsetType | None = UNSET
