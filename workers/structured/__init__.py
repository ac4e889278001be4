"""Structured output and tool calls: grammars as token masks."""
