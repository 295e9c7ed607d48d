"""Builds HTML and SVG. Text that is not Markup is escaped, such as names of cameras, rules and labels."""

from html import escape


class Markup(str):
    """Finished HTML."""

    __slots__ = ()


def tag(name: str, /, *content: str | float | None, **attributes: str | float | None) -> Markup:
    """An element. class_ is class, aria_label is aria-label. None is omitted; other content is escaped."""
    named = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    head = "".join(f' {key}="{escape(_text(value))}"' for key, value in named)
    inner = joined(*content)
    return Markup(f"<{name}{head}>" if name in _EMPTY else f"<{name}{head}>{inner}</{name}>")


def joined(*content: str | float | None) -> Markup:
    """The concatenated parts; parts that are not Markup are escaped."""
    return Markup("".join(one if isinstance(one, Markup) else escape(_text(one)) for one in content if one is not None))


_EMPTY = frozenset(("meta", "img"))


def _text(value: str | float) -> str:
    """Replaces unprintable characters, which could reverse text, by question marks."""
    if isinstance(value, str):
        return (
            value if value.isprintable() else "".join(one if one.isprintable() or one == "\n" else "?" for one in value)
        )
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
