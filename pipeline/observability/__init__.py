"""Metrics and traces: the definitions of metrics, samples, exposition, OpenTelemetry."""
