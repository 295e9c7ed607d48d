"""The shallow scan."""

import contextlib
import json
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.call import InferHead, RegionUse
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.http_codec import check_repository_body, read_head

MODEL = InferHead("ident", "3")
DEPTH = 64


def tensor(**members: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | members


def binary(size: Any, **members: Any) -> dict[str, Any]:
    made = tensor(**members) | {"parameters": {"binary_data_size": size}}
    del made["data"]
    return made


def body_of(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs)} | members).encode()


def scan(body: bytes, header_length: int | None = None) -> InferHead:
    return read_head(body, header_length, MODEL, DEPTH)


def refusal(body: bytes, header_length: int | None = None) -> str:
    with pytest.raises(InvalidRequest) as refused:
        scan(body, header_length)
    return str(refused.value)


def test_scan_of_a_json_request_gives_head_and_classification_outputs() -> None:
    """Name and version come from the path, id, timeout and the outputs that shall be classes from the body."""
    body = body_of(
        tensor(),
        id="r-7",
        parameters={"timeout": 2500, "priority": 1, "note": "a{b"},
        outputs=[
            {"name": "y", "parameters": {"classification": 3}},
            {"name": "z", "parameters": {"classification": 0}},
            {"name": "w"},
        ],
    )
    assert scan(body) == InferHead("ident", "3", "r-7", 2500, classification_outputs=("y",))


def test_scan_of_binary_inputs_takes_sizes_that_add_up() -> None:
    """Fixed-size and BYTES tensors behind the JSON."""
    words = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0)
    header = body_of(binary(8), binary(len(words), name="w", datatype="BYTES", shape=[2]))
    assert scan(header + bytes(8) + words, len(header)).model_name == "ident"


def test_scan_of_the_same_head_again_is_of_its_own_model_and_of_what_stands_behind_it() -> None:
    """A cached head is not used for another model, or for a longer or shorter body."""
    header = body_of(binary(8))
    whole = header + bytes(8)
    for model in (MODEL, InferHead("other"), MODEL):
        assert read_head(whole, len(header), model, DEPTH) == model
    assert "belong to no input" in refusal(whole + b"x", len(header))
    assert "bytes are left" in refusal(whole[:-1], len(header))
    with pytest.raises(InvalidRequest, match="nested 4 deep"):
        read_head(whole, len(header), MODEL, 3)


@pytest.mark.parametrize(("shape", "rowless"), [([0, 2], "x"), ([0], "x"), ([2, 0], "")])
def test_scan_tells_of_an_input_without_rows(shape: list[int], rowless: str) -> None:
    """For most models the first dimension is the batch."""
    assert scan(body_of({"name": "x", "datatype": "FP32", "shape": shape, "data": []})).rowless_input == rowless


@pytest.mark.parametrize("body", [b"", b"\x00\x01\x02", b"{not json"])
def test_scan_of_a_raw_binary_request_looks_at_nothing(body: bytes) -> None:
    """A header length of 0, or an empty body, is a raw binary request."""
    assert scan(body, 0) == replace(MODEL, is_raw=True)
    assert scan(b"") == replace(MODEL, is_raw=True)


@pytest.mark.parametrize(
    "member",
    [
        {"data": [float("nan"), float("inf")]},
        {"data": [[1.0], [2.0]]},
        {"data": [1, 2], "extra": {"a": {"b": 1}, "c": {"b": 2}}},
        {"datatype": "BYTES", "data": ['a:{"b"', "c\\"]},
        {"datatype": "BYTES", "data": ["NaN", 'x", NaN, "y']},
        {"shape": [0, 2], "data": []},
        {"name": "käse", "shape": [2]},
    ],
)
def test_scan_of_what_the_engine_takes_refuses_nothing(member: dict[str, Any]) -> None:
    """Odd but valid: NaN and infinities, nesting, unknown members, strings that look like structure."""
    assert scan(body_of(tensor(**member), unknown={"inputs": [{"name": 1}]})).model_name == "ident"


def test_scan_beside_nan_keeps_names_that_hold_its_letters() -> None:
    """Reading NaN as a number changes no string: an output `Info` stays `Info`."""
    body = body_of(
        tensor(data=[float("nan"), float("-inf")]), outputs=[{"name": "Info NaN", "parameters": {"classification": 1}}]
    )
    assert scan(body).classification_outputs == ("Info NaN",)


def test_scan_of_shared_memory_input_asks_for_no_bytes() -> None:
    """The bytes are elsewhere; whether the region exists is the engine's to say."""
    shared = tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8})
    del shared["data"]
    assert scan(body_of(shared)).model_name == "ident"


