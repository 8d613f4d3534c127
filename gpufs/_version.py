"""The version. The build reads this line for the package, CMake for the native engine."""

__version__ = "0.1.0"
