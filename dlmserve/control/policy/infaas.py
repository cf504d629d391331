"""The INFaaS baseline: a request goes to the least loaded instance, stays there, threshold fixed.

Source: Romero et al., "INFaaS: Automated Model-less Inference Serving" (ATC 2021), as the baseline of
the TeDiServe paper (arXiv 2606.29094) has it: load is the tokens assigned to an instance.
"""

from dlmserve.config import ServerConfig
from dlmserve.control.policy.cluster import Cluster, Instance
from dlmserve.control.policy.request import RequestState


class Infaas:
    def __init__(self, config: ServerConfig) -> None:
        self._threshold = max(config.thresholds)

    def place(self, request: RequestState, cluster: Cluster) -> Instance | None:
        with_room = [i for i in cluster.instances.values() if i.has_room(request.num_pages)]
        return min(with_room, key=lambda instance: instance.num_tokens, default=None)

    def threshold(self, request: RequestState) -> float:
        return self._threshold
