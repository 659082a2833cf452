"""What can go wrong between us and an engine. Each message names the engine."""


class EngineDeadError(RuntimeError):
    """The engine's process ended, or nothing answers at its address."""


class EngineReplyError(RuntimeError):
    """The engine refused a request, or its answer is not what was agreed."""
