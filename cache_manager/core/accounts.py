"""On whose account each published block is, and what each account is owed.

Blocks of one tree, which are all chains that begin with the same block, are on one account: that of whoever published
the first block. So what one account keeps never leaves a hole in the chain of another.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cache_manager.core.block import Block
from octavo.ids import NOBODY, TenantTag


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What a tenant is owed in one pool."""

    floor_blocks: int = 0
    """With so many published blocks or fewer, it gives none of them up while others can."""
    retained_blocks: int = 0
    """At most so many wait for their turn where requests have asked to retain them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowances:
    """Of one pool. Whoever is not named shares one account with all others."""

    named: Mapping[TenantTag, Allowance] = field(default_factory=dict[TenantTag, Allowance])
    others: Allowance = Allowance()


NO_ALLOWANCES = Allowances()


@dataclass(slots=True, eq=False)
class Account:
    """One tenant's, or that of all who are not named."""

    number: int
    tenant: TenantTag
    allowance: Allowance
    blocks: int = 0
    """Published and not given up. Not counted for those who are not named: they have no floor."""

    @property
    def spare(self) -> int:
        """Blocks above the floor; less than 0 below it."""
        return self.blocks - self.allowance.floor_blocks


class Accounts:
    """The accounts of one pool, and whose blocks are on which."""

    def __init__(self, allowances: Allowances) -> None:
        assert allowances.others.floor_blocks == 0, "a floor is owed to somebody"
        self._allowances = allowances
        self.others = Account(0, NOBODY, allowances.others)
        self._named = {
            tenant: Account(number, tenant, allowance)
            for number, (tenant, allowance) in enumerate(allowances.named.items(), start=1)
        }
        self.owners: dict[Block, Account] = {}
        """Of the blocks that are on the account of somebody named. For reading."""

    def __len__(self) -> int:
        return 1 + len(self._named)

    def __iter__(self) -> Iterator[Account]:
        yield self.others
        yield from self._named.values()

    def of_tenant(self, tenant: TenantTag) -> Account:
        """The account of a tenant."""
        return self._named.get(tenant, self.others)

    def of_block(self, block: Block) -> Account:
        """The account that a published block is on."""
        return self.owners.get(block, self.others)

    def put(self, blocks: Iterable[Block], account: Account) -> None:
        """These blocks have just been published, on the account of somebody named."""
        self.owners.update(dict.fromkeys(blocks, account))

    def clear(self) -> None:
        """Nothing is published any more."""
        self.owners.clear()
        for account in self:
            account.blocks = 0

    def copy(self, twins: Mapping[Block, Block]) -> "Accounts":
        """Others that stand alike, with the twins of these blocks on them."""
        twin = Accounts(self._allowances)
        for account, copied in zip(self, twin, strict=True):
            copied.blocks = account.blocks
        twin.owners = {
            twins[block]: twin.of_tenant(account.tenant) for block, account in self.owners.items() if block in twins
        }
        return twin

    def forget(self, blocks: Iterable[Block]) -> None:
        """Nothing is published in these blocks any more."""
        for block in blocks:
            self.owners.pop(block, None)
