"""The two tokens by which a model that generates scores pairs, found in its tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.models.encoders.classifier import ClassifierSettings
from engine.models.encoders.token_scores import token_score_settings
from workers.errors import TokenizerError
from workers.text.chat_options import ChatOptions
from workers.text.tokenizer import Tokenizer


def scores_by_tokens(path: Path, tokenizer: Tokenizer, chat: ChatOptions) -> ClassifierSettings | None:
    """The settings of the scores of the model at `path`; None: it scores nothing by tokens.

    Raises:
        UnsupportedModel: as `token_score_settings`.
        TokenizerError: the tokens are none of the tokenizer's, or its chat template renders no pairs.
    """
    found = token_score_settings(path, chat.score_tokens)
    if found is None:
        return None
    ids: list[int] = []
    for token in found.tokens:
        token_id = tokenizer.token_to_id(token) if isinstance(token, str) else token
        if token_id is None or token_id >= tokenizer.size:
            raise TokenizerError(
                f"{path}: {token!r} is no token of the model's; name two that are as score_tokens (--score-tokens)"
            )
        ids.append(token_id)
    if not tokenizer.renders_pairs:
        raise TokenizerError(
            f"{path}: scores by tokens need a chat template with the roles query and document; give one as "
            "chat_template (--chat-template): a file, or qwen3_reranker"
        )
    return replace(found.settings, tokens=(ids[0], ids[1]))
