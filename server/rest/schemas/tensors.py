"""Inference: KServe v2's request and response, with Triton's parameters."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from server.core.infer import Parameter
from server.core.tensor import Datatype

Name = Annotated[str, Meta(description="A tensor's name, as the model's metadata has it.")]
Data = Annotated[
    list[msgspec.Raw],
    Meta(description="The elements in row-major order, flat or nested as the shape is. BYTES: strings."),
]
Shape = Annotated[
    list[Annotated[int, Meta(ge=0)]],
    Meta(min_length=1, max_length=64, description="Its product is 2^40 at most."),
]


class InputParameters(msgspec.Struct):
    """Where an input's elements are, when they are not in `data`; others are passed on."""

    binary_data_size: (
        Annotated[int, Meta(ge=0, description="Bytes of this tensor after the JSON, in the inputs' order.")] | UnsetType
    ) = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_byte_size: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    shared_memory_offset: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


class OutputParameters(msgspec.Struct):
    """How an output shall come; others are passed on."""

    binary_data: Annotated[bool, Meta(description="After the JSON instead of in it.")] | UnsetType = UNSET
    classification: (
        Annotated[int, Meta(ge=0, description="So many of the likeliest classes, as BYTES; 0: the tensor.")] | UnsetType
    ) = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_byte_size: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    shared_memory_offset: Annotated[int, Meta(ge=0)] | UnsetType = UNSET


class RequestInput(msgspec.Struct):
    """One input: its elements in `data`, after the JSON (`binary_data_size`) or in shared memory."""

    name: Name
    shape: Shape
    datatype: Datatype
    parameters: InputParameters | UnsetType = UNSET
    data: Data | UnsetType = UNSET


class RequestOutput(msgspec.Struct):
    """One output that is wanted."""

    name: Name
    parameters: OutputParameters | UnsetType = UNSET


class InferenceParameters(msgspec.Struct):
    """Of a whole request; others are passed on to the model."""

    timeout: (
        Annotated[int, Meta(ge=0, description="Microseconds from the body's last byte on; 0 for none.")] | UnsetType
    ) = UNSET
    priority: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    sequence_id: int | str | UnsetType = UNSET
    sequence_start: bool | UnsetType = UNSET
    sequence_end: bool | UnsetType = UNSET
    binary_data_output: Annotated[bool, Meta(description="All outputs after the JSON.")] | UnsetType = UNSET


class InferenceRequest(msgspec.Struct):
    """KServe v2's. A name stands once in each object; depth, objects and names are limited."""

    inputs: Annotated[list[RequestInput], Meta(max_length=1000)]
    id: str | UnsetType = UNSET
    parameters: InferenceParameters | UnsetType = UNSET
    outputs: Annotated[list[RequestOutput], Meta(max_length=1000)] | UnsetType = UNSET


class ResponseOutput(msgspec.Struct):
    """One output: its elements in `data`, after the JSON, or in shared memory."""

    name: Name
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, Parameter] | UnsetType = UNSET
    data: Data | UnsetType = UNSET


class InferenceResponse(msgspec.Struct):
    """KServe v2's."""

    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str | UnsetType = UNSET
    parameters: dict[str, Parameter] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct):
    """The outputs as members beside these, each by its name: an element, or an array of them."""

    model_name: str
    model_version: str
