"""The kinds of groups, embeddings and chat: shared calls are built here, and their answers split.

`core/grouping/embeddings.py` and `core/grouping/chat.py` have the rules. This module applies them
to a route and a deployment's settings. It does not wait, send or count.
"""

from collections.abc import Sequence
from typing import Protocol

from tidegate.core.deployments import Deployment
from tidegate.core.errors import BrokenAnswer, Refused, UpstreamError
from tidegate.core.grouping import chat, embeddings
from tidegate.core.grouping.chat import ChatBatching, ChatPart, Singly
from tidegate.core.grouping.embeddings import Part
from tidegate.core.nouns import Call, Usage
from tidegate.core.retry import GiveUp
from tidegate.core.wording import in_words
from tidegate.upstream.routing.routes import NameRoute

# One item's answer, as a separate call would have got it, or the error in its place.
Share = tuple[bytes, Usage] | UpstreamError


class GroupKind(Protocol):
    """The groups of items of one endpoint.

    `endpoint` is the items', `path` that of a call for several.
    """

    endpoint: str
    path: str

    def read(self, route: NameRoute, call: Call) -> Part | ChatPart | str:
        """Return an item's part in a group, or one word for the reason why it goes alone."""

    def items_max(self, deployment: Deployment) -> int:
        """Return how many items a deployment takes in one call; 1 if items never share one."""

    def items_min(self, deployment: Deployment) -> int:
        """Return how many items are enough to share a call."""

    def tokens_max(self, deployment: Deployment) -> int:
        """Return how many prompt tokens a deployment takes in one call for several.

        Return 0 for any number.
        """

    def build(self, parts: Sequence[Part | ChatPart]) -> bytes:
        """Return the body of one call for all of these, in order."""

    def split(self, body: bytes, parts: Sequence[Part | ChatPart]) -> list[Share]:
        """Return each item's part of the answer, in order.

        Raise BrokenAnswer if it cannot be split.
        """


class EmbeddingGroups:
    endpoint = path = embeddings.ENDPOINT

    def read(self, route: NameRoute, call: Call) -> Part | str:
        return embeddings.read(call.endpoint, route.model or call.model, call.body)

    def items_max(self, deployment: Deployment) -> int:
        return deployment.upstream_max_batch_inputs

    def items_min(self, deployment: Deployment) -> int:
        return deployment.upstream_min_batch_inputs

    def tokens_max(self, deployment: Deployment) -> int:
        return 0

    def build(self, parts: Sequence[Part | ChatPart]) -> bytes:
        return embeddings.build([part for part in parts if isinstance(part, Part)])

    def split(self, body: bytes, parts: Sequence[Part | ChatPart]) -> list[Share]:
        try:
            return list(embeddings.split(body, [part for part in parts if isinstance(part, Part)]))
        except embeddings.CannotSplit as wrong:
            why = str(wrong)
        raise BrokenAnswer(f"an answer for {in_words(len(parts), 'request')} cannot be taken apart: {why}")


class ChatGroups:
    endpoint = chat.ENDPOINT
    path = chat.BATCH_ENDPOINT

    def read(self, route: NameRoute, call: Call) -> ChatPart | str:
        batching = _widest(route)
        if batching is None:
            return Singly.MODE
        # All items of a call go to one deployment under one name, so the same deployments must be
        # able to take each of them over.
        failover = tuple(state.deployment.name for state in route.states)
        model = route.model or call.model
        way = chat.ChatRoute("", "", "", call.model, model, failover)
        return chat.read(call.endpoint, call.body, way, batching, executor=batching.has_executor)

    def items_max(self, deployment: Deployment) -> int:
        batching = deployment.chat_batching
        return batching.upstream_max_batch_size if batching.groups else 1

    def items_min(self, deployment: Deployment) -> int:
        return embeddings.GROUP_INPUTS_MIN

    def tokens_max(self, deployment: Deployment) -> int:
        return deployment.chat_batching.max_total_input_tokens

    def build(self, parts: Sequence[Part | ChatPart]) -> bytes:
        return chat.build([part for part in parts if isinstance(part, ChatPart)])

    def split(self, body: bytes, parts: Sequence[Part | ChatPart]) -> list[Share]:
        return [_share(found) for found in chat.split(body, len(parts))]


def _widest(route: NameRoute) -> ChatBatching | None:
    """Return the settings of the deployment with the largest calls, if possible with an adapter."""
    asking = [state.deployment.chat_batching for state in route.states]
    asking = [one for one in asking if one.mode is chat.ChatMode.SYNC_MICROBATCH]
    return max(asking, key=lambda one: (one.has_executor, one.upstream_max_batch_size), default=None)


def _share(found: chat.ChatAnswer | UpstreamError | GiveUp) -> Share:
    if isinstance(found, chat.ChatAnswer):
        return found.body, found.usage
    if isinstance(found, GiveUp):
        return Refused(found.message, status=502, code="chat_usage_missing")
    return found


KINDS: dict[str, GroupKind] = {kind.endpoint: kind for kind in (EmbeddingGroups(), ChatGroups())}
