"""Which choice vLLM gets next, and which one it gives back; without vLLM."""

from __future__ import annotations

from itertools import count

from engine import Request, SamplingParams, as_token_ids
from engine.vllm.choices import ChoiceState, OpenRequest
from engine.vllm.handover import Handover

serials = count()


def choice(priority: int, length: int = 10, group: int | None = None, **params: float) -> ChoiceState:
    settings = SamplingParams(max_tokens=5, temperature=0.0, **params)  # type: ignore[arg-type]
    request = Request(str(next(serials)), as_token_ids(range(length)), settings, priority=priority, prefix_group=group)
    made = ChoiceState(OpenRequest(request, 0.0), 0, next(serials))
    made.owner.choices.append(made)
    return made


def handed(handover: Handover, *choices: ChoiceState, begun: bool = True) -> None:
    for one in choices:
        handover.hand(one, one.owner.request.request_id)
        if begun:
            handover.begin(one)


def give_back(handover: Handover, starved: int | None) -> ChoiceState | None:
    found = handover.to_take_back(starved)
    if found is not None:
        handover.drop(found)
        handover.push(found)
    return found


def test_memory_is_taken_from_one_choice_after_the_other_and_not_given_to_them_again() -> None:
    handover = Handover(16, 8, None)
    first, second, waiting, lane = choice(2), choice(2), choice(2), choice(0)
    handed(handover, first, second)
    handed(handover, waiting, lane, begun=False)  # vLLM has no memory for these
    assert give_back(handover, 0) is second, "the latest one that holds memory"
    assert handover.pop() is None, "nor does it get the memory at once"
    assert give_back(handover, 0) is first
    assert give_back(handover, 0) is None, "there is no further one"
    handover.begin(lane)
    assert give_back(handover, None) is None
    assert (handover.pop(), handover.pop(), handover.pop()) == (first, second, None)


def test_a_row_is_taken_from_a_lower_class_alone() -> None:
    handover = Handover(4, 2, None)
    bulk, standard, another, lane = choice(2), choice(1), choice(1), choice(0)
    handed(handover, bulk, standard)
    handover.push(another)
    assert give_back(handover, None) is bulk
    assert handover.pop() is another
    handed(handover, another)
    assert give_back(handover, None) is None, "bulk waits, and takes none from a higher class"
    handover.push(lane)
    assert handover.pop() is lane, "rows beyond max_num_seqs are the lane's"


def test_answers_with_penalties_keep_their_rows_once_they_have_tokens() -> None:
    handover = Handover(4, 1, None)
    penalized = choice(2, frequency_penalty=0.5)
    handed(handover, penalized)
    penalized.tokens.append(7)
    handover.push(choice(1))
    assert give_back(handover, None) is None


def test_prompts_come_as_slowly_as_fits_a_step_and_wait_for_no_lower_class() -> None:
    handover = Handover(64, 32, 100)
    bulk, more, standard = choice(2, 90), choice(2, 90), choice(1, 90)
    handed(handover, bulk, begun=False)
    handover.push(more)
    assert handover.pop() is None
    handover.push(standard)
    assert handover.pop() is standard
    handover.begin(bulk)
    assert handover.pop() is more


def test_what_a_group_shares_counts_only_with_a_prefix_cache() -> None:
    for caching, follows in ((True, True), (False, False)):
        handover = Handover(64, 32, 100, prefix_caching=caching)
        first, second = choice(2, 90, group=1), choice(2, 95, group=1)
        handed(handover, first, begun=False)
        handover.push(second)
        assert (handover.pop() is second) == follows
