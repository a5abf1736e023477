"""The setting that names the log: what it may be, and that no message tells a credential."""

import shutil
import subprocess
from pathlib import Path

import pytest
from log_kit import EPOCH, SECONDS, OpenLog, append_all, drain, page
from redis_server import free_port, redis_server
from redis_topologies import SentinelSet, client_of

from services.common.errors import KvblendError
from services.matcher.log.open import open_log

SECRET = "hunter2"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "sqlite:",
        "redis",
        "redis:",
        "http://localhost",
        f"redis://user:{SECRET}",
        f"redis://user:{SECRET}@host:port",
        f"redis://user:{SECRET}@host/name",
        f"redis://user:{SECRET}@host?no_such_option=1",
        f"redis://user:{SECRET}@host?socket_timeout=1",
        f"redis://user:{SECRET}@host?db=x",
        f"rediss://user:{SECRET}@host?ssl_cert_reqs=perhaps",
        f"unix://user:{SECRET}@/run/redis.sock?no_such_option=1",
        f"redis+sentinel://user:{SECRET}@host:26379",
        f"redis+sentinel://user:{SECRET}@host:26379/",
        f"redis+sentinel://user:{SECRET}@host:26379,/master",
        f"redis+sentinel://user:{SECRET}@host:26379,other:{SECRET}/master",
        f"redis+sentinel://user:{SECRET}@host:26379/master/name",
        f"redis+sentinel://host/master?sentinel_password={SECRET}&no_such_option=1",
        f"redis://user:{SECRET}@[{SECRET}]",
        f"redis+cluster://user:{SECRET}@[::1",
        f"redis+cluster://user:{SECRET}@host/1",
        f"redis+cluster://user:{SECRET}@",
        f"redis+cluster://user:{SECRET}@host:{SECRET}",
        f"redis+other://user:{SECRET}@host",
        f"unix+sentinel://user:{SECRET}@host/master",
    ],
)
def test_case_73_a_setting_that_cannot_be_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        open_log(url, "kvblend")
    assert len(str(caught.value).splitlines()) == 1
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("prefix", ["", "{a}", "a{b", "}"])
def test_a_prefix_that_cannot_keep_keys_together_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        open_log("redis://localhost", prefix)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@127.0.0.1:1/2",
        f"rediss://:{SECRET}@127.0.0.1:1?ssl_cert_reqs=none",
        f"unix://user:{SECRET}@/nowhere.sock?db=1",
        f"redis+sentinel://user:{SECRET}@127.0.0.1:1,127.0.0.1:2/master/1?sentinel_password={SECRET}",
        f"rediss+sentinel://user:{SECRET}@127.0.0.1:1/master?ssl_check_hostname=false",
        f"redis+cluster://user:{SECRET}@127.0.0.1:1,127.0.0.1:2",
        f"rediss+cluster://user:{SECRET}@127.0.0.1:1/0",
    ],
)
def test_credentials_are_in_no_message_and_no_repr(url: str, opened: OpenLog) -> None:
    log = opened(url, "kvblend")
    with pytest.raises(KvblendError, match="cannot be reached") as caught:
        log.tail("a", EPOCH, SECONDS)
    assert caught.value.reason == "LOG_UNAVAILABLE"
    assert SECRET not in str(caught.value) + repr(log) + repr(vars(log))


def test_a_password_is_used_and_a_wrong_one_is_not_told(opened: OpenLog) -> None:
    with redis_server() as server, client_of(server) as client:
        client.config_set("requirepass", "open sesame")
        good = server.tcp_url.replace("://", "://:open%20sesame@")
        append_all(opened(good, "kvblend"), page())
        with pytest.raises(KvblendError, match="assword") as caught:
            opened(server.tcp_url.replace("://", f"://:{SECRET}@"), "kvblend").end(SECONDS)
        assert caught.value.reason == "LOG_UNAVAILABLE"
        assert SECRET not in str(caught.value)
        with pytest.raises(KvblendError, match="uthentication"):
            opened(server.tcp_url, "kvblend").end(SECONDS)


def test_a_master_that_the_sentinels_do_not_know_is_named(sentinels: SentinelSet, opened: OpenLog) -> None:
    log = opened(sentinels.url + "-other", "kvblend")
    with pytest.raises(KvblendError, match="kvblend-other"):
        log.end(SECONDS)


def test_databases_are_apart(opened: OpenLog) -> None:
    with redis_server() as server:
        append_all(opened(server.tcp_url.removesuffix("0") + "3", "kvblend"), page())
        assert opened(server.tcp_url, "kvblend").end(SECONDS).number == 0
        assert opened(f"{server.unix_url}?db=3", "kvblend").end(SECONDS).number == 1


def test_tls_is_used_and_the_servers_certificate_checked(tmp_path: Path, opened: OpenLog) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    with redis_server() as server:
        server.kill()
        try:
            server.start(*options)
        except RuntimeError:
            pytest.skip("this server was built without TLS")
        log = opened(f"rediss://localhost:{port}?ssl_ca_certs={certificate}", "kvblend")
        append_all(log, *(page("a", number, data=bytes(100_000)) for number in range(1, 20)))
        assert len(drain(log)) == 19
        with client_of(server) as client:
            assert len(client.client_list()) == 2, "connections are used again"
        with pytest.raises(KvblendError, match="CERTIFICATE_VERIFY_FAILED"):
            opened(f"rediss://localhost:{port}", "kvblend").end(SECONDS)
