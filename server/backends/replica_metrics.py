"""The metrics pages of several engines as one page. Sans-IO."""

from collections.abc import Mapping


def merged_pages(pages: Mapping[str, bytes]) -> bytes:
    """Every sample with the label `replica`, each family's samples together under its one HELP and TYPE.

    pages: Prometheus' text format 0.0.4 by replica.
    """
    families: dict[str, dict[str, list[str]]] = {}
    for replica, page in pages.items():
        name = ""
        for line in page.decode("utf-8", "replace").splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, *_ = line.split(" ", 3)
                families.setdefault(name, {}).setdefault(kind, [line])
            elif line and not line.startswith("#"):
                family = name if name and line.startswith(name) else line.partition("{")[0].partition(" ")[0]
                families.setdefault(family, {}).setdefault("samples", []).append(_labelled(line, replica))
    lines = [
        line for parts in families.values() for kind in ("HELP", "TYPE", "samples") for line in parts.get(kind, ())
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _labelled(sample: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = sample.partition("{")
    if brace:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
