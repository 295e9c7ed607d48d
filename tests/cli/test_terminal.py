"""What commands print of names that other people chose."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.build import print_engine
from penstock.cli.terminal import print_failure, printable
from penstock.engines.ort_serving.placement import Precision
from penstock.models.tensorrt_rtx.build import BuiltEngine
from penstock.models.tensorrt_rtx.layers import EngineLayer, FusionTable, OnnxNode

EVIL = "a\x1b[31m\x1b]0;title\x07\x9b2J\u202e"


def test_name_cannot_move_the_cursor_or_write_the_title() -> None:
    """Escape sequences, one-byte controls and right-to-left marks are shown as text; blanks and letters stay."""
    assert printable(f"  {EVIL}é") == r"  a\x1b[31m\x1b]0;title\x07\x9b2J\u202eé"


def test_engine_of_a_model_with_a_hostile_name_is_shown_as_text() -> None:
    """In the summary, in the table and in the paths; square brackets are no markup."""
    node = OnnxNode("n", f"[bold]{EVIL}[/bold]")
    table = FusionTable(1, (EngineLayer("layer", "conv", (node,), ()),), 0, {EVIL: 1})
    shapes = {f"x{EVIL}": ((1, 3), (8, 3))}
    built = BuiltEngine((8, 9), Precision.FP32, "1.7", "0" * 64, 1, 1.0, shapes, table)
    written = io.StringIO()
    print_engine(Console(file=written, width=200), EVIL, built, Path(f"/models/{EVIL}.onnx"))
    text = written.getvalue()
    assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert r"[bold]a\x1b[31m" in text
    assert text.count(r"\x1b]0;title") == 6


def test_failure_with_a_long_name_is_one_short_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A node of an ONNX file may have a name of megabytes."""
    print_failure(f"operator {'N' * 1_000_000}\nis not supported")
    text = capsys.readouterr().err
    assert len(text) < 8100
    assert text.endswith("N… (1000026 characters)\n")
