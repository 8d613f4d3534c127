"""The benchmark of the mount: ``make bench`` or ``python -m bench`` (``--help`` shows the options)."""
