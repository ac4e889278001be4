"""Content policies: matching, growing answers, and failing closed."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import re2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from engine.request import PartialChoice, TokenLogprobs
from schemas.requests.errors import RowError, RowErrorCode
from workers.policies.loader import PolicyError, load_policies
from workers.policies.policy import (
    ALLOWED,
    Answer,
    JudgedText,
    Policies,
    PolicyGuard,
    PolicyVerdict,
    Prompt,
)
from workers.policies.rules import Rules, RulesError, load
from workers.policies.stream_filter import GrowingAnswer, PolicyStreamFilter
from workers.text.detokenizer import IncrementalDetokenizer
from workers.text.logprobs import TokenTexts
from workers.text.tokenizer import Tokenizer

ABOUT = JudgedText("job-1/7", "default", "tiny", "/v1/chat/completions")
SECRET = "kanarienvogel7261"
BOUNDED = [
    "ab", "a{1,3}b", r"\bab\b", r"b$", "^a b", "(?m)^c", "(?m)a$", "(?i)AB", "a.c", "é[ab]", r"\Bb\B", "(?:ab){2,3}c?",
    "b{0,4}a", r"a\z", r"(?s)c.{0,4}c",
]  # fmt: skip
"""Regexes whose matches have at most `WINDOW` characters."""
WINDOW = 7


@pytest.fixture
def rules(tmp_path: Path) -> Callable[[str], Rules]:
    """Makes the policy of a file with this text."""

    def rules(text: str) -> Rules:
        path = tmp_path / "policy.toml"
        path.write_text(text, encoding="utf-8")
        return load(str(path))

    return rules


def guard(*policies: Any) -> PolicyGuard:
    found = Policies(tuple((f"p{at}", policy) for at, policy in enumerate(policies))).guard(ABOUT)
    assert found is not None
    return found


def of_regexes(folder: Path, regexes: Sequence[str]) -> Rules:
    path = folder / "policy.toml"
    listed = ", ".join(f"'{regex}'" for regex in regexes)
    path.write_text(f"[[rule]]\nname = 'r'\nregexes = [{listed}]\nwindow = {WINDOW}\n", encoding="utf-8")
    return Rules(path)


def pieces(text: str, cuts: Sequence[int]) -> Iterator[str]:
    """The text, cut at these positions."""
    return (text[start:end] for start, end in itertools.pairwise([0, *sorted(cuts), len(text)]))


def earliest(regexes: Sequence[str], text: str, end: int | None = None) -> int | None:
    """Where the first match begins of those that end before `end`."""
    found = [re2.compile(regex).search(text, 0, len(text) if end is None else end) for regex in regexes]
    return min((match.start() for match in found if match), default=None)


def check_growing(judge: PolicyGuard, regexes: Sequence[str], text: str, cuts: Sequence[int]) -> None:
    """A stream of these pieces is judged as the whole text is, and nothing of a match is emitted."""
    growing = GrowingAnswer(judge)
    for piece in pieces(text, cuts):
        growing.push(piece)
    first = earliest(regexes, text)
    assert judge.refuses(text) == (first is not None)
    if first is None:
        assert not growing.refused, "refused for what the whole doesn't hold"
        assert growing.cleared == max(0, len(text) - WINDOW), "held back without need"
    else:
        assert growing.cleared <= first, "some of it was emitted"
        assert growing.refused == (earliest(regexes, text, len(text) - 1) is not None)


@settings(max_examples=400)
@example(text="cab" + " " * 10, cuts=[], regexes=[r"\bab\b"])  # a word that doesn't begin where forgotten text ended
@example(text="ca b" + "c" * 10, cuts=[], regexes=["^a b"])
@example(text="ab" + "c" * 10 + "ab", cuts=[], regexes=["b$"])
@example(text=" " * 10 + "aaab", cuts=[13], regexes=["a{1,3}b"])
@given(
    text=st.text("abcé \n", max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=12),
    regexes=st.lists(st.sampled_from(BOUNDED), min_size=1, max_size=3, unique=True),
)
@pytest.mark.slow
def test_a_stream_is_judged_as_the_whole_text_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int], regexes: list[str]
) -> None:
    judge = guard(of_regexes(tmp_path_factory.mktemp("rules"), regexes))
    check_growing(judge, regexes, text, [min(cut, len(text)) for cut in cuts])
    check_growing(judge, regexes, text, range(len(text)))


@pytest.mark.parametrize("text", ["xxab abaxx", "cab ab ca", "a b\nc aab", "éabéa b"])
@pytest.mark.slow
def test_a_stream_is_judged_as_the_whole_text_for_each_cut(tmp_path: Path, text: str) -> None:
    judge = guard(of_regexes(tmp_path, BOUNDED[:9]))
    for count in range(len(text)):
        for cuts in itertools.combinations(range(1, len(text)), count):
            check_growing(judge, BOUNDED[:9], text, cuts)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    text=st.text("ab é日🎉\n", max_size=30),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    regexes=st.lists(st.sampled_from(["ab", "日.b", "🎉", r"\bab\b", "é{2}"]), min_size=1, max_size=2, unique=True),
)
def test_tokens_leave_when_their_text_is_judged_and_half_characters_don_t(
    tmp_path_factory: pytest.TempPathFactory, byte_level: Tokenizer, text: str, cuts: list[int], regexes: list[str]
) -> None:
    judge = guard(of_regexes(tmp_path_factory.mktemp("rules"), regexes))
    (ids,) = byte_level.encode_batch([text], add_special_tokens=False)
    table = np.arange(len(ids), dtype=np.float32)
    gate = PolicyStreamFilter(judge, IncrementalDetokenizer(byte_level, np.zeros(0, np.int32)), 0)
    emitted: list[int] = []
    logprobs: list[float] = []
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        lines = TokenLogprobs(table[start:end], ids[start:end, None], table[start:end, None])
        cleared = gate.push(PartialChoice(0, ids[start:end], lines))
        if cleared is not None:
            assert cleared.logprobs is not None
            emitted += cleared.token_ids.tolist()
            logprobs += cleared.logprobs.chosen.tolist()
    assert emitted == ids[: len(emitted)].tolist()
    assert logprobs == table[: len(emitted)].tolist()
    first = earliest(regexes, text)
    most = text[: max(0, len(text) - WINDOW) if first is None else first].encode()
    assert most.startswith(b"".join(map(TokenTexts(byte_level).bytes_of, emitted))), (
        "a byte of what isn't judged was emitted"
    )
    assert gate.refused == (earliest(regexes, text, len(text) - 1) is not None if text else False)


class CountedArray(np.ndarray):
    """An array that counts the elements which are joined."""

    joined = 0

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.concatenate:
            CountedArray.joined += sum(map(len, args[0]))
        return super().__array_function__(function, types, args, kwargs)


def test_each_token_is_joined_once_however_long_it_is_held(
    byte_level: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given tokens that are each held for a window of characters
    monkeypatch.setattr(CountedArray, "joined", 0)
    ids = byte_level.encode_batch(["0123456789" * 20], add_special_tokens=False)[0].view(CountedArray)
    judge = guard(of_regexes(tmp_path, ["ab"]))
    gate = PolicyStreamFilter(judge, IncrementalDetokenizer(byte_level, np.zeros(0, np.int32)), 0)
    # when they come one by one, then the ones that pass are joined, and no others.
    passed = [gate.push(PartialChoice(0, ids[at : at + 1])) for at in range(len(ids))]
    emitted = [token_id for choice in passed if choice is not None for token_id in choice.token_ids.tolist()]
    assert emitted == ids[: len(emitted)].tolist()
    assert len(ids) - WINDOW <= len(emitted) == CountedArray.joined


def test_a_match_that_begins_in_an_earlier_attempts_tokens_is_found(byte_level: Tokenizer, tmp_path: Path) -> None:
    def ids(text: str) -> Any:
        return byte_level.encode_batch([text], add_special_tokens=False)[0]

    judge = guard(of_regexes(tmp_path, ["ab cd"]))
    gate = PolicyStreamFilter(judge, IncrementalDetokenizer(byte_level, np.zeros(0, np.int32)), 0)
    gate.replay(ids("xx ab").tolist())
    assert not gate.refused
    assert gate.push(PartialChoice(0, ids(" cd ."))) is None
    assert gate.refused


def test_keywords_of_prompts_and_of_answers(rules: Callable[[str], Rules]) -> None:
    policy = rules(
        """
        [[rule]]
        name = "prompt-rule"
        apply = "prompt"
        keywords = ["Blue Heron", "a.b"]

        [[rule]]
        name = "answer-rule"
        apply = "answer"
        keywords = ["class"]
        whole_words = true
        ignore_case = false
        """
    )

    def rule_of_prompt(*texts: str) -> str:
        return policy.before(Prompt(ABOUT, texts)).rule

    def emitted(text: str) -> bool:
        return policy.after(Answer(ABOUT, text)).action is None

    assert rule_of_prompt("fine", "the BLUE heron") == rule_of_prompt("A.B") == "prompt-rule"
    assert rule_of_prompt("blue  heron, axb, class") == "" == rule_of_prompt("half a pair \ud800")
    assert not emitted("a class.")
    assert emitted("first-classy Class blue heron")
    assert policy.window == 5


def test_a_policy_that_can_t_judge_pieces_holds_all_back_while_others_still_stop_it(tmp_path: Path) -> None:
    seen: list[Answer] = []

    class WholeTextPolicy:
        fingerprint = "1"
        window = None

        def before(self, prompt: Prompt) -> PolicyVerdict:
            return ALLOWED

        def after(self, answer: Answer) -> PolicyVerdict:
            seen.append(answer)
            return ALLOWED

    judge = guard(WholeTextPolicy(), of_regexes(tmp_path, ["ab"]))
    growing = GrowingAnswer(judge)
    growing.push("x" * 100)
    assert (growing.cleared, seen) == (0, [])
    assert not judge.refuses("x" * 100)
    assert [(answer.text, answer.start, answer.ended) for answer in seen] == [("x" * 100, 0, True)]
    growing.push("ab.")
    assert growing.refused


class RaisingPolicy:
    """A policy that fails, and whose error quotes the text."""

    fingerprint = "1"
    window = 3

    def __init__(self, how: Callable[[str], Any]) -> None:
        self._how = how

    def before(self, prompt: Prompt) -> PolicyVerdict:
        verdict: PolicyVerdict = self._how(prompt.texts[0])
        return verdict

    def after(self, answer: Answer) -> PolicyVerdict:
        verdict: PolicyVerdict = self._how(answer.text)
        return verdict


@pytest.mark.parametrize(
    "how", [lambda text: int(text), lambda text: None, lambda text: True, lambda text: {}[text], lambda text: 1 / 0]
)
def test_a_text_that_can_t_be_judged_is_refused_and_not_logged(how: Callable[[str], Any]) -> None:
    judge = guard(RaisingPolicy(how))
    with capture_logs() as logs:
        for call in (lambda: judge.check_prompt([SECRET]), lambda: judge.refuses(SECRET)):
            with pytest.raises(RowError, match="content policy 'p0' could not judge the") as failed:
                call()
            assert failed.value.code is RowErrorCode.ENGINE_ERROR
            assert SECRET not in failed.value.message
        with pytest.raises(RowError):
            GrowingAnswer(judge).push(SECRET)
    assert [(log["policy"], log["row"]) for log in logs] == [("p0", "job-1/7")] * 3
    assert SECRET not in repr(logs)
    assert re.search(r"(content_policies|policy)\.py:\d+$", logs[0]["at"])


def test_a_refusal_names_policy_rule_and_row_and_quotes_nothing(rules: Callable[[str], Rules]) -> None:
    judge = guard(rules(f"[[rule]]\nname = 'birds'\nkeywords = ['{SECRET}']\n"))
    with capture_logs() as logs:
        with pytest.raises(RowError, match="the prompt is refused by content policy 'p0', rule 'birds'") as refused:
            judge.check_prompt(["x", f"my {SECRET}"])
        assert judge.refuses(SECRET)
    assert refused.value.code is RowErrorCode.CONTENT_FILTER
    assert SECRET not in refused.value.message
    assert [{**log, "event": ""} for log in logs] == [
        {"event": "", "log_level": "info", "policy": "p0", "rule": "birds", "row": "job-1/7", "what": what}
        for what in ("prompt", "answer")
    ]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("[[rule]]\nname = 'a'\nregexes = ['x', '(y']\n", "rule 'a': regexes[1]", "missing ): (y; correct it (RE2's"),
        ("[[rule]]\nname = 'a'\nregexes = ['(?=x)']\n", "rule 'a': regexes[0]", "neither look-around nor back-"),
        ("[[rule]]\nname = 'a'\nregexes = ['(a+)+\\1']\n", "rule 'a': regexes[0]", "invalid escape sequence"),
        ("[[rule]]\nname = 'a'\nregexes = ['x*']\n", "rule 'a': regexes[0]", "so it refuses everything"),
        ("[[rule]]\nname = 'a'\nregexes = ['(?:\\p{L}{1,50}\\s){5}']\n", "regexes[0]", "steps, but at most 10000"),
        ("[[rule]]\nname = 'a'\n", "rule 1", "must have either keywords or regexes"),
        ("[[rule]]\nname = 'a'\nkeywords = ['x']\nregexes = ['y']\n", "rule 1", "must have either"),
        ("[[rule]]\nname = 'a'\nkeywords = ['x', '']\n", "rule 1 keywords[1]", "at least 1 character"),
        (
            "[[rule]]\nname = 'a'\nkeywords = ['x']\nwindow = 9\n",
            "rule 1",
            "which is for regexes that refuse answers",
        ),
        (
            "[[rule]]\nname = 'a'\nkeywords = ['naïf', 'été']\nwhole_words = true\n",
            "rule 1",
            "keywords[1]: whole_words",
        ),
        ("[[rule]]\nname = 'a'\nregexes = ['x']\nignore_case = true\n", "rule 1", "write (?i) or \\b in the regexes"),
        ("[[rule]]\nname = 'a'\nkeyword = ['x']\n", "rule 1 keyword", "is not known; a rule has name, apply,"),
        ("[[rule]]\nname = 'a'\nkeywords = ['x']\napply = 'both sides'\n", "rule 1 apply", "'prompt', 'answer' or"),
        (
            "[[rule]]\nname = 'a'\nkeywords = ['x']\naction = 'log'\n",
            "rule 1 action",
            "should be 'refuse', 'route' or 'flag'",
        ),
        ("[[rule]]\nkeywords = ['x']\n", "rule 1 name", "is missing; add it"),
        (
            "[[rule]]\nname='a'\nkeywords=['x']\n[[rule]]\nname='a'\nkeywords=['y']",
            "policy.toml",
            "two rules are called",
        ),
        ("", "the file rule", "write at least one [[rule]]"),
        ("rule = []", "the file rule", "write at least one [[rule]]"),
        ("[[rule", "policy.toml", "is no TOML"),
    ],
)
def test_an_invalid_rules_file_is_refused_at_the_start_with_the_fix(
    rules: Callable[[str], Rules], tmp_path: Path, text: str, where: str, what: str
) -> None:
    with pytest.raises(RulesError) as wrong:
        rules(text)
    message = str(wrong.value)
    assert message.startswith(f"{tmp_path}/policy.toml: ")
    assert where in message
    assert what in message
    assert "\n" not in message


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    for chosen, what in (
        (["rules"], "needs a file; name it, as in rules:policy.toml"),
        ([f"rules:{tmp_path}/none.toml"], "none.toml: can't be read: No such file"),
        (["unknown"], "content policy 'unknown' is not installed (known: guard, rules)"),
    ):
        with pytest.raises((PolicyError, RulesError)) as wrong:
            load_policies(chosen)
        assert what in str(wrong.value)


def test_another_file_another_order_or_another_policy_is_another_fingerprint(tmp_path: Path) -> None:
    made = []
    for name, word in (("a", "x"), ("b", "y"), ("c", "x")):
        (tmp_path / f"{name}.toml").write_text(f"[[rule]]\nname = 'r'\nkeywords = ['{word}']\n", encoding="utf-8")
        made.append(f"rules:{tmp_path}/{name}.toml")
    one, other, same = ([name] for name in made)
    prints = [load_policies(chosen).fingerprint for chosen in (one, other, one + other, other + one)]
    assert len(set(prints)) == 4
    assert load_policies(one).fingerprint == load_policies(same).fingerprint
    assert load_policies([]).fingerprint is None


@pytest.mark.parametrize(
    ("regex", "text"),
    [("(a+)+$", "a" * 1_000_000 + "b"), ("(x+x+)+y", "x" * 1_000_000), ("(?:a|a)*c", "a" * 1_000_000)],
)
def test_a_regex_that_hangs_others_takes_no_longer_than_its_text(
    rules: Callable[[str], Rules], regex: str, text: str
) -> None:
    judge = guard(rules(f"[[rule]]\nname = 'r'\nregexes = ['{regex}']\n"))
    assert not judge.refuses(text)


@pytest.mark.slow
def test_a_regex_at_the_limit_takes_time_in_proportion_to_the_text(rules: Callable[[str], Rules]) -> None:
    judge = guard(rules("[[rule]]\nname = 'r'\nregexes = ['a[ab]{500}c']\n"))
    characters = random.Random(0).choices("ab", k=60_000)
    assert not judge.refuses("".join(characters))


def test_the_example_in_the_docs_works(rules: Callable[[str], Rules]) -> None:
    page = (Path(__file__).parents[3] / "docs/content-policy.md").read_text(encoding="utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    judge = guard(rules(example))
    assert judge.window == 40
    assert judge.refuses("number 4111 1111 1111 1111.")
    assert not judge.refuses("falconry, 4111")
    made: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], made)  # noqa: S102 - our own page
    quiet = guard(made["Quiet"](None))
    growing = GrowingAnswer(quiet)
    growing.push("well, well")
    assert (growing.cleared, growing.refused) == (9, False)
    growing.push("!")
    assert growing.refused
    assert not quiet.refuses("well, well")
