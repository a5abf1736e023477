"""A real Redis that speaks TLS only, and certificates for it and its clients."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redis_server import RedisServer, free_port, redis_server

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]


class Certificates:
    """An authority (`ca`), and what it signed: `server` and `client`, as (certificate, key) files."""

    def __init__(self, folder: Path) -> None:
        self.ca = folder / "ca.pem"
        ca_key = folder / "ca.key"
        _openssl("req", "-x509", *_KEY, "-subj", "/CN=authority", "-keyout", ca_key, "-out", self.ca)
        signed_by = ["-CA", self.ca, "-CAkey", ca_key]
        self.server = (folder / "server.pem", folder / "server.key")
        self.client = (folder / "client.pem", folder / "client.key")
        for (certificate, key), name in ((self.server, "localhost"), (self.client, "client")):
            extra = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
            names = ["-subj", f"/CN={name}", *extra, "-keyout", key, "-out", certificate]
            _openssl("req", "-x509", *signed_by, *_KEY, *names)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


class TlsServer:
    """`url` has everything that a client needs; `plain_url` is the same port without TLS."""

    def __init__(self, server: RedisServer, port: int, certificates: Certificates) -> None:
        self.server = server
        self.certificates = certificates
        self.port = port
        certificate, key = certificates.client
        self.trusting_url = f"rediss://localhost:{port}?ssl_ca_certs={certificates.ca}"
        self.url = f"{self.trusting_url}&ssl_certfile={certificate}&ssl_keyfile={key}"
        self.plain_url = f"redis://localhost:{port}"


@contextmanager
def tls_server() -> Iterator[TlsServer]:
    """It asks its clients for a certificate of the authority."""
    with tempfile.TemporaryDirectory(prefix="kvb-tls-") as folder:
        certificates = Certificates(Path(folder))
        certificate, key = certificates.server
        port = free_port()
        options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "yes"]
        options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        with redis_server(*options, "--tls-ca-cert-file", str(certificates.ca)) as server:
            yield TlsServer(server, port, certificates)
