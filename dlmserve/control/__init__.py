"""The control plane: an asyncio shell (this package) around a pure state machine (`policy/`)."""
