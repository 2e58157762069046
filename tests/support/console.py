"""The console of a real server as an operator's browser sees it: signed in with a key, every page that links lead to."""

from __future__ import annotations

import html
import re

import httpx2

PAGES_MAX = 300
_LINK = re.compile(r'href="(/console[^"#]*)')


def console_pages(base_url: str, key: str) -> dict[str, str]:
    """The text of every page that links from the console's first page lead to, by address."""
    with httpx2.Client(base_url=base_url, timeout=60, trust_env=False) as browser:
        answer = browser.post("/console/sign-in", data={"key": key})
        assert answer.status_code == 303, answer.text
        browser.cookies.clear()
        # Over plain HTTP the client would not send a cookie that is marked as secure; a browser does so on this machine.
        browser.headers["Cookie"] = answer.headers["set-cookie"].partition(";")[0]
        found, todo = dict[str, str](), ["/console"]
        while todo:
            address = todo.pop()
            if address in found:
                continue
            assert len(found) < PAGES_MAX, f"more than {PAGES_MAX} pages: {sorted(found)}"
            found[address] = browser.get(address).text
            todo += [html.unescape(link) for link in _LINK.findall(found[address])]
        return found
