"""The demo through its command line, and what it is made of."""

import io
import json
import pathlib
import re
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import rich.console
from conftest import wait_for_no_leftovers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from orbax_reshard.errors import OptionsError
from orbax_reshard.tools import bits, demo, demo_checkpoint, demo_table, launch

pytestmark = pytest.mark.usefixtures("no_leftovers")

# Far above what the small demo needs, also on a busy machine.
TIMEOUT_SECONDS = 240

SMALL = ("demo", "--size-mb", "1", "--processes", "2", "--devices-per-process", "2")


def start(*arguments: str, tmp: pathlib.Path) -> subprocess.Popen[str]:
    """The command as users start it, with its temporary files where we can look."""
    env = launch.child_environment(1) | {"TMPDIR": str(tmp), "COLUMNS": "100"}
    return subprocess.Popen(
        [sys.executable, "-m", "orbax_reshard.tools.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def run(*arguments: str, tmp: pathlib.Path) -> tuple[int, str, str]:
    with start(*arguments, tmp=tmp) as process:
        out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict:
    tmp = tmp_path_factory.mktemp("demo")
    status, out, err = run(*SMALL, "--json", tmp=tmp)
    assert status == 0, err
    steps = re.findall(r"^\[(\d+)/11\] .+$", err, re.MULTILINE)
    assert steps == [str(i) for i in range(1, 12)]
    assert list(tmp.iterdir()) == []  # the temporary folder is gone
    return json.loads(out)  # fails if anything else was printed


def test_json_says_what_was_run(document):
    assert document["num_processes"] == 2
    assert document["devices_per_process"] == 2
    assert document["policy"] == "read_once"
    assert document["saved_mesh"] == [4, 8, 1]
    assert document["axis_names"] == ["data", "fsdp", "tensor"]
    leaves = demo_checkpoint.transformer(1_000_000)
    assert document["num_leaves"] == len(leaves)
    assert document["array_bytes"] == sum(leaf.num_bytes for leaf in leaves)
    # Incompressible: chunks hold the values, and per chunk some tens of bytes more.
    assert 1.0 <= document["stored_bytes"] / document["array_bytes"] < 1.2


def test_json_has_both_ways_for_every_target(document):
    targets = document["targets"]
    assert [t["mesh"] for t in targets] == [[4, 1, 1], [1, 1, 4], [1, 2, 2]]
    assert [t["first"] for t in targets] == ["stock", "planned", "stock"]
    assert document["equal"] is True
    for target in targets:
        assert target["num_shards"] == document["num_leaves"] * 4  # devices
        assert target["differences"] == []
        for way in ("stock", "planned"):
            measured = target[way]
            assert len(measured["fetched_bytes_per_host"]) == 2
            total = sum(measured["fetched_bytes_per_host"])
            assert measured["amplification"] == total / document["stored_bytes"]
            assert 0 < measured["seconds"] < TIMEOUT_SECONDS
        assert target["stock"]["collectives"] == target["stock"]["reasons"] == {}
        assert sum(target["planned"]["reasons"].values()) == document["num_leaves"]


def test_planned_reads_once_where_stock_reads_everything_on_every_host(document):
    replicated = document["targets"][0]
    # Two hosts. Each also reads the index, about a twentieth of so small a checkpoint.
    assert replicated["stock"]["amplification"] == pytest.approx(2.0, abs=0.2)
    assert replicated["planned"]["amplification"] == pytest.approx(1.0, abs=0.2)
    assert sum(replicated["planned"]["collectives"].values()) > 0


@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGINT, "[1/"), (signal.SIGTERM, "[2/"), (signal.SIGINT, "[4/")],
)
def test_an_interrupt_leaves_nothing_behind(tmp_path, number, when):
    with start(*SMALL, tmp=tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(when):
                break
        process.send_signal(number)
        out, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 130
    assert out == ""
    assert list(tmp_path.iterdir()) == []
    wait_for_no_leftovers()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--processes", "3"),
            "3 processes with 2 devices each make 6 devices, but the demo's arrays "
            "divide over 2, 4, 8 or 16 devices.\n",
        ),
        (("--processes", "0"), None),
        (("--policy", "sometimes"), None),
    ],
)
def test_what_cannot_be_run_is_status_2(tmp_path, arguments, sentence):
    status, out, err = run("demo", *arguments, tmp=tmp_path)
    assert (status, out) == (2, "")
    assert sentence is None or err == sentence


