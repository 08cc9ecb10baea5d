"""Backends: what carries a plan out. Each is imported only when it is asked for."""

from shardlab.backends.base import Applied, Backend, Job
from shardlab.plan import Plan

__all__ = ["Applied", "Backend", "Job", "make_backend"]


def make_backend(plan: Plan) -> Backend:
    """The backend that `plan` names."""
    if plan.backend == "ddp":
        from shardlab.backends.ddp import DDPBackend

        return DDPBackend()
    if plan.backend == "fsdp":
        from shardlab.backends.fsdp import FSDPBackend

        return FSDPBackend()
    if plan.backend == "stream":
        from shardlab.backends.stream.engine import StreamBackend

        return StreamBackend()
    from shardlab.backends.zero import ZeROBackend

    return ZeROBackend()