def test_scan_of_shared_memory_tells_every_part_that_is_used() -> None:
    """Inputs' and outputs', with the numbers as they stand: whether they fit is for who knows the region."""
    shared = tensor(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 2**64 - 1})
    del shared["data"]
    wanted = {"name": "y", "parameters": {"shared_memory_region": "s", "shared_memory_offset": -4}}
    assert scan(body_of(shared, outputs=[wanted])).regions == (RegionUse("r", 0, 2**64 - 1), RegionUse("s", -4, None))


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": 7},
        {"shared_memory_region": "r", "shared_memory_offset": "0"},
        {"shared_memory_region": "r", "shared_memory_byte_size": 8.0},
        {"shared_memory_region": "r", "shared_memory_byte_size": True},
    ],
)
def test_scan_of_shared_memory_that_is_not_a_name_and_numbers_is_refused(parameters: dict[str, Any]) -> None:
    """What the engine might read in another way than we do does not reach it."""
    shared = tensor(parameters=parameters)
    del shared["data"]
    with pytest.raises(InvalidRequest, match="shared_memory_"):
        scan(body_of(shared))


MALFORMED = [
    (b"{", "malformed JSON"),
    (b'{"inputs":[}', "(byte 11)"),
    (b"[]", "Expected `object`"),
    (b"nonsense", "malformed JSON"),
    (b'{"inputs":[]} x', "trailing characters"),
    (b'{"inputs":[],"\xff":1}', "malformed JSON"),
    (b'{"inputs":[],"a":NaM}', "malformed JSON"),
    (b'{"inputs":[],"a":NaNs}', "malformed JSON"),
    (b"{}", "no `inputs`"),
    (b'{"inputs":5}', "inputs: Expected `array`"),
    (b'{"inputs":[5]}', "inputs: Expected `object`"),
    (b'{"inputs":[{}]}', "inputs[0] has no `name`"),
    (b'{"inputs":[{"name":7}]}', "inputs[0]: name: Expected `str`"),
    (b'{"inputs":[],"outputs":{}}', "outputs: Expected `array`"),
    (b'{"inputs":[],"outputs":[{"name":"y"},{"name":"y"}]}', "output 'y' is given twice"),
    (b'{"inputs":[],"id":5}', "id: Expected `str`"),
    (b'{"inputs":[],"parameters":{"a":[1]}}', "the request: parameters"),
    (b'{"inputs":[],"parameters":{"timeout":-1}}', "timeout"),
    (b'{"inputs":[],"parameters":{"timeout":"soon"}}', "timeout"),
    (b'{"inputs":[],"parameters":{"timeout":true}}', "timeout"),
    (b'{"inputs":[],"inputs":[]}', "stands twice"),
    (b'{"inputs":[],"in\\u0070uts":[]}', "stands twice"),
    (b'{"inputs":[],"parameters":{"a":1,"a":2}}', "stands twice"),
    (b'{"inputs":[{"name":"x","shape":[1],"shape":[1],"datatype":"FP32","data":[1]}]}', "stands twice"),
    (b'{"inputs":[],"outputs":[{"name":"y","name":"z"}]}', "stands twice"),
    (b'{"inputs":[],"outputs":[{"name":"y","parameters":{"classification":-1}}]}', "output 'y': classification"),
    (b'{"inputs":[],"outputs":[{"name":"y","parameters":{"classification":"2"}}]}', "output 'y': classification"),
]


@pytest.mark.parametrize(("body", "said"), MALFORMED)
def test_scan_of_a_malformed_body_says_what_is_wrong(body: bytes, said: str) -> None:
    """JSON that is none, members of the wrong type, names that stand twice."""
    assert said in refusal(body)


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ({"shape": [2**31, 2**31]}, "more than 1099511627776 elements"),
        ({"shape": [2**40, 2**40, 0]}, "more than 1099511627776 elements"),
        ({"shape": [10**400]}, "input 'x'"),
        ({"shape": [-1, -2]}, "negative"),
        ({"shape": []}, "0 dimensions"),
        ({"shape": [1] * 65}, "65 dimensions"),
        ({"shape": [1] * 5000}, "characters long"),
        ({"shape": [1.0, 2]}, "Expected `int`"),
        ({"shape": ["1", 2]}, "Expected `int`"),
        ({"shape": [True, 2]}, "Expected `int`"),
        ({"shape": None}, "Expected `array`"),
        ({"shape": [1000]}, "asks for 1000 elements; its data holds 2 at most"),
        ({"datatype": "FP99"}, "'FP99' is no datatype"),
        ({"datatype": 1}, "datatype: Expected `str`"),
        ({"parameters": {"binary_data_size": "8"}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": -8}}, "binary_data_size"),
        ({"parameters": {"binary_data_size": True}}, "binary_data_size"),
        ({"name": "x" * 500, "datatype": "no"}, "xxx…'"),
    ],
)
def test_scan_of_a_wrong_tensor_names_the_input(member: dict[str, Any], said: str) -> None:
    """Shapes that cannot be, unknown datatypes, sizes that are none: before anything is allocated."""
    message = refusal(body_of(tensor(**member)))
    assert said in message
    assert message.startswith("input 'x")
    assert len(message) < 300


