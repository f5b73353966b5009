"""The model that every section is made of: strict, documented at the field, frozen once loaded."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PluginTable(BaseModel):
    """A table that picks a plug-in by `name`; its other keys are the plug-in's own options."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    """A built-in name, an installed entry point, or an import path 'module:attribute'."""

    def options(self) -> dict[str, Any]:
        """The keys beside the table's own fields, for the plug-in's Options model."""
        return dict(self.model_extra or {})


class StrictModel(BaseModel):
    """Unknown keys are errors; the docstring under a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_default_plugins(cls, data: Any) -> Any:
        """A table that only sets options of a plug-in keeps the plug-in that is the default there."""
        if not isinstance(data, dict):
            return data
        for key, field in cls.model_fields.items():
            given = data.get(key)
            if isinstance(field.default, PluginTable) and isinstance(given, dict) and "name" not in given:
                data = {**data, key: {"name": field.default.name, **given}}
        return data
