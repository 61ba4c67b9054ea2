"""The containers, run for real: `docker compose up` from the root, and a client outside of it.

`make test-compose` runs this file, with an engine of its own where none answers.
"""

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from openai import OpenAI

from octavo.v1 import gateway_pb2 as pb
from octavo.v1.gateway_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SYSTEM = "You keep the books of a small library. " + "Every loan is written down with its day and its reader. " * 12


class Stack:
    """One Compose project of the checkout's compose.yaml, under a name and on a port of its own."""

    def __init__(self) -> None:
        with socket.socket() as free, socket.socket() as free_too:
            free.bind(("127.0.0.1", 0))
            free_too.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
            self.http_port = free_too.getsockname()[1]
        self.project = f"octavo-test-{os.getpid()}"

    def compose(self, *arguments: str) -> str:
        """What `docker compose ARGUMENTS` prints."""
        # Greedy text repeats in float32; in bfloat16 a hit may differ from a miss in the last bits, and at a near tie
        # in its tokens. One thread for each worker: two workers share two cores here.
        settings = {"OCTAVO_PORT": self.address.rpartition(":")[2], "OCTAVO_HTTP_PORT": str(self.http_port)}
        settings |= {"OCTAVO_DTYPE": "float32", "OCTAVO_THREADS": "1"}
        return _output("docker", "compose", "--project-name", self.project, *arguments, env=os.environ | settings)

    def containers(self, service: str) -> list[dict[str, str]]:
        lines = self.compose("ps", "--all", "--format", "json", service).splitlines()
        return [json.loads(line) for line in lines]

    def left_over(self) -> list[str]:
        """Ids of the containers, volumes and networks that the project has."""
        mine = ("--quiet", "--filter", f"label=com.docker.compose.project={self.project}")
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [line for kind in kinds for line in _output("docker", *kind, *mine).splitlines()]


def _output(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack()
    try:
        stack.compose("--parallel", "1", "build")  # the images share steps
        stack.compose("up", "--wait")
        yield stack
    except subprocess.CalledProcessError as error:
        error.add_note(stack.compose("logs", "--no-color", "--tail", "50"))
        raise
    finally:
        stack.compose("down", "--volumes")


@pytest.fixture
def gateway(stack: Stack) -> Iterator[InferenceStub]:
    with grpc.insecure_channel(stack.address) as channel:
        yield InferenceStub(channel)


def ask(gateway: InferenceStub, question: str) -> tuple[str, pb.Usage]:
    """The answer to a chat that starts with SYSTEM, and what it cost."""
    messages = [pb.ChatMessage(role="system", content=SYSTEM), pb.ChatMessage(role="user", content=question)]
    request = pb.GenerateRequest(chat=pb.Chat(messages=messages), max_tokens=8)
    replies = list(gateway.Generate(request, timeout=300, wait_for_ready=True))
    return "".join(reply.delta.text for reply in replies), replies[-1].usage


def test_every_container_becomes_healthy(stack: Stack) -> None:
    health = {
        service: [container["Health"] for container in stack.containers(service)]
        for service in ("redis", "cache-manager", "worker", "gateway")
    }

    assert health == {
        "redis": ["healthy"],
        "cache-manager": ["healthy"],
        "worker": ["healthy", "healthy"],
        "gateway": ["healthy"],
    }


def test_the_managers_books_are_compiled(stack: Stack) -> None:
    lines = stack.compose("logs", "--no-color", "--no-log-prefix", "cache-manager").splitlines()
    started = [json.loads(line) for line in lines if "keeping_books" in line]
    assert started
    assert all(line["compiled"] for line in started)


def test_the_gateway_knows_both_workers(gateway: InferenceStub) -> None:
    fleet = gateway.GetFleet(pb.GetFleetRequest(), timeout=10)

    assert len({worker.worker_id for worker in fleet.workers}) == 2
    assert len({worker.address for worker in fleet.workers}) == 2


def test_the_second_request_computes_only_what_is_new(gateway: InferenceStub) -> None:
    text, cold = ask(gateway, "Who has the atlas?")
    again, warm = ask(gateway, "Who has the atlas?")

    block_size = gateway.GetFleet(pb.GetFleetRequest(), timeout=10).workers[0].pool.block_size

    assert again == text
    assert cold.cached_tokens == 0
    whole_blocks = (warm.prompt_tokens - 1) // block_size * block_size
    assert whole_blocks <= warm.cached_tokens < warm.prompt_tokens
    assert warm.worker_id == cold.worker_id


def test_openais_api_is_there_for_clients_of_it(stack: Stack) -> None:
    with OpenAI(base_url=f"http://127.0.0.1:{stack.http_port}/v1", api_key="any") as client:
        answer = client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
        )

    assert answer.choices[0].message.content


def test_the_image_of_the_gateway_has_no_torch(stack: Stack) -> None:
    probe = "from importlib.util import find_spec; print(find_spec('torch'), find_spec('gateway') is not None)"

    assert stack.compose("exec", "-T", "gateway", "python", "-c", probe).split() == ["None", "True"]


def test_a_killed_worker_comes_back(stack: Stack, gateway: InferenceStub) -> None:
    container = stack.containers("worker")[0]["ID"]
    since = _output("docker", "inspect", "--format", "{{.State.StartedAt}}", container).strip()
    events = ["docker", "events", "--since", since, "--filter", f"container={container}", "--format", "{{.Status}}"]

    # The container's first process is an init; its only child is the service.
    _output("docker", "exec", container, "sh", "-c", "kill -9 $(cat /proc/1/task/1/children)")
    text, _ = ask(gateway, "Who answers while one worker is away?")
    with subprocess.Popen(events, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        died = False
        for status in watch.stdout:
            died = died or status.startswith("die")
            if died and status.startswith("health_status: healthy"):
                break
        watch.terminate()

    assert text
    assert len(gateway.GetFleet(pb.GetFleetRequest(), timeout=10).workers) == 2


def test_down_leaves_nothing(stack: Stack) -> None:
    assert len(stack.left_over()) >= 7

    stack.compose("down", "--volumes")

    assert stack.left_over() == []
