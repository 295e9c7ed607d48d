"""Plans the thread limits of the processes that share a GPU under MPS, and says how many processes a model needs.

Measured with ResNet-50 FP16 (cuDNN's fused calls) on an H200 with 132 SMs, images/s, one image a request, one process
and two callers a client (medians; 2026-11-29, from 16 clients on 2026-11-23, another machine):

| clients | no MPS | MPS | 25 % of the threads each | 12 % |
|---|---|---|---|---|
| 1 | 1,615 | | | 1,231 |
| 4 | 2,005 | 3,910 | 4,534 | 3,988 |
| 8 | 1,998 | 5,070 | 7,058 | 6,500 |
| 16 | 2,003 | 4,822 | | 10,267 |
| 47 | 1,998 | 4,694 | | 10,576 |

Both ends follow from the kernels that cuDNN selects. For a process that sees all SMs it splits the work of one image
over the whole GPU: the fastest way for one client, but the kernels of several clients wait for each other. For fewer
SMs it selects kernels that need less SM time for an image, so more clients are served at once. That is NVIDIA's rule,
100 / (clients / 2) percent. It holds for single rows only: a large batch fills the GPU by itself, and a limit would
take threads from it for nothing.

A model with merged requests needs few processes. With 1, 2, 4 and 6 processes and Triton's batches of up to 32 it
answered 3,730, 4,981, 5,790 and 6,106 images/s to 16 callers, and 4,914, 6,809, 8,010 and 8,112 to 32. Triton's Python
backend takes about 0.1 ms for each request in its process, so that one process alone leaves the GPU idle.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.gpu.mps.limits import ModelClients

# Processes with single rows on one card, and the percentage for each. With other numbers of an H200's SMs cuDNN
# returned wrong results (torch_serving/trial.py).
_LIMITS = ((9, 12.0), (4, 25.0))
MERGED_PROCESSES = 4  # of a model with merged requests: some prepare batches while another's runs


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """threads: percentage of the GPU's for each process, 0 for no limit. enough: processes that the model needs."""

    model: str
    processes: int
    threads: float
    reason: str
    enough: int

    @property
    def line(self) -> str:
        """For the log and `penstock mps status`."""
        threads = f"{self.threads:g} % of the threads each" if self.threads else "all threads"
        advice = f"; {self.enough} are enough (set count in instance_group)" if self.enough < self.processes else ""
        return f"{self.model}: {self.processes} process{'es' * (self.processes > 1)}, {threads}: {self.reason}{advice}"


def plan_models(wanted: Iterable[ModelClients], card_count: int, *, limit: float | None) -> tuple[ModelPlan, ...]:
    """A plan for each model, by name. limit: percentage for every client, 0 for no limit, None to choose by model."""
    rows = tuple(wanted)
    single = [
        sum(row.count for row in rows if row.is_on(card) and row.max_rows == 1 and not row.is_merged)
        for card in range(card_count)
    ]
    return tuple(_planned(group, single, limit) for group in _by_model(rows))


def _by_model(rows: Sequence[ModelClients]) -> list[list[ModelClients]]:
    names = sorted({row.model for row in rows})
    return [[row for row in rows if row.model == name] for name in names]


def _planned(rows: Sequence[ModelClients], single: Sequence[int], limit: float | None) -> ModelPlan:
    first, cards = rows[0], range(len(single))
    processes = max((sum(row.count for row in rows if row.is_on(card)) for card in cards), default=0)
    enough = min(processes, MERGED_PROCESSES) if first.is_merged else processes
    if first.threads:
        return ModelPlan(first.model, processes, first.threads, "set in config.pbtxt", enough)
    if limit is not None:
        reason = "set for every client" if limit else "no limit is set"
        return ModelPlan(first.model, processes, limit, reason, enough)
    beside = max((single[card] for card in cards if any(row.is_on(card) for row in rows)), default=0)
    threads, reason = _choice(first, beside)
    return ModelPlan(first.model, processes, threads, reason, enough)


def single_row_limit(processes: int) -> float:
    """Percentage of the threads for each of so many processes with single rows on a GPU; 0 for no limit."""
    return next((percent for count, percent in _LIMITS if processes >= count), 0.0)


def _choice(row: ModelClients, beside: int) -> tuple[float, str]:
    """The percentage and its reason. beside: processes with single rows on its fullest card, its own included."""
    if row.is_merged:
        return 0.0, f"batches of up to {row.max_rows} fill the GPU"
    if row.max_rows > 1:
        return 0.0, f"a request may have {row.max_rows} rows"
    if not row.is_checked:
        return 0.0, "only backend torch checks its answers with a limit"
    threads = single_row_limit(beside)
    if not threads:
        return 0.0, f"only {beside} process{'es' * (beside > 1)} with single rows share the GPU"
    return threads, f"{beside} processes with single rows share the GPU"
