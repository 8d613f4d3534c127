"""The CSI node plug-in of `gpufs csi`: models on the node's mount as read-only inline volumes of pods.

:mod:`gpufs.csi.server` answers the kubelet's calls. :mod:`gpufs.csi.volumes` says what a volume is and which are
refused, :mod:`gpufs.csi.models` puts models on the mount and removes them, :mod:`gpufs.csi.binding` binds them into
pods, :mod:`gpufs.csi.state` has the volumes, :mod:`gpufs.csi.labels` labels the node.
"""
