"""YAML text <-> values, with the place of every key. Scalars follow YAML 1.2: `1e-4` is a number, `off` is a word."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from megatron_rl.config.errors import ConfigError, Location, join_path

# (tag, pattern, first characters). PyYAML's own 1.1 rules read `1e-4` as text, `off` as a boolean and `1:30` as 90.
_SCALARS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", "-+0123456789"),
    ("float", r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$", "-+0123456789."),
    ("float", r"^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$", "-+."),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """PyYAML folds the rarer line breaks away unless they are escaped."""
    style = '"' if set(text) & set("\r\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
for _kind in (_Loader, _Dumper):
    for _tag, _pattern, _first in _SCALARS:
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where its key stands: a mapping of nodes, a list of nodes, or a scalar."""

    value: dict[str, Node] | list[Node] | str | int | float | bool | None
    location: Location

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def parse_yaml(text: str, source: str, line: int | None = 1) -> Node:
    """The tree of `text`; an empty text is null. `line` None: `source` is an override and has no lines.

    Raises `ConfigError` for a syntax error, a duplicate key, a key that is no string, or an unknown tag.
    """
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        place = Location(source, text.count("\n", 0, error.position) + 1 if line is not None else None)
        reason = f"not valid YAML: character #x{int(error.character):04x} is not allowed"
        raise ConfigError(place, "", reason) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return Node(None, Location(source, line))
        return _Reader(loader, source, line is not None).read(root, Location(source, line), "", ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Location(source, mark.line + 1 if mark and line is not None else line)
        raise ConfigError(place, "", f"not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(Location(source, line), "", f"not valid YAML: {error}") from error
    finally:
        loader.dispose()


class _Reader:
    def __init__(self, loader: _Loader, source: str, has_lines: bool) -> None:
        self._loader, self._source, self._has_lines = loader, source, has_lines

    def _location(self, node: yaml.Node) -> Location:
        return Location(self._source, node.start_mark.line + 1 if self._has_lines else None)

    def read(self, node: yaml.Node, location: Location, path: str, ancestors: tuple[int, ...]) -> Node:
        if id(node) in ancestors:
            raise ConfigError(location, path, "an alias that contains itself")
        ancestors = (*ancestors, id(node))
        if isinstance(node, yaml.MappingNode):
            return Node(self._read_mapping(node, path, ancestors), location)
        if isinstance(node, yaml.SequenceNode):
            items = enumerate(node.value)
            return Node([self.read(v, self._location(v), join_path(path, i), ancestors) for i, v in items], location)
        return Node(self._loader.construct_object(node), location)

    def _read_mapping(self, node: yaml.MappingNode, path: str, ancestors: tuple[int, ...]) -> dict[str, Node]:
        children: dict[str, Node] = {}
        for key_node, value_node in node.value:
            location = self._location(key_node)
            if key_node.tag != "tag:yaml.org,2002:str" or not isinstance(key_node, yaml.ScalarNode):
                shown = getattr(key_node, "value", key_node.tag)
                raise ConfigError(location, path, f"expected a word as key, got {shown!r}; quote it if it is a name")
            key = key_node.value
            if key in children:
                first = children[key].location
                raise ConfigError(location, join_path(path, key), f"duplicate key, first given at {first}; keep one")
            children[key] = self.read(value_node, location, join_path(path, key), ancestors)
        return children


def dump_plain(value: Any) -> str:
    """Block-style YAML that `parse_yaml` reads back to an equal value; key order is kept."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110, allow_unicode=True)
