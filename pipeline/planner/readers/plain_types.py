"""Arrow types with values in place of codes and views, and how names and types are shown in messages."""

from __future__ import annotations

import pyarrow as pa


def shown(text: str, most: int = 100) -> str:
    """A name or type from a file for messages: cut, and escaped where it has characters that can't be printed."""
    cut = text[:most]
    return (cut if cut.isprintable() else repr(cut)) + "…" * (len(text) > most)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with values in place of dictionary codes, which differ between row groups and record batches, and
    strings in place of string views, for which Arrow lacks functions."""
    return pa.schema([pa.field(field.name, plain_type(field.type)) for field in schema])


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type in a plain schema."""
    types = pa.types
    if types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, plain_type(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if types.is_large_list(kind):
        return pa.large_list(plain_type(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(plain_type(kind.value_type), kind.list_size)
    return pa.list_(plain_type(kind.value_type)) if types.is_list(kind) else kind
