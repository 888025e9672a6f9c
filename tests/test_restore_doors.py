"""Every door of Orbax leads to the plugin; saving and registries stay as found."""

import contextlib
import pathlib
import re

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import scenarios
import tensorstore as ts
from orbax.checkpoint._src.serialization import type_handler_registry
from scenarios import Leaf, Scenario

import orbax_reshard as oresh

SCENARIO = Scenario(
    id="doors",
    saved={"x": 4},
    target={"x": 8},
    leaves={
        "w": Leaf((64, 1024), ("x", None), (None, "x")),
        "scale": Leaf((4096,), (None,), (None,)),
    },
)
READ_ONCE = oresh.Options(policy="read_once")


def tree_of(scenario: Scenario) -> dict[str, jax.Array]:
    mesh = scenarios.mesh_of(scenario.saved)
    return {
        name: jax.device_put(
            scenarios.addressed(leaf.shape, leaf.dtype),
            scenarios.sharding_of(mesh, leaf.saved),
        )
        for name, leaf in scenario.leaves.items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("doors") / "checkpoint"
    scenarios.save(SCENARIO, str(path))
    return path


@pytest.fixture(scope="module")
def manager_folder(tmp_path_factory) -> pathlib.Path:
    """What a training run leaves: steps with an item ``default``."""
    path = tmp_path_factory.mktemp("manager")
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree_of(SCENARIO)))
    return path


@pytest.fixture
def target() -> dict[str, jax.ShapeDtypeStruct]:
    return scenarios.target_tree(SCENARIO)


def registry() -> tuple[list, dict]:
    """Orbax's global registry, by identity of its handlers."""
    found = type_handler_registry.GLOBAL_TYPE_HANDLER_REGISTRY
    entries = [(id(matches), id(handler)) for matches, handler in found._type_registry]
    return entries, {name: id(h) for name, h in found._typestr_registry.items()}


def check(restored, target, report) -> None:
    """The arrays as saved, placed as asked, and by the plugin: w was read once."""
    for name, leaf in target.items():
        expected = scenarios.addressed(leaf.shape, leaf.dtype.name)
        seeded = scenarios.addressed(
            leaf.shape, leaf.dtype.name, scenarios.hash_text(name)
        )
        got = scenarios.bits(restored[name]).tobytes()
        assert got in (expected.tobytes(), seeded.tobytes())
        assert restored[name].sharding == leaf.sharding
    reasons = {leaf.name: (leaf.decision, leaf.reason) for leaf in report.leaves}
    assert reasons["w"] == ("planned", "reads_once")
    assert set(reasons) == set(target)
    assert report.fetched_bytes == report.needed_bytes > 0
    assert report.amplification == 1.0


# --- the global registry --------------------------------------------------------------


def test_importing_registers_nothing():
    handler = ocp.type_handlers.get_type_handler(jax.Array)
    assert type(handler) is ocp.type_handlers.ArrayHandler


def test_register_and_unregister_leave_the_registry_as_found():
    before = registry()
    registration = oresh.register(READ_ONCE)
    try:
        registered = ocp.type_handlers.get_type_handler(jax.Array)
        assert registered is registration.handler
        assert registry() != before
    finally:
        registration.unregister()
    assert registry() == before
    registration.unregister()  # again: nothing happens
    assert registry() == before


def test_a_with_block_unregisters_also_after_an_error():
    before = registry()
    with contextlib.suppress(KeyError), oresh.register(READ_ONCE) as registration:
        assert ocp.type_handlers.get_type_handler(jax.Array) is registration.handler
        raise KeyError
    assert registry() == before


def test_registrations_nest():
    before = registry()
    with oresh.register(READ_ONCE):
        between = registry()
        with oresh.register(oresh.Options(policy="direct")):
            assert registry() not in (before, between)
        assert registry() == between
    assert registry() == before


def test_settings_of_the_replaced_handler_are_kept():
    found = ocp.type_handlers.get_type_handler(jax.Array)
    with oresh.register() as registration:
        ours = vars(registration.handler)
        assert {name: ours[name] for name in vars(found)} == vars(found)


# --- restoring ------------------------------------------------------------------------


def test_pytree_handler_with_a_registry(checkpoint, target):
    handler = oresh.ReshardingArrayHandler(READ_ONCE)
    assert handler.last_report is None
    restored = scenarios.restore(str(checkpoint), target, handler)
    check(restored, target, handler.last_report)


def test_pytree_handler_while_registered(checkpoint, target):
    with oresh.register(READ_ONCE) as registration:
        assert registration.last_report is None
        restored = scenarios.restore(str(checkpoint), target)
        check(restored, target, registration.last_report)


def test_after_unregistering_restores_are_stock(checkpoint, target):
    with oresh.register(READ_ONCE) as registration:
        pass
    scenarios.restore(str(checkpoint), target)
    assert registration.last_report is None


def test_standard_handler(checkpoint, target):
    with (
        oresh.register(READ_ONCE) as registration,
        ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer,
    ):
        restored = checkpointer.restore(
            checkpoint, args=ocp.args.StandardRestore(target)
        )
        check(restored, target, registration.last_report)


