"""The checker of queries finds what it is there to find, and lets the rest pass."""

from dataclasses import dataclass

import pytest

from tests.deploy.promql import complaints, labels_of, parsed


@dataclass(frozen=True, slots=True)
class Row:
    """A metric of these tests."""

    kind: str
    labels: frozenset[str]


KNOWN = {
    "requests_total": Row("counter", frozenset({"job", "model", "code"})),
    "depth": Row("gauge", frozenset({"job", "model"})),
    "seconds_bucket": Row("bucket", frozenset({"job", "model", "le"})),
    "up": Row("gauge", frozenset({"job"})),
}


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("sum(depth", "does not parse: "),
        ("dept", "no such metric: 'dept'"),
        ('depth{modell="a"}', "depth has no label 'modell'"),
        ("sum by (code) (depth)", "sum by 'code', which 'depth' has not"),
        ("sum by (code) (sum by (model) (requests_total))", "sum by 'code', which "),
        ("depth / on (code) up", "matches on 'code', which 'depth' has not"),
        ("histogram_quantile(0.9, sum by (model) (rate(seconds_bucket[5m])))", "histogram_quantile over "),
        ("rate(depth[5m])", "rate of depth, a gauge"),
        ("deriv(requests_total[5m])", "deriv of requests_total, a counter"),
    ],
)
def test_wrong_query_is_refused(expression: str, complaint: str) -> None:
    """Each fault is found, and said."""
    found = complaints(expression, KNOWN)
    assert found
    assert found[0].startswith(complaint)


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("sum(depth)", set()),
        ("sum by (model) (depth)", {"model"}),
        ("sum without (model) (depth)", {"job"}),
        ("topk(3, depth)", {"job", "model"}),
        ("depth * on (job) group_left up", {"job", "model"}),
        ("sum by (job) (depth) or sum by (model) (depth)", {"job", "model"}),
        ("histogram_quantile(0.5, sum by (le, job) (rate(seconds_bucket[5m])))", {"job"}),
        ("time() - up", {"job"}),
    ],
)
def test_labels_that_an_expression_leaves(expression: str, labels: set[str]) -> None:
    """What a recording rule's series may have."""
    assert labels_of(parsed(expression), KNOWN) == labels
