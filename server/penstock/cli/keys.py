"""`penstock keys`: API keys for a gateway that asks for them."""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.terminal import AsJson, fail, print_json
from penstock.gateway.auth.access_file import AccessFileError, EmptyAccessFile, read_access_file
from penstock.gateway.auth.api_keys import InvalidApiKey, check_key_name, digest_of, new_secret, roles_of
from penstock.protocol.identity import Role

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def _keys() -> None:
    """Create API keys for a gateway."""


@app.command(short_help="Create a key: it is printed once, and its hash is added to the access file.")
def new(
    name: Annotated[str, typer.Argument(help="name of the client in logs, metrics and error messages")],
    file: Annotated[Path, typer.Option(help="the access file; created if it does not exist")],
    role: Annotated[list[str] | None, typer.Option(help="role: infer, read or admin; may be repeated [infer]")] = None,
    rate: Annotated[str, typer.Option(help='requests, such as "100/second" [no limit]')] = "",
    share: Annotated[
        float | None, typer.Option(help="maximum share of requests in flight, up to 1 [0.5 if there are other keys]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a key and print it once. The file has only its hash.

    The access file is TOML, and a gateway reads it again when it changes:

    \b
    [keys."camera"]
    sha256 = "…"                  # or as plain text: key = "20 characters or more"
    roles = ["infer"]             # infer, read, admin
    rate = "100/second"           # optional, like share = 0.25

    \b
    [tokens]                      # JSON web tokens of an identity provider
    audience = "penstock"
    issuer = "https://issuer.example/"
    jwks_url = "https://issuer.example/keys"   # or public_key_file, or secret_file
    roles_claim = "roles"         # a list or words; tokens without it: roles = ["infer"]
    """
    secret = new_secret()
    try:
        words = ",".join(role or [Role.INFER]).split(",")
        roles_of(check_key_name(name), words)
        table = _table(name, secret, words, rate=rate, share=share)
        _append(file, name, table)
    except (InvalidApiKey, AccessFileError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{file} cannot be written ({error.strerror}); give --file another place")
    if as_json:
        print_json({"name": name, "key": secret, "roles": list(dict.fromkeys(words)), "file": str(file)})
    else:
        typer.echo(secret)
    typer.echo(f"{file} has only the hash of this key: store the key now, it cannot be shown again", err=True)


def _table(name: str, secret: str, roles: list[str], *, rate: str, share: float | None) -> str:
    words = ", ".join(f'"{role}"' for role in dict.fromkeys(roles))
    lines = [f'[keys."{name}"]', f'sha256 = "{digest_of(secret)}"', f"roles = [{words}]"]
    if rate:
        lines.append(f"rate = {json.dumps(rate)}")
    if share is not None:
        lines.append(f"share = {share:g}")
    return "\n".join(lines) + "\n"


def _append(file: Path, name: str, table: str) -> None:
    """Appends the key's table to the file, in one step and only if the result is valid. Raises AccessFileError."""
    before = ""
    if file.exists():
        with suppress(EmptyAccessFile):
            if name in {key.name for key in read_access_file(file).keys}:
                raise AccessFileError(
                    f'{file} has a key {name!r}; choose another name, or delete [keys."{name}"] first'
                )
        before = file.read_text().rstrip("\n") + "\n\n"
    replaced = file.stat() if before else None
    handle, draft = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(before + table)
        if replaced is not None:
            _copy_owner(draft, file, replaced)
        try:
            read_access_file(Path(draft))
        except AccessFileError as error:
            raise AccessFileError(str(error).replace(draft, str(file), 1)) from error
        os.replace(draft, file)
    finally:
        Path(draft).unlink(missing_ok=True)


def _copy_owner(draft: str, file: Path, replaced: os.stat_result) -> None:
    """Owner and mode as the file has them that the draft replaces: a gateway of another user goes on reading it."""
    try:
        os.chown(draft, replaced.st_uid, replaced.st_gid)
    except PermissionError:
        says = "let it read the file (chmod 644, where hashes are all that it holds), or it keeps the keys that it has"
        typer.echo(f"{file} is yours now: where the gateway is another user's, {says}", err=True)
    os.chmod(draft, replaced.st_mode & 0o777)
