"""Adapter: the tenants file, read again whenever it changes. Says on whose account a call is made."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

from gateway.core.account import Account, account_of
from octavo.tenants import api_key_in, read_tenants

log = logging.getLogger("octavo.gateway")

LOOK_SECONDS = 1.0
"""From look to look at the file."""


class Tenancy:
    """Who may ask, by their API keys. Without a file anybody may, and all are one."""

    def __init__(self, file: Path | None = None, secret: str = "") -> None:
        """Read the file. `secret` goes into every salt: gateways that are to share blocks have the same.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no tenants file.
        """
        self._file = file
        self._secret = secret
        self._tenants = None if file is None else read_tenants(file)
        self._seen = _look(file)

    def account(self, metadata: Iterable[tuple[str, str | bytes]]) -> Account:
        """On whose account a call with this metadata is made.

        Raises:
            Unauthenticated: there is a tenants file, and the call shows no key of it.
        """
        tenant = None if self._tenants is None else self._tenants.with_key(api_key_in(metadata))
        return account_of(tenant, self._secret)

    async def keep_looking(self) -> None:
        """Follow the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Read the file again if it has changed. One that cannot be read or understood changes nothing, and is told."""
        seen = _look(self._file)
        if self._file is None or seen == self._seen:
            return
        self._seen = seen
        try:
            self._tenants = read_tenants(self._file)
        except (OSError, ValueError) as error:
            log.error("tenants_kept", extra={"reason": str(error)})
        else:
            log.info("tenants_read", extra={"tenants": len(self._tenants)})


def _look(file: Path | None) -> tuple[int, ...]:
    """What changes when a file is replaced or written."""
    try:
        status = None if file is None else file.stat()
    except OSError:
        status = None
    return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)
