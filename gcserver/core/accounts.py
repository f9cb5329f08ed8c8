"""Credit on one link: contribution bytes by domain, in this pair of lives.

What may live here: the books. What may not: what credit is for and when it goes back (`link.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcserver.core.events import DomainKey

#: Domains whose credit is accounted for on a link at once: those a peer makes up must not fill memory.
MAX_BOOKS = 4096


@dataclass(slots=True)
class Account:
    """Of one domain: sent on this link, returned by the peer, taken from the peer, of those not said so yet; bytes."""

    spent: int = 0
    returned: int = 0
    taken: int = 0
    untold: int = 0


class Accounts(dict[DomainKey, Account]):
    """An account is opened by the first use of its domain; ``get`` opens none."""

    def __missing__(self, domain: DomainKey) -> Account:
        account = self[domain] = Account()
        return account

    def full(self, domain: DomainKey) -> bool:
        """Whether there is no room for an account of ``domain``."""
        return domain not in self and len(self) >= MAX_BOOKS

    def told(self) -> tuple[tuple[bytes, int, int], ...]:
        """(job, domain, bytes taken), which the peer is told now."""
        for account in self.values():
            account.untold = 0
        return tuple((job, domain, a.taken) for (job, domain), a in self.items() if a.taken)

    def returned(self, domain: DomainKey, total: int) -> None:
        """The peer says how much it is done with: never less than before, never more than was spent."""
        account = self.get(domain)
        if account is not None and total > account.returned:
            account.returned = min(total, account.spent)
