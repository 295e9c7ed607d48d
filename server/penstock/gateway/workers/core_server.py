"""The core's end of the batch socket: sends the engine's state to its peers, and runs their inferences."""

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.engines.replicas import Replicas
from penstock.engines.watch import EngineWatch
from penstock.gateway.workers.connection import (
    CLOSE_GRACE_S,
    SOCKET_NAME,
    UNLIMITED_BYTES,
    CallFailed,
    CallLate,
    CallsCut,
    CancelInfer,
    CancelledAt,
    ClientHello,
    ClientRejected,
    CoreState,
    EngineSuspected,
    FindModel,
    Infer,
    Inferred,
    MessageConnection,
    ModelFound,
    ModelsServed,
    QueuesReported,
    SlabPartGranted,
    Sync,
    SyncDone,
    ToCore,
    WorkerHello,
    failed_message,
)
from penstock.gateway.workers.inference_calls import ClientProcessCalls, QueuedCall, ReportFailures, enqueue_call
from penstock.gateway.workers.picture_batches import ReportedQueues
from penstock.gateway.workers.shared_counters import MAX_PROCESSES
from penstock.gateway.workers.slab_sharing import (
    CLIENT_STALLED_BYTES,
    CLIENT_UNREAD_BYTES,
    GREETING_BYTES,
    GREETING_S,
    MAX_CLIENT_CALLS,
    MAX_CLIENT_MESSAGE_BYTES,
    MAX_CLIENT_PROCESSES,
    MAX_NAME,
    SlabPartitions,
)
from penstock.logs import get_logger
from penstock.protocol.cancellation import CancelStage, when_stage_known
from penstock.protocol.engine import Engine
from penstock.protocol.errors import Overloaded
from penstock.protocol.request_checks import checked_name

if TYPE_CHECKING:
    from penstock.gateway.batching.batcher import BatcherPool

LOOK_S = 0.05
SPREAD_S = 0.5  # time for workers to confirm a change of the models
UNREAD_BYTES = 1 << 20  # a peer with more unread bytes gets state changes only, no repetitions
_REQUESTS = (Infer, FindModel, CancelInfer)  # the usual messages, as a constant tuple for speed
STATE_EVERY_LOOKS = 20  # an unchanged state is repeated as a heartbeat

log = get_logger("core")


class _ProtocolViolation(Exception):
    """A message violates the protocol. The text is the reason for closing the connection."""


@dataclass(slots=True)
class _Peer:
    """A connected peer. index: 0 for a client process. tasks, asks: by its numbers. known: last confirmed `Sync`."""

    index: int
    name: str
    tasks: dict[int, "asyncio.Task[None]"] = field(default_factory=dict)
    asks: dict[int, QueuedCall] = field(default_factory=dict)
    known: int = 0

    @property
    def is_client_process(self) -> bool:
        return not self.index


