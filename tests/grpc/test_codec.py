"""The shallow scan reads what protobuf reads, touches no tensor, and survives any bytes."""

import re
import time
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import assume, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from penstock.protocol import grpc_codec as codec
from penstock.protocol.call import InferHead, RegionUse
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.grpc_codec import read_head, read_model_name, read_repository_model_name

texts = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp", "Cf", "Zs", "Co", "Cn")), max_size=8)
int64s = st.integers(-(2**63), 2**63 - 1)


def infer_request(model_name: str = "m", shape: tuple[int, ...] = (1, 2)) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model_name)
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    request.raw_input_contents.append(bytes(8))
    return request


def outcome(scanner: Callable[[bytes], InferHead], message: bytes) -> InferHead | str:
    """What it says, or why it refuses."""
    try:
        return scanner(message)
    except InvalidRequest as error:
        return error.message


def scan(request: service_pb2.ModelInferRequest) -> InferHead:
    return read_head(request.SerializeToString())


@st.composite
def parameters(draw: st.DrawFn) -> service_pb2.InferParameter:
    kind = draw(st.sampled_from(("bool_param", "int64_param", "string_param", "double_param", "uint64_param", "")))
    values = {
        "bool_param": st.booleans(),
        "int64_param": int64s,
        "string_param": texts,
        "double_param": st.floats(allow_nan=False),
        "uint64_param": st.integers(0, 2**64 - 1),
    }
    return service_pb2.InferParameter(**{kind: draw(values[kind])}) if kind else service_pb2.InferParameter()


@st.composite
def requests(draw: st.DrawFn) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=draw(texts), model_version=draw(texts), id=draw(texts))
    for key in draw(st.lists(st.sampled_from(("timeout", "priority", "x")), unique=True)):
        request.parameters[key].CopyFrom(draw(parameters()))
    for shape in draw(st.lists(st.lists(st.integers(0, 1000), max_size=4), max_size=3)):
        tensor = request.inputs.add(name=draw(texts), datatype=draw(texts), shape=shape)
        tensor.contents.fp32_contents.extend(draw(st.lists(st.floats(width=32), max_size=3)))
        request.raw_input_contents.append(draw(st.binary(max_size=300)))
    for name in draw(st.lists(texts, max_size=3, unique=True)):
        output = request.outputs.add(name=name)
        if draw(st.booleans()):
            output.parameters["classification"].int64_param = draw(int64s)
        if draw(st.booleans()):
            output.parameters["other"].CopyFrom(draw(parameters()))
    return request


def as_protobuf_reads(request: service_pb2.ModelInferRequest) -> InferHead:
    timeout = request.parameters["timeout"] if "timeout" in request.parameters else service_pb2.InferParameter()
    kind = timeout.WhichOneof("parameter_choice")
    timeout_us = getattr(timeout, kind) if kind in ("int64_param", "uint64_param") else None
    rowless = [given.name for given in request.inputs if given.shape[:1] == [0]]
    return InferHead(
        request.model_name,
        request.model_version,
        request.id,
        timeout_us,
        rowless_input=rowless[-1] if rowless else "",
        classification_outputs=tuple(o.name for o in request.outputs if "classification" in o.parameters),
    )


@pytest.mark.parametrize(("shape", "rowless"), [((0, 2), "x"), ((0,), "x"), ((2, 0), "")])
def test_scan_tells_of_an_input_without_rows(shape: tuple[int, ...], rowless: str) -> None:
    """For most models the first dimension is the batch."""
    assert scan(infer_request(shape=shape)).rowless_input == rowless


@given(st.data())
def test_head_that_came_before_says_what_it_would_say_by_itself(data: st.DataObject) -> None:
    """However the message is cut, changed or continued behind it: the same answer, the same words."""
    whole = data.draw(requests()).SerializeToString()
    read_head(whole)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    damaged = (
        whole[:start]
        + data.draw(st.sampled_from((b"", b"\x3a\x00", b"\x3a", b"\xba\x00\x00", b"\x0a\x01z")))
        + whole[end:]
    )
    for message in (whole, damaged, damaged):
        assert outcome(read_head, message) == outcome(codec._read_head, message)


@given(requests())
def test_scan_valid_message_agrees_with_protobuf(request: service_pb2.ModelInferRequest) -> None:
    """Name, version, id, timeout and classified outputs are what the generated class reads."""
    assert scan(request) == as_protobuf_reads(request)


@given(requests(), requests())
def test_scan_concatenated_messages_merge_as_protobuf_merges(
    one: service_pb2.ModelInferRequest, other: service_pb2.ModelInferRequest
) -> None:
    """The last value of a field wins, so the gateway and the engine read the same name."""
    names = [output.name for output in (*one.outputs, *other.outputs)]
    assume(len(set(names)) == len(names))
    message = one.SerializeToString() + other.SerializeToString()

    assert read_head(message) == as_protobuf_reads(service_pb2.ModelInferRequest.FromString(message))


@given(st.binary(max_size=200))
def test_scan_any_bytes_are_read_or_refused(message: bytes) -> None:
    """No bytes raise anything but InvalidRequest, and what is read is what protobuf reads, if it reads it."""
    try:
        scanned = read_head(message)
    except InvalidRequest:
        return
    try:
        parsed = service_pb2.ModelInferRequest.FromString(message)
    except DecodeError:
        return
    assert scanned == as_protobuf_reads(parsed)


