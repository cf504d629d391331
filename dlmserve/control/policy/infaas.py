"""The INFaaS baseline: a request goes to the least loaded instance, stays there, threshold fixed.

Source: Romero et al., "INFaaS: Automated Model-less Inference Serving" (ATC 2021), as the baseline of
the TeDiServe paper (arXiv 2606.29094) has it: load is the tokens assigned to an instance.
"""

from dlmserve.control.policy.policy import Policy


class Infaas(Policy):
    """The base as it is."""
