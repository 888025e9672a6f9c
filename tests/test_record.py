"""Records: adding and sharing them."""

from hypothesis import given
from hypothesis import strategies as st
from planning_oracle import fixed

from orbax_reshard.planning.record import Record, sum_records


@st.composite
def records(draw):
    hosts = sorted(draw(st.sets(st.integers(0, 5), max_size=4)))
    return Record(
        hosts=tuple(hosts),
        chunk_reads_per_host=tuple(draw(st.integers(0, 9)) for _ in hosts),
        fetched_bytes_per_host=tuple(draw(st.integers(0, 999)) for _ in hosts),
        bytes_are_exact=draw(st.booleans()),
        collectives=tuple(
            sorted(
                draw(
                    st.dictionaries(
                        st.sampled_from(["all-gather", "all-to-all"]), st.integers(1, 3)
                    )
                ).items()
            )
        ),
        received_bytes_per_device=draw(st.integers(0, 99)),
        seconds=draw(st.sampled_from([0.0, 0.5, 2.0])),
    )


@fixed(200)
@given(st.lists(records(), max_size=4))
def test_sums(found):
    total = sum_records(found)
    assert list(total.hosts) == sorted({host for r in found for host in r.hosts})
    for host, chunks, size in zip(
        total.hosts,
        total.chunk_reads_per_host,
        total.fetched_bytes_per_host,
        strict=True,
    ):
        own = [(r, r.hosts.index(host)) for r in found if host in r.hosts]
        assert chunks == sum(r.chunk_reads_per_host[i] for r, i in own)
        assert size == sum(r.fetched_bytes_per_host[i] for r, i in own)
    for kind in ("all-gather", "all-to-all"):
        count = sum(dict(r.collectives).get(kind, 0) for r in found)
        assert dict(total.collectives).get(kind, 0) == count
    assert total.fetched_bytes == sum(r.fetched_bytes for r in found)
    assert total.chunk_reads == sum(r.chunk_reads for r in found)
    assert total.received_bytes_per_device == sum(
        r.received_bytes_per_device for r in found
    )
    assert total.seconds == sum(r.seconds for r in found)
    assert total.bytes_are_exact == all(r.bytes_are_exact for r in found)
    assert sum_records([total]) == total


@fixed(100)
@given(records(), st.integers(1, 7))
def test_shares_are_rounded_up(record, parts):
    share = record.share(parts)
    assert share.hosts == record.hosts
    for name in ("chunk_reads_per_host", "fetched_bytes_per_host"):
        for part, whole in zip(
            getattr(share, name), getattr(record, name), strict=True
        ):
            assert whole <= part * parts < whole + parts
    assert share.seconds * parts == record.seconds or parts in (3, 5, 6, 7)
    assert share.bytes_are_exact == (record.bytes_are_exact and parts == 1)
    assert record.share(1) == record
