"""Whatever is said to a gateway, over the wire: each call is answered, or refused with a status and words.

Behind it stand a real cache manager, which audits every exchange, and a real engine whose model is a function. No call
ends as a bug does, nothing is left behind by those that end or are left in the middle, books balance, and a request
beside them is answered right. What is said is drawn from the schemas, so a new message or method needs no word here.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.bounds import Bounds
from gateway.core.request import Generation, Limits, TextPrompt
from octavo.status import REASON_KEY, STATUS_OF
from octavo.v1 import gateway_pb2 as v1
from octavo.v1 import open_inference_pb2 as v2
from tests.support import words
from tests.support.fakes import FunctionRunner, solo_text
from tests.support.gateway_service import Gateway, gateway, words_pool
from tests.support.wild import mangled, messages
from tests.support.worker_service import ManagerProcess, RealFleet, attend, manager_process, until, worker_service

METHODS = [
    *v1.DESCRIPTOR.services_by_name["Inference"].methods,
    *v2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods,
]
CALLS_AN_EXAMPLE = 8
PATIENCE_SECONDS = 30
POOL_BLOCKS = 40
"""Of 16: several requests do not fit together."""
STATUSES = set(STATUS_OF.values()) - {grpc.StatusCode.INTERNAL}
TEXT = "An octavo is a book"

signed = st.sampled_from([0, 1, 2, 3, 5, 20, -1, 2**31 - 1, -(2**31)])
unsigned = st.sampled_from([0, 1, 2, 5, words.EOS_TOKEN, words.VOCAB_SIZE - 1, words.VOCAB_SIZE, 2**31, 2**32 - 1])
numbers = st.sampled_from([0.0, 0.5, 1.0, 2.0, -0.0, -1.0, 101.0, 1e-38, 3e38, float("inf"), float("nan")])
texts = st.sampled_from(
    ["", "words", "user", "nobody", TEXT, "本🤗", "\0", "x" * 3000, "<|im_end|>", "[]", "{}", '[{"a": 1}]', "[" * 2000]
)
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: signed,
    FieldDescriptor.TYPE_UINT32: unsigned,
    FieldDescriptor.TYPE_UINT64: unsigned | st.just(2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: numbers,
    FieldDescriptor.TYPE_DOUBLE: numbers,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: texts,
}


def plausible() -> st.SearchStrategy[v1.GenerateRequest]:
    """A request that would be served, but for what is drawn besides."""

    def request(prompt: dict[str, Any], besides: Message) -> v1.GenerateRequest:
        whole = v1.GenerateRequest(**prompt, max_tokens=5)
        whole.MergeFrom(besides)
        return whole

    chat = v1.Chat(messages=[v1.ChatMessage(role="user", content=TEXT)])
    prompts = st.sampled_from([{"text": TEXT}, {"chat": chat}, {"tokens": v1.TokenIds(ids=[5, 6, 7])}])
    besides = messages(v1.GenerateRequest.DESCRIPTOR, SCALARS, most=1) | messages(
        v1.GenerateRequest.DESCRIPTOR, SCALARS
    )
    return st.builds(request, prompts, besides)


@dataclass(frozen=True)
class Call:
    """A method, the bytes it is called with, and after how many replies the caller leaves."""

    method: MethodDescriptor
    raw: bytes
    leaves_after: int


def calls_of(method: MethodDescriptor) -> st.SearchStrategy[Call]:
    whole: st.SearchStrategy[Message] = messages(method.input_type, SCALARS)
    if method.name == "Generate":
        whole = plausible() | plausible() | whole
    elif method.name == "GenerateBatch":
        whole = st.builds(v1.GenerateBatchRequest, requests=st.lists(plausible(), max_size=4)) | whole
    elif method.name == "Explain":
        whole = st.builds(v1.ExplainRequest, request=plausible()) | whole
    as_bytes = whole.map(lambda message: message.SerializeToString())
    return st.builds(
        Call, st.just(method), as_bytes | as_bytes | mangled(whole), st.sampled_from([*[10**6] * 4, 3, 1, 0])
    )


calls = st.sampled_from([*METHODS, *[METHODS[0]] * 6]).flatmap(calls_of)


@dataclass
class Stage:
    """All services, and those who call them."""

    front: Gateway
    manager: ManagerProcess
    runner: FunctionRunner
    calls: int = 0

    async def example(self, drawn: list[Call]) -> None:
        """All at once, and a request that behaves; then nothing is left."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, *_ = await asyncio.gather(self._behave(), *map(self._call, drawn))
            while not self.front.at_rest() or self.manager.audit().sequences:
                await self.front.load()
        books = self.manager.audit()
        assert books.violation == ""
        assert (books.free_blocks + books.cached_blocks, books.held_blocks) == (books.num_blocks, 0)

    async def _behave(self) -> None:
        answer = await self.front.client.complete(Generation(prompt=TextPrompt(TEXT), max_tokens=3, ignore_eos=True))
        prompt = words.tokenizer().encode(TEXT).ids
        assert list(answer.samples[0].token_ids) == solo_text(prompt, 3, vocab_size=words.VOCAB_SIZE)

    async def _call(self, call: Call) -> None:
        self.calls += 1
        path = f"/{call.method.containing_service.full_name}/{call.method.name}"
        try:
            if not call.method.server_streaming:
                await self.front.channel.unary_unary(path)(call.raw, timeout=PATIENCE_SECONDS)
                return
            stream = self.front.channel.unary_stream(path)(call.raw, timeout=PATIENCE_SECONDS)
            heard = 0
            while heard < call.leaves_after and await stream.read() is not grpc.aio.EOF:
                heard += 1
            stream.cancel()
        except grpc.aio.AioRpcError as refusal:
            _require_reason(call, refusal)


def _require_reason(call: Call, refusal: grpc.aio.AioRpcError) -> None:
    """A refusal is one of ours, and says something."""
    assert refusal.code() in STATUSES, (call, refusal.code(), refusal.details())
    assert REASON_KEY in dict(refusal.trailing_metadata() or ()), (call, refusal.details())
    assert refusal.details()


@asynccontextmanager
async def stage(folder: Path) -> AsyncGenerator[Stage]:
    bounds = Bounds(limits=Limits(max_samples=4, max_prompt_bytes=2000, max_batch_requests=3), max_running=4)
    pool = words_pool(num_blocks=POOL_BLOCKS)
    runner = FunctionRunner(pool)
    async with manager_process() as manager, worker_service(pool, runner, attend(manager)) as worker:
        await until(lambda: worker.ready == [True])
        async with gateway(RealFleet(manager, [worker]), folder, bounds) as front:
            yield Stage(front, manager, runner)


def test_nothing_that_is_said_breaks_a_gateway(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with asyncio.Runner() as runner:
        opened = stage(tmp_path)
        running = runner.run(opened.__aenter__())

        @settings(max_examples=settings.default.max_examples)
        @given(st.lists(calls, min_size=CALLS_AN_EXAMPLE, max_size=CALLS_AN_EXAMPLE))
        def say(drawn: list[Call]) -> None:
            runner.run(running.example(drawn))

        try:
            say()
        finally:
            runner.run(opened.__aexit__(None, None, None))
    assert running.calls >= settings.default.max_examples * CALLS_AN_EXAMPLE
    served = sum(chunk.start == 0 for step in running.runner.steps for chunk in step.chunks)
    assert served > settings.default.max_examples, "none was served but those that behave"
    assert "call_failed" not in {record.message for record in caplog.records}
