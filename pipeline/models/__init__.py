"""The model registry: the catalog of served models, releases, canaries."""
