"""The outline of a JSON text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import json_outline as outline
from penstock.protocol.json_outline import Outline, outline_of, with_plain_numbers


def counted(value: Any) -> Outline:
    """The same by Python's parser: depth, objects, members."""
    if isinstance(value, dict):
        inner = [counted(item) for item in value.values()]
        own = Outline(1, 1, len(value))
    elif isinstance(value, list):
        inner = [counted(item) for item in value]
        own = Outline(1, 0, 0)
    else:
        return Outline(0, 0, 0)
    return Outline(
        own.depth + max((item.depth for item in inner), default=0),
        own.objects + sum(item.objects for item in inner),
        own.members + sum(item.members for item in inner),
    )


VALUES = st.recursive(
    st.none() | st.floats() | st.text(st.sampled_from('ab"\\[]{}:,NaN'), max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\{:', max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES, st.booleans())
def test_outline_of_valid_json_is_what_a_parser_counts(value: Any, is_ascii: bool) -> None:
    """Whatever stands in its strings, by the way for short texts and by the way for long ones."""
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    for short_bytes in (0, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(outline, "_SHORT_BYTES", short_bytes)
            assert outline_of(text) == counted(value)


def test_outline_over_many_chunks_carries_strings_and_levels(monkeypatch: Any) -> None:
    """A chunk may end inside a string or deep inside arrays."""
    text = json.dumps({"a": [[{"b{": '"]}:'}]] * 9, "c": 'x"{' * 20}).encode()
    whole = outline_of(text)
    monkeypatch.setattr(outline, "_SHORT_BYTES", 0)
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(outline, "_CHUNK_BYTES", size)
        assert outline_of(text) == whole


@given(VALUES)
def test_plain_numbers_replace_only_what_is_no_string(value: Any) -> None:
    """NaN and infinities become zeros of the same length; strings and all else stay."""
    text = json.dumps([value, float("nan"), float("-inf"), "NaN"]).encode()
    plain = with_plain_numbers(text)
    assert len(plain) == len(text)
    read = json.loads(plain)
    assert read[1:] == [0.0, 0.0, "NaN"]
    assert read[0] == _without_special(value)


def _without_special(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_special(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_special(item) for item in value]
    is_special = isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))
    return 0.0 if is_special else value
