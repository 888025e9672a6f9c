"""What cannot be restored: one clear error, on every process, and nothing hangs."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import tempfile

import pytest
import scenarios
from scenarios import Leaf, Scenario

from orbax_reshard.tools import launch

WORKER = str(pathlib.Path(__file__).with_name("failure_worker.py"))
TIMEOUT_SECONDS = 200.0
NUM_HOSTS = 2

# An error that all hosts wait for arrives within this time also on a busy machine.
SOON_SECONDS = 30.0

# A chunk of w is 32 KiB: far more than all metadata, so that reading one shows.
SAVED = Scenario(
    id="failures",
    saved={"x": 8},
    target={"x": 8},
    leaves={
        "odd": Leaf((12, 8), (), ()),
        "w": Leaf((64, 1024), ("x", None), (None, "x")),
    },
)
ROWS, COLS, WHOLE = ["x", None], [None, "x"], [None, None]
GOOD = {"odd": ((12, 8), WHOLE), "w": ((64, 1024), COLS)}
ALIGNED = {"odd": ((12, 8), WHOLE), "w": ((64, 1024), ROWS)}


def change(leaf, shape, spec):
    return {**GOOD, leaf: (shape, spec)}


# id -> (checkpoint or one per host, what each host asks for, options of each host,
# whether stock restores it too); the last entry is that of all further hosts.
CASES = {
    # Bad input, the same on every host.
    "not-divisible": ("plain", [change("odd", (12, 8), ROWS)], [{}], False),
    "shape-differs": ("plain", [change("w", (32, 1024), COLS)], [{}], False),
    # R64.
    "missing-path": ("nowhere", [GOOD], [{}], True),
    "missing-leaf": ("plain", [{**GOOD, "nope": ((8,), ["x"])}], [{}], True),
    "unknown-policy": ("plain", [GOOD], [{"policy": "fast"}], False),
    # Bad input of one host: the other one says whose it is.
    "one-host-shape": ("plain", [GOOD, change("w", (32, 1024), COLS)], [{}], False),
    # R63: hosts that do not ask for the same.
    "shardings-differ": ("plain", [GOOD, change("w", (64, 1024), ROWS)], [{}], False),
    "policies-differ": ("plain", [GOOD], [{}, {"policy": "auto"}], False),
    # Two checkpoints of one structure, such as two steps; their chunks would mix.
    "paths-differ": (("plain", "other"), [GOOD], [{}], False),
    # R62: the last chunk of w, which host 1 reads, is gone or is nonsense.
    "chunk-deleted": ("deleted", [GOOD], [{}], False),
    "chunk-corrupt": ("corrupt", [GOOD], [{}], False),
    # The same for a leaf that goes to stock.
    "direct-deleted": ("deleted", [ALIGNED], [{}], False),
    # The processes have survived all that.
    "good-again": ("plain", [GOOD], [{}], True),
    # Old checkpoints: as stock, whatever that is.
    "no-array-metadatas": ("no-array-metadatas", [GOOD], [{}], True),
    "no-array-metadatas-plain": ("no-array-metadatas-plain", [GOOD], [{}], True),
    "no-sharding-file": ("no-sharding-file", [GOOD], [{}], True),
    # R82: process folders of OCDBT that were never merged.
    "unmerged": ("unmerged", [GOOD], [{}], True),
}


def make_checkpoints(folder: pathlib.Path) -> None:
    """Checkpoints that were saved well, and what happened to them."""
    for name, ocdbt in (("plain", False), ("merged", True)):
        scenario = dataclasses.replace(SAVED, ocdbt=ocdbt)
        scenarios.save(scenario, str(folder / name))
    for copy, of in (
        ("other", "plain"),
        ("deleted", "plain"),
        ("corrupt", "plain"),
        ("no-array-metadatas-plain", "plain"),
        ("no-array-metadatas", "merged"),
        ("no-sharding-file", "merged"),
        ("unmerged", "merged"),
    ):
        shutil.copytree(folder / of, folder / copy)
    (folder / "deleted/w/c/7/0").unlink()
    (folder / "corrupt/w/c/7/0").write_bytes(os.urandom(32768))
    for copy in ("no-array-metadatas-plain", "no-array-metadatas"):
        shutil.rmtree(folder / copy / "array_metadatas")
    (folder / "no-sharding-file/_sharding").unlink()
    (folder / "unmerged/manifest.ocdbt").unlink()
    shutil.rmtree(folder / "unmerged/d")


@functools.cache
def _run() -> tuple[str, dict[str, list[dict]], dict[str, int]]:
    """The folder, what was said of every case, and the bytes of array metadata."""
    folder = tempfile.mkdtemp(prefix="oresh-failures-")
    try:
        make_checkpoints(pathlib.Path(folder))
        job = [
            {
                "id": name,
                "paths": [
                    f"{folder}/{one}"
                    for one in ([where] if isinstance(where, str) else where)
                ],
                "targets": targets,
                "options": options,
                "stock": stock,
            }
            for name, (where, targets, options, stock) in CASES.items()
        ]
        file = pathlib.Path(folder, "job.json")
        file.write_text(json.dumps(job))
        results = launch.run_cluster(
            (WORKER, str(file)),
            num_processes=NUM_HOSTS,
            devices_per_process=4,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        launch.raise_for_failure(results)
        files = pathlib.Path(folder, "plain").rglob("zarr.json")
        metadata = {file.parent.name: file.stat().st_size for file in files}
    finally:
        shutil.rmtree(folder)
    said = {
        name: [m for r in results for m in r.messages if m["id"] == name]
        for name in CASES
    }
    return folder, said, metadata


def said_of(name: str) -> list[dict]:
    """What the hosts said about a case, the folder's name shortened."""
    folder, said, _ = _run()
    assert len(said[name]) == NUM_HOSTS
    return [{**m, "message": m["message"].replace(folder, "DIR")} for m in said[name]]


