"""Plug-ins for model servers and fsspec, which find them by the package's entry points."""
