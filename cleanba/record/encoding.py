"""JSON as records have it: plain types, null for NaN and infinities, one line for each error."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

_PLACE = re.compile(r"^(?P<what>.*) - at `\$\.?(?P<field>.+)`$")


def jsonable(value: Any) -> Any:
    """Return a value as plain JSON types; what JSON cannot express becomes null or text."""
    if isinstance(value, float):
        return float(value) if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    if hasattr(value, "item"):
        return jsonable(value.item())
    return str(value)


ENCODER = msgspec.json.Encoder(enc_hook=jsonable)


def describe_error(error: Exception) -> str:
    """Return what is wrong with JSON that was decoded as a struct, with the field's name."""
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON ({error})"
    text = str(error).replace("Object missing required field", "Missing field")
    text = text[0].lower() + text[1:]
    if place := _PLACE.match(text):
        return f"{place['field']}: {place['what']}"
    return text
