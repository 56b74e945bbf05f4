"""A YAML document read into a frozen model, with every mistake told in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from configs.failure import BadConfig


class Document(BaseModel):
    """Base of all configuration models: immutable, unknown keys refused, field docstrings exported as descriptions."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


M = TypeVar("M", bound=Document)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping from a YAML file.

    Raises:
        BadConfig: the file is missing, is not UTF-8 YAML, or holds something other than a mapping.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadConfig(f"{path}: no such file; name a YAML file such as configs/runs/quickstart.yaml") from None
    except OSError as error:
        raise BadConfig(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    except UnicodeDecodeError:
        raise BadConfig(f"{path}: is not UTF-8 text; save it as UTF-8") from None
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise BadConfig(f"{path}:{line} is not valid YAML ({problem}); mend the syntax there") from None
    if not isinstance(loaded, dict):
        raise BadConfig(f"{path}: holds no mapping at its top level; start it with keys such as 'name:' and 'train:'")
    return loaded


def validated(model: type[M], values: dict[str, Any], source: str) -> M:
    """Build `model` from plain values.

    Args:
        values: What a YAML or JSON document held.
        source: Where it came from, for the message.

    Raises:
        BadConfig: with the first mistake, the key it is at, and how many more there are.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise BadConfig(f"{source}: {_sentence(error, model)}") from None


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    mistakes = error.errors(include_url=False)
    first = mistakes[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(_fields_at(model, first["loc"][:-1]))
        text = f"unknown key '{key}'; known there: {known}"
    elif first["type"] == "missing":
        text = f"key '{key}' is missing; give it a value"
    elif first["type"] == "value_error":
        reason = str(first["ctx"]["error"])
        text = f"'{key}': {reason}" if key else reason
    else:
        text = f"'{key}' is {first['input']!r}, but {first['msg'][:1].lower()}{first['msg'][1:]}"
    more = len(mistakes) - 1
    return text + (f" (and {more} more mistake{'s' if more > 1 else ''})" if more else "")


def _fields_at(model: type[BaseModel], location: Iterable[int | str]) -> list[str]:
    """The keys known where a mistake stands, for the message."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return sorted(model.model_fields)
        model = field.annotation
    return sorted(model.model_fields)
