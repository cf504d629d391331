"""The HTTP edge: OpenAI's API over a Head. Knows nothing of ranks, instances or torch."""
