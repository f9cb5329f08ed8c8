"""Credit on one link: contribution bytes by domain, in this pair of lives.

What may live here: the books. What may not: what credit is for and when it goes back (`link.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gcserver.core.events import DomainKey


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
