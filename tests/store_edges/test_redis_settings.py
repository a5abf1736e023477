"""The settings of L2: refused in one line when wrong, never with a credential; each reaches the tier."""

from pathlib import Path

import pytest

from services.common.config import load_settings
from services.common.redis_url import parse_route
from services.store.server import make_tier
from services.store.settings import StoreSettings

SECRET = "hunter2"
REFUSED = {
    "another scheme": (["--redis-url", "http://127.0.0.1"], "must start with redis://"),
    "another scheme, with a login": (["--redis-url", f"amqp://user:{SECRET}@host"], "must start with redis://"),
    "no port": (["--redis-url", f"redis://user:{SECRET}@host:port"], "cannot be understood"),
    "no such option": (["--redis-url", f"redis://:{SECRET}@host?no_such_option=1"], "option"),
    "an option that is no number": (["--redis-url", f"redis://:{SECRET}@host?db=x"], "cannot be understood"),
    "a database that is no number": (["--redis-url", f"redis://:{SECRET}@host/x"], "database"),
    "a cluster's database": (["--redis-url", f"redis+cluster://:{SECRET}@host/3"], "database 0"),
    "Sentinels without a master": (["--redis-url", f"redis+sentinel://host?sentinel_password={SECRET}"], "master"),
    "no authority": (["--redis-url", "rediss://host?ssl_ca_certs=/does/not/exist"], "ssl_ca_certs"),
    "no certificate": (["--redis-url", "rediss+cluster://host?ssl_certfile=/does/not/exist"], "ssl_certfile"),
    "braces": (["--redis-key-prefix", "a{b}"], "braces"),
    "small parts": (["--redis-part-bytes", "1000"], "1048576"),
    "large parts": (["--redis-part-bytes", "8388608"], "4194304"),
    "no connections": (["--redis-connections", "0"], "1"),
    "no time": (["--redis-connect-seconds", "0"], "0"),
    "no interval": (["--redis-retry-seconds", "0"], "0"),
    "no life": (["--redis-ttl-seconds", "0"], "1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_case_73_a_wrong_setting_is_refused_in_one_line(what: str) -> None:
    flags, allowed = REFUSED[what]
    with pytest.raises(SystemExit) as ended:
        load_settings(StoreSettings, flags)
    line = str(ended.value)
    assert "\n" not in line
    assert flags[0].removeprefix("--").replace("-", "_") in line
    assert allowed in line
    assert SECRET not in line


@pytest.mark.parametrize(
    "url",
    [
        "redis://host",
        "redis://user:password@host:6380/2",
        "rediss://host?ssl_cert_reqs=required",
        "unix:///run/redis.sock?db=1",
        "redis+sentinel://one:26379,two/master/1?sentinel_password=x",
        "redis+cluster://user:password@one:7000,two:7001",
        "rediss+cluster://one,two",
    ],
)
def test_every_kind_of_server_is_taken(url: str) -> None:
    settings = load_settings(StoreSettings, ["--redis-url", url])
    tier = make_tier(settings)
    assert tier is not None
    assert tier.tier_id == f"{parse_route(url).name}#kvblend:"
    tier.close()


def test_files_that_are_there_are_taken(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.write_text("")
    assert load_settings(StoreSettings, ["--redis-url", f"rediss://host?ssl_ca_certs={authority}"]).redis_url
