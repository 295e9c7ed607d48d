"""Checks a model that this gateway serves: runs `penstock models check` against it, in a process with limits."""

import asyncio

import msgspec

from penstock.gateway.audit import NO_AUDIT, OK, AuditLog
from penstock.gateway.model_command import MAX_TEXT, ModelCommand, ModelProcessOptions
from penstock.gateway.model_uploads import ModelUploads
from penstock.protocol.errors import Conflict, InferenceError, InvalidRequest
from penstock.protocol.identity import Identity
from penstock.protocol.model_reports import ModelCheck

ACTION = "check_model"  # in the audit log


class ModelChecker:
    """Checks one model at a time. url: of this gateway, for a client on this machine."""

    def __init__(
        self, uploads: ModelUploads, url: str, options: ModelProcessOptions | None = None, audit: AuditLog = NO_AUDIT
    ) -> None:
        self._uploads, self._url, self._audit = uploads, url, audit
        self._options = options or ModelProcessOptions()
        self._lock = asyncio.Lock()

    async def check(self, name: str, caller: Identity, api_key: str) -> ModelCheck:
        """The result for a model of this gateway. api_key: the client's; it needs the roles infer and read.

        Raises Conflict while another one runs, InvalidRequest with the reason if there is no result, and StorageFull or
        NotSupported for an OSError.
        """
        try:
            if self._lock.locked():
                raise Conflict("another model is being checked; wait for its end")
            async with self._lock:
                check = await self._run(name, api_key)
        except OSError as error:
            raise self._uploads.failure(error) from error
        except InferenceError as error:
            self._audit.record(caller.key_name, caller.address, ACTION, name, error.reason)
            raise
        self._audit.record(caller.key_name, caller.address, ACTION, name, OK)
        return check

    async def _run(self, name: str, api_key: str) -> ModelCheck:
        with self._uploads.folder() as scratch:
            command = ModelCommand(self._uploads, self._options, None, name)
            result = await command.run("check", scratch, [f"--url={self._url}"], api_key)
        try:
            (check,) = msgspec.json.decode(result.reply, type=list[ModelCheck])
        except (msgspec.DecodeError, ValueError):
            text = command.for_client(command.failure(result))
            raise InvalidRequest(f"the model was not checked: {text}"[:MAX_TEXT]) from None
        return check
