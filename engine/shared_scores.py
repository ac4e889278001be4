"""Continuations of a prompt are scored by as few sequences as their tokens need.

A position's logits give the log-probabilities of every token that may follow it. So all continuations of one prompt
read their first token from the prompt's last position, those that begin alike read the next one from a shared position,
and no continuation's last token is computed. What remains of the members is the tree of all their tokens but the last
ones: each path from its root to a leaf is the prompt of one sequence (`SamplingParams.prompt_targets`), and the prompt
itself is computed once, by the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.request import Completion, Request, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SharedScores:
    """The sequences that score the members of a request.

    Attributes:
        members: as given.
        requests: one for each leaf of the tree.
        made_of: for each request the number of the member whose tokens it has.
        targets: for each member, for each of its scored tokens the request and its target that have it.
    """

    members: tuple[Request, ...]
    requests: tuple[Request, ...]
    made_of: tuple[int, ...]
    targets: tuple[tuple[tuple[int, int], ...], ...]

    def completions(self, done: Sequence[Completion]) -> list[Completion]:
        """The members' completions, from those of the requests. Of a member's tokens all count as cached that were
        computed for another one, or not at all."""
        made_by = {number: at for at, number in enumerate(self.made_of)}
        parts = []
        for number, (member, targets) in enumerate(zip(self.members, self.targets, strict=True)):
            last = done[targets[-1][0]]
            scores = np.full(len(member.prompt_token_ids), np.nan, dtype=np.float32)
            scored = [done[request].target_logprobs for request, _ in targets]
            known = all(one is not None for one in scored)
            for at, (one, (_, target)) in enumerate(zip(scored, targets, strict=True)):
                if one is not None:
                    scores[member.params.prompt_logprobs_start + at] = one[target]
            of_none = np.empty((len(scores), 0))
            total = len(member.prompt_token_ids)
            own = None if number not in made_by else done[made_by[number]]
            parts.append(
                replace(
                    last,
                    prompt_tokens=total,
                    cached_tokens=total if own is None else total - own.prompt_tokens + own.cached_tokens,
                    prompt_logprobs=TokenLogprobs(scores, of_none.astype(np.int32), of_none.astype(np.float32))
                    if known
                    else None,
                    preemptions=0 if own is None else own.preemptions,
                    target_logprobs=None,
                )
            )
        return parts


def share_scores(members: tuple[Request, ...]) -> SharedScores | None:
    """Share the work of members that only have log-probabilities of their own last tokens to compute; None: some have
    more."""
    if not all(map(is_scored_only, members)):
        return None
    # Nodes are numbered: a root for each different beginning, and a child for each different token behind a node.
    roots: dict[bytes, int] = {}
    children: dict[tuple[int, int], int] = {}
    paths: list[list[tuple[int, int]]] = []  # of each member: the node before each scored token, and the token
    for member in members:
        start = member.params.prompt_logprobs_start
        beginning = member.prompt_token_ids[:start].tobytes()
        node = roots.setdefault(beginning, len(roots) + len(children))
        paths.append([])
        for token in member.prompt_token_ids[start:].tolist():
            paths[-1].append((node, token))
            node = children.setdefault((node, token), len(roots) + len(children))
    read = {node for path in paths for node, _ in path}
    continued = {parent for (parent, _), child in children.items() if child in read}
    leaves: dict[int, int] = {}  # node -> the first member that reads its last token there
    for number, path in enumerate(paths):
        if path[-1][0] not in continued:
            leaves.setdefault(path[-1][0], number)
    made_of = tuple(leaves.values())
    reader: dict[int, int] = {}  # node -> the first request whose prompt leads through it
    for request, number in enumerate(made_of):
        for node, _ in paths[number]:
            reader.setdefault(node, request)
    wanted: list[list[tuple[int, int]]] = [[] for _ in made_of]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for member, path in zip(members, paths, strict=True):
        for index, (node, token) in enumerate(path, member.params.prompt_logprobs_start):
            if (node, token) not in found:
                request = reader[node]
                found[node, token] = request, len(wanted[request])
                wanted[request].append((index, token))
    requests = tuple(
        replace(
            members[number],
            prompt_token_ids=members[number].prompt_token_ids[:-1],
            params=SamplingParams(max_tokens=0, temperature=0.0, prompt_targets=tuple(targets)),
        )
        for number, targets in zip(made_of, wanted, strict=True)
    )
    return SharedScores(members, requests, made_of, tuple(tuple(found[step] for step in path) for path in paths))


def is_scored_only(member: Request) -> bool:
    """Whether log-probabilities of its last tokens are all that there is to compute of a request."""
    params = member.params
    return (
        params.max_tokens == 0
        and params.n == 1
        and params.prompt_logprobs == 0
        and 0 < params.prompt_logprobs_start < len(member.prompt_token_ids)
        and member.pooling is None
        and not member.retain
        and not any(len(partial.token_ids) for partial in member.partial)
    )
