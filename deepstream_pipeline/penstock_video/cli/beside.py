"""`penstock video beside`: the video program of `penstock up --video`, with the stack's engine, keys and addresses."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from penstock.cli.terminal import Failed, fail, one_line
from penstock.cli.up import allow_open_files
from penstock.gateway.auth.api_keys import key_of_hashed
from penstock.gateway.settings import Settings
from penstock.gateway.workers.gateway_process import GATEWAY_ENVIRONMENT
from penstock.gateway.workers.running_stacks import running_stacks
from penstock.logs import also_log_to_stack, configure_logs
from penstock.models.catalogue import DEFAULT_DETECTOR, CatalogueError, scan
from penstock.protocol.system_reports import VIDEO_FAULT_FILE
from penstock_video.api.options import KEY_VARIABLE
from penstock_video.cli.access import SecurityFlags, saver_of, security_of, warn_of_short_key
from penstock_video.cli.engine import START_TIMEOUT_S, EngineUnavailable, place_of
from penstock_video.cli.progress import QuietWatch, refuse_settings
from penstock_video.cli.run import RunParts, run_to_its_end
from penstock_video.infer.options import EngineAddress
from penstock_video.settings.document import InvalidSettings
from penstock_video.settings.loader import Flags, read_settings

if TYPE_CHECKING:
    from penstock_video.main import Program

SHIPPED_DETECTOR = "street"  # used if the default detector was not pulled
CLIPS_BYTES = 2 << 30  # limit of all clips of events
_LOOK_S = 0.2


def beside(run_dir: Path, config: Path, program_of: Callable[..., "Program"]) -> int:
    """The exit code. Runs until SIGTERM, with or without sources, and saves the changes of API clients.

    run_dir: of the stack. config: the settings file, created if missing. program_of: as of `penstock video run`.
    """
    with _fault_noted(run_dir / VIDEO_FAULT_FILE) as watch:
        return _run(run_dir, config, program_of, watch)


def _run(run_dir: Path, config: Path, program_of: Callable[..., "Program"], watch: QuietWatch) -> int:
    stack = Settings.model_validate_json((run_dir / "settings.json").read_text())
    configure_logs(stack.log_format, stack.log_level)
    also_log_to_stack("video")
    create_config(config, stack)
    flags = Flags(
        api_port=stack.video_port, allowed_hosts=stack.allowed_host, cors_origins=stack.cors_origin,
        allowed_outbound=stack.allow_outbound,
    )  # fmt: skip
    try:
        settings = read_settings(config, flags)
    except InvalidSettings as refused:
        refuse_settings(refused, as_json=False)
    settings = replace(settings, api=replace(settings.api, host=stack.host, is_enabled=True))
    api = replace(security_of(_security(stack), os.environ), saver=saver_of(config, flags, os.environ))
    warn_of_short_key(settings.api, os.environ)
    os.environ.pop(KEY_VARIABLE, None)
    os.environ.update(GATEWAY_ENVIRONMENT)
    allow_open_files()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps the summary table out of the stack's output
    parts = RunParts(partial(engine_of_stack, run_dir), partial(program_of, api=api), api, ends_with_sources=False)
    return run_to_its_end(settings, watch, parts, is_json=False)


class _Watch(QuietWatch):
    """Removes the fault file of an earlier attempt once the program runs."""

    def __init__(self, fault_file: Path) -> None:
        super().__init__()
        self._fault_file = fault_file

    def begin(self, sentence: str, record: dict[str, object]) -> None:
        """As QuietWatch."""
        self._fault_file.unlink(missing_ok=True)
        super().begin(sentence, record)


@contextmanager
def _fault_noted(file: Path) -> Iterator[_Watch]:
    """Writes why the program cannot run to the fault file, for the stack's reports, until it runs."""
    try:
        yield _Watch(file)
    except Failed as failed:
        with suppress(OSError):  # the log also contains it
            file.write_text(one_line(failed.message), encoding="utf-8")
        raise


def create_config(path: Path, stack: Settings) -> None:
    """A settings file without sources, for this user alone, unless there is one. Exit code 2 if it cannot be.

    One that is as it was created gets a detector that was pulled meanwhile.
    """
    model = _detector(stack)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.read_bytes() == _first_config(SHIPPED_DETECTOR).encode():
            path.unlink()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        fail(f"{path}: cannot be created ({error.strerror}); choose another path with --video-config", code=2)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(_first_config(model))


def _first_config(model: str) -> str:
    clips = {"type": "record", "folder": "video/recordings", "quota-bytes": CLIPS_BYTES}
    return yaml.safe_dump({"primary-gie": {"model": model}, "sink": [clips]}, sort_keys=False)


def _detector(stack: Settings) -> str:
    """The default detector if the stack may load it, else the shipped one."""
    if not stack.engine_has_files:
        return DEFAULT_DETECTOR
    try:
        names = {model.name for model in scan(stack.repositories)}
    except CatalogueError:
        return DEFAULT_DETECTOR
    loaded = names if stack.models is None else names & set(stack.models)
    return DEFAULT_DETECTOR if DEFAULT_DETECTOR in loaded or SHIPPED_DETECTOR not in loaded else SHIPPED_DETECTOR


def _security(stack: Settings) -> SecurityFlags:
    anonymous = ",".join(sorted(stack.anonymous_roles)) or "none"
    return SecurityFlags(
        stack.tls_cert, stack.tls_key, stack.tls_client_ca, stack.audit_log, stack.access_file, anonymous,
        keys=tuple(map(key_of_hashed, stack.api_keys)),
    )  # fmt: skip


@contextmanager
def engine_of_stack(run_dir: Path) -> Iterator[EngineAddress]:
    """The stack's engine, once the stack is ready. Raises EngineUnavailable."""
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        for stack in running_stacks(run_dir.parent):
            if stack.run_dir.name == run_dir.name:
                yield place_of(stack, "")
                return
        time.sleep(_LOOK_S)
    raise EngineUnavailable(f"the stack was not ready within {START_TIMEOUT_S:g} s; see `penstock logs`")
