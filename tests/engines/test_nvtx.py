"""Stages marked for a profiler: where it is asked for, and at no cost where it is not."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock.engines.torch_serving.instance import stage, stages


def torch_with(nvtx: object) -> ModuleType:
    """A torch of which nothing else is known."""
    module = ModuleType("torch")
    module.cuda = SimpleNamespace(nvtx=nvtx)  # type: ignore[attr-defined]
    return module


def test_stages_are_marked_and_closed_whatever_happens_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside the other, and one that raises."""
    ranges: list[str] = []
    nvtx = SimpleNamespace(range_push=ranges.append, range_pop=lambda: ranges.append("end"))
    monkeypatch.setitem(sys.modules, "torch", torch_with(nvtx))
    marked = stages({"PENSTOCK_NVTX": "1"})
    ranges.clear()
    with pytest.raises(KeyError), marked("infer"), marked("copy"):
        raise KeyError
    assert ranges == ["infer", "copy", "end", "end"]


def test_unrequested_stages_do_not_touch_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a torch that has no NVTX keep a model from serving."""
    monkeypatch.setitem(sys.modules, "torch", None)
    for environment in ({}, {"PENSTOCK_NVTX": "0"}, {"PENSTOCK_NVTX": "1"}):
        with stages(environment)("infer"):
            pass

    def absent(name: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    monkeypatch.setitem(sys.modules, "torch", torch_with(SimpleNamespace(range_push=absent)))
    with stages({"PENSTOCK_NVTX": "1"})("infer"):
        pass


def test_stage_may_be_used_again_and_in_itself() -> None:
    """As a picture's decoding is within a batch's."""
    with stage("a"), stage("a"):
        pass
