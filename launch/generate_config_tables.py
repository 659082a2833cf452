"""Write megatron_rl/config/tables/*.json from the Megatron-Core and SGLang that are installed.

    python launch/generate_config_tables.py

Reads their source with `ast` and imports neither, so that it runs where they cannot be imported.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parents[1] / "megatron_rl" / "config" / "tables"

# Names of types whose values YAML can write; an annotation that mentions another one is "not_yaml".
YAML_TYPES = {"bool", "int", "float", "str", "None", "list", "dict", "tuple", "List", "Dict", "Tuple", "Sequence",
              "Mapping", "Any", "Optional", "Union", "Literal"}  # fmt: skip


def main() -> None:
    for file_name, table in build_tables().items():
        temporary = TABLES / f"{file_name}.tmp"
        temporary.write_text(json.dumps(table, indent=1, sort_keys=False) + "\n", encoding="utf-8")
        os.replace(temporary, TABLES / file_name)
        print(f"{file_name}: {len(table['options'])} options, {len(table['not_yaml'])} that YAML cannot express")


def build_tables() -> dict[str, dict[str, Any]]:
    """File name -> table, for every table of the configuration."""
    megatron, sglang = _root("megatron-core", "megatron/core"), _root("sglang", "sglang/srt/arg_groups/fields")
    parallel = megatron / "model_parallel_config.py"
    transformer = megatron / "transformer" / "transformer_config.py"
    optimizer = megatron / "optimizer" / "optimizer_config.py"
    ddp = megatron / "distributed" / "distributed_data_parallel_config.py"
    server_fields = [field for path in sorted(sglang.glob("*.py")) for field in _namespace_fields(path)]
    return {
        "megatron_transformer.json": _table(
            "megatron-core",
            [*_class_fields(parallel, "ModelParallelConfig"), *_class_fields(transformer, "TransformerConfig")],
        ),
        "megatron_optimizer.json": _table("megatron-core", _class_fields(optimizer, "OptimizerConfig")),
        "megatron_ddp.json": _table("megatron-core", _class_fields(ddp, "DistributedDataParallelConfig")),
        "sglang_server_args.json": _table("sglang", server_fields),
    }


def _root(package: str, folder: str) -> Path:
    return Path(str(distribution(package).locate_file(folder)))


def _table(package: str, fields: Iterable[ast.AnnAssign]) -> dict[str, Any]:
    """A later field of the same name (a subclass) replaces an earlier one."""
    options: dict[str, dict[str, Any]] = {}
    not_yaml: dict[str, str] = {}
    for field in fields:
        assert isinstance(field.target, ast.Name)
        name, annotation = field.target.id, _yaml_part(_plain_annotation(field.annotation))
        options.pop(name, None)
        not_yaml.pop(name, None)
        if _type_names(annotation) <= YAML_TYPES:
            options[name] = {"type": ast.unparse(annotation), "default": _default(field.value)}
        else:
            not_yaml[name] = ast.unparse(annotation)
    return {
        "source": package,
        "version": distribution(package).version,
        "options": dict(sorted(options.items())),
        "not_yaml": dict(sorted(not_yaml.items())),
    }


def _class_fields(path: Path, name: str) -> list[ast.AnnAssign]:
    """The public dataclass fields that class `name` itself declares."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                item
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
            ]
    raise SystemExit(f"{path} has no class {name}: adapt launch/generate_config_tables.py to this release")


def _namespace_fields(path: Path) -> list[ast.AnnAssign]:
    """SGLang 0.5.23 assembles `ServerArgs` from the classes with `_NS_PATH`; fields marked `Derived` are no input."""
    fields: list[ast.AnnAssign] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any("_NS_PATH" in ast.unparse(item) for item in node.body[:3]):
            fields += [f for f in _class_fields(path, node.name) if "Derived(" not in ast.unparse(f.annotation)]
    return fields


def _plain_annotation(annotation: ast.expr) -> ast.expr:
    """`T` of `A[T, help]` and of `"T"`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("A", "Annotated"):
        assert isinstance(annotation.slice, ast.Tuple)
        return _plain_annotation(annotation.slice.elts[0])
    return annotation


def _yaml_part(annotation: ast.expr) -> ast.expr:
    """A union without the members that YAML cannot express, as long as one remains."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) in ("Union", "Optional")):
        return annotation
    members = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    kept = [part for part in map(_yaml_part, members) if _type_names(part) <= YAML_TYPES]
    if not kept:
        return annotation
    inner = kept[0] if len(kept) == 1 else ast.Tuple(kept, ast.Load())
    is_plain = len(kept) == 1 and ast.unparse(annotation.value) == "Union"
    return inner if is_plain else ast.Subscript(annotation.value, inner, ast.Load())


def _type_names(annotation: ast.expr) -> set[str]:
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            return  # its strings are values, not types
        if isinstance(node, (ast.Name, ast.Attribute)):
            names.add(ast.unparse(node).removeprefix("typing."))
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(annotation)
    return names


def _default(value: ast.expr | None) -> Any:
    """The default as a YAML value; Python source in angle brackets where it is none; None for a required field."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in keywords:
            return {"list": [], "dict": {}, "tuple": []}.get(ast.unparse(keywords["default_factory"]))
        return _default(keywords.get("default"))
    if value is None:
        return None
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return f"<{ast.unparse(value)}>"
    return list(literal) if isinstance(literal, tuple) else literal


if __name__ == "__main__":
    main()
