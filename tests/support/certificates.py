"""An authority for tests, and certificates of it."""

from dataclasses import dataclass
from pathlib import Path

import trustme

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files."""

    certificate: Path
    key: Path
    both: Path
    """In one file."""


class Authority:
    """Whom the processes of a fleet believe. Its files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *identities: str) -> Certificate:
        """A certificate for these hosts and addresses, by default for the loopback address."""
        issued = self._authority.issue_cert(*(identities or (LOOPBACK,)))
        found = Certificate(*(self._folder / f"{name}-{part}.pem" for part in ("certificate", "key", "both")))
        issued.cert_chain_pems[0].write_to_path(str(found.certificate))
        issued.private_key_pem.write_to_path(str(found.key))
        issued.private_key_and_cert_chain_pem.write_to_path(str(found.both))
        return found

    def variables(self, name: str) -> dict[str, str]:
        """What a service that has a certificate of this authority, and believes it, finds in its environment."""
        own = self.issue(name)
        return {
            "OCTAVO_TLS_CERT": str(own.certificate),
            "OCTAVO_TLS_KEY": str(own.key),
            "OCTAVO_TLS_CA": str(self.file),
        }
