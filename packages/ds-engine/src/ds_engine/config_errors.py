"""Turns pydantic's complaints into sentences: the key, the value, and what to write instead."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from ds_comm.names import did_you_mean


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line for each complaint."""
    lines = []
    for complaint in error.errors():
        path = ".".join(str(part) for part in complaint["loc"])
        if complaint["type"] == "extra_forbidden":
            section = _section(model, complaint["loc"][:-1])
            known = _keys(section) if section is not None else []
            key = str(complaint["loc"][-1])
            where = ".".join(str(part) for part in complaint["loc"][:-1]) or "the configuration"
            lines.append(
                f"{where} has no key {key!r}{did_you_mean(key, known)}; correct or remove it. Known: {', '.join(known)}"
            )
        elif complaint["type"] == "value_error":
            message = complaint["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}" if path else message)
        elif complaint["type"] == "model_type":
            lines.append(f"{path}: a section is an object, got {complaint['input']!r}; write {{...}}")
        elif complaint["type"] == "missing":
            lines.append(f"{path} is required and missing; add it")
        else:
            lines.append(f"{path}: {complaint['msg']}, got {complaint['input']!r}; change the value")
    return "\n".join(lines)


def _section(model: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel] | None:
    for part in path:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        if field is None:
            return None
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if inner is None:
            return None
        model = inner
    return model


def _keys(model: type[BaseModel]) -> list[str]:
    return sorted(field.alias or name for name, field in model.model_fields.items())
