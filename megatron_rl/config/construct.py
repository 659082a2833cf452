"""A tree of YAML nodes -> the frozen dataclasses of `sections`, by their type hints and nothing else."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_rl.config.errors import ConfigError, did_you_mean, join_path
from megatron_rl.config.yaml_tree import Node

Section = TypeVar("Section")


@cache
def hints_of(section: type) -> dict[str, Any]:
    return get_type_hints(section)


def key_paths(section: type, prefix: str = "") -> list[str]:
    """Every key path below `section`, sections included, in declaration order."""
    paths: list[str] = []
    for name, hint in hints_of(section).items():
        path = join_path(prefix, name)
        paths.append(path)
        inner = next((a for a in (hint, *get_args(hint)) if isinstance(a, type) and dataclasses.is_dataclass(a)), None)
        if inner is not None:
            paths.extend(key_paths(inner, join_path(path, 0) if get_origin(hint) is tuple else path))
    return paths


def build_section(section: type[Section], node: Node, path: str = "", root: type | None = None) -> Section:
    """`node` as a `section`. `root` is where suggestions for unknown keys are looked for (default: `section`).

    Raises `ConfigError` for an unknown or missing key and for a value of the wrong type.
    """
    root = root or section
    if not isinstance(node.value, dict):
        raise ConfigError(node.location, path, f"expected a section with keys, got {_shown(node)}")
    hints: dict[str, Any] = hints_of(section)  # type: ignore[arg-type]
    for key, child in node.value.items():
        if key not in hints:
            full = join_path(path, key)
            siblings = [join_path(path, name) for name in hints]
            raise ConfigError(child.location, full, "unknown key" + did_you_mean(full, siblings, key_paths(root)))
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in node.value:
            reason = f"missing key {field.name!r}, expected {describe(hints[field.name])}"
            raise ConfigError(node.location, path, reason)
    values = {key: _convert(hints[key], child, join_path(path, key), root) for key, child in node.value.items()}
    return section(**values)


def describe(hint: Any) -> str:
    """A type hint in words: what was expected."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if arg is type(None) else describe(arg) for arg in args)
    if origin is tuple:
        return f"a list of {describe(args[0])}"
    if origin is Mapping:
        return "a mapping"
    if dataclasses.is_dataclass(hint):
        return "a section with keys"
    return {str: "text", int: "an integer", float: "a number", bool: "true or false"}.get(hint, str(hint))


def _shown(node: Node) -> str:
    value = node.value
    return "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(value)


def _convert(hint: Any, node: Node, path: str, root: type) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if node.value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        if dataclasses.is_dataclass(inner) or get_origin(inner) is not None:
            return _convert(inner, node, path, root)
        return _scalar(inner, node, path, hint)
    if dataclasses.is_dataclass(hint):
        return build_section(hint, node, path, root)  # type: ignore[arg-type]
    if origin is tuple:
        if not isinstance(node.value, list):
            raise ConfigError(node.location, path, f"expected {describe(hint)}, got {_shown(node)}")
        return tuple(_convert(args[0], item, join_path(path, i), root) for i, item in enumerate(node.value))
    if origin is Mapping:
        if node.value is not None and not isinstance(node.value, dict):
            raise ConfigError(node.location, path, f"expected {describe(hint)}, got {_shown(node)}")
        return node.plain() or {}
    return _scalar(hint, node, path, hint)


def _scalar(hint: Any, node: Node, path: str, shown_hint: Any) -> Any:
    value = node.value
    if get_origin(hint) is Literal:
        if value in get_args(hint) and not isinstance(value, bool):
            return value
        near = did_you_mean(str(value), map(str, get_args(hint))) if isinstance(value, str) else ""
        near = near if near.startswith("; did you mean") else ""
        raise ConfigError(node.location, path, f"expected {describe(shown_hint)}, got {_shown(node)}{near}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(node.location, path, f"expected a finite number, got {value}")
        return value
    raise ConfigError(node.location, path, f"expected {describe(shown_hint)}, got {_shown(node)}")