# What every host raises: class, code and message.
ON_EVERY_HOST = {
    "not-divisible": (
        "TargetError",
        "not_divisible",
        "leaf 'odd': dimension 0 of 12 does not divide into the 8 shards of mesh axes "
        "('x',) ({'x': 8}) in the target P('x', None)",
    ),
    "shape-differs": (
        "TargetError",
        "shape_mismatch",
        "leaf 'w': the target has shape (32, 1024), the checkpoint has (64, 1024). To "
        "pad or cut, pass strict=False in ArrayRestoreArgs.",
    ),
    "unknown-policy": (
        "OptionsError",
        "unknown_policy",
        "policy is 'fast'; it must be one of auto, read_once, direct",
    ),
    # These two are Orbax's own: it looks for path and tree before it asks us.
    "missing-path": ("FileNotFoundError", None, "Checkpoint at DIR/nowhere not found."),
    "missing-leaf": (
        "ValueError",
        None,
        "User-provided restore item and on-disk value metadata tree structures do not "
        "match:\nnope:\n",
    ),
    "shardings-differ": (
        "PlanMismatchError",
        "plan_mismatch",
        "the hosts do not ask for the same restore. First difference at leaf 'w' ",
    ),
    "policies-differ": (
        "PlanMismatchError",
        "plan_mismatch",
        "the hosts ask for the same leaves but made different plans: their Options "
        "(policy, profile, budgets) or package versions differ.",
    ),
    "paths-differ": (
        "PlanMismatchError",
        "path_mismatch",
        "the hosts do not restore one checkpoint: host 0: 'DIR/plain'; host 1: "
        "'DIR/other'. Every process must pass the same path and step.",
    ),
}


@pytest.mark.parametrize("name", ON_EVERY_HOST)
def test_every_host_raises_before_any_array_is_read(name):
    kind, code, message = ON_EVERY_HOST[name]
    _, _, metadata = _run()
    for said in said_of(name):
        assert (said["error"], said["code"]) == (kind, code)
        assert said["message"].startswith(message)
        # Each array's metadata at most once, and no chunk: those are larger.
        assert said["fetched"] <= sum(metadata.values()) < 32 * 1024
        assert said["seconds"] < SOON_SECONDS


def test_one_host_with_a_bad_target_stops_the_other():
    own = "leaf 'w': the target has shape (32, 1024), the checkpoint has (64, 1024)."
    other, guilty = said_of("one-host-shape")
    assert guilty["error"] == "TargetError"
    assert guilty["message"].startswith(own)
    assert (other["error"], other["code"]) == ("RestoreReadError", "host_failed")
    said = f"host 1 failed at leaf (before reading): TargetError: {own}"
    assert other["message"].startswith(said)
    _, _, metadata = _run()
    assert max(other["fetched"], guilty["fetched"]) <= sum(metadata.values())


# What storage says of the chunk that only host 1 reads, and of which leaf.
STORAGE_SAYS = {
    "chunk-deleted": ("'w'", "NOT_FOUND", "DIR/deleted/w/c/7/0"),
    "chunk-corrupt": ("'w'", "DATA_LOSS", "DIR/corrupt/w/c/7/0"),
    "direct-deleted": ("'w'", "NOT_FOUND", "DIR/deleted/w/c/7/0"),
}


@pytest.mark.parametrize("name", STORAGE_SAYS)
def test_a_host_that_cannot_read_stops_all(name):
    leaf, code, file = STORAGE_SAYS[name]
    first, second = said_of(name)
    assert first["message"] == second["message"]
    for said in (first, second):
        assert said["error"] == "RestoreReadError"
        assert "OSError" in said["bases"]
        assert said["code"] == "host_failed"
        pattern = rf"host 1 failed at leaf {leaf}: \w+: {code}: .*{re.escape(file)}"
        assert re.match(pattern, said["message"], re.DOTALL), said["message"]
        assert said["seconds"] < SOON_SECONDS


GOOD_RESTORES = (
    "good-again",
    "no-array-metadatas",
    "no-array-metadatas-plain",
    "no-sharding-file",
)


@pytest.mark.parametrize("name", GOOD_RESTORES)
def test_restores_after_failures_and_of_old_checkpoints(name):
    for said in said_of(name):
        assert said["error"] is None, said["message"]
        assert said["stock"]["error"] is None
        assert said["difference"] is None


@pytest.mark.parametrize("name", ["missing-path", "missing-leaf", "unmerged"])
def test_the_error_is_one_that_catches_stocks(name):
    for said in said_of(name):
        assert said["stock"]["error"] in said["bases"]


def test_an_unmerged_checkpoint_names_the_leaf_that_is_not_there():
    for said in said_of("unmerged"):
        assert (said["error"], said["code"]) == ("CheckpointError", "missing_leaf")
        assert said["message"].startswith("leaf 'odd' cannot be opened: NOT_FOUND: ")
        assert said["fetched"] == 0
