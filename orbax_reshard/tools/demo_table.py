"""The demo's result as a table for people."""

from __future__ import annotations

import rich.box
import rich.console
import rich.table

from orbax_reshard.tools import demo, demo_checkpoint

_MEGABYTE = 10**6

# Columns that the table is made for.
WIDTH = 100

# With more hosts than this, the numbers of single hosts no longer fit, and the
# smallest and the largest are shown.
_MAX_HOSTS_SHOWN = 4

# Characters of the longest bar; what is left of WIDTH.
_BAR_WIDTH = 8

_COLORS = {"stock": "yellow", "planned": "green"}


def show(result: demo.DemoResult, console: rich.console.Console) -> None:
    """Prints heading, table, and what to think of it."""
    saved = "-".join(map(str, demo_checkpoint.SAVED_MESH))
    axes = ", ".join(demo_checkpoint.AXIS_NAMES)

    def say(*lines: str) -> None:
        console.print("\n".join(lines), highlight=False, soft_wrap=True)

    say(
        "",
        f"[bold]One checkpoint, {len(result.targets)} other topologies[/]",
        f"  saved     {result.num_leaves} arrays of a transformer, "
        f"{result.stored_bytes / _MEGABYTE:.1f} MB, on a {saved} ({axes}) mesh",
        f"  restored  on {_count(result.num_processes, 'host')} with "
        f"{_count(result.devices_per_process, 'CPU device')} each, by "
        f"[yellow]stock[/] Orbax and as [green]planned[/] here ({result.policy})",
    )
    console.print(_table(result))
    num_shards = sum(target.num_shards for target in result.targets)
    if result.equal:
        say(f"[green]✓[/] All {num_shards:,} shards are equal, bit for bit.")
    else:
        num_differences = sum(len(target.differences) for target in result.targets)
        say(f"[red]✗[/] {num_differences} of {num_shards:,} shards differ; see below.")
    notes = [
        "MB are what each host read from storage, as TensorStore counted. "
        "Amplification: their sum / stored.",
        "Seconds say little here: storage is the page cache, and all hosts share this "
        "machine's processors.",
    ]
    compiling = [target.planned.compile_seconds for target in result.targets]
    if any(compiling):
        listed = ", ".join(f"{seconds:.1f}" for seconds in compiling)
        notes.append(
            f"Planned seconds include compiling, once per process: {listed} s."
        )
    say(*(f"[dim]{note}[/]" for note in notes), "")


def _table(result: demo.DemoResult) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("target", style="bold")
    table.add_column("restore")
    table.add_column(
        f"MB fetched by {_count(result.num_processes, 'host')}",
        justify="right",
        no_wrap=True,
    )
    table.add_column("amplification", no_wrap=True)
    table.add_column("collectives")
    table.add_column("seconds", justify="right")
    largest = max(
        measured.amplification
        for target in result.targets
        for measured in (target.stock, target.planned)
    )
    for target in result.targets:
        for way, measured in (("stock", target.stock), ("planned", target.planned)):
            color = _COLORS[way]
            share = measured.amplification / max(largest, 1.0)
            bar = "━" * max(1, round(share * _BAR_WIDTH))
            table.add_row(
                target.label if way == "stock" else "",
                f"[{color}]{way}[/]",
                _per_host(measured.fetched_bytes_per_host),
                f"{measured.amplification:.2f}× [{color}]{bar}[/]",
                _collectives(measured),
                f"{measured.seconds:.1f}",
                end_section=way == "planned",
            )
    return table


def _per_host(fetched: tuple[int, ...]) -> str:
    """Such as ``16.8  16.8  16.8  16.8``, or ``16.7 to 16.8`` for many hosts."""
    if len(fetched) <= _MAX_HOSTS_SHOWN:
        return " ".join(f"{value / _MEGABYTE:5.1f}" for value in fetched)
    return f"{min(fetched) / _MEGABYTE:.1f} to {max(fetched) / _MEGABYTE:.1f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _collectives(measured: demo.Measured) -> str:
    """Such as ``3 all-gather, 1 all-to-all``, or why a plan has none."""

    def listed(counts: dict[str, int]) -> list[str]:
        return [f"{count} {what}" for what, count in counts.items()]

    if measured.collectives:
        return ", ".join(listed(measured.collectives))
    if measured.reasons:
        return "none: " + "\n".join(listed(measured.reasons))
    return "none"
