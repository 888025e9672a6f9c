"""The import rule of docs/design.md, section 10, and that the check can fail.

errors < planning < engine, live < plugin < tools: a module imports only from layers
below its own, or from its own. Read with `ast`, so that imports inside functions and
under ``TYPE_CHECKING`` count, too; so do private modules reached as attributes
(``jax._src``) or by name (``import_module("jax._src")``).
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

PACKAGE = "orbax_reshard"
ROOT = pathlib.Path(__file__).parents[1] / PACKAGE

# Layer of the first part of a module's name below the package. `engine` and `live`
# share a layer, as the two of them may use each other.
LAYERS = {"errors": 0, "planning": 1, "engine": 2, "live": 2, "plugin": 3, "tools": 4}

# Planning is testable for machines that are not here because it needs nothing of them.
PLANNING_MAY_IMPORT = frozenset({"numpy", PACKAGE}) | sys.stdlib_module_names

# All uses of Orbax's private modules are in one place, to look at on every upgrade.
ORBAX_PRIVATE = "orbax.checkpoint._src"
MAY_IMPORT_ORBAX_PRIVATE = "plugin/compat.py"
PRIVATE_NAME = re.compile(r"(jax|orbax\.checkpoint)\._src[\w.]*")


def imported_names(tree: ast.AST, module: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a module imports or reaches.

    ``from a.b import c`` gives ``a.b.c``, as c may be a module. ``module`` is the name
    of the importing module in parts, for relative imports.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else ()
            parent = ".".join((*base, *filter(None, [node.module])))
            for alias in node.names:
                yield node.lineno, f"{parent}.{alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr == "_src":
            # The owner may have been imported under another name.
            owner = ast.unparse(node.value)
            yield node.lineno, "jax._src" if owner == "jax" else ORBAX_PRIVATE
        elif isinstance(node, ast.Constant) and PRIVATE_NAME.fullmatch(str(node.value)):
            yield node.lineno, str(node.value)


def is_or_is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(root: pathlib.Path) -> list[str]:
    """One line per import that breaks the rule, in a package folder of that layout."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        parts = relative.with_suffix("").parts
        tree = ast.parse(path.read_text())
        for line, name in imported_names(tree, (PACKAGE, *parts)):
            reason = broken_rule(parts, relative.as_posix(), name)
            if reason is not None:
                found.append(f"{relative.as_posix()}:{line}: {name}: {reason}")
    return found


def broken_rule(parts: tuple[str, ...], path: str, name: str) -> str | None:
    if is_or_is_in(name, "jax._src"):
        return "JAX's private modules are not for us"
    if is_or_is_in(name, ORBAX_PRIVATE) and path != MAY_IMPORT_ORBAX_PRIVATE:
        return f"only {MAY_IMPORT_ORBAX_PRIVATE} may import Orbax's private modules"
    top = name.split(".")[0]
    if parts[0] == "planning" and top not in PLANNING_MAY_IMPORT:
        return "planning imports only the standard library and numpy"
    if top != PACKAGE or parts == ("__init__",):
        return None
    own = LAYERS.get(parts[0])
    if own is None:
        return f"{parts[0]} has no layer"
    imported = name.split(".")[1:2]
    if not imported or imported[0] not in LAYERS:
        # The package itself: its __init__ has everything, so only tools may.
        return None if own == LAYERS["tools"] else "the package imports this module"
    if LAYERS[imported[0]] > own:
        return f"{parts[0]} is below {imported[0]}"
    return None


def test_imports_point_down():
    assert violations(ROOT) == []


def test_every_module_has_a_layer():
    names = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}
    assert {name.removesuffix(".py") for name in names} - {"__init__"} <= set(LAYERS)


BAD = [  # file, source, and a part of the reason
    ("errors.py", "from orbax_reshard.planning import boxes", "errors is below"),
    ("planning/a.py", "import orbax_reshard.engine.read", "planning is below engine"),
    ("planning/a.py", "from orbax_reshard import live", "planning is below live"),
    ("planning/a.py", "from ..engine import read", "planning is below engine"),
    ("planning/a.py", "from .. import engine", "planning is below engine"),
    ("planning/a.py", "def f():\n    import jax", "only the standard library"),
    ("planning/a.py", "from tensorstore import open", "only the standard library"),
    ("engine/a.py", "from orbax_reshard.plugin import compat", "engine is below"),
    ("live.py", "from orbax_reshard.plugin.compat import x", "live is below plugin"),
    ("plugin/a.py", "from orbax_reshard.tools import report", "plugin is below tools"),
    ("plugin/a.py", "import orbax_reshard", "the package imports this module"),
    ("plugin/a.py", "from orbax.checkpoint._src import x", "only plugin/compat.py"),
    ("engine/a.py", "from orbax.checkpoint import _src", "only plugin/compat.py"),
    ("tools/a.py", "import orbax.checkpoint._src.path", "only plugin/compat.py"),
    ("plugin/compat.py", "from jax._src import config", "JAX's private modules"),
    ("__init__.py", "import jax._src.mesh", "JAX's private modules"),
    ("tools/a.py", "from jax import _src", "JAX's private modules"),
    ("tools/a.py", "import jax\njax._src.config", "JAX's private modules"),
    ("tools/a.py", "f('jax._src.config')", "JAX's private modules"),
    ("engine/a.py", "import orbax.checkpoint as o\no._src.x", "only plugin/compat.py"),
    ("other/a.py", "from orbax_reshard import errors", "other has no layer"),
    (
        "live.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from orbax_reshard.tools import demo",
        "live is below tools",
    ),
]

GOOD = [
    ("errors.py", "import dataclasses"),
    ("planning/a.py", "import math, numpy as np\nfrom orbax_reshard import errors"),
    ("planning/a.py", "from . import boxes\nfrom ..errors import ReshardError"),
    ("engine/a.py", "import jax, tensorstore\nfrom orbax_reshard.planning import plan"),
    ("live.py", "from orbax_reshard.engine import exchange"),
    ("plugin/compat.py", "from orbax.checkpoint._src.path import x"),
    ("plugin/a.py", "from orbax_reshard.plugin import compat\nimport jax.extend"),
    ("tools/a.py", "import orbax_reshard as oresh\nfrom orbax_reshard import plugin"),
    ("__init__.py", "from orbax_reshard.plugin.handler import Options"),
]


def write(tmp_path: pathlib.Path, path: str, source: str) -> pathlib.Path:
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source + "\n")
    return tmp_path / PACKAGE


@pytest.mark.parametrize(("path", "source", "reason"), BAD)
def test_the_check_can_fail(tmp_path, path, source, reason):
    (violation,) = violations(write(tmp_path, path, source))
    assert violation.startswith(f"{path}:")
    assert reason in violation


@pytest.mark.parametrize(("path", "source"), GOOD)
def test_the_check_lets_pass_what_is_right(tmp_path, path, source):
    assert violations(write(tmp_path, path, source)) == []
