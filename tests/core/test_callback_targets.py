"""Which URLs and addresses tenants may have us call: every spelling of a closed one is refused."""

import pytest

from tidegate.core.callback_targets import Target, TargetRefused, TargetRules, is_public, is_reachable, read_target

PUBLIC = TargetRules()
OPEN = TargetRules(frozenset({"127.0.0.1", "hooks.internal", "::1"}), allow_http=True)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "https://example.com/",
        "https://example.com:443/hook?tenant=a&b=%20",
        "https://example.com:8443/a/b;c=d",
        "HTTPS://EXAMPLE.com/Path",
        "https://xn--bcher-kva.example/hook",
        "https://8.8.8.8/hook",
        "https://[2606:4700:4700::1111]/hook",
    ],
)
def test_public_https_is_taken(url: str) -> None:
    target = read_target(url, PUBLIC)
    assert target.url == url
    assert not target.is_allowed


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com",
        "//example.com/",
        "http://example.com/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "gopher://example.com/",
        "javascript:alert(1)",
        "https://",
        "https:///path",
        "https://user@example.com/",
        "https://user:password@example.com/",
        "https://example.com@169.254.169.254/",
        "https://example.com/#fragment",
        "https://example.com\\@10.0.0.1/",
        "https://example.com\\.internal/",
        "https://example.com/a b",
        "https://example.com/\n",
        "https://example.com/\r\nX-Evil: 1",
        "https://example.com/\x00",
        " https://example.com/",
        "https://exämple.com/",
        "https://example。com/",
        "https://example.com./",
        "https://.example.com/",
        "https://-example.com/",
        "https://exa..mple.com/",
        "https://example.com:80/",
        "https://example.com:22/",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:/",
        "https://example.com/%zz",
        "https://localhost/",
        "https://intranet/",
        "https://127.0.0.1/",
        "https://127.1/",
        "https://0177.0.0.1/",
        "https://0x7f.0.0.1/",
        "https://0x7f000001/",
        "https://2130706433/",
        "https://0/",
        "https://10.1/",
        "https://[::1]/",
        "https://[::]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:7f00:1]/",
        "https://[64:ff9b::10.0.0.1]/",
        "https://[fe80::1%25eth0]/",
        "https://[fe80::1]/",
        "https://[1.2.3.4]/",
        "https://[::1/",
        "https://169.254.169.254/latest/meta-data/",
        "https://example.com/" + "a" * 2_048,
    ],
)
def test_everything_else_is_refused_in_words(url: str) -> None:
    with pytest.raises(TargetRefused, match=r"^it|^an address"):
        read_target(url, PUBLIC)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "100.100.100.200",
        "127.0.0.1",
        "127.255.255.254",
        "168.63.129.16",
        "169.254.169.254",
        "169.254.170.2",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.192",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.51.100.7",
        "203.0.113.9",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:0:127.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::a00:1",
        "100::1",
        "2001::1",
        "2001:0:7f00:1::",
        "2001:10::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::",
        "3fff::1",
        "5f00::1",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700:4700::1111%eth0",
        "fec0::1",
        "ff02::1",
        "2606:4700::5efe:7f00:1",
        "2606:4700::200:5efe:a00:1",
        "4000::1",
        "x",
        "1.2.3",
        "1.2.3.4.5",
    ],
)
def test_a_closed_address_is_never_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_an_open_address_is_public(address: str) -> None:
    assert is_public(address)


def test_an_operator_may_allow_hosts_at_any_address_and_port() -> None:
    for url in ("http://127.0.0.1:9000/hook", "http://hooks.internal:81/", "https://[::1]:5000/"):
        assert read_target(url, OPEN).is_allowed
    with pytest.raises(TargetRefused):
        read_target("http://127.0.0.2:9000/", OPEN)
    with pytest.raises(TargetRefused):
        read_target("http://hooks.internal.example:81/", OPEN)
    for port in (0, 65_536, 99_999):
        with pytest.raises(TargetRefused, match="from 1 to 65535"):
            read_target(f"http://127.0.0.1:{port}/hook", OPEN)
    assert read_target("http://127.0.0.1:65535/hook", OPEN).port == 65_535
    allowed = Target("http://hooks.internal/", "http", "hooks.internal", 80, True)
    assert allowed.allows("10.1.2.3")
    assert allowed.allows("127.0.0.1")
    assert allowed.allows("::1")
    assert allowed.allows("fd12::1")


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "168.63.129.16",
        "100.100.100.200",
        "fd00:ec2::254",
        "fe80::1",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "::ffff:169.254.169.254",
        "::169.254.169.254",
        "::ffff:0:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::169.254.169.254",
        "2002:a9fe:a9fe::1",
        "2002:a83f:8110::1",
        "2001:0:4136:e378:8000:63bf:5601:5601",
        "fd12::5efe:169.254.169.254",
        "fd12::200:5efe:169.254.169.254",
        "x",
    ],
)
def test_a_metadata_address_is_closed_even_to_allowed_hosts(address: str) -> None:
    assert not is_reachable(address)
