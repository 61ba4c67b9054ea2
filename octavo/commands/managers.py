"""Asking cache managers: one that is away does not keep the others from being asked."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc

from octavo.commands.connection import transport
from octavo.commands.console import CommandFailed
from octavo.commands.unanswered import why_no_manager
from octavo.service import open_blocking_channel
from octavo.settings import split_address
from octavo.status import translated
from octavo.v1.cache_manager_pb2_grpc import CacheManagerStub

Answer = TypeVar("Answer")

Metadata = tuple[tuple[str, str], ...]


def answers(
    addresses: Sequence[str], ask: Callable[[CacheManagerStub, Metadata], Answer]
) -> Iterator[tuple[str, Answer]]:
    """The address and the answer of each cache manager that answers `ask`, which sends the metadata with its calls.

    Raises:
        CommandFailed: after the last of them, where others do not answer: which, why, and what would change that; or
            before the first, where an address is none.
        OctavoError: the one that is asked refuses.
    """
    own = transport()
    unanswered: list[str] = []
    for address in addresses:
        _check(address)
    for address in addresses:
        with open_blocking_channel(address, own) as channel:
            try:
                with translated():
                    answer = ask(CacheManagerStub(channel), own.fleet_metadata)
            except grpc.RpcError as error:
                unanswered.append(why_no_manager(address, own, error))
                continue
        yield address, answer
    if unanswered:
        raise CommandFailed("; ".join(unanswered))


def _check(address: str) -> None:
    try:
        split_address(address)
    except ValueError as error:
        raise CommandFailed(f"--cache-manager: {error}") from error