def test_a_run_that_breaks_off_is_status_3(tmp_path):
    status, out, err = run(*SMALL, "--timeout-seconds", "1", tmp=tmp_path)
    assert (status, out) == (3, "")
    assert "Process 0 of 1 was still running at the time limit" in err


def test_an_existing_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(OptionsError, match="exists already; name another folder"):
        demo.run(keep=tmp_path)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_one_sentence_says_what_to_install(tmp_path, missing):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from orbax_reshard.tools import cli\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=launch.child_environment(1),
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"The orbax-reshard command needs {missing}, which is not installed: "
        "pip install 'orbax-reshard[cli]'\n"
    )


@pytest.mark.parametrize(
    ("also", "status"), [("", 0), ("; jax.devices()", 1)], ids=["import", "devices"]
)
def test_importing_every_module_starts_no_backend(also, status):
    # JAX refuses to change the number of CPU devices once a backend is there.
    program = (
        "import importlib, pkgutil, jax, orbax_reshard\n"
        "for m in pkgutil.walk_packages(orbax_reshard.__path__, 'orbax_reshard.'):\n"
        f"    importlib.import_module(m.name){also}\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "assert jax.device_count() == 3\n"
    )
    env = launch.child_environment(1)
    del env["XLA_FLAGS"]
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=env,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == status, done.stderr
    assert ("before backends are initialized" in done.stderr) == bool(status)


# ---- comparing bits: proves that a single bit is seen, for every kind of value

REPLICATED = P()


def placed(values: np.ndarray, spec: P = REPLICATED) -> jax.Array:
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    return jax.device_put(values, NamedSharding(mesh, spec))


def with_one_bit_flipped(array: jax.Array, device_index: int, byte: int) -> jax.Array:
    """A copy in which one bit of one device's shard is different."""
    pieces = []
    for i, shard in enumerate(array.addressable_shards):
        values = np.array(shard.data)
        if i == device_index:
            values.reshape(-1).view(np.uint8)[byte] ^= 1
        pieces.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, pieces, dtype=array.dtype
    )


@pytest.mark.parametrize("spec", [P(), P("x"), P("y", "x"), P(None, ("x", "y"))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "complex64"])
def test_one_bit_on_one_device_is_a_difference(spec, dtype):
    values = np.arange(128).reshape(16, 8) % 2
    array = placed(values.astype(jnp.dtype(dtype)), spec)
    same = placed(np.asarray(array), spec)
    assert bits.describe_difference(array, same) is None
    for device_index in (0, 5, 7):
        other = with_one_bit_flipped(array, device_index, byte=0)
        assert bits.describe_difference(array, other) is not None
        assert bits.describe_difference(other, array) is not None


def test_the_description_names_the_place_in_the_whole_array():
    values = np.zeros((16, 8), np.uint16)
    stock = placed(values, P("x", "y"))
    # Device 5 is (2, 1) in the 4 x 2 mesh: rows 8 to 12, columns 4 to 8. Byte 13 of its
    # 4 x 4 shard of two bytes an element is the high byte of element 6, at (1, 2).
    planned = with_one_bit_flipped(stock, 5, byte=13)
    assert bits.describe_difference(stock, planned) == (
        "element (9, 6) on device 5 is 0x0000 from stock and 0x0100 as planned "
        "(1 of 16 elements of that shard)"
    )


def test_one_replica_of_several_is_enough():
    stock = placed(np.ones(4, np.float32))
    difference = bits.describe_difference(stock, with_one_bit_flipped(stock, 6, 0))
    assert difference is not None and "on device 6" in difference


def test_nan_payloads_and_signed_zeros_are_bits():
    patterns = np.uint32([0x7FC00000, 0x7FC00001, 0x80000000, 0])
    array = placed(patterns.view(np.float32))
    assert bits.describe_difference(array, array) is None
    zero = placed(np.float32([0.0]))
    assert bits.describe_difference(zero, placed(np.float32([-0.0]))) is not None