@pytest.mark.parametrize(
    ("inputs", "extra", "said"),
    [
        ([binary(8)], 4, "input 'x': binary_data_size is 8, but only 4 bytes are left"),
        ([binary(8)], 12, "4 of 12 bytes after the JSON belong to no input"),
        ([binary(12)], 12, "needs 8 bytes; binary_data_size is 12"),
        ([binary(4)], 4, "needs 8 bytes"),
        ([binary(4, datatype="BYTES")], 4, "needs at least 8 bytes"),
        ([binary(8), binary(8, name="z")], 8, "input 'z'"),
        ([tensor()], 1, "1 of 1 bytes after the JSON belong to no input"),
    ],
)
def test_scan_of_binary_sizes_that_do_not_fit_names_the_input(
    inputs: list[dict[str, Any]], extra: int, said: str
) -> None:
    """binary_data_size must fit the shape, and all of them the bytes after the JSON."""
    header = body_of(*inputs)
    assert said in refusal(header + bytes(extra), len(header))


@pytest.mark.parametrize("header_length", [-1, 3])
def test_scan_with_a_header_length_outside_the_body_is_refused(header_length: int) -> None:
    """The JSON cannot be longer than the body."""
    assert "Inference-Header-Content-Length" in refusal(b"{}", header_length)


def test_scan_of_an_input_without_tensor_is_refused() -> None:
    """Neither data, nor binary, nor shared memory."""
    bare = tensor()
    del bare["data"]
    assert "neither `data`" in refusal(body_of(bare))


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_scan_of_very_many_tensors_is_refused(kind: str) -> None:
    """More than 1000 inputs or outputs."""
    body = {"inputs": []} | {kind: [{"name": str(index)} for index in range(1001)]}
    assert f"1001 {kind} (limit 1000)" in refusal(json.dumps(body).encode())


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"b":'])
def test_scan_of_very_deep_json_is_refused_without_recursion(opening: bytes) -> None:
    """10,000 levels, closed or not."""
    assert "deep (limit 64)" in refusal(opening * 10_000)
    assert "deep (limit 64)" in refusal(b'{"inputs":[],"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}")


def test_scan_of_json_at_the_depth_limit_passes() -> None:
    """64 levels are taken, 65 are not; brackets in strings do not count."""
    nested = b"[" * 63 + b'"[[[["' + b"]" * 63
    assert scan(b'{"inputs":[],"a":' + nested + b"}").model_name == "ident"
    assert "65 deep" in refusal(b'{"inputs":[],"a":[' + nested + b"]}")


def test_scan_of_a_million_elements_builds_no_array(traced_peak: Any) -> None:
    """Extra memory stays a small multiple of the body, as it would not with a Python object for each number."""
    body = body_of(tensor(shape=[1_000_000], data=[1.5] * 1_000_000))
    assert traced_peak(lambda: scan(body)) < 2.5 * len(body)


def test_scan_of_a_huge_shape_allocates_nothing(traced_peak: Any) -> None:
    """2^31 × 2^31 elements are refused by arithmetic."""
    body = body_of(tensor(shape=[2**31, 2**31]))
    assert traced_peak(lambda: refusal(body)) < 1 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"ready":true}',
        b'{"parameters":{"unload_dependents":true}}',
        b'{"parameters":{"file:1/a":"YQ=="}}',
    ],
)
def test_repository_scan_of_valid_calls_passes(body: bytes) -> None:
    """Load, unload and index as Triton's clients send them."""
    check_repository_body(body, DEPTH)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "malformed JSON"),
        (b"[]", "malformed JSON"),
        (b'{"parameters":{"file:' + b"a" * 256 + b'":"YQ=="},"parameters":{}}', "stands twice"),
        (b'{"parameters":5}', "parameters"),
    ],
)
def test_repository_scan_of_dangerous_calls_refuses(body: bytes, said: str) -> None:
    """It refuses malformed JSON, and duplicate names, which two parsers may read differently."""
    with pytest.raises(InvalidRequest) as refused:
        check_repository_body(body, DEPTH)
    assert said in str(refused.value)


@given(st.binary(max_size=200), st.none() | st.integers(-5, 250))
def test_scan_of_any_bytes_is_a_scan_or_an_invalid_request(body: bytes, header_length: int | None) -> None:
    """No bytes raise anything else."""
    with contextlib.suppress(InvalidRequest):
        assert scan(body, header_length).model_name == "ident"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["name", "shape", "datatype", "data", "parameters", "binary_data_size", "classification"])
TENSORS = st.dictionaries(
    NAMES, JSON_VALUES | st.just([1, 2]) | st.just("FP32") | st.dictionaries(NAMES, JSON_VALUES), max_size=6
)
BODIES = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3) | JSON_VALUES},
    optional={"outputs": st.lists(TENSORS, max_size=3) | JSON_VALUES, "id": JSON_VALUES, "parameters": JSON_VALUES},
)


@given(BODIES, st.binary(max_size=16))
def test_scan_of_any_request_like_json_is_a_scan_or_an_invalid_request(body: dict[str, Any], tail: bytes) -> None:
    """Members of every type in every place raise nothing else."""
    header = json.dumps(body).encode()
    with contextlib.suppress(InvalidRequest):
        assert scan(header + tail, len(header)).model_name == "ident"
