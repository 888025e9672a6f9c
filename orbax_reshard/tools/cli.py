"""The door of the ``orbax-reshard`` command; the commands are in `commands`.

It only checks that what the commands are made of is installed, because typer and rich
come with an extra and a traceback would not say which.
"""

from __future__ import annotations

import sys

# Status of a command that could not be run as asked; the one that typer uses, too.
USAGE_STATUS = 2


def main() -> None:
    """Runs the command line; ends the process with the command's exit status."""
    try:
        import rich  # pyright: ignore[reportUnusedImport]  # noqa: F401
        import typer  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except ImportError as error:
        print(
            f"The orbax-reshard command needs {error.name}, which is not installed: "
            "pip install 'orbax-reshard[cli]'",
            file=sys.stderr,
        )
        sys.exit(USAGE_STATUS)

    from orbax_reshard.tools import commands

    commands.run()


if __name__ == "__main__":
    main()
