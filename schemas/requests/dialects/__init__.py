"""Dialects: other spellings of a chat request and of its response."""
