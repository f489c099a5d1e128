"""Which replica a new session goes to: the one that has the most bytes free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplica(RequestRouter):  # type: ignore[misc, unused-ignore]  # without Ray: Any
    """Ray's choice for a call: the replica that its keyword `replica` names, while it runs.

    Where it does not, and for calls that name none, the one with the fewest calls under way.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        named: list[RunningReplica] = []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            name = pending_request.kwargs.get("replica")
            named = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        return [named, candidate_replicas]


def most_free(replicas: Sequence[Mapping[str, Any]], coming: Mapping[str, int]) -> str:
    """The name of the replica with the most bytes free, of what each tells of itself.

    `coming` are sessions that were sent to a replica and have not reserved anything there yet; each
    counts as one of the default plan's.
    """

    def left(one: Mapping[str, Any]) -> tuple[bool, int]:
        count = coming.get(one["replica"], 0)
        return one["free_sessions"] > count, one["free_bytes"] - count * one["session_bytes"]

    return str(max(replicas, key=left)["replica"]) if replicas else ""
