"""Plug-ins for model servers, which find them by the package's entry points."""
