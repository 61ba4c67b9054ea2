"""What fields of a request over HTTP may hold, before anything is known of their meaning.

Numbers are bounded as the gRPC schema's types bound them, and floats rounded as they are there: both doors ask for the
very same. What a number may be within that is judged where both doors meet (`gateway.core.request`).
"""

import struct
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, core_schema

Int32 = Annotated[int, Field(ge=-(1 << 31), le=(1 << 31) - 1)]
TokenId = Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
TokenIdKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
"""JSON has no keys but text. Without leading zeros: "5" and "05" would name one token twice."""
Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)]


def _as_float32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        raise ValueError(f"{value:.9g}, wanted a number of 32 bits") from None


Float32 = Annotated[float, Field(allow_inf_nan=False), AfterValidator(_as_float32)]


def _as_list(value: object) -> object:
    """One string is a list of one."""
    return [value] if isinstance(value, str) else value


Strings = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
"""A string, or a list of strings."""


class Only:
    """A field of OpenAI's API that is served for a few values; null always stands for its absence.

    verbosity: Annotated[Any, Only("medium", why="which this model cannot vary")] = None
    """

    def __init__(self, *served: object, why: str) -> None:
        """Refuse what is not `served`, and say `why`."""
        self._served = (None, *served)
        self._why = why

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self._served]}

    def _check(self, value: object) -> object:
        if any(type(value) is type(served) and value == served for served in self._served):  # 1 is not True
            return value
        raise ValueError(f"{_shown(value)}, {self._why}")


Ignored = Annotated[Any, WithJsonSchema({"description": "Taken, and changes nothing here."})]
"""What providers keep for their own books."""

UNCONSTRAINED = "which needs constrained decoding; this server has none yet"
"""Why a field is not served that says what an answer must be."""

Unserved = Annotated[Any, Only(why="which this server does not serve")]
"""A field of OpenAI's API that asks for what is not here."""


def _shown(value: object) -> str:
    """What was sent, if it is short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class Fields(BaseModel):
    """An object of a request: exactly these fields, of exactly these types. Null stands for a field's absence.

    A field that is not known is refused, as OpenAI itself does it: a typing error must not change an answer unseen.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
