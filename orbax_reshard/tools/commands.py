"""The commands of ``orbax-reshard``: options in, tables and exit statuses out.

Results go to standard output, progress and messages to standard error. Exit statuses:
0 all is well, 1 the result is bad (a bit differs), 2 the command cannot be run as
asked, 3 it was run and broke off, 130 it was interrupted.
"""

from __future__ import annotations

import contextlib
import enum
import pathlib
import signal
import sys
from collections.abc import Callable, Generator
from types import FrameType
from typing import Annotated, NoReturn

import rich.console
import rich.progress
import typer

from orbax_reshard.errors import OptionsError
from orbax_reshard.tools import demo as demo_tool
from orbax_reshard.tools import demo_table, launch
from orbax_reshard.tools.cli import USAGE_STATUS

DIFFERENCE_STATUS = 1
BROKEN_STATUS = 3
INTERRUPTED_STATUS = 130  # 128 + SIGINT, as shells have it

_MEGABYTE = 10**6

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback is to be read, and copied
    rich_markup_mode="markdown",
)


class PolicyChoice(enum.StrEnum):
    """The values of ``--policy``; a test compares them with those of the package.

    An enum, as typer 0.12 makes no choices of a ``Literal``.
    """

    READ_ONCE = "read_once"
    AUTO = "auto"
    DIRECT = "direct"


@app.callback()
def describe() -> None:
    """Restore Orbax checkpoints onto another topology, reading each byte once."""


@app.command()
def demo(
    processes: Annotated[int, typer.Option(help="Hosts to play.", min=1)] = 4,
    devices_per_process: Annotated[
        int, typer.Option(help="Virtual CPU devices of each host.", min=1)
    ] = 2,
    size_mb: Annotated[
        float, typer.Option(help="Size of the checkpoint, in 10^6 bytes.", min=0.5)
    ] = 64.0,
    policy: Annotated[
        PolicyChoice, typer.Option(help="How the plugin restores.")
    ] = PolicyChoice.READ_ONCE,
    keep: Annotated[
        pathlib.Path | None,
        typer.Option(help="Keep the checkpoint in this folder.", metavar="DIR"),
    ] = None,
    timeout_seconds: Annotated[
        float, typer.Option(help="Time limit for saving, and for restoring.", min=1)
    ] = 600.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of a table.")
    ] = False,
) -> None:
    """Restore one checkpoint onto three other meshes: stock Orbax against the plugin.

    Makes a transformer-shaped checkpoint, starts a cluster of local processes, restores
    in both ways, compares every bit, and prints what was fetched. Needs no network and
    no accelerator; leaves nothing behind. Exit status 1 if a bit differs.
    """
    with _progress() as on_step:
        try:
            result = demo_tool.run(
                num_processes=processes,
                devices_per_process=devices_per_process,
                size_bytes=round(size_mb * _MEGABYTE),
                policy=policy.value,
                keep=keep,
                timeout_seconds=timeout_seconds,
                on_step=on_step,
            )
        except OptionsError as error:
            _stop(str(error), USAGE_STATUS)
        except launch.ClusterError as error:
            _stop(str(error), BROKEN_STATUS)

    if json:
        print(result.to_json())
    else:
        console = rich.console.Console()
        if not console.is_terminal:
            console.width = demo_table.WIDTH  # and not the 80 of a terminal of old
        demo_table.show(result, console)
    if not result.equal:
        _stop("\n".join(result.sentences()), DIFFERENCE_STATUS)


def run() -> None:
    """Runs the command line of this process; a plain ``kill`` ends it like ^C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # The default of SIGTERM and SIGHUP ends Python on the spot, and the temporary
    # folder would stay. What nohup has told us to ignore stays ignored.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        _stop("Interrupted.", INTERRUPTED_STATUS)


def _stop(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)


@contextlib.contextmanager
def _progress() -> Generator[Callable[[str, int, int], None]]:
    """Shows steps: a bar that goes away on a terminal, lines elsewhere."""
    console = rich.console.Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, done, total: print(
            f"[{done + 1}/{total}] {text}", file=sys.stderr, flush=True
        )
        return
    bar = rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )
