"""Rates of a machine: what the cost model divides bytes by.

The rates decide only *which* plan is taken under ``policy="auto"`` and how many
seconds it forecasts; bytes, chunks and collectives follow from the plan alone.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from orbax_reshard.errors import OptionsError


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Sustained rates, all above 0; bytes are 8-bit bytes, not bits.

    Attributes:
        name: what the report shows.
        storage_bytes_per_second: one host reading alone from storage.
        storage_total_bytes_per_second: all hosts together; ``inf`` when storage
            scales with the hosts, the rate of the disk when they share one.
        request_seconds: latency of a read request that nothing hides.
        decode_bytes_per_second: one host decompressing and copying chunks.
        host_to_device_bytes_per_second: one host filling all its devices.
        in_host_bytes_per_second: one device receiving from devices of its host.
        cross_host_bytes_per_second: one host receiving from other hosts.
        collective_seconds: latency of one collective.
        compile_seconds: compiling one exchange program.
    """

    name: str
    storage_bytes_per_second: float
    storage_total_bytes_per_second: float = math.inf
    request_seconds: float = 0.0
    decode_bytes_per_second: float
    host_to_device_bytes_per_second: float
    in_host_bytes_per_second: float
    cross_host_bytes_per_second: float
    collective_seconds: float
    compile_seconds: float

    def __post_init__(self) -> None:
        """Refuses rates that would make a cost meaningless."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            floor_allowed = field.name.endswith("_seconds")
            if not (value >= 0 if floor_allowed else value > 0):
                raise OptionsError(
                    f"profile {self.name!r}: {field.name} is {value}, but must be "
                    f"{'at least' if floor_allowed else 'above'} 0",
                    code="bad_profile",
                )


_MB = 1e6
_GB = 1e9

# Warm local disk under several processes of one machine: measured on 2 cores, the
# decoder is the limit (design section 8: 500 MB in 1.03 s), and gloo over loopback
# moves about 0.25 GB/s per process while it competes for the same cores.
CPU_FILE = HardwareProfile(
    name="cpu, local files",
    storage_bytes_per_second=1.0 * _GB,
    storage_total_bytes_per_second=2.0 * _GB,
    request_seconds=1e-4,
    decode_bytes_per_second=0.5 * _GB,
    host_to_device_bytes_per_second=4 * _GB,
    in_host_bytes_per_second=1 * _GB,
    cross_host_bytes_per_second=0.25 * _GB,
    collective_seconds=2e-3,
    compile_seconds=0.5,
)

# An object store over a data-centre network. 100 MB/s is what one virtual machine
# sustains from a standard bucket without tuning (Google Cloud Storage documents
# "request rate and access distribution" and about 1 Gbit/s to 10 Gbit/s per VM); 10
# ms is the order of a first byte. The network between hosts is taken as 10 Gbit/s.
CPU_OBJECT_STORE = dataclasses.replace(
    CPU_FILE,
    name="cpu, object store",
    storage_bytes_per_second=100 * _MB,
    storage_total_bytes_per_second=math.inf,
    request_seconds=1e-2,
    cross_host_bytes_per_second=1.0 * _GB,
)

# A100/H100 class hosts: PCIe gen 4 x16 per device (about 20 GB/s, eight of them),
# NVLink (hundreds of GB/s, 200 taken), 8 x 200 Gbit/s InfiniBand per host.
GPU_FILE = HardwareProfile(
    name="gpu, shared file system",
    storage_bytes_per_second=2 * _GB,
    request_seconds=1e-3,
    decode_bytes_per_second=4 * _GB,
    host_to_device_bytes_per_second=80 * _GB,
    in_host_bytes_per_second=200 * _GB,
    cross_host_bytes_per_second=100 * _GB,
    collective_seconds=1e-4,
    compile_seconds=0.5,
)
GPU_OBJECT_STORE = dataclasses.replace(
    GPU_FILE,
    name="gpu, object store",
    storage_bytes_per_second=1 * _GB,
    request_seconds=1e-2,
)

# TPU v4/v5p: ICI carries 100 GB/s per link and chip, hosts of 4 chips; crossing the
# host stays on ICI inside a slice.
TPU_OBJECT_STORE = HardwareProfile(
    name="tpu, object store",
    storage_bytes_per_second=1 * _GB,
    request_seconds=1e-2,
    decode_bytes_per_second=4 * _GB,
    host_to_device_bytes_per_second=40 * _GB,
    in_host_bytes_per_second=100 * _GB,
    cross_host_bytes_per_second=200 * _GB,
    collective_seconds=5e-5,
    compile_seconds=1.0,
)


def default_profile(*, platform: str, scheme: str) -> HardwareProfile:
    """The named default for a JAX platform and a storage scheme.

    Args:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``; anything else counts as gpu.
        scheme: ``"file"``, ``"gs"``, ``"s3"``, ...
    """
    local = scheme == "file"
    if platform == "cpu":
        return CPU_FILE if local else CPU_OBJECT_STORE
    if platform == "tpu":
        return TPU_OBJECT_STORE
    return GPU_FILE if local else GPU_OBJECT_STORE