def test_scalars_and_empty_arrays_are_compared():
    scalar = placed(np.float32(1))
    assert bits.describe_difference(scalar, scalar) is None
    assert bits.describe_difference(scalar, with_one_bit_flipped(scalar, 3, 0)) == (
        "element () on device 3 is 0x3f800000 from stock and 0x3f800001 as planned "
        "(1 of 1 elements of that shard)"
    )
    empty = placed(np.zeros((0, 4), ml_dtypes.bfloat16))
    assert bits.describe_difference(empty, empty) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "spec", "fact"),
    [
        ((4, 4), "float32", REPLICATED, "shape"),
        ((8, 4), "int32", REPLICATED, "dtype"),
        ((8, 4), "float32", P("x"), "sharding"),
    ],
)
def test_other_facts_differ_before_bits(shape, dtype, spec, fact):
    stock = placed(np.zeros((8, 4), np.float32))
    other = placed(np.zeros(shape, dtype), spec)
    assert f"its {fact} is" in str(bits.describe_difference(stock, other))


def result_with(differences: tuple[dict, ...]) -> demo.DemoResult:
    measured = demo.Measured(  # the widest that the default demo can show
        fetched_bytes_per_host=(123_400_000,) * 4,
        amplification=4.0,
        collectives={"all-gather": 10, "all-to-all": 10},
        seconds=123.4,
        compile_seconds=12.3,
        reasons={},
    )
    target = demo.TargetResult(
        mesh=(1, 2, 2),
        first="stock",
        stock=measured,
        planned=measured,
        num_shards=4,
        differences=differences,
    )
    return demo.DemoResult(
        num_processes=4,
        devices_per_process=2,
        policy="read_once",
        num_leaves=56,
        array_bytes=123_400_000,
        stored_bytes=123_400_000,
        targets=(target,),
    )


DIFFERENCE = {"process": 1, "leaf": "decoder/scale", "what": "element (3,) is wrong"}


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_difference_is_status_1_and_a_sentence(monkeypatch, capsys, options):
    """The command on a result with a difference; that one is found is shown above."""
    from orbax_reshard.tools import commands

    monkeypatch.setattr(demo, "run", lambda **kwargs: result_with((DIFFERENCE,)))
    with pytest.raises(SystemExit) as caught:
        commands.app(["demo", *options])
    assert caught.value.code == 1
    out, err = capsys.readouterr()
    assert err == (
        "Leaf decoder/scale on target 1-2-2 differs on host 1: element (3,) is wrong.\n"
    )
    if options:
        assert json.loads(out)["equal"] is False
    else:
        assert "1 of 4 shards differ" in out


def test_the_policies_are_those_of_the_package():
    from orbax_reshard.planning.plan import POLICIES
    from orbax_reshard.tools import commands

    assert {choice.value for choice in commands.PolicyChoice} == set(POLICIES)


def test_the_table_fits_into_its_width():
    out = io.StringIO()
    console = rich.console.Console(width=demo_table.WIDTH, file=out)
    demo_table.show(result_with(()), console)
    text = out.getvalue()
    assert "All 4 shards are equal, bit for bit." in text
    assert max(map(len, text.splitlines())) <= demo_table.WIDTH


# ---- the checkpoint


@pytest.mark.parametrize("size_bytes", [500_000, 1_000_000, 10**7, 64_000_000, 10**9])
def test_the_model_has_about_the_size_asked_for(size_bytes):
    leaves = demo_checkpoint.transformer(size_bytes)
    total = sum(leaf.num_bytes for leaf in leaves)
    assert total == pytest.approx(size_bytes, rel=0.15)
    assert len({leaf.name for leaf in leaves}) == len(leaves)
    assert {leaf.dtype for leaf in leaves} == {"float32", "bfloat16"}


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
def test_every_leaf_divides_over_every_target(num_devices):
    for sizes in demo.target_meshes(num_devices):
        assert np.prod(sizes) == num_devices
        by_name = dict(zip(demo_checkpoint.AXIS_NAMES, sizes, strict=True))
        for leaf in demo_checkpoint.transformer(500_000):
            for extent, axis in zip(leaf.shape, leaf.axes, strict=True):
                assert axis is None or extent % by_name[axis] == 0


def test_every_element_carries_its_address():
    leaf = demo_checkpoint.transformer(500_000)[0]
    first, second = (demo_checkpoint.values(leaf, seed) for seed in (0, 1))
    assert len(np.unique(first.view(np.uint32))) == first.size
    assert (first.view(np.uint32) == second.view(np.uint32)).mean() < 0.001
