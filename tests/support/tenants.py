"""A tenants file."""

from hashlib import sha256
from pathlib import Path


def write_tenants(file: Path, **api_keys: str) -> Path:
    """A file with these tenants, one API key each; put in its place whole."""
    tables = (
        f'[tenants.{name}]\napi_key_sha256 = ["{sha256(api_key.encode()).hexdigest()}"]\n'
        for name, api_key in api_keys.items()
    )
    draft = file.with_suffix(".new")
    draft.write_text("".join(tables), encoding="utf-8")
    return draft.replace(file)
