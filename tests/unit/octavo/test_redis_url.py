"""URLs of the prefix index: what they mean, and what is refused."""

import pytest

from octavo.redis_url import RedisUrl, Topology, parse_redis_url, without_secrets

STANDALONE, SENTINEL, CLUSTER = Topology.STANDALONE, Topology.SENTINEL, Topology.CLUSTER


@pytest.mark.parametrize(
    ("url", "meaning"),
    [
        ("redis://there", RedisUrl(topology=STANDALONE, hosts=(("there", 6379),))),
        ("redis://there:7000/3", RedisUrl(topology=STANDALONE, hosts=(("there", 7000),), database=3)),
        ("redis://[::1]:7000", RedisUrl(topology=STANDALONE, hosts=(("::1", 7000),))),
        ("redis://:word@there", RedisUrl(topology=STANDALONE, hosts=(("there", 6379),), password="word")),
        (
            "rediss://some%40one:a%2Fb%3Ac@there?ssl_ca_certs=/etc/ca.pem",
            RedisUrl(
                topology=STANDALONE,
                hosts=(("there", 6379),),
                tls=True,
                username="some@one",
                password="a/b:c",
                options={"ssl_ca_certs": "/etc/ca.pem"},
            ),
        ),
        ("unix:///run/redis.sock", RedisUrl(topology=STANDALONE, hosts=(), socket_path="/run/redis.sock")),
        (
            "redis+sentinel://:word@a,b:1/main/2?sentinel_password=other",
            RedisUrl(
                topology=SENTINEL,
                hosts=(("a", 26379), ("b", 1)),
                service="main",
                database=2,
                password="word",
                options={"sentinel_password": "other"},
            ),
        ),
        (
            "rediss+sentinel://a/main",
            RedisUrl(topology=SENTINEL, hosts=(("a", 26379),), service="main", tls=True, sentinel_tls=True),
        ),
        (
            "rediss+sentinel://a/main?sentinel_tls=no",
            RedisUrl(topology=SENTINEL, hosts=(("a", 26379),), service="main", tls=True),
        ),
        (
            "redis+sentinel://a/main?sentinel_tls=yes&ssl_ca_certs=/etc/ca.pem",
            RedisUrl(
                topology=SENTINEL,
                hosts=(("a", 26379),),
                service="main",
                sentinel_tls=True,
                options={"ssl_ca_certs": "/etc/ca.pem"},
            ),
        ),
        ("rediss+cluster://a:1,b,c:3", RedisUrl(topology=CLUSTER, hosts=(("a", 1), ("b", 6379), ("c", 3)), tls=True)),
        ("redis+cluster://a/0", RedisUrl(topology=CLUSTER, hosts=(("a", 6379),))),
    ],
)
def test_a_url_means(url: str, meaning: RedisUrl) -> None:
    assert parse_redis_url(url) == meaning


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "wanted a URL"),
        ("there:6379", "wanted a URL"),
        ("http://there", "wanted a URL"),
        ("redis+ring://there", "wanted a URL"),
        ("redis://", "wanted host"),
        ("redis://there:port", "wanted host"),
        ("redis://there:0", "wanted host"),
        ("redis://there:65536", "wanted host"),
        ("redis://a,b", "wanted one host, got 2"),
        ("redis+sentinel://a,b", "got no service"),
        ("redis+sentinel://a,,b/main", "wanted host"),
        ("redis://there/main", "database number"),
        ("redis://:wo/rd@there", "percent-encoded"),
        ("redis://:wo?rd@there", "percent-encoded"),
        ("redis://:wo#rd@there", "percent-encoded"),
        ("redis://there/1/2", "database number"),
        ("redis+cluster://a,b/1", "database 0 only"),
        ("redis://there?ssl_ca_certs=/etc/ca.pem", "needs TLS"),
        ("rediss://there?ssl_cert_reqs=none", "not known"),
        ("redis://there?sentinel_password=word", "is for redis+sentinel://"),
        ("rediss://there?sentinel_tls=yes", "is for redis+sentinel://"),
        ("redis+sentinel://a/main?sentinel_tls=on", "'sentinel_tls' is 'on', wanted yes or no"),
        ("redis+sentinel://a/main?sentinel_tls=no&ssl_ca_certs=/etc/ca.pem", "needs TLS"),
        ("unix://", "wanted unix:///path"),
    ],
)
def test_a_url_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason.replace("+", r"\+")):
        parse_redis_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://there/0", "redis://there/0"),
        ("redis://me:word@there", "redis://***@there"),
        ("redis://:w@rd@there", "redis://***@there"),
        ("redis://:w/o?r#d@there", "redis://***@there"),
        (
            "redis+sentinel://:word@a,b/main?sentinel_password=other&x=1",
            "redis+sentinel://***@a,b/main?sentinel_password=***&x=1",
        ),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert "word" not in repr(parse_redis_url("redis://:word@there"))
