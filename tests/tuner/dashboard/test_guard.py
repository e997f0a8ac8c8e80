"""The guard of servers that also take requests by POST."""

from __future__ import annotations

from typing import Any

from tests.tuner.dashboard.asking import ask

from relax_tune.tuner.dashboard.guard import App, Guard

TOKEN = "0123456789abcdef-secret"


def guarded(token: str | None, **options: Any) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"inside"})

    return Guard(app, token, **options)


def test_post_is_refused_unless_listed() -> None:
    assert ask(guarded(None), "/", method="POST").status == 405
    posts = guarded(None, methods=("GET", "POST"))
    assert ask(posts, "/", method="POST").text == "inside"
    assert ask(posts, "/", method="DELETE").headers["allow"] == "GET, POST"


def test_post_for_a_page_of_another_site_is_refused() -> None:
    posts = guarded(None, methods=("GET", "POST"))
    for headers in ({"origin": "https://example.com"}, {"origin": "null"}, {"sec_fetch_site": "cross-site"}):
        assert ask(posts, "/", method="POST", **headers).status == 403
    same = {"origin": "http://127.0.0.1:8788", "sec_fetch_site": "same-origin"}
    assert ask(posts, "/", method="POST", **same).status == 200


def test_token_of_an_address_admits_no_post() -> None:
    posts = guarded(TOKEN, methods=("GET", "POST"))
    assert ask(posts, f"/?token={TOKEN}", method="POST").status == 401
    assert ask(posts, "/", method="POST", authorization=f"Bearer {TOKEN}").status == 200
    assert ask(posts, f"/?token={TOKEN}").status == 303


def test_open_paths_need_no_token_to_be_read() -> None:
    app = guarded(TOKEN, methods=("GET", "POST"), open_paths=("/health",))
    assert ask(app, "/health").status == 200
    assert ask(app, "/health", method="POST").status == ask(app, "/healthy").status == 401
