"""Dates and times that exist: llguidance knows the lengths of months, and neither leap years nor leap seconds."""

from __future__ import annotations

from typing import Any

_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = f"({_LEAP_YEAR}-02-29|[0-9]{{4}}-(02-([01][0-9]|2[0-8])|(0[13-9]|1[0-2])-[0-9]{{2}}))"
# Beside what llguidance asks of a format. No second is the 60th, as which minutes have one is not known in advance.
_PATTERNS = {"date": f"^{_DATE}", "time": "^.{6}[0-5]", "date-time": f"^{_DATE}.{{7}}[0-5]"}

_WITH_ONE = {"items", "additionalItems", "additionalProperties"}
_WITH_SEVERAL = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_WITH_NAMED = {"properties", "patternProperties", "$defs", "definitions"}
DEEPEST_LEVELS = 128  # levels; llguidance reads no schema that has more


def with_real_dates(schema: Any, depth: int = 0) -> Any:
    """A JSON schema whose dates and times are also bound by patterns. Other values are left as they are.

    The keywords with schemas within are those that llguidance implements.
    """
    if not isinstance(schema, dict) or depth > DEEPEST_LEVELS:
        return schema
    bound = {keyword: _within(keyword, value, depth + 1) for keyword, value in schema.items()}
    name, others = schema.get("format"), bound.get("allOf", [])
    if isinstance(name, str) and name in _PATTERNS and isinstance(others, list):
        bound["allOf"] = [*others, {"pattern": _PATTERNS[name]}]
    return bound


def _within(keyword: str, value: Any, depth: int) -> Any:
    if keyword in _WITH_NAMED and isinstance(value, dict):
        return {name: with_real_dates(each, depth) for name, each in value.items()}
    if keyword in _WITH_SEVERAL and isinstance(value, list):
        return [with_real_dates(each, depth) for each in value]
    return with_real_dates(value, depth) if keyword in _WITH_ONE else value
