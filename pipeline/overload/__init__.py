"""Overload: forecasts of waiting, refusal of requests that would be late, and steps of degradation."""
