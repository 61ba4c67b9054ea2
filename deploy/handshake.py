"""Whether services that share one certificate would believe one another: a handshake in memory, before any is started.

gRPC tries again for ever, and tells nobody why nobody can connect.
"""

import ssl
from pathlib import Path


def why_unbelieved(certificate: Path, key: Path, authorities: Path, host: str) -> str | None:
    """Why who shows this certificate to itself, called at `host`, would be refused; None: it would be believed.

    All files are PEM. Both ends show the certificate, as cache managers and workers ask for one as well.
    """
    try:
        caller, called = (
            _context(role, certificate, key, authorities) for role in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
        )
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [caller.wrap_bio(back, there, server_hostname=host), called.wrap_bio(there, back, server_side=True)]
        while ends:
            ends = [end for end in ends if not _is_done(end)]
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError as error:
        return error.reason or str(error)
    return None


def _context(role: int, certificate: Path, key: Path, authorities: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(role)
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC believes an authority that is not the root
    context.load_cert_chain(certificate, key, password="")  # as gRPC does, which asks nobody for one
    context.load_verify_locations(authorities)
    return context


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
