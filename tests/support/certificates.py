"""Certificates that sign themselves, and servers that show them."""

from __future__ import annotations

import ipaddress
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def self_signed(directory: Path, name: str = "127.0.0.1", stem: str = "cert") -> tuple[Path, Path]:
    """A certificate for an address or a host, and its key; `stem` names its files and its subject."""
    cert, key = directory / f"{stem}.pem", directory / f"{stem}.key"
    kind = "DNS"
    with suppress(ValueError):
        kind = "IP" if ipaddress.ip_address(name) else kind
    named = ("-subj", f"/CN={stem}", "-addext", f"subjectAltName={kind}:{name}", "-keyout", key, "-out", cert)
    subprocess.run(["openssl", "req", "-x509", *EC, "-nodes", "-days", "2", *named], check=True, capture_output=True)
    return cert, key


def shown_by_server(cert: Path, key: Path, clients: Path | None = None) -> ssl.SSLContext:
    """Let a server show a certificate, and ask for one that is signed by `clients` if that is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    return context
