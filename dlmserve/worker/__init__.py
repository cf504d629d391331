"""The worker side: node agents, rank processes and the engine that a model instance runs."""
