"""What the keys of a sequence's blocks depend on besides its tokens."""

from dataclasses import dataclass

from octavo.hashing import NO_SEAM, Seam


@dataclass(frozen=True, slots=True)
class Media:
    """An image or sound in a prompt."""

    position: int
    """Of its first token."""
    digest: bytes
    """32 bytes, of the content as the model is given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the keys of a sequence's blocks depend on besides its tokens and its pool: scopes that differ share nothing.

    Empty fields are the plain case: text alone, blocks that everybody may find.
    """

    salt: bytes = b""
    """Keeps a tenant's blocks apart: 32 bytes."""
    media: tuple[Media, ...] = ()
    """By position."""
    public_tokens: int = 0
    """So many leading tokens anybody may know: their full blocks are found by everybody, whatever the salt."""

    def agrees_with(self, other: "Scope") -> bool:
        """Whether equal tokens are equal blocks in both. How many of them are public follows from the tokens."""
        return self.salt == other.salt and self.media == other.media

    def seam(self, block_size: int) -> Seam:
        """Where hash chains of this scope become private, if not at their roots."""
        block = self.public_tokens // block_size
        return Seam(block, self.salt) if block and self.salt else NO_SEAM


PLAIN = Scope()
