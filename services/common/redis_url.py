"""The setting that names Redis, as a route. No message has a part of it that may be a credential."""

import os
from urllib.parse import SplitResult, unquote, urlsplit

from redis.connection import parse_url

from services.common.redis_connection import Options, check_options
from services.common.redis_route import ClusterRoute, FixedRoute, Route, SentinelRoute

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
# Options that name files, which must be there.
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")
_SENTINEL_PORT = 26379
_SENTINEL_LOGIN = ("sentinel_username", "sentinel_password")
# Without the text: where a URL has a mistake, a password may stand where a port should.
_MISTAKEN = "a Redis URL cannot be understood: scheme://[user:password@]host[:port]..."


def parse_route(url: str, key: bytes = b"") -> Route:
    """The way to the server that holds `key`, and to all of them (`Route.layout`).

    redis:// or rediss://[user:password@]host[:port][/database], unix://[user:password@]/path[?db=0],
    redis+sentinel://[user:password@]host[:port],.../master[/database] (of the Sentinels themselves:
    ?sentinel_username=...&sentinel_password=...), redis+cluster://[user:password@]host[:port],...; with rediss+ for
    TLS. Further options are redis-py's, in the query: ?ssl_ca_certs=/path&ssl_certfile=/path&ssl_keyfile=/path.

    Raises ValueError.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(_MISTAKEN) from None
    if parts.scheme not in SCHEMES:
        raise ValueError(f"must start with {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    scheme, _, kind = parts.scheme.partition("+")
    if kind == "sentinel":
        return _sentinel_route(parts, scheme)
    if kind == "cluster":
        return _cluster_route(parts, scheme, key)
    options = _options(url)
    if scheme == "unix":
        return FixedRoute(f"unix:{options.get('path', '')}/{options.get('db', 0)}", options)
    _check_database(parts.path.removeprefix("/"))
    address = f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return FixedRoute(f"{scheme}:{address}/{options.get('db', 0)}", options)


def _sentinel_route(parts: SplitResult, scheme: str) -> Route:
    master, _, database = parts.path.removeprefix("/").partition("/")
    if not master:
        raise ValueError(f"{scheme}+sentinel:// needs the master's name: host:port,host:port/master")
    _check_database(database)
    login, hosts = _split(parts)
    data = _options(f"{scheme}://{login}localhost/{database}?{parts.query}", without=_SENTINEL_LOGIN)
    # Sentinels have a login of their own, and no databases.
    asked = _options(f"{scheme}://localhost?{parts.query}", without=("db",))
    for name in _SENTINEL_LOGIN:
        if name in asked:
            asked[name.removeprefix("sentinel_")] = asked.pop(name)
    check_options(asked)
    sentinels = [{**asked, "port": _SENTINEL_PORT, **_address(host)} for host in hosts]
    return SentinelRoute(f"{scheme}+sentinel:{','.join(hosts)}/{master}", sentinels, unquote(master), data)


def _cluster_route(parts: SplitResult, scheme: str, key: bytes) -> Route:
    if parts.path.strip("/") not in ("", "0"):
        raise ValueError("a Redis Cluster has database 0 only")
    login, hosts = _split(parts)
    nodes = [_options(f"{scheme}://{login}{host}?{parts.query}") for host in hosts]
    nodes = [{"port": 6379, **options} for options in nodes]
    return ClusterRoute(f"{scheme}+cluster:{','.join(hosts)}", nodes, key)


def _split(parts: SplitResult) -> tuple[str, list[str]]:
    login, at, hosts = parts.netloc.rpartition("@")
    if not all(hosts.split(",")):
        raise ValueError(f"{parts.scheme}:// needs at least one host: host:port,host:port")
    return login + at, hosts.split(",")


def _address(host: str) -> Options:
    return _parsed(f"redis://{host}")


def _options(url: str, without: tuple[str, ...] = ()) -> Options:
    options = {name: value for name, value in _parsed(url).items() if name not in without}
    if not set(options) & set(_SENTINEL_LOGIN):
        check_options(options)
    for name in _FILES:
        if name in options and not os.access(options[name], os.R_OK):
            raise ValueError(f"the file that {name} names in the Redis URL cannot be read")
    return options


def _parsed(url: str) -> Options:
    try:
        options: Options = parse_url(url)
    except ValueError:
        raise ValueError(_MISTAKEN) from None
    return options


def _check_database(text: str) -> None:
    if text and not text.isdecimal():
        raise ValueError("the database in a Redis URL must be a number")
