"""One record for forecast and measurement, so that the two can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orbax_reshard.planning.boxes import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was, or will be, read and moved.

    Forecast and measurement of a planned group agree on chunk reads and collectives,
    and on bytes where ``bytes_are_exact``; only seconds may differ.

    Attributes:
        hosts: process indices, ascending; the per-host fields follow this order.
        chunk_reads_per_host: chunks decoded by each host.
        fetched_bytes_per_host: bytes that each host fetches from storage.
        bytes_are_exact: False when the stored sizes of compressed chunks were not
            known beforehand and decoded sizes stand in for them.
        collectives: pairs of kind and number launched, kinds ascending.
        received_bytes_per_device: bytes that a device receives in the exchange.
        seconds: wall time.
    """

    hosts: tuple[int, ...] = ()
    chunk_reads_per_host: tuple[int, ...] = ()
    fetched_bytes_per_host: tuple[int, ...] = ()
    bytes_are_exact: bool = True
    collectives: tuple[tuple[str, int], ...] = ()
    received_bytes_per_device: int = 0
    seconds: float = 0.0

    @property
    def fetched_bytes(self) -> int:
        """Bytes fetched by all hosts."""
        return sum(self.fetched_bytes_per_host)

    @property
    def chunk_reads(self) -> int:
        """Chunks decoded by all hosts."""
        return sum(self.chunk_reads_per_host)

    def share(self, parts: int) -> Record:
        """An equal share of this record, rounded up; seconds are divided."""
        return Record(
            hosts=self.hosts,
            chunk_reads_per_host=tuple(
                ceil_div(n, parts) for n in self.chunk_reads_per_host
            ),
            fetched_bytes_per_host=tuple(
                ceil_div(n, parts) for n in self.fetched_bytes_per_host
            ),
            bytes_are_exact=self.bytes_are_exact and parts == 1,
            collectives=self.collectives,
            received_bytes_per_device=ceil_div(self.received_bytes_per_device, parts),
            seconds=self.seconds / parts,
        )


def sum_records(records: Sequence[Record]) -> Record:
    """Adds records; hosts are united.

    >>> a = Record(hosts=(0, 1), chunk_reads_per_host=(1, 2),
    ...            fetched_bytes_per_host=(10, 20), collectives=(("all_gather", 1),))
    >>> b = Record(hosts=(1,), chunk_reads_per_host=(5,), fetched_bytes_per_host=(50,))
    >>> sum_records([a, b]).chunk_reads_per_host
    (1, 7)
    """
    chunks: Counter[int] = Counter()
    fetched: Counter[int] = Counter()
    collectives: Counter[str] = Counter()
    for record in records:
        for host, n, size in zip(
            record.hosts,
            record.chunk_reads_per_host,
            record.fetched_bytes_per_host,
            strict=True,
        ):
            chunks[host] += n
            fetched[host] += size
        collectives.update(dict(record.collectives))
    hosts = tuple(sorted(chunks))
    return Record(
        hosts=hosts,
        chunk_reads_per_host=tuple(chunks[h] for h in hosts),
        fetched_bytes_per_host=tuple(fetched[h] for h in hosts),
        bytes_are_exact=all(r.bytes_are_exact for r in records),
        collectives=tuple(sorted(collectives.items())),
        received_bytes_per_device=sum(r.received_bytes_per_device for r in records),
        seconds=sum(r.seconds for r in records),
    )
