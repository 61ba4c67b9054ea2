"""What one event of a chat's stream costs the HTTP door, in microseconds of one core.

    python -m bench.http_events

- `http_event_us`: from the dispatcher's event to the bytes of a server-sent event. Sending them is not in it.
- `http_event_json_us`, `http_event_to_json_us`: of that, writing the JSON, by `json` and as the door does it.

Medians of CPU time, one JSON object a line.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from statistics import median

from pydantic_core import to_json

from gateway.core.events import Delta, Event, Started
from gateway.http_door.answers import Stream
from gateway.http_door.forms import ChatForm, Extras, Head
from octavo.ids import WorkerId

EVENTS = 20_000
ROUNDS = 9
_HEAD = Head(id="chatcmpl-" + "0" * 32, created=1_700_000_000, model="smollm2")
_CHUNK = {
    "id": _HEAD.id,
    "object": ChatForm.chunk,
    "created": _HEAD.created,
    "model": _HEAD.model,
    "choices": [{"index": 0, "delta": {"content": " blue"}, "logprobs": None, "finish_reason": None}],
}


async def _events() -> AsyncGenerator[tuple[int, Event]]:
    yield 0, Started(request_id="r", worker_id=WorkerId("w"), prompt_tokens=9, predicted_cached_tokens=0)
    delta = Delta(0, " blue", (7,))
    for _ in range(EVENTS):
        yield 0, delta


async def _stream() -> None:
    form = ChatForm(tool_form=None, extras=Extras(), piece=lambda _: b"")
    async for _ in Stream(form, _HEAD, 1, usage=False, usage_so_far=False).of(_events()):
        pass


def _written(write: Callable[[object], object]) -> None:
    for _ in range(EVENTS):
        write(_CHUNK)


def _microseconds(work: Callable[[], object]) -> float:
    """Of CPU time an event."""
    taken: list[float] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return median(taken) / EVENTS * 1e6


def main() -> None:
    """Measure and print."""
    for name, work in (
        ("http_event_us", lambda: asyncio.run(_stream())),
        ("http_event_json_us", lambda: _written(lambda chunk: json.dumps(chunk, ensure_ascii=False).encode())),
        ("http_event_to_json_us", lambda: _written(to_json)),
    ):
        print(json.dumps({"name": name, "value": round(_microseconds(work), 2), "unit": "us"}))


if __name__ == "__main__":
    main()
