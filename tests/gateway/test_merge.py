"""Rows of several images become as few engine calls as the model allows."""

import numpy as np

from penstock.gateway.batching.merging import merge_rows


def test_merge_for_model_without_batch_axis_calls_once_an_array() -> None:
    """max_batch_size 0: one call each, with the leading ones that the model declares."""
    calls = merge_rows([np.zeros((3, 4, 4)), np.ones((3, 4, 4))], declared_shape=(1, 3, 4, 4), max_batch_size=0)
    assert [call.array.shape for call in calls] == [(1, 3, 4, 4)] * 2
    assert [call.members for call in calls] == [(0,), (1,)]
    assert not any(call.has_batch_axis for call in calls)


def test_merge_keeps_shape_where_dimensions_vary() -> None:
    """A model that takes any height and width gets the array as it is."""
    (call,) = merge_rows([np.zeros((5, 7, 3))], declared_shape=(-1, -1, 3), max_batch_size=0)
    assert call.array.shape == (5, 7, 3)


def test_merge_of_unlike_shapes_groups_likes_within_the_limit() -> None:
    """Unlike shapes never share a call, and no call is larger than max_batch_size."""
    arrays = [np.full((2,), 0), np.full((3,), 1), np.full((2,), 2), np.full((2,), 3)]
    calls = merge_rows(arrays, declared_shape=(-1,), max_batch_size=2)
    assert [call.members for call in calls] == [(0, 2), (3,), (1,)]
    for call in calls:
        assert [row[0] for row in call.array] == list(call.members)
