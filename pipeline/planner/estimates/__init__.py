"""Estimates of tokens, time and cost before a job runs."""
