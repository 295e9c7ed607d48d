"""Runs of ONNX Runtime in this process that end after a time, and at Ctrl-C."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, TimeoutError, wait
from typing import TypeVar

import onnxruntime as ort

from penstock.models.inspect.trial_session import TrialFailed

_Result = TypeVar("_Result")


def run_within(limit_s: float, work: Callable[[ort.RunOptions], _Result]) -> _Result:
    """What `work` returns, in another thread. A run with its options ends at the next node after limit_s or Ctrl-C.

    A loop in a model may never end, and a signal does not interrupt it. Raises TrialFailed if it took longer.
    """
    options = ort.RunOptions()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work, options)
        try:
            return future.result(limit_s)
        except TimeoutError:
            options.terminate = True
            wait([future])
            raise TrialFailed(f"it did not end within {limit_s:g} s") from None
        except KeyboardInterrupt:
            options.terminate = True
            raise
