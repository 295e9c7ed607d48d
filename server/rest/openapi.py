"""The table of routes as OpenAPI."""

from collections.abc import Iterable, Iterator

from server.rest.routes import OPTIONAL, SLOT, Row

ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


def paths_of(rows: Iterable[Row]) -> dict[str, dict[str, object]]:
    """OpenAPI's `paths`: a row with an optional piece stands twice."""
    paths: dict[str, dict[str, object]] = {}
    for row in rows:
        for path in _spelled_out(row.path):
            for method in row.methods:
                paths.setdefault(path, {})[method.lower()] = _operation(row, path)
    return paths


def _spelled_out(template: str) -> Iterator[str]:
    yield OPTIONAL.sub("", template)
    if OPTIONAL.search(template):
        yield OPTIONAL.sub(r"\1", template)


def _operation(row: Row, path: str) -> dict[str, object]:
    return {
        "summary": row.summary,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in SLOT.findall(path)
        ],
        "responses": {
            "200": {"description": "Done."},
            "default": {
                "description": "Why not.",
                "content": {"application/json": {"schema": ERROR_SCHEMA}},
            },
        },
    }
