"""The command `gcserver pki`: a CA, certificates of nodes and of operators, in a folder.

What may live here: its arguments and what it prints. What may not: certificates (`pki.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from gcserver.admin.roles import ROLES

#: how long certificates hold if nobody says
CA_DAYS: Final = 3650
NODE_DAYS: Final = 825
OPERATOR_DAYS: Final = 365
ABOUT: Final = "make the certificates by which operators and daemons know each other"


def add_arguments(command: argparse.ArgumentParser) -> None:
    what = command.add_subparsers(dest="pki", required=True, metavar="WHAT")

    def add(name: str, about: str, days: int) -> argparse.ArgumentParser:
        sub = what.add_parser(name, help=about, description=about, allow_abbrev=False)
        sub.add_argument("--days", type=float, metavar="N", default=days, help=f"how long it holds (default {days})")
        sub.add_argument("--force", action="store_true", help="put it in the place of one that is there")
        return sub

    init = add(
        "init", "make a CA: ca.pem, which everybody needs, and ca.key, which signs and nobody else needs", CA_DAYS
    )
    init.add_argument("dir", type=Path, metavar="DIR", help="folder for it; is made if it is not there")
    init.add_argument("--name", default="gradcomm", help="its common name (default gradcomm)")
    node = add(
        "node", "make a node's certificate: node-NAME.pem and node-NAME.key, for admin.cert and admin.key", NODE_DAYS
    )
    node.add_argument("name", metavar="NAME", help="of the node")
    node.add_argument("--dir", type=Path, default=Path(), help="folder of the CA (default: the current one)")
    node.add_argument(
        "--host", action="append", default=[], metavar="HOST",
        help="host name or IP address that operators reach it by; several times for several (NAME, localhost and the "
        "loopback addresses are always among them)",
    )  # fmt: skip
    person = add(
        "operator", "make a certificate for gcctl or Prometheus: operator-NAME.pem, operator-NAME.key", OPERATOR_DAYS
    )
    person.add_argument("name", metavar="NAME", help="of the person or program, as the audit log shows it")
    person.add_argument("--dir", type=Path, default=Path(), help="folder of the CA (default: the current one)")
    person.add_argument(
        "--role", choices=ROLES, required=True, help="viewer: may look; operator: may change things as well"
    )


def run(options: argparse.Namespace) -> None:
    """Raises :class:`gcserver.pki.PkiError`, OSError."""
    from gcserver import pki

    if options.pki == "init":
        made = pki.init(options.dir, options.name, options.days, options.force)
        use = f"copy {made.certificate.name} to every node and operator; keep {made.key.name} where nobody else is"
    elif options.pki == "node":
        hosts = [*options.host, options.name, "localhost", "127.0.0.1", "::1"]
        made = pki.add_node(options.dir, options.name, hosts, options.days, options.force)
        use = "copy both to the node: admin.cert and admin.key; admin.ca is ca.pem"
    else:
        made = pki.add_operator(options.dir, options.name, options.role, options.days, options.force)
        use = (
            "gcctl takes them with ca.pem as --tls-cert, --tls-key and --tls-ca, or GC_TLS_CERT, GC_TLS_KEY, GC_TLS_CA"
        )
    print(f"{made.certificate} and {made.key}, until {made.until:%Y-%m-%d}; {use}")
