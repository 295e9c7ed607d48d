"""Names of files and folders inside a model's folder."""

from urllib.parse import unquote

from server.core.errors import InvalidRequest

MAX_NAME_BYTES = 255  # of one path component; a longer one in a model load crashes Triton 2.51
MAX_SHOWN = 80
MAX_VERSION = (1 << 63) - 1  # Triton's version numbers are 64-bit integers; a larger one crashes Triton 2.51


def check_inside_folder(what: str, name: str) -> None:
    """Raises InvalidRequest for a path outside the folder that it is relative to.

    what: the field that contains the name, for the message. Refuses absolute names, "..", backslashes, control
    characters and their percent-encoded forms, even if no engine decodes them today.
    """
    if any(not _is_inside(form) for form in (name, unquote(name))):
        raise InvalidRequest(f"{what} is {shown(name)}; it must name a file inside the model's folder")
    if any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in name.split("/")):
        raise InvalidRequest(f"{what} is {shown(name)}; a name may have at most {MAX_NAME_BYTES} bytes")


def is_version(folder_name: str) -> bool:
    """Whether a model's folder is a version: its name is a decimal integer without leading zeros."""
    is_number = folder_name.isascii() and folder_name.isdecimal()
    return is_number and (folder_name == "0" or folder_name[0] != "0") and int(folder_name) <= MAX_VERSION


def shown(name: str) -> str:
    """A client's text, quoted and shortened for a message."""
    return repr(name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "…")


def _is_inside(name: str) -> bool:
    parts = name.split("/")
    return name.isprintable() and not set(parts) & {"", ".", "..", "~", "*"} and "\\" not in name
