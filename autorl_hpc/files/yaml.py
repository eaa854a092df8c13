"""YAML files of users, read so that a mistake is named by file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError
from autorl_hpc.files import reading

MAX_YAML_BYTES = 1024 * 1024


def parse_yaml(data: bytes, where: str | Path) -> Any:
    """The value of a YAML text (the safe loader: no objects).

    Raises:
        AutorlError: it is not YAML, a key stands twice, or it is not UTF-8.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """The safe loader, which also refuses a key that stands twice."""

    def mapping(loader: Any, node: Any) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key.value}` stands twice", key.start_mark
                )
            seen.add(str(key.value))
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node, deep=True))

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(data.decode("utf-8"), Loader=Loader)
    except UnicodeDecodeError as error:
        raise AutorlError(f"not UTF-8 (byte {error.start})", where=where, next_step="save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise AutorlError(
            f"not readable as YAML{line}: {problem}", where=where, next_step="correct that line"
        ) from None
    except (RecursionError, ValueError, TypeError) as error:
        raise AutorlError(f"not readable as YAML: {error}", where=where, next_step="simplify it") from None


def read_yaml(path: Path) -> Any:
    """The value of a YAML file.

    Raises:
        AutorlError: it is absent, unreadable or no YAML.
    """
    try:
        data = reading.read_bytes(path, max_bytes=MAX_YAML_BYTES)
    except FileNotFoundError:
        raise AutorlError("there is no such file", where=path, next_step="check the path") from None
    except (OSError, ValueError) as error:
        raise AutorlError(
            f"can't be read: {error}", where=path, next_step="check the path and its permissions"
        ) from None
    return parse_yaml(data, path)