@pytest.mark.parametrize(
    "shape", [(2**31, 2**31), (1, 2**62), (2**32, 2**32), (2**40 + 1,), (2**62, 4, 0), (2**63 - 1,)]
)
def test_scan_shape_that_overflows_is_refused(shape: tuple[int, ...]) -> None:
    """Every product that Triton would compute wrongly stops here, and before anything of that size is made."""
    with pytest.raises(InvalidRequest, match=r"input 'x' has shape .* more than 2\^40 elements"):
        scan(infer_request(shape=shape))


@pytest.mark.parametrize("shape", [(-1,), (2, -(2**63)), (0, -5)])
def test_scan_negative_dimension_is_refused(shape: tuple[int, ...]) -> None:
    """A request has sizes, not wildcards."""
    with pytest.raises(InvalidRequest, match="no dimension may be negative"):
        scan(infer_request(shape=shape))


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (2**40,), (1,) * 20])
def test_scan_odd_but_possible_shape_passes(shape: tuple[int, ...]) -> None:
    """Scalars and empty tensors are the engine's to judge."""
    assert scan(infer_request(shape=shape)).model_name == "m"


def test_scan_shared_memory_tells_every_part_that_is_used() -> None:
    """Inputs' and outputs', with the numbers as they stand: whether they fit is for who knows the region."""
    request = infer_request()
    given = request.inputs[0].parameters
    given["shared_memory_region"].string_param = "r"
    given["shared_memory_byte_size"].int64_param = -1
    given["shared_memory_offset"].int64_param = 16
    wanted = request.outputs.add(name="y").parameters
    wanted["shared_memory_byte_size"].string_param = "8"
    wanted["shared_memory_region"].string_param = "s"
    assert scan(request).regions == (RegionUse("r", 16, -1), RegionUse("s", 0, None))


def test_scan_shared_memory_given_twice_counts_the_last_as_protobuf_does() -> None:
    """Two entries of one key in a map: the engine sees the second, and so do we."""
    request = infer_request()
    request.inputs[0].parameters["shared_memory_region"].string_param = "first"
    tensor = request.inputs[0].SerializeToString()
    request.inputs[0].parameters["shared_memory_region"].string_param = "last"
    merged = request.inputs[0].__class__.FromString(tensor + request.inputs[0].SerializeToString())
    assert merged.parameters["shared_memory_region"].string_param == "last"
    doubled = tensor + request.inputs[0].SerializeToString()
    message = b"\x0a\x01m" + b"\x2a" + bytes([len(doubled)]) + doubled
    assert read_head(message).regions == (RegionUse("last"),)


def test_scan_unpacked_shape_is_read_too() -> None:
    """Old encoders write a repeated number one by one."""
    request = b"\x0a\x01m\x2a\x0c\x0a\x01x" + b"\x18\xff\xff\xff\xff\xff\xff\xff\x7f"[:9]

    with pytest.raises(InvalidRequest, match="more than 2"):
        read_head(request)


def test_scan_message_of_nothing_but_fields_is_refused_at_once() -> None:
    """Thirty million empty fields cost the event loop milliseconds, not half a minute."""
    message = b"\x0a\x01m" + b"\x2a\x00" * (16 << 20)
    started = time.thread_time()  # of this thread alone: what else this machine does is not the scan's

    with pytest.raises(InvalidRequest, match="more than 50000 fields"):
        read_head(message)

    assert time.thread_time() - started < 1


def test_scan_endless_shape_is_refused_at_once() -> None:
    """A shape of millions of dimensions is no list of millions of numbers."""
    inner = b"\x1a\x80\x80\x80\x04" + b"\x01" * (8 << 20)
    message = b"\x2a" + b"\x85\x80\x80\x04" + inner

    with pytest.raises(InvalidRequest, match="more than 50000 fields"):
        read_head(message)


def test_scan_large_tensor_is_not_read() -> None:
    """Sixty-four megabytes of tensor cost nothing."""
    request = infer_request()
    request.raw_input_contents[0] = bytes(64 << 20)
    message = request.SerializeToString()
    started = time.thread_time()

    assert read_head(message).model_name == "m"
    assert time.thread_time() - started < 0.02


@pytest.mark.parametrize("name", ["a\r\nb", "a\x00", "\x1b[31m", "a\u2028b"])
def test_scan_control_characters_in_a_name_are_refused(name: str) -> None:
    """No name breaks a log line or a header, whichever message it stands in."""
    with pytest.raises(InvalidRequest, match="control characters"):
        scan(infer_request(name))
    with pytest.raises(InvalidRequest, match="control characters"):
        read_model_name(service_pb2.ModelReadyRequest(name=name).SerializeToString())
    with pytest.raises(InvalidRequest, match="control characters"):
        read_repository_model_name(service_pb2.RepositoryModelLoadRequest(model_name=name).SerializeToString())


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        (1, ["y", "z", "y"], "output 'y' is given twice"),
        (1, [f"o{number}" for number in range(10_000)], "10000 outputs (limit 1000); send fewer"),
        (1001, ["y"], "1001 inputs (limit 1000); send fewer"),
    ],
)
def test_scan_of_too_many_or_doubled_tensors_is_refused(inputs: int, outputs: list[str], said: str) -> None:
    """As over REST; an engine would answer the first of two and hold the rest."""
    request = service_pb2.ModelInferRequest(model_name="m")
    for number in range(inputs):
        request.inputs.add(name=f"x{number}", datatype="FP32", shape=[1])
    for name in outputs:
        request.outputs.add(name=name)
    with pytest.raises(InvalidRequest, match=re.escape(said)):
        scan(request)
