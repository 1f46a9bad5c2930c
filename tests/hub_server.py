"""A Hub on the loopback address: the endpoints that uploading and downloading a repository use.

Repositories live in memory, one branch each; data sets are only read. `TOKEN` belongs to the user `me`; private
repositories are for it alone.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


TOKEN = "hf_right"
COMMIT = "0" * 40


class Repository:
    def __init__(self, private: bool) -> None:
        self.private = private
        self.files: dict[str, bytes] = {}


class Hub(BaseHTTPRequestHandler):
    repositories: dict[str, Repository]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Nothing on the screen."""

    # ---- answers ----------------------------------------------------------------------------------------------------

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def may(self, repository: Repository | None, write: bool = False) -> bool:
        """Whether the request's token may read or write; answers if not. The Hub does not tell what is private."""
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if given not in ("", TOKEN):
            self.answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials in Authorization")
        elif repository is None or ((repository.private or write) and given != TOKEN):
            self.answer(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            return True
        return False

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    # ---- endpoints --------------------------------------------------------------------------------------------------

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/api/repos/create":
            settings = json.loads(body)
            if self.may(Repository(private=True), write=True):
                name = f"{settings.get('organization') or 'me'}/{settings['name']}"
                if name in self.repositories:
                    return self.answer(409, {"error": "exists", "url": f"http://{self.headers['Host']}/{name}"})
                private = settings.get("private") or settings.get("visibility") == "private"
                self.repositories[name] = Repository(bool(private))
                self.answer(200, {"url": f"http://{self.headers['Host']}/{name}", "name": name})
            return None
        if self.path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        name, action = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main.*", self.path).groups()
        repository = self.repositories.get(name)
        if not self.may(repository, write=True):
            return None
        if action == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                repository.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        return self.answer(
            200,
            {
                "commitUrl": f"http://{self.headers['Host']}/{name}/commit/{COMMIT}",
                "commitOid": COMMIT,
                "success": True,
            },
        )

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+?)(/revision/[^/]+|/tree/[^/]+)?", path):
            name, what = match.groups()
            repository = self.repositories.get(name)
            if self.may(repository):
                files = [{"rfilename": file} for file in repository.files]
                entries = [
                    {"type": "file", "path": file, "size": len(content), "oid": "0"}
                    for file, content in repository.files.items()
                ]
                information = {"id": name, "sha": COMMIT, "private": repository.private, "siblings": files}
                self.answer(200, entries if what and what.startswith("/tree") else information)
        elif match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            repository = self.repositories.get(match[1])
            if self.may(repository):
                content = repository.files.get(match[2])
                if content is None:
                    self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                else:
                    etag = hashlib.sha1(content).hexdigest()
                    self.answer(200, content, ETag=f'"{etag}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(404, {"error": f"no such endpoint: {path}"})

    do_HEAD = do_GET


@contextlib.contextmanager
def running() -> Iterator[tuple[str, dict[str, Repository]]]:
    """A running Hub: its address and its repositories."""
    repositories: dict[str, Repository] = {}
    handler = type("RunningHub", (Hub,), {"repositories": repositories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", repositories
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
