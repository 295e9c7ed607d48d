"""Names of classes: of well-known data sets, and of files."""

from functools import cache
from importlib.resources import files
from pathlib import Path

from penstock.models.inspect.metadata import MAX_CLASSES, labels_of, literal, one_label

_UNUSED_COCO_IDS = frozenset({0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
MAX_LABELS_BYTES = 1 << 20


@cache
def coco_80() -> tuple[str, ...]:
    """COCO's 80 classes in their usual order."""
    return _packaged("fastestdet")


@cache
def coco_91() -> tuple[str, ...]:
    """COCO's classes by COCO id, 0 to 90; the label of an unused id is its number."""
    names = iter(coco_80())
    return tuple(str(number) if number in _UNUSED_COCO_IDS else next(names) for number in range(91))


@cache
def imagenet() -> tuple[str, ...]:
    """ImageNet's 1000 classes in their usual order."""
    return _packaged("resnet50")


def _packaged(model: str) -> tuple[str, ...]:
    text = files("penstock.models").joinpath("folders", model, "labels.txt").read_text("utf-8")
    return tuple(one_label(line) for line in text.splitlines() if line.strip())


def labels_of_file(path: Path) -> tuple[str, ...]:
    """Labels of a file: one per line, a Python or JSON list or dictionary, or the `names` of a data.yaml.

    Empty if the file is none of these, is not UTF-8, or is over MAX_LABELS_BYTES.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_LABELS_BYTES:
            return ()
        text = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ()
    if path.suffix in (".yaml", ".yml"):
        return _labels_of_yaml(text)
    if text[:1] in ("[", "{"):
        labels = labels_of(literal(text))
        if labels or len(text.partition("\n")[0].strip()) > 1:  # else a list of characters, of which it is the first
            return labels
    lines = [one_label(line) for line in text.splitlines()]
    return tuple(line or str(number) for number, line in enumerate(lines)) if len(lines) <= MAX_CLASSES else ()


def _labels_of_yaml(text: str) -> tuple[str, ...]:
    """`names` of a data set's YAML: a list or dictionary in one line, or one name per line."""
    _, found, rest = f"\n{text}".partition("\nnames:")
    if not found:
        return ()
    first, _, following = rest.partition("\n")
    if first.strip():
        plain = labels_of(literal(first.strip()))
        listed = first.strip().removeprefix("[").removesuffix("]").split(",")
        return plain or (tuple(one_label(name.strip(" '\"")) for name in listed) if first.strip()[0] == "[" else ())
    by_id: dict[int, str] = {}
    for line in following.splitlines():
        if not line.startswith((" ", "-", "\t")):
            break
        entry = line.strip()
        number, separator, name = entry.partition(":")
        if entry.startswith("- "):
            by_id[len(by_id)] = entry[2:].strip(" '\"")
        elif separator and number.strip().isdecimal() and len(number) < 6:
            by_id[int(number)] = name.strip(" '\"")
    return labels_of(by_id)


def of_count(count: int, *, has_background: bool = False) -> tuple[str, ...]:
    """Labels of the data set with this number of classes, COCO or ImageNet; empty for other numbers.

    has_background: class ids are COCO's, with 0 for the background, if the number is not known.
    """
    if count in (90, 91) or (has_background and count == 0):
        return coco_91()
    if count == 80:
        return coco_80()
    if count == 1000:
        return imagenet()
    return ("background", *imagenet()) if count == 1001 else ()