class CoreServer:
    """Batches the gateway's models; sends other requests to the backend unbatched. Run `run()` as one task.

    client_calls: runs the calls of client processes; None rejects client processes. apart: models with an engine
    process of their own.
    """

    def __init__(
        self,
        watch: EngineWatch,
        backend: Engine,
        queues: "BatcherPool",
        *,
        slab_partitions: SlabPartitions | None = None,
        client_calls: ClientProcessCalls | None = None,
        apart: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._watch = watch
        self._backend = backend
        self._queues = queues
        self._slab_partitions = slab_partitions
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._client_calls = client_calls
        self._apart = apart
        self._replicas = backend if isinstance(backend, Replicas) else None
        self._fronts: dict[MessageConnection[ToCore], _Peer] = {}
        self._unidentified: dict[MessageConnection[ToCore], float] = {}  # and when they connected
        self._client_numbers = itertools.count(1)
        self._is_full_logged = False
        self._is_draining = False
        self._sent_state: CoreState | None = None
        self._spreads = 0
        self._has_spread = asyncio.Event()
        self.reported = ReportedQueues()

    @property
    def front_count(self) -> int:
        return sum(1 for front in self._fronts.values() if not front.is_client_process)

    @property
    def client_process_count(self) -> int:
        return len(self._fronts) - self.front_count

    def cut(self, reason: str) -> None:
        """Informs all peers that their calls in the engine will not be answered any more."""
        for line in self._fronts:
            line.send(CallsCut(reason))

    async def drain(self, grace_s: float) -> bool:
        """Stops accepting from client processes. Returns whether their calls ended, and were read, in time."""
        self._is_draining = True
        clients = {line: front for line, front in self._fronts.items() if front.is_client_process}
        tasks = [task for client in clients.values() for task in client.tasks.values()]
        running = (await asyncio.wait(tasks, timeout=grace_s))[1] if tasks else set()
        for _ in range(round(CLOSE_GRACE_S / LOOK_S)):
            if not any(line.unsent_bytes for line in clients):
                break
            await asyncio.sleep(LOOK_S)
        return not running

    async def spread(self) -> None:
        """Returns when every worker has the current models, so that their next client sees them."""
        self._tell(is_due=False)
        self._spreads += 1
        number = self._spreads
        for line, front in self._fronts.items():
            if not front.is_client_process:
                line.send(Sync(number))
        try:
            async with asyncio.timeout(SPREAD_S):
                while any(front.known < number and not front.is_client_process for front in self._fronts.values()):
                    self._has_spread.clear()
                    await self._has_spread.wait()
        except TimeoutError:
            log.warning("worker did not confirm a change of the models in time", seconds=SPREAD_S)

    async def run(self, run_dir: Path) -> None:
        """Listens in the stack's folder and sends the state until cancelled; then closes all connections."""
        path = run_dir / SOCKET_NAME
        path.unlink(missing_ok=True)
        server = await asyncio.get_running_loop().create_unix_server(self._new_line, str(path))
        looks = 0
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                looks += 1
                since = time.monotonic() - GREETING_S  # a connection without a hello message holds a descriptor
                for line in [line for line, connected_at in self._unidentified.items() if connected_at < since]:
                    self._refuse(line, f"no hello message within {GREETING_S:g} s")
                if self._fronts:
                    self._tell(is_due=looks % STATE_EVERY_LOOKS == 0)
                    self._grant_slab_parts()
        finally:
            server.close()
            for line in [*self._fronts, *self._unidentified]:
                line.close()
                self._lost(line)

    def _new_line(self) -> MessageConnection[ToCore]:
        line = MessageConnection(self._decoder, self._hear, self._lost)
        line.max_record_bytes = GREETING_BYTES
        self._unidentified[line] = time.monotonic()
        return line

    def _state(self) -> CoreState:
        watch = self._watch
        models = tuple(watch.models.values())
        owned = tuple(known.name for known in models if self._queues.owns(known.name))
        homes = {} if self._replicas is None else {name: tuple(at) for name, at in self._replicas.homes.items()}
        return CoreState(
            watch.is_up, watch.reason, watch.generation, models, owned, self._apart(), dict(watch.left_out), homes
        )

    def _tell(self, *, is_due: bool) -> None:
        state = self._state()
        is_new = state != self._sent_state
        if is_due or is_new:
            self._sent_state = state
            for line, front in self._fronts.items():
                if (is_new and not front.is_client_process) or line.unsent_bytes <= UNREAD_BYTES:
                    line.send(state)

    def _grant_slab_parts(self) -> None:
        """Grants parts to new peers, and to all after a renewal of the slab."""
        if self._slab_partitions is None:
            return
        for line, front in self._fronts.items():
            if (lent := self._slab_partitions.due(line, is_client_process=front.is_client_process)) is not None:
                line.send(SlabPartGranted(lent))

    def _hear(self, line: MessageConnection[ToCore], record: ToCore) -> None:
        try:
            self._take(line, record)
        except _ProtocolViolation as error:
            self._refuse(line, str(error))

    def _take(self, line: MessageConnection[ToCore], record: ToCore) -> None:
        """Raises _ProtocolViolation."""
        front = self._fronts.get(line)
        if front is None:
            if not isinstance(record, WorkerHello | ClientHello):
                raise _ProtocolViolation("the first message is no hello")
            self._welcome(line, record)
        elif isinstance(record, _REQUESTS):
            self._serve(line, front, record)
        elif isinstance(record, WorkerHello | ClientHello):
            raise _ProtocolViolation("second hello message")
        elif isinstance(record, SyncDone):
            front.known = min(record.number, self._spreads)
            self._has_spread.set()
        elif not front.is_client_process:  # ClientProcessCalls reports this for client processes
            self._note(front, record)

    def _note(
        self, front: _Peer, record: ModelsServed | CallFailed | EngineSuspected | CallLate | QueuesReported
    ) -> None:
        if isinstance(record, QueuesReported):
            self.reported.take(front.index, record.queues)
        elif isinstance(record, ModelsServed):
            for name in record.model_names:
                self._watch.note_served(name)
        elif isinstance(record, EngineSuspected):
            self._watch.suspect()
        elif isinstance(record, CallFailed):
            self._watch.note_failed(record.model_name)
        else:
            self._watch.note_late(record.model_name, record.waited_s, is_waiting=record.is_waiting)

    def _welcome(self, line: MessageConnection[ToCore], greeting: WorkerHello | ClientHello) -> None:
        """Raises _ProtocolViolation."""
        if isinstance(greeting, WorkerHello):
            if not 0 < greeting.index < MAX_PROCESSES:
                raise _ProtocolViolation(f"there is no worker {greeting.index}")
            front = _Peer(greeting.index, f"worker {greeting.index}")
            line.max_record_bytes = UNLIMITED_BYTES
            log.debug("worker connected", worker=greeting.index)
        elif self._client_calls is None or self.client_process_count >= MAX_CLIENT_PROCESSES:
            self._turn_away(line, greeting.name[:MAX_NAME])
            return
        else:
            front = _Peer(0, f"client-{next(self._client_numbers)}")
            line.max_record_bytes = MAX_CLIENT_MESSAGE_BYTES
            log.info("client process connected", program=greeting.name[:MAX_NAME], name=front.name)
        del self._unidentified[line]
        self._fronts[line] = front
        line.send(self._state())

    def _turn_away(self, line: MessageConnection[ToCore], name: str) -> None:
        """Logs once until a client process leaves, because it reconnects each second."""
        tell = log.debug if self._is_full_logged else log.warning
        tell("client process rejected", program=name, connected=self.client_process_count)
        self._is_full_logged = True
        reason = (
            f"the gateway serves {MAX_CLIENT_PROCESSES} other programs of this host already; end one, or use its ports"
        )
        self._end(line, reason if self._client_calls else "the gateway serves no other programs of this host")

    def _refuse(self, line: MessageConnection[ToCore], reason: str) -> None:
        """Closes the connection of a peer that violates the protocol."""
        front = self._fronts.get(line)
        log.warning("peer broke the protocol; closing the connection", who=front.name if front else "", reason=reason)
        self._end(line, reason)

    def _end(self, line: MessageConnection[ToCore], reason: str) -> None:
        """Sends the reason, and stops reading."""
        self._lost(line)
        line.send(ClientRejected(reason))
        line.end()

    def _serve(self, line: MessageConnection[ToCore], front: _Peer, question: Infer | FindModel | CancelInfer) -> None:
        """Raises _ProtocolViolation."""
        number = question.number
        known: QueuedCall | asyncio.Task[None] | None = front.asks.get(number) or front.tasks.get(number)
        if isinstance(question, CancelInfer):
            if known is not None:
                known.cancel()
            return
        if known is not None:
            raise _ProtocolViolation(f"two running requests have the number {number}")
        if front.is_client_process:
            if (refusal := self._beyond(line, front)) is not None:
                if self._client_calls is not None and isinstance(question, Infer):
                    self._client_calls.refused(question, refusal)
                line.send(failed_message(number, refusal))
                return
        elif isinstance(question, Infer) and enqueue_call(
            self._queues, self._slab_partitions, line, question, front.asks
        ):
            return
        work = self._infer(line, front, question) if isinstance(question, Infer) else self._find(line, question)
        task = front.tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda task: self._ended(line, front, question, task))

    def _beyond(self, line: MessageConnection[ToCore], client: _Peer) -> Overloaded | None:
        """The error if a client process exceeds a limit now. Raises _ProtocolViolation."""
        if self._is_draining:
            return Overloaded("this gateway is about to stop; send to another one", reason="draining")
        if line.unsent_bytes > CLIENT_STALLED_BYTES:
            raise _ProtocolViolation(f"{line.unsent_bytes} bytes of answers are unread")
        if line.unsent_bytes > CLIENT_UNREAD_BYTES:
            return Overloaded(f"{line.unsent_bytes} bytes of this program's answers are not read; retry after 0.2 s")
        if len(client.tasks) >= MAX_CLIENT_CALLS:
            return Overloaded(f"{len(client.tasks)} requests of this program wait; retry after 0.2 s")
        return None

    def _ended(
        self, line: MessageConnection[ToCore], front: _Peer, question: Infer | FindModel, task: "asyncio.Task[None]"
    ) -> None:
        front.tasks.pop(question.number, None)
        if isinstance(question, Infer) and task.cancelled():
            self._send_cancelled_at(line, question, task)

    def _send_cancelled_at(self, line: MessageConnection[ToCore], ask: Infer, task: "asyncio.Task[None]") -> None:
        """For a cancelled request. A batched one without a noted stage had not been queued yet."""
        otherwise = CancelStage.QUEUE if self._queues.owns(ask.request.model_name) else CancelStage.ENGINE
        try:
            task.result()
        except asyncio.CancelledError as cancelled:
            when_stage_known(cancelled, otherwise, lambda where: line.send(CancelledAt(ask.number, where)))

    def _lost(self, line: MessageConnection[ToCore]) -> None:
        self._unidentified.pop(line, None)
        front = self._fronts.pop(line, None)
        if front is not None and front.is_client_process:
            log.info("client process disconnected", name=front.name, waiting=len(front.tasks))
            self._is_full_logged = False
        elif front is not None:
            self.reported.lost(front.index)
        for task in list(front.tasks.values()) if front is not None else ():
            task.cancel()
        for ask in list(front.asks.values()) if front is not None else ():
            ask.cancel()
        if self._slab_partitions is not None:
            self._slab_partitions.gone(line)
        self._has_spread.set()

    async def _infer(self, line: MessageConnection[ToCore], front: _Peer, ask: Infer) -> None:
        request, client_calls = ask.request, self._client_calls
        with ReportFailures(line, ask.number):
            if front.is_client_process and client_calls is not None:
                response = await client_calls.infer(ask, peer=line, client=front.name)
            else:
                if self._slab_partitions is not None:
                    request = self._slab_partitions.in_full(request, line)
                response = await self._backend.infer(request)
            line.send(Inferred(ask.number, response))

    async def _find(self, line: MessageConnection[ToCore], find: FindModel) -> None:
        with ReportFailures(line, find.number):
            line.send(ModelFound(find.number, await self._watch.find(checked_name(find.model_name))))
