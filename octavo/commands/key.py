"""API keys: `octavo key` draws one; the other verbs show the one that OCTAVO_API_KEY holds."""

import os
import secrets
from hashlib import sha256

from octavo.commands.console import err

VARIABLE = "OCTAVO_API_KEY"

_KEY_BYTES = 32


def api_key() -> str | None:
    """The user's own key; None for a gateway that asks for none."""
    return os.environ.get(VARIABLE) or None


def draw_key() -> None:
    """Print a new key, which nothing remembers, and say what stands for it in a tenants file."""
    key = f"octavo-{secrets.token_urlsafe(_KEY_BYTES)}"
    print(key)
    err.print(
        f'In the tenants file: api_key_sha256 = ["{sha256(key.encode()).hexdigest()}"]', markup=False, soft_wrap=True
    )
    err.print(f"For its holder: {VARIABLE}, or the metadata `authorization: Bearer KEY`.", markup=False, soft_wrap=True)
