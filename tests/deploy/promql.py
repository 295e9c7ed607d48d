"""What is wrong with a PromQL expression, given the metrics that exist: names, labels, kinds."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import promql_parser

# Grafana's own variables, as a query of them might say.
GRAFANA = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
RATES = {"rate", "irate", "increase"}
AFTER_GAUGES = {"deriv", "delta", "idelta", "predict_linear"}
WITHOUT_LABELS = {"vector", "scalar", "time", "pi"}


class Metric(Protocol):
    """What is asked of a row of the tables."""

    @property
    def kind(self) -> str:
        """counter, gauge, bucket or recorded."""

    @property
    def labels(self) -> frozenset[str]:
        """Every label that it may have."""


def substituted(expression: str) -> str:
    """A dashboard's query as Prometheus would get it: every variable says `all`."""
    for name, value in GRAFANA.items():
        expression = expression.replace(name, value)
    return re.sub(r"\$(\{\w+(:\w+)?\}|\w+)", ".*", expression)


def parsed(expression: str) -> Any:
    """Its tree; ValueError where it does not parse."""
    return promql_parser.parse(substituted(expression))


def _children(node: Any) -> list[Any]:
    if isinstance(node, promql_parser.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql_parser.Call):
        return list(node.args)
    if isinstance(node, promql_parser.AggregateExpr):
        return [part for part in (node.param, node.expr) if part is not None]
    if isinstance(node, promql_parser.MatrixSelector):
        return [node.vector_selector]
    if isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr | promql_parser.SubqueryExpr):
        return [node.expr]
    return []


def walked(node: Any) -> Iterator[Any]:
    """The node and everything below it."""
    yield node
    for child in _children(node):
        yield from walked(child)


def _name(selector: Any) -> str:
    if selector.name is not None:
        return str(selector.name)
    return next((one.value for one in selector.matchers.matchers if one.name == "__name__"), "")


def metrics_of(expression: str) -> set[str]:
    """The names of the series that it selects."""
    return {_name(node) for node in walked(parsed(expression)) if isinstance(node, promql_parser.VectorSelector)}


def labels_of(node: Any, known: Mapping[str, Metric]) -> frozenset[str]:
    """The labels that its result may have; none of a metric that is not known."""
    if isinstance(node, promql_parser.VectorSelector):
        metric = known.get(_name(node))
        return metric.labels if metric else frozenset()
    if isinstance(node, promql_parser.AggregateExpr):
        return _aggregated(node, known)
    if isinstance(node, promql_parser.BinaryExpr):
        return _combined(node, known)
    if isinstance(node, promql_parser.Call):
        return _called(node, known)
    return frozenset().union(*(labels_of(child, known) for child in _children(node)))


def _aggregated(node: Any, known: Mapping[str, Metric]) -> frozenset[str]:
    inner = labels_of(node.expr, known)
    if str(node.op) in ("topk", "bottomk", "limitk"):
        return inner
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    return inner & named if node.modifier.type == promql_parser.AggModifierType.By else inner - named


def _combined(node: Any, known: Mapping[str, Metric]) -> frozenset[str]:
    left, right = labels_of(node.lhs, known), labels_of(node.rhs, known)
    if str(node.op) == "or":
        return left | right
    if str(node.op) in ("and", "unless") or not right:
        return left
    if not left:
        return right
    modifier = node.modifier
    if modifier is None or modifier.matching is None:
        return left & right
    if modifier.card == promql_parser.VectorMatchCardinality.ManyToOne:
        return left | frozenset(modifier.group_labels or ())
    if modifier.card == promql_parser.VectorMatchCardinality.OneToMany:
        return right | frozenset(modifier.group_labels or ())
    named = frozenset(modifier.matching.labels)
    return left & named if modifier.matching.type == promql_parser.LabelModifierType.Include else left - named


def _called(node: Any, known: Mapping[str, Metric]) -> frozenset[str]:
    name, arguments = node.func.name, list(node.args)
    if name in WITHOUT_LABELS:
        return frozenset()
    if name == "absent":
        return frozenset(one.name for one in arguments[0].matchers.matchers)
    inner = frozenset().union(*(labels_of(argument, known) for argument in arguments))
    if name == "histogram_quantile":
        return inner - {"le"}
    if name in ("label_replace", "label_join"):
        return inner | {arguments[1].val}
    return inner


def complaints(expression: str, known: Mapping[str, Metric]) -> list[str]:
    """What is wrong with it, in words; nothing where it parses and names only what exists, as what it is."""
    try:
        tree = parsed(expression)
    except ValueError as error:
        return [f"does not parse: {error}"]
    return [complaint for node in walked(tree) for complaint in _complaints_of(node, known)]


def _complaints_of(node: Any, known: Mapping[str, Metric]) -> Iterator[str]:
    if isinstance(node, promql_parser.VectorSelector):
        yield from _of_selector(node, known)
    elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        missing = set(node.modifier.labels) - labels_of(node.expr, known)
        yield from (f"{node.op} by {label!r}, which {node.expr.prettify()!r} has not" for label in sorted(missing))
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _of_matching(node, known)
    elif isinstance(node, promql_parser.Call):
        yield from _of_call(node, known)


def _of_selector(node: Any, known: Mapping[str, Metric]) -> Iterator[str]:
    name = _name(node)
    if name not in known:
        yield f"no such metric: {name!r}"
        return
    for matcher in node.matchers.matchers:
        if matcher.name not in known[name].labels | {"__name__"}:
            yield f"{name} has no label {matcher.name!r}"


def _of_matching(node: Any, known: Mapping[str, Metric]) -> Iterator[str]:
    if node.modifier is None or node.modifier.matching is None:
        return
    for side in (node.lhs, node.rhs):
        for label in sorted(set(node.modifier.matching.labels) - labels_of(side, known)):
            yield f"matches on {label!r}, which {side.prettify()!r} has not"


def _of_call(node: Any, known: Mapping[str, Metric]) -> Iterator[str]:
    name = node.func.name
    if name == "histogram_quantile" and "le" not in labels_of(node.args[1], known):
        yield f"histogram_quantile over {node.args[1].prettify()!r}, which has no `le`"
    selectors = [one for one in node.args if isinstance(one, promql_parser.MatrixSelector)]
    for selector in selectors:
        metric = _name(selector.vector_selector)
        kind = known[metric].kind if metric in known else ""
        if name in RATES and kind == "gauge":
            yield f"{name} of {metric}, a gauge"
        if name in AFTER_GAUGES and kind in ("counter", "bucket"):
            yield f"{name} of {metric}, a counter"
