"""The keywords of `tokenmill.map`: which go to the requests and which to the engine, and what is refused."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tokenmill.config.engine_options import engine_options
from tokenmill.errors import InvalidCall
from tokenmill.frames.options import EngineKeywords, MapKeywords, split_options


def test_given_keywords_when_split_then_each_goes_where_it_belongs() -> None:
    given = {"temperature": 0, "quantize": "int8", "max_num_seqs": 4, "kv_cache_dir": Path("cache"), "seed": 1}

    sampling, engine = split_options(given, MapKeywords)

    assert sampling == {"temperature": 0, "seed": 1}
    assert engine == {"quantize": "int8", "max_num_seqs": 4, "kv_cache_dir": Path("cache")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantise": "int8"}, "quantise: is no parameter; did you mean quantize?"),
        (
            {"xyz": 1},
            "known are of the call: .*, output, .*; sampling parameters: temp.*; options of the engine: ",
        ),
        ({"response_format": {}}, "response_format: is no parameter; did you mean output?"),
        ({"quantize": "int9"}, "quantize: Input should be 'none', .*, not 'int9'"),
        ({"threads": 0}, "threads: .* greater than or equal to 1, not 0"),
        ({"threads": "4"}, "threads: Input should be a valid integer, not '4'"),
        ({"expert_parallel": 1}, "expert_parallel: Input should be a valid boolean"),
        ({"speculate": "magic"}, "speculate: 'magic' is no method"),
        ({"engine": "vllm"}, "engine: Input should be 'auto', 'tokenmill' or 'transformers'"),
    ],
)
def test_given_an_unknown_or_wrong_keyword_when_split_then_the_message_names_it(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidCall, match=message):
        split_options(given, MapKeywords)


def test_the_keywords_are_the_options_of_the_engine_that_commands_have() -> None:
    options = inspect.signature(engine_options).parameters.keys() - {"settings", "engine_option", "role", "adapter"}

    others = {"adapters", "concurrency"}  # several of the option --adapter, and one of clusters
    assert get_type_hints(EngineKeywords).keys() - others == options
