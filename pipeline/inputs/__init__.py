"""Inputs of jobs: opened by URI, pinned to one version, regular files only."""
