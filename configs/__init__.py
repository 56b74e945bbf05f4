"""Typed configuration: the pydantic models beside the YAML files they validate."""
