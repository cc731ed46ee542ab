"""What docs/architecture.md says about modules and import-linter cannot check."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ucp_dcp"

# docs/architecture.md, "may use torch": no
WITHOUT_TORCH = ("errors", "names", "paths", "geometry", "patterns", "spec", "catalog", "storage")
# ... lazily: inside functions only
LAZY_TORCH = ("dtypes", "safe_pickle", "storage.framing")
# ... yes, though their package says no
WITH_TORCH = ("storage.dcp_writer", "storage.dcp_reader", "storage.staging", "storage.shared_open", "storage.stock_metadata")


def modules() -> dict[str, Path]:
    """Name below ``ucp_dcp`` -> file; packages by their ``__init__``."""
    out = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return out


def below(name: str, roots: tuple[str, ...]) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def torch_imports(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[int, bool]]:
    """``(line, inside a function)`` of every import of torch that runs; ``if TYPE_CHECKING:`` does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, ast.Import):
                names = [a.name for a in node.names]
            else:
                names = [] if node.level or node.module is None else [node.module]
            if any(below(name, ("torch",)) for name in names):
                yield node.lineno, inside
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for other in node.orelse:
                yield from torch_imports(ast.Module([other], []), inside=inside)
        else:
            yield from torch_imports(node, inside=inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


def test_torch_import_finder() -> None:
    source = "import torch\n"
    source += "if TYPE_CHECKING:\n    import torch\ndef f():\n    from torch.nn import x\nfrom .torch import y\nimport torchx\n"
    assert list(torch_imports(ast.parse(source))) == [(1, False), (5, True)]


@pytest.mark.parametrize("name", [n for n in modules() if below(n, WITHOUT_TORCH + LAZY_TORCH) and not below(n, WITH_TORCH)])
def test_pure_modules_do_not_import_torch(name: str) -> None:
    lazily = below(name, LAZY_TORCH)
    bad = [line for line, inside in torch_imports(ast.parse(modules()[name].read_text())) if not (lazily and inside)]
    assert not bad, f"ucp_dcp.{name} imports torch in lines {bad}"


def test_every_module_has_its_layer() -> None:
    """import-linter ignores what its contract does not name, so a new module must be named."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = [c for c in config["tool"]["importlinter"]["contracts"] if c["id"] == "layers"]
    named = {m.removeprefix("ucp_dcp.") for layer in contract["layers"] for m in re.findall(r"[\w.]+", layer)}
    wanted = {n.split(".")[0] for n in modules() if n} - {"storage"}
    wanted |= {n for n in modules() if n.count(".") == 1 and n.startswith("storage.")}
    assert wanted <= named, f"name these in the layers contract of pyproject.toml: {sorted(wanted - named)}"


def test_pure_layers_run_without_torch(isolated_python: Callable[..., str]) -> None:
    """Indirectly too; and the command line answers `ucp --help` without paying for torch."""
    code = """
        import ucp_dcp, ucp_dcp.cli.app
        import ucp_dcp.geometry, ucp_dcp.patterns, ucp_dcp.spec, ucp_dcp.catalog, ucp_dcp.safe_pickle, ucp_dcp.dtypes
        import ucp_dcp.storage.store, ucp_dcp.storage.local, ucp_dcp.storage.fsspec_store, ucp_dcp.storage.ranges, ucp_dcp.storage.framing
        import ucp_dcp.storage.manifest, ucp_dcp.storage.index_file, ucp_dcp.storage.commit
        print("fine")
    """
    assert isolated_python(code, forbid=("torch",)) == "fine\n"
