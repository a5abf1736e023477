"""Each rule for matchers sees the fault that it is for, and none where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
from manifest_kit import Document, documents, env, find, first, pod

from tools import matcher_rules as rules

LOG = "KVBLEND_MATCHER_LOG"


def set_log(every: list[Document], url: str) -> None:
    env(first(every, "matcher"), LOG, url)


def set_policy(every: list[Document], server: str, policy: str) -> None:
    arguments = first(every, server)["args"]
    arguments[arguments.index("--maxmemory-policy") + 1] = policy


def set_l2(every: list[Document], url: str) -> None:
    env(pod(every, "engine")["initContainers"][0], "KVBLEND_STORE_REDIS_URL", url)


def set_strategy(every: list[Document], **values: object) -> None:
    find(every, "Deployment", "matcher")["spec"]["strategy"] = values


def limit(every: list[Document], memory: str) -> None:
    first(every, "matcher")["resources"]["limits"].update(memory=memory)


# folder, rule, fault, what the finding says
MUTATIONS: dict[str, tuple[str, Any, Callable[[list[Document]], object], str]] = {
    "log server that evicts": (
        "base",
        rules.logs_are_kept,
        lambda every: set_policy(every, "matcher-log", "allkeys-lru"),
        "evicts (allkeys-lru)",
    ),
    "log server that evicts, in one word": (
        "base",
        rules.logs_are_kept,
        lambda every: first(every, "matcher-log").update(args=["--maxmemory-policy=allkeys-random"]),
        "evicts (allkeys-random)",
    ),
    "log in L2": (
        "overlays/with-redis",
        rules.logs_are_kept,
        lambda every: set_log(every, "redis://redis:6379/1"),
        "Deployment/redis, which is L2",
    ),
    "log in an L2 that evicts nothing": (
        "overlays/with-redis",
        rules.logs_are_kept,
        lambda every: (set_policy(every, "redis", "noeviction"), set_log(every, "redis://redis:6379/1")),
        "Deployment/redis, which is L2",
    ),
    "L2 in the log": (
        "base",
        rules.logs_are_kept,
        lambda every: set_l2(every, "redis://user:word@matcher-log.kvblend.svc:6379/1"),
        "StatefulSet/matcher-log, which is L2",
    ),
    "log among several, one of which evicts": (
        "overlays/with-redis",
        rules.logs_are_kept,
        lambda every: set_log(every, "redis+cluster://matcher-log:6379,redis:6379"),
        "Deployment/redis, which evicts",
    ),
    "log nowhere": (
        "base",
        rules.logs_are_kept,
        lambda every: set_log(every, "redis://matcher-lgo:6379/0"),
        "matcher-lgo, which is no Service",
    ),
    "log of one for several": (
        "base",
        rules.own_logs_serve_one,
        lambda every: (set_log(every, "sqlite:/tmp/matcher.db"), set_strategy(every, type="Recreate")),
        "a log for one replica",
    ),
    "log by the default": (
        "base",
        rules.own_logs_serve_one,
        lambda every: first(every, "matcher").pop("env"),
        "memory: is a log for one replica",
    ),
    "log of one for two": (
        "overlays/small",
        rules.own_logs_serve_one,
        lambda every: find(every, "Deployment", "matcher")["spec"].update(replicas=2),
        "a log for one replica",
    ),
    "log of one for the old and the new": (
        "overlays/small",
        rules.own_logs_serve_one,
        lambda every: set_strategy(every, type="RollingUpdate"),
        "must be Recreate",
    ),
    "log file on the root file system": (
        "overlays/small",
        rules.log_files_have_a_volume,
        lambda every: set_log(every, "sqlite:/matcher.db"),
        "/matcher.db is in no volume",
    ),
    "log file on a volume for reading": (
        "overlays/small",
        rules.log_files_have_a_volume,
        lambda every: [mount.update(readOnly=True) for mount in first(every, "matcher")["volumeMounts"]],
        "is in no volume",
    ),
    "store of a name for once": (
        "base",
        rules.store_names_come_again,
        lambda every: find(every, "StatefulSet", "engine").update(kind="Deployment"),
        "a name that each new pod has anew",
    ),
    "one table fits": ("base", rules.tables_fit, lambda every: limit(every, "2Gi"), "two tables"),
    "no limit": ("base", rules.tables_fit, lambda every: first(every, "matcher").pop("resources"), "two tables"),
    "table of the default size": (
        "base",
        rules.tables_fit,
        lambda every: first(every, "matcher").pop("env"),
        "two tables",
    ),
    "table of no number": (
        "base",
        rules.tables_fit,
        lambda every: env(first(every, "matcher"), "KVBLEND_MATCHER_MEMORY_LIMIT_BYTES", "much"),
        "two tables",
    ),
}


@pytest.mark.parametrize("fault", sorted(MUTATIONS))
def test_each_rule_for_matchers_sees_the_fault_it_is_for(fault: str) -> None:
    folder, rule, mutate, told = MUTATIONS[fault]
    assert list(rule(documents(folder))) == []
    broken = documents(folder)
    mutate(broken)
    found = list(rule(broken))
    assert any(told in finding for finding in found), found
    assert not any("\n" in finding for finding in found)


def test_no_rule_for_matchers_is_without_a_fault() -> None:
    assert {rule for _, rule, _, _ in MUTATIONS.values()} == set(rules.MATCHER_RULES)
