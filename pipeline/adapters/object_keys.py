"""Validation of object keys: the same in every adapter, so that a job can move from a folder to a bucket."""

from __future__ import annotations

from pipeline.ports import StoreError

MAX_KEY_BYTES = 1024  # S3's limit
MAX_PART_BYTES = 255  # most file systems' limit for one name
_FIRST_PRINTABLE = " "
_DELETE = "\x7f"


def check_key(key: str) -> str:
    """Return the key; raises `StoreError` when it isn't a safe relative path.

    Parts that begin with a dot are the store's own (temporaries, locks): they are never objects.
    """
    problem = _problem(key)
    if problem:
        raise StoreError(f"object key {key!r}: {problem}; use a relative path such as 'results/part-00000.parquet'")
    return key


def check_prefix(prefix: str) -> str:
    """Return a listing's prefix: empty, or the prefix of a valid key; raises `StoreError`."""
    if prefix:
        # A prefix may end in a slash or in the middle of a part; one more character makes it a complete key.
        check_key(prefix + "x")
    return prefix


def is_object_name(name: str) -> bool:
    """Whether a file or folder of this name can be part of an object's key."""
    return _problem(name) is None


def _problem(key: str) -> str | None:
    if not key:
        return "is empty"
    if key.startswith("/"):
        return "is absolute"
    if any(letter < _FIRST_PRINTABLE or letter == _DELETE for letter in key):
        return "holds a control character"
    try:
        if len(key.encode()) > MAX_KEY_BYTES:
            return f"is longer than {MAX_KEY_BYTES} bytes"
    except UnicodeEncodeError:
        return "is not valid Unicode"
    for part in key.split("/"):
        if not part:
            return "has an empty part"
        if part.startswith("."):
            return "has a part that begins with a dot"
        if "\\" in part:
            return "holds a backslash"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"has a part longer than {MAX_PART_BYTES} bytes"
    return None
