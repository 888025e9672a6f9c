"""Hosts on one machine: network namespaces with a rate each, and a storage server.

    storage 10.77.0.254 ----+
                            |  bridge
    host 0  10.77.0.1   ----+     per host, on the bridge's side of its link:
    host 1  10.77.0.2   ----+       from storage   storage_rate
     :                      |       from others    link_rate

Linux only, and root only: `Network.reason` says why it is not available.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

BRIDGE = "oreshbr0"
STORAGE = "oreshst"
STORAGE_ADDRESS = "10.77.0.254"

# Bytes that may pass at once above the rate: large enough for htb to reach the rate
# with a 250 Hz timer, small enough that 1 MB is not for free.
_STORAGE_BURST = "256k"
_LINK_BURST = "1m"


def unavailable() -> str | None:
    """Why namespaces cannot be made here, or None when they can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"needs the program {program!r} (Debian: iproute2, util-linux)"
    return None


def host_name(index: int) -> str:
    """Name of a host's namespace, and of the host itself."""
    return f"oreshh{index}"


def host_address(index: int) -> str:
    """Address of a host."""
    return f"10.77.0.{index + 1}"


class Network:
    """The hosts and the storage server; made by ``with``, removed at its end.

    Args:
        num_hosts: hosts beside the storage server.
        storage_rate: what a host receives from storage, as ``tc`` writes rates.
        link_rate: what a host receives from all other hosts.
    """

    def __init__(self, num_hosts: int, storage_rate: str, link_rate: str) -> None:
        """Stores the arguments."""
        self._num_hosts = num_hosts
        self._storage_rate = storage_rate
        self._link_rate = link_rate

    def __enter__(self) -> Network:
        """Makes everything; what an earlier run left behind is removed first."""
        self._remove()
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        _run("ip", "link", "set", BRIDGE, "up")
        self._add(STORAGE, STORAGE_ADDRESS)
        for index in range(self._num_hosts):
            self._add(host_name(index), host_address(index))
            self._limit(index)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Removes everything."""
        self._remove()

    def command_on_host(self, index: int) -> tuple[str, ...]:
        """Words that run the words behind them on a host, under the host's name.

        Gloo binds to the machine's own name, so a host needs one that resolves.
        """
        script = f'hostname {host_name(index)}; exec "$0" "$@"'
        return (
            *(_path("ip"), "netns", "exec", host_name(index)),
            *(_path("unshare"), "--uts", "/bin/sh", "-c", script),
        )

    def command_on_storage(self) -> tuple[str, ...]:
        """Words that run the words behind them on the storage server."""
        return (_path("ip"), "netns", "exec", STORAGE)

    def received_bytes(self, index: int) -> int:
        """Bytes that a host's interface has received so far."""
        text = subprocess.run(
            [*self.command_on_host(index), "cat", "/proc/net/dev"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        line = next(x for x in text.splitlines() if x.strip().startswith("eth0:"))
        return int(line.split(":", 1)[1].split()[0])

    def _add(self, name: str, address: str) -> None:
        _run("ip", "netns", "add", name)
        outer = f"v{name}"
        _run(
            "ip",
            "link",
            "add",
            outer,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            name,
        )
        _run("ip", "link", "set", outer, "master", BRIDGE, "up")
        inside = ("ip", "netns", "exec", name, "ip")
        _run(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        lines = ["127.0.0.1 localhost", f"{STORAGE_ADDRESS} {STORAGE}"]
        lines += [f"{host_address(i)} {host_name(i)}" for i in range(self._num_hosts)]
        folder = pathlib.Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def _limit(self, index: int) -> None:
        """Two classes towards a host: from storage, and from everybody else."""
        link = f"v{host_name(index)}"
        _run(
            "tc",
            "qdisc",
            "add",
            "dev",
            link,
            "root",
            "handle",
            "1:",
            "htb",
            "default",
            "20",
        )
        for number, rate, burst in (
            ("10", self._storage_rate, _STORAGE_BURST),
            ("20", self._link_rate, _LINK_BURST),
        ):
            _run(
                *("tc", "class", "add", "dev", link, "parent", "1:"),
                *("classid", f"1:{number}", "htb", "rate", rate),
                *("burst", burst, "cburst", burst),
            )
        _run(
            *("tc", "filter", "add", "dev", link, "protocol", "ip", "parent", "1:"),
            *("prio", "1", "u32", "match", "ip", "src", f"{STORAGE_ADDRESS}/32"),
            *("flowid", "1:10"),
        )

    def _remove(self) -> None:
        listed = subprocess.run(
            ["ip", "netns", "list"], check=False, capture_output=True, text=True
        ).stdout
        for line in listed.splitlines():
            name = line.split()[0] if line.split() else ""
            if name == STORAGE or name.startswith("oreshh"):
                _run("ip", "netns", "del", name)
                shutil.rmtree(pathlib.Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


def _path(program: str) -> str:
    found = shutil.which(program)
    assert found is not None
    return found


def _run(*words: str) -> None:
    done: Sequence[str] = words
    result = subprocess.run(done, check=False, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(words)}: {result.stderr.strip()}")
