"""The process that serves one mount; ``python -m gpufs.daemon`` starts it.

:mod:`gpufs.daemon.__main__` joins the parts: :mod:`gpufs.daemon.startup` (the launcher's request and the answer to it),
:mod:`gpufs.daemon.environment` (limits, the directory of its socket and counters, systemd), :mod:`gpufs.daemon.logs`
(the log file), :mod:`gpufs.daemon.devices` (the GPUs that were chosen), :mod:`gpufs.daemon.mountpoint` (the mount in
the kernel), :mod:`gpufs.daemon.control_plane` (names and answers), :mod:`gpufs.daemon.serving` (what runs until the
mount ends), and :mod:`gpufs.daemon.keeper` (the process that acts if the daemon dies: it starts
:mod:`gpufs.daemon.takeover`, or :mod:`gpufs.daemon.guard`, which unmounts).
"""
