"""Messages of any schema, drawn by hypothesis from the schema itself: a new field or method needs no word here."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Scalars = Mapping[int, st.SearchStrategy[Any]]
"""FieldDescriptor.TYPE_* -> what a field of that type may hold."""


def messages(schema: Descriptor, scalars: Scalars, most: int = 4) -> st.SearchStrategy[Message]:
    """Any message of the schema, with up to `most` of its fields, and up to four of those within."""
    fields = st.lists(st.sampled_from(list(schema.fields)), unique_by=lambda field: field.name, max_size=most)
    none = st.just(GetMessageClass(schema)())
    return fields.flatmap(partial(_built, schema, scalars)) if schema.fields else none


def _built(schema: Descriptor, scalars: Scalars, fields: list[FieldDescriptor]) -> st.SearchStrategy[Message]:
    return st.builds(GetMessageClass(schema), **{field.name: _values(field, scalars) for field in fields})


def _values(field: FieldDescriptor, scalars: Scalars) -> st.SearchStrategy[Any]:
    part = field.message_type
    if part is not None and part.GetOptions().map_entry:
        key, value = part.fields
        return st.dictionaries(scalars[key.type], _values(value, scalars), max_size=2)
    one = scalars[field.type] if part is None else messages(part, scalars)
    return st.lists(one, max_size=2) if field.is_repeated else one


@st.composite
def mangled(draw: st.DrawFn, whole: st.SearchStrategy[Message]) -> bytes:
    """The bytes of a message with some changed, lost or added."""
    raw = draw(whole).SerializeToString()
    start, end = sorted((draw(st.integers(0, len(raw))), draw(st.integers(0, len(raw)))))
    return raw[:start] + draw(st.binary(max_size=4)) + raw[end:]
