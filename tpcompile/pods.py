"""Kubeflow's environment variables -> those that torchrun would set, in a pod whose one process is a rank.

The operator of a PyTorchJob sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each pod, and no LOCAL_RANK; newer
ones, and the trainer of a TrainJob, set PET_NNODES and others for a torchrun in the pod.
"""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.errors import ConfigError

_OF_THE_JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FOR_TORCHRUN = "PET_"
"""Prefix of torchrun's own defaults."""


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set in this pod and is not set yet; empty elsewhere.

    Raises ConfigError where a pod has several ranks: its RANK and WORLD_SIZE may be those of pods.
    """
    is_pod = "KUBERNETES_SERVICE_HOST" in environ  # in each pod of a cluster, by its kubelet
    if not is_pod or "LOCAL_RANK" in environ or any(name not in environ for name in _OF_THE_JOB):
        return {}
    per_pod = environ.get("PET_NPROC_PER_NODE", "1")
    if per_pod.isdecimal() and per_pod != "1":
        raise ConfigError(
            f"PET_NPROC_PER_NODE={per_pod} and no LOCAL_RANK: this is a pod for {per_pod} ranks; "
            "start them with `torchrun -m tpcompile gate`"
        )
    return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def num_pods(environ: Mapping[str, str]) -> int:
    """Pods of the job that this one is for a torchrun of; 1 elsewhere. A range of them counts as its upper end."""
    last = environ.get(f"{_FOR_TORCHRUN}NNODES", "1").rpartition(":")[2]
    return int(last) if last.isdecimal() else 1


def without_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """Without torchrun's defaults for the pods of a job, which one for this pod alone would wait for."""
    return {name: value for name, value in environ.items() if not name.startswith(_FOR_TORCHRUN)}
