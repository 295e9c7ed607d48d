"""`penstock setup`: installs what does not come with our wheel."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.gateway_client import settings_or_fail
from penstock.cli.terminal import fail, print_json, stoppable
from penstock.engines.triton.environment import SetupFailed, TritonSetup
from penstock.engines.triton.runtime import TritonUnavailable, default_environment

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _setup() -> None:
    """Install what does not come with the package."""


@app.command()
def triton(
    folder: Annotated[Path | None, typer.Option(help="where its environment is made [HOME/triton]")] = None,
    python: Annotated[Path | None, typer.Option(help="a Python 3.11 or 3.12 [this one, else one on PATH]")] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="with PyTorch and onnxruntime-gpu for models on a GPU (5 GB, CUDA 13)")
    ] = False,
    tensorrt: Annotated[
        bool, typer.Option("--tensorrt", help="with ONNX Runtime's plug-in, which runs TensorRT-RTX engines (146 MB)")
    ] = False,
    home: Annotated[Path | None, typer.Option(help="folder of our data [~/.penstock]", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Install the bundled Triton with the environment of its models; `penstock up` then uses it.

    It is for Linux on x86-64 with glibc 2.35 or newer. An environment that is complete stays as it is.
    """
    target = _target(folder, settings_or_fail(home).home_path)
    try:
        with stoppable("the same command goes on from there"):
            is_changed = TritonSetup(target, python, has_gpu=gpu, has_tensorrt=tensorrt).run(print_step)
    except (SetupFailed, TritonUnavailable) as error:
        fail(str(error), code=1)
    if as_json:
        print_json({"environment": str(target), "changed": is_changed})
    else:
        typer.echo(f"Triton is {'installed' if is_changed else 'up to date'} in {target}; `penstock up` starts it")


def _target(folder: Path | None, home: Path) -> Path:
    """The folder of the environment. Fails if `penstock up` would use another one, of a checkout, all the same."""
    target = (folder or home / "triton").expanduser().absolute()
    used = default_environment(Path(sys.prefix), home).expanduser().absolute()
    if folder is None and used != target:
        fail(
            f"`penstock up` of this checkout uses {used}, not {target}: run make gpu or make tensorrt there, "
            f"or name the folder: --folder {used}"
        )
    return target


def print_step(text: str) -> None:
    """Progress goes to standard error, with that of the installer."""
    sys.stderr.write(f"{text}\n")
