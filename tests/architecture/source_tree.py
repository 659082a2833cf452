"""A package as parsed source: its modules and what each of them imports, without importing any."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One imported name. `target` is the longest dotted path that is written; `is_local`: inside a function."""

    target: str
    line: int
    is_local: bool


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"

    def imports(self) -> list[Import]:
        """Every import, also local ones and those under TYPE_CHECKING; relative ones are made absolute."""
        found: list[Import] = []

        def visit(node: ast.AST, is_local: bool) -> None:
            if isinstance(node, ast.Import):
                found.extend(Import(alias.name, node.lineno, is_local) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node)
                found.extend(Import(f"{base}.{alias.name}", node.lineno, is_local) for alias in node.names)
            inside = is_local or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                visit(child, inside)

        visit(self.tree, False)
        return found

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        kept = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*kept, *([node.module] if node.module else [])])


def read_modules(root: Path, package: str) -> dict[str, Module]:
    """Name -> module, for every Python file below `root / package`."""
    modules: dict[str, Module] = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path.relative_to(root), ast.parse(text, str(path)), len(text.splitlines()))
    return modules


def is_within(name: str, prefix: str) -> bool:
    """Whether dotted `name` is `prefix` or below it."""
    return name == prefix or name.startswith(prefix + ".")


def internal_imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[str, Import]]:
    """The imports that lead into the same package, each with the name of the module that it lands in."""
    top = module.name.split(".")[0]
    for found in module.imports():
        if is_within(found.target, top):
            target = found.target
            while target not in modules and "." in target:
                target = target.rpartition(".")[0]
            yield target, found


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One closed walk for every strongly connected set of more than one node."""
    cycles: list[list[str]] = []
    seen: set[str] = set()
    for start in sorted(graph):
        if start in seen:
            continue
        members = {n for n in _reachable(graph, start) if start in _reachable(graph, n)}
        if members:
            seen |= members
            cycles.append(_walk_back(graph, start, members))
    return cycles


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """What can be reached in one step or more."""
    reached: set[str] = set()
    frontier = list(graph.get(start, ()))
    while frontier:
        node = frontier.pop()
        if node not in reached:
            reached.add(node)
            frontier.extend(graph.get(node, ()))
    return reached


def _walk_back(graph: dict[str, set[str]], start: str, members: set[str]) -> list[str]:
    """The shortest walk from `start` back to itself."""
    paths = [[start]]
    while True:
        path = paths.pop(0)
        for node in sorted(graph[path[-1]] & members):
            if node == start:
                return [*path, start]
            paths.append([*path, node])
