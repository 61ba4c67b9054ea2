"""The client's and the server's halves of the wire agree."""

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.client import AsyncClient
from gateway.client.messages import event_from_wire, generation_to_wire
from gateway.client.values import completion_of
from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.core.request import ChatMessage, ChatPrompt, Generation, TextPrompt, TokenPrompt
from gateway.core.retries import NEVER
from gateway.servicer import PROMPT_LOGPROBS_A_MESSAGE, SERVICE_NAME, event_to_wire, generation_from_wire, parts_of
from octavo.errors import InvalidRequest
from octavo.ids import WorkerId
from octavo.records.sampling import BeamSearch
from octavo.records.serve import FinishReason, TokenLogprobs
from octavo.sampling import MAX_TOP_LOGPROBS

words = st.text(max_size=10)
counts = st.integers(0, 2**32 - 1)
signed = st.integers(-(2**31), 2**31 - 1)
single = st.floats(width=32, allow_nan=False)
seconds = st.floats(allow_nan=False)

prompts = st.one_of(
    st.none(),
    words.map(TextPrompt),
    st.builds(ChatPrompt, st.lists(st.builds(ChatMessage, *[words] * 5), max_size=3).map(tuple), words),
    st.lists(counts, max_size=5).map(lambda ids: TokenPrompt(tuple(ids))),
)
generations = st.builds(
    Generation,
    prompt=prompts,
    model=words,
    max_tokens=st.none() | signed,
    samples=signed.filter(bool),
    temperature=single,
    top_k=signed,
    top_p=single,
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(words, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    cache_salt=words,
    retain_seconds=signed,
    min_p=single,
    repetition_penalty=single,
    presence_penalty=single,
    frequency_penalty=single,
    logit_bias=st.dictionaries(counts, single, max_size=3),
    stop_token_ids=st.lists(counts, max_size=3).map(tuple),
    min_tokens=signed,
    logprobs=st.none() | counts,
    prompt_logprobs=st.none() | counts,
    best_of=st.none() | signed.filter(bool),
    stream_interval=st.none() | signed.filter(bool),
    beam=st.none()
    | st.builds(
        BeamSearch, width=counts, length_penalty=single, early_stopping=st.booleans(), exhaustive=st.booleans()
    ),
)
logprobs = st.lists(
    st.builds(TokenLogprobs, single, st.lists(st.tuples(counts, single), max_size=3).map(tuple)), max_size=3
).map(tuple)
events = st.one_of(
    st.builds(
        Started,
        request_id=words,
        worker_id=words.map(WorkerId),
        prompt_tokens=counts,
        predicted_cached_tokens=counts,
    ),
    st.builds(PromptLogprobs, logprobs),
    st.builds(Delta, counts, words, st.lists(counts, max_size=5).map(tuple), logprobs),
    st.builds(Finished, counts, st.sampled_from(FinishReason), st.none() | seconds),
    st.builds(
        Usage,
        prompt_tokens=counts,
        cached_tokens=counts,
        predicted_cached_tokens=counts,
        carried_over=counts,
        output_tokens=counts,
        worker_id=words.map(WorkerId),
        time_to_first_token_seconds=seconds,
        total_seconds=seconds,
    ),
)


@given(generations)
def test_a_request_arrives_as_it_was_sent(request: Generation) -> None:
    assert generation_from_wire(generation_to_wire(request)) == request


@given(events)
def test_an_event_arrives_as_it_was_told(event: Event) -> None:
    assert event_from_wire(event_to_wire(event)) == event


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("max_tokens", Generation(prompt=TextPrompt("hi"), max_tokens=1 << 31)),
        ("seed", Generation(prompt=TextPrompt("hi"), seed=-1)),
        ("prompt", Generation(prompt=TokenPrompt((1 << 32,)))),
        ("prompt", Generation(prompt=TextPrompt("\udcff"))),
        ("prompt", Generation(prompt=ChatPrompt((ChatMessage("user", "\udcff"),)))),
        ("stop", Generation(prompt=TextPrompt("hi"), stop=("\udcff",))),
    ],
    ids=["max_tokens", "seed", "tokens", "text", "chat", "stop"],
)
def test_what_no_message_can_hold_is_an_invalid_request(field: str, request_: Generation) -> None:
    """A terminal hands bytes that are no UTF-8 over as halves of characters."""
    with pytest.raises(InvalidRequest, match=f"^{field}: cannot be sent: "):
        generation_to_wire(request_)


def test_a_prompt_of_another_type_is_told_which_there_are() -> None:
    bare: Any = "hi"
    with pytest.raises(InvalidRequest, match=r"^prompt: of type str, wanted TextPrompt, "):
        generation_to_wire(Generation(prompt=bare))


def test_a_string_is_short_for_a_text_prompt_with_every_default() -> None:
    assert generation_from_wire(generation_to_wire("hi")) == Generation(prompt=TextPrompt("hi"))


@pytest.mark.parametrize("tokens", [1, PROMPT_LOGPROBS_A_MESSAGE, 2 * PROMPT_LOGPROBS_A_MESSAGE + 1])
def test_the_logprobs_of_a_long_prompt_come_in_messages_that_plain_clients_take(tokens: int) -> None:
    """Token ids as large as there are, 20 in each place."""
    top = tuple((2**32 - 1 - at, -float(at)) for at in range(MAX_TOP_LOGPROBS))
    told = PromptLogprobs(tuple(TokenLogprobs(-float(at), top) for at in range(tokens)))
    usage = Usage(
        prompt_tokens=tokens + 1,
        cached_tokens=0,
        output_tokens=1,
        worker_id=WorkerId("a"),
        time_to_first_token_seconds=0.0,
        total_seconds=0.0,
    )

    messages = [event_to_wire(part) for part in parts_of(told)]

    assert len(messages) == -(-tokens // PROMPT_LOGPROBS_A_MESSAGE)
    assert max(message.ByteSize() for message in messages) < 4 << 20
    completion = completion_of([*map(event_from_wire, messages), usage])
    assert completion.prompt_logprobs == told.tokens


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, ConnectionError),
        (grpc.StatusCode.CANCELLED, ConnectionError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, TimeoutError),
    ],
)
async def test_a_gateway_that_goes_away_is_one_of_pythons_own_errors(
    status: grpc.StatusCode, error: type[Exception]
) -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        await context.abort(status, "going")
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Tokenize": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retries=NEVER) as client:
            with pytest.raises(error, match="going"):
                await client.tokenize("words")
    finally:
        await server.stop(0)
