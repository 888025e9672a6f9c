"""Every private name of Orbax that this package uses, and nothing else.

If a later Orbax moves one of them, importing this file fails with one sentence that
says so; stock restores are not affected, because nothing is registered on import.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import orbax.checkpoint as ocp

TESTED_ORBAX = "0.12.8"

try:
    from orbax.checkpoint._src.futures import signaling_client as _signaling
    from orbax.checkpoint._src.metadata import array_metadata_store as _store
    from orbax.checkpoint._src.path import async_path as _async_path
    from orbax.checkpoint._src.serialization import jax_array_handlers as _handlers
    from orbax.checkpoint._src.serialization import tensorstore_utils as _ts_utils
    from orbax.checkpoint._src.serialization import type_handler_registry as _registry
    from orbax.checkpoint._src.serialization import types as _types

    _deserialize_shardings = _handlers._deserialize_shardings
    _physical_read_spec = _handlers._physical_read_spec
    _wrap_random_key_data = _handlers._wrap_random_key_data
    _validate_non_ocdbt_files = _handlers._validate_non_ocdbt_files
    _validate_ocdbt_settings = _handlers._validate_ocdbt_settings
    _SHARDING_FILE = _handlers._SHARDING_FILE_NAME
    ParamInfo = _types.ParamInfo
    RestoreArgs = _types.RestoreArgs
except (ImportError, AttributeError) as error:  # pragma: no cover
    raise ImportError(
        f"orbax_reshard was tested with orbax-checkpoint {TESTED_ORBAX}; version "
        f"{ocp.__version__} has moved a name that it needs ({error}). Stock Orbax "
        f"restores are not affected."
    ) from error

# OCDBT joins reads whose gap is below this, and fetches the gap too. Orbax asks for
# 1 MB on remote storage, which fits a host that reads everything; a host that reads a
# quarter then fetched 2.5 times its bytes (docs/design.md). 4 KiB is below the cost
# of a request's own headers and still joins neighbouring chunks.
READ_COALESCING_GAP_BYTES = 4096

ArrayHandler = ocp.type_handlers.ArrayHandler
ArrayRestoreArgs = ocp.type_handlers.ArrayRestoreArgs


async def resolve_shardings(
    infos: Sequence[ParamInfo], args: Sequence[RestoreArgs]
) -> list[Any]:
    """The target of each leaf, as stock resolves it: args first, then the file."""
    for info in infos:
        await info.await_path_creation()
    exists = await _async_path.exists(infos[0].parent_dir / _SHARDING_FILE)
    return list(await _deserialize_shardings(infos, args, exists))


def given_shardings(args: Sequence[RestoreArgs]) -> list[Any]:
    """The targets that the args themselves carry, None where they carry none."""
    return [getattr(arg, "sharding", None) for arg in args]


def physical_target(arg: RestoreArgs, sharding: Any) -> tuple[Any, Any, Any]:
    """Shape, dtype and sharding that the stored array is read with.

    Typed PRNG keys are stored as their key data; shape and sharding are translated,
    and the dtype is None because key data is never cast.
    """
    shape, dtype, physical = _physical_read_spec(arg, sharding)
    return shape, None if is_prng_key(arg.dtype) else dtype, physical


def is_prng_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed PRNG keys."""
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


async def check_files(infos: Sequence[ParamInfo], metadata_key: str | None) -> bool:
    """Stock's own checks before opening; returns whether the checkpoint is OCDBT."""
    use_ocdbt = _validate_ocdbt_settings(infos)
    if not use_ocdbt:
        await _validate_non_ocdbt_files(infos, cast(str, metadata_key))
    return use_ocdbt


def read_spec(
    info: ParamInfo, arg: RestoreArgs, *, use_ocdbt: bool, metadata_key: str | None
) -> tuple[dict[str, Any], bool]:
    """Orbax's own spec for reading an array, with this package's read coalescing.

    Returns:
        The spec, and whether stock would have joined reads over large gaps.
    """
    spec = _ts_utils.build_array_read_spec(
        info,
        use_ocdbt=use_ocdbt,
        metadata_key=metadata_key,
        raise_array_data_missing_error=info.raise_array_data_missing_error,
        target_dtype=arg.dtype,
    ).json
    inner = spec
    while "base" in inner and "kvstore" not in inner:
        inner = inner["base"]
    store = inner["kvstore"]
    gap = "experimental_read_coalescing_threshold_bytes"
    joins = store.get(gap, 0) > READ_COALESCING_GAP_BYTES
    if joins:
        store[gap] = READ_COALESCING_GAP_BYTES
    return spec, joins


async def wrap_keys(
    store: Any, infos: Sequence[ParamInfo], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Turns key data back into typed PRNG keys where the checkpoint says so."""
    if store is None or not infos:
        return list(arrays)
    found = await store.read(checkpoint_dir=infos[0].parent_dir)
    if not found:
        return list(arrays)
    return list(_wrap_random_key_data(found, infos, list(arrays)))


def byte_limit(info: ParamInfo) -> int | None:
    """The bound that the checkpoint handler set on bytes in flight, if any."""
    return getattr(info.byte_limiter, "max_bytes", None)


class JaxCoordinator:
    """JAX's coordination service, through Orbax's client."""

    def __init__(self) -> None:
        """Finds the client of this process."""
        self._client = _signaling.get_signaling_client()

    def put(self, key: str, value: str) -> None:
        """Writes a value once."""
        self._client.key_value_set(key, value)

    def directory(self, prefix: str) -> Sequence[tuple[str, str]]:
        """All keys and values below a prefix."""
        return self._client.key_value_dir_get(prefix)

    def barrier(self, key: str, timeout_seconds: float, hosts: Sequence[int]) -> None:
        """Waits for all hosts; raises TimeoutError."""
        self._client.wait_at_barrier(
            key, timeout_secs=max(1, round(timeout_seconds)), process_ids=list(hosts)
        )

    def delete(self, prefix: str) -> None:
        """Forgets everything below a prefix."""
        self._client.key_value_delete(prefix)


def default_array_metadata_store() -> Any:
    """A store like the one that Orbax's default handler has."""
    return _store.Store()


def registered_handler() -> Any:
    """The handler that is registered for ``jax.Array`` now."""
    return _registry.GLOBAL_TYPE_HANDLER_REGISTRY.get(jax.Array)


def replace_registered(old: Any, new: Any) -> None:
    """Puts ``new`` where ``old`` stands in the global registry; the rest stays."""
    registry = cast(Any, _registry.GLOBAL_TYPE_HANDLER_REGISTRY)
    entries: list[Any] = registry._type_registry
    for index, (matches, handler) in enumerate(entries):
        if handler is old:
            entries[index] = (matches, new)
    names: dict[str, Any] = registry._typestr_registry
    for name, handler in list(names.items()):
        if handler is old:
            names[name] = new


def registry_with(handler: Any) -> Any:
    """A registry like the global one, with another handler for ``jax.Array``."""
    registry = cast(Any, _registry.GLOBAL_TYPE_HANDLER_REGISTRY)
    pairs: Iterable[tuple[Any, Any]] = [
        (ty, handler if ty is jax.Array else registry.get(ty))
        for ty in ocp.type_handlers.supported_types()
    ]
    return ocp.type_handlers.create_type_handler_registry(*pairs)
