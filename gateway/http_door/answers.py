"""From the dispatcher's events to an answer, streamed or whole."""

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import to_json

from gateway.core.events import Delta, Event, Finished, PromptLogprobs, Started, Usage
from gateway.http_door import replies
from gateway.http_door.errors import problem_of
from gateway.http_door.forms import Draft, Form, Head, Part, ReadPrompt
from octavo.errors import OctavoError
from octavo.records.serve import FinishReason

_DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Bill:
    """What all prompts of a request cost together."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, usage: Usage) -> None:
        """One prompt's."""
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.output_tokens += usage.output_tokens

    def told(self) -> replies.Usage:
        """As OpenAI has it."""
        return replies.Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.output_tokens,
            total_tokens=self.prompt_tokens + self.output_tokens,
            prompt_tokens_details=replies.PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


async def whole(events: AsyncIterable[tuple[int, Event]], form: Form, head: Head, samples: int) -> replies.Reply:
    """The answer at once, of `samples` choices a prompt. Raises what the events raise."""
    prompts: dict[int, ReadPrompt] = {}
    drafts: dict[int, Draft] = {}
    bill = Bill()
    async for prompt, event in events:
        first = prompt * samples
        match event:
            case Started():
                prompts[prompt] = ReadPrompt(event.prompt_ids)
                drafts |= {first + sample: Draft() for sample in range(samples)}
            case PromptLogprobs(tokens):
                prompts[prompt] = replace(prompts[prompt], logprobs=tokens)
            case Delta():
                drafts[first + event.sample].add(event)
            case Finished(sample, reason):
                drafts[first + sample].reason = reason
            case Usage():
                bill.add(event)
    return form.whole(head, prompts, drafts, bill.told())


async def prompts_alone(events: AsyncGenerator[tuple[int, Event]]) -> AsyncGenerator[tuple[int, Event]]:
    """The same without what was generated; closing this closes `events`."""
    async with aclosing(events):
        async for prompt, event in events:
            match event:
                case Delta():
                    pass
                case Finished():
                    yield prompt, replace(event, reason=FinishReason.LENGTH)
                case Usage():
                    yield prompt, replace(event, output_tokens=0)
                case _:
                    yield prompt, event


class Stream:
    """The answer as server-sent events, each as soon as there is something to tell."""

    def __init__(self, form: Form, head: Head, samples: int, *, usage: bool, usage_so_far: bool) -> None:
        """Tell `samples` choices a prompt; and the usage, at the end or with every event."""
        self._form = form
        self._samples = samples
        self._head = {"id": head.id, "object": form.chunk, "created": head.created, "model": head.model}
        self._usage = usage
        self._usage_so_far = usage_so_far
        self._unopened: dict[int, ReadPrompt] = {}
        self._so_far = Bill()
        self._bill = Bill()

    async def of(self, events: AsyncIterable[tuple[int, Event]]) -> AsyncGenerator[bytes]:
        """The events; an error in mid-stream is told as the last one, and `[DONE]` is not said."""
        try:
            async for prompt, event in events:
                for part in self._parts(prompt, event):
                    yield self._event([part], self._so_far if self._usage_so_far else None)
        except (OctavoError, TimeoutError) as error:
            yield _event(problem_of(error).body)
            return
        if self._usage:
            yield self._event([], self._bill)
        yield _DONE

    def _parts(self, prompt: int, event: Event) -> list[Part]:
        """Each is told with an event of its own."""
        first = prompt * self._samples
        match event:
            case Delta():
                self._so_far.output_tokens += len(event.token_ids)
                return [*self._opened(prompt), *self._form.grown(first + event.sample, event)]
            case Finished(sample, reason):
                return [*self._opened(prompt), *self._form.ended(first + sample, reason)]
            case Started():
                self._so_far.prompt_tokens += event.prompt_tokens
                self._unopened[prompt] = ReadPrompt(event.prompt_ids)
                return [] if self._form.awaits_prompt_logprobs else self._opened(prompt)
            case PromptLogprobs(tokens):
                if prompt in self._unopened:
                    self._unopened[prompt] = replace(self._unopened[prompt], logprobs=tokens)
                return self._opened(prompt)
            case Usage():
                self._bill.add(event)
                return []

    def _opened(self, prompt: int) -> list[Part]:
        """The first parts of its choices; none if they were told."""
        if prompt not in self._unopened:
            return []
        read, first = self._unopened.pop(prompt), prompt * self._samples
        return [part for sample in range(self._samples) for part in self._form.opening(first + sample, read)]

    def _event(self, choices: list[dict[str, Any]], bill: Bill | None) -> bytes:
        body: dict[str, Any] = {**self._head, "choices": choices}
        if bill is not None:
            body["usage"] = bill.told().model_dump(exclude=None if bill is self._bill else {"prompt_tokens_details"})
        elif self._usage:
            body["usage"] = None
        return _event(body)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