def test_standard_checkpointer(checkpoint, target):
    with (
        oresh.register(READ_ONCE) as registration,
        ocp.StandardCheckpointer() as checkpointer,
    ):
        restored = checkpointer.restore(checkpoint, target)
        check(restored, target, registration.last_report)


def restore_args(kind: str, target):
    if kind == "standard":
        return ocp.args.StandardRestore(target)
    how = ocp.checkpoint_utils.construct_restore_args(target)
    return ocp.args.PyTreeRestore(target, restore_args=how)


@pytest.mark.parametrize("kind", ["standard", "pytree"])
def test_manager_while_registered(manager_folder, target, kind):
    with (
        oresh.register(READ_ONCE) as registration,
        ocp.CheckpointManager(manager_folder) as manager,
    ):
        assert manager.latest_step() == 7
        restored = manager.restore(7, args=restore_args(kind, target))
        check(restored, target, registration.last_report)


def test_manager_with_a_handler_of_its_own(manager_folder, target):
    ours = oresh.ReshardingArrayHandler(READ_ONCE)
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=types_with(ours))
    with ocp.CheckpointManager(manager_folder, item_handlers=handler) as manager:
        restored = manager.restore(7, args=restore_args("pytree", target))
        check(restored, target, ours.last_report)


def test_plan_restore_finds_the_item_of_a_step(manager_folder, target):
    plan = oresh.plan_restore(manager_folder / "7", target, READ_ONCE)
    reasons = {leaf.name: (leaf.decision, leaf.reason) for leaf in plan.leaves}
    assert reasons["w"] == ("planned", "reads_once")


def test_policy_direct_is_stock_and_says_so(checkpoint, target):
    handler = oresh.ReshardingArrayHandler(oresh.Options(policy="direct"))
    restored = scenarios.restore(str(checkpoint), target, handler)
    stock = scenarios.restore(str(checkpoint), target)
    assert scenarios.difference(stock, restored) is None
    assert {leaf.reason for leaf in handler.last_report.leaves} == {"policy_direct"}


# --- saving ---------------------------------------------------------------------------


def save(path: pathlib.Path, **how) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**how)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(tree_of(SCENARIO)))


def types_with(handler):
    return ocp.type_handlers.create_type_handler_registry((jax.Array, handler))


def files(path: pathlib.Path) -> dict[str, bytes]:
    """Relative name to content; random names and the folder by what they are."""
    found = {}
    for file in sorted(path.rglob("*")):
        if file.is_file():
            name = re.sub(r"/[0-9a-f]{32}$", "/UUID", f"/{file.relative_to(path)}")
            found[name] = file.read_bytes().replace(str(path).encode(), b"DIR")
    return found


def values(path: pathlib.Path) -> dict[bytes, bytes]:
    """All keys and values of an OCDBT database."""
    store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{path}/"}).result()
    return {key: store.read(key).result().value for key in store.list().result()}


# How a checkpoint is saved -> arguments, and whether its chunks are in OCDBT.
FORMATS = {
    "ocdbt-zarr3": {"use_ocdbt": True, "use_zarr3": True},
    "ocdbt-zarr2": {"use_ocdbt": True, "use_zarr3": False},
    "plain-zarr3": {"use_ocdbt": False, "use_zarr3": True},
    "plain-zarr2": {"use_ocdbt": False, "use_zarr3": False},
}


@pytest.mark.parametrize("door", ["registered", "handler"])
@pytest.mark.parametrize("name", FORMATS)
def test_saving_writes_what_stock_writes(tmp_path, name, door):
    how = FORMATS[name]
    stock_path, our_path = tmp_path / "stock", tmp_path / "ours"
    if door == "registered":
        save(stock_path, **how)
        with oresh.register(READ_ONCE):
            save(our_path, **how)
    else:
        stock_types = types_with(ocp.type_handlers.ArrayHandler())
        save(stock_path, type_handler_registry=stock_types, **how)
        our_types = types_with(oresh.ReshardingArrayHandler(READ_ONCE))
        save(our_path, type_handler_registry=our_types, **how)
    stock, ours = files(stock_path), files(our_path)
    assert set(stock) == set(ours)
    # The first holds times; OCDBT's files hold random names of each other.
    varying = re.compile("_CHECKPOINT_METADATA|UUID|manifest.ocdbt")
    compared = [file for file in stock if not varying.search(file)]
    assert "/_METADATA" in compared
    assert ("/array_metadatas/process_0" in compared) == (door == "registered")
    for file in compared:
        assert ours[file] == stock[file], file
    if how["use_ocdbt"]:
        chunks = values(stock_path)
        assert values(our_path) == chunks
    else:
        chunks = [file for file in compared if file.startswith(("/w/", "/scale/"))]
    assert len(chunks) > 8  # 4 chunks and more of each array


def test_what_the_plugin_saved_stock_restores(tmp_path, target):
    with oresh.register(READ_ONCE), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree_of(SCENARIO))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "checkpoint", target)
    for name, value in tree_of(SCENARIO).items():
        assert np.asarray(restored[name]).tobytes() == np.asarray(value).tobytes()
