"""The first thing that runs in a child of `launch.run_cluster`, and the last.

A plain script that needs only the standard library: it is run by its path, as
``python child_main.py ARGUMENTS``, where the arguments are what would follow
``python``: ``-c PROGRAM``, ``-m MODULE ...`` or ``SCRIPT ...``. Two things it does that
a program would forget:

1. It ends the process without tearing down the interpreter. Exit functions run, JAX's
   shutdown barrier among them; then `os._exit`. The destructor of a JAX CPU client
   waits for its worker threads, and one of those may be in ``gloo::Pair::connect``,
   waiting without end for a peer that has left: a program whose last collective was
   not awaited on every device hung in one of about a hundred runs on a busy 2-core
   machine (JAX 0.12.0.1).
2. A process that failed says so and stays for a moment. It skips JAX's shutdown
   barrier, which would hide the failure until the others come, but its peers get the
   time to report before its sockets close.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
import types

# Peers that fail for the same reason do so within milliseconds; a busy machine needs
# more. Shorter than the grace of `supervised`, which starts when this process is gone.
_LINGER_SECONDS = 3.0


def main() -> None:
    """Becomes the program, and ends the process with the status that it earns."""
    status = 0

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    atexit.register(leave)  # exit functions run last in, first out: this is the end
    try:
        _run(sys.argv[1:])
    except SystemExit as error:
        status = _status_of(error)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    if status != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        if "jax" in sys.modules:
            time.sleep(_LINGER_SECONDS)
        leave()


def _run(arguments: list[str]) -> None:
    """Does what ``python ARGUMENTS`` does, in a ``__main__`` of its own."""
    what, *rest = arguments
    if what == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)
    elif what == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [what, *rest], os.path.dirname(os.path.abspath(what))
        runpy.run_path(what, run_name="__main__")


def _status_of(error: SystemExit) -> int:
    """The exit status that python makes of ``sys.exit(code)``; prints a message."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
