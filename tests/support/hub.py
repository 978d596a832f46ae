"""A small hub on loopback for `huggingface_hub`: listings, downloads with ranges, uploads, and faults."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

_LARGE = 256  # bytes from which a pushed file goes by LFS


def commit_of(files: Mapping[str, bytes]) -> str:
    """A commit's name: a hash of its files."""
    digest = hashlib.sha1()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + hashlib.sha1(files[path]).digest())
    return digest.hexdigest()


@dataclass(repr=False)
class Repo:
    """A repository: its commits and the branches that name them; `gated` and `private` as on the real hub."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds a commit with these files, which the branch then names; returns its name."""
        name = commit_of(files)
        self.commits[name] = dict(files)
        self.branches[branch] = name
        return name


@dataclass(repr=False)
class Hub:
    """A hub that serves repositories over HTTP and counts what is asked of it.

    Attributes:
        repos: by name.
        gets: number of GET requests by path; HEAD requests are not counted.
        tokens: what came as `Authorization`.
        bytes_a_second: how fast files are sent; None: at once.
        swapped: path in a repository -> bytes sent in place of the listed ones.
        sizes: path in a repository -> bytes that are listed in place of its own; None: no size is listed.
        refuses: the HTTP status with which every listing is refused.
        role: of the users' tokens.
        pushed: summaries of the pushed commits.
        uploads: what was uploaded for a commit, by its hash.
        endpoint: its address.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    gets: Counter[str] = field(default_factory=Counter)
    tokens: set[str] = field(default_factory=set)
    bytes_a_second: float | None = None
    swapped: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int | None] = field(default_factory=dict)
    refuses: int | None = None
    role: str = "write"
    pushed: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)
    endpoint: str = ""

    def add(self, name: str, folder: Path, branch: str = "main") -> str:
        """Publishes a folder's files as the next commit of a repository; returns the commit."""
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        return self.repos.setdefault(name, Repo()).commit(files, branch)

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process uses this hub, with its cache below `home`."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def fetched(self, file: str) -> int:
        """How often a file of any repository was sent."""
        return sum(
            count for path, count in self.gets.items() if "/resolve/" in path and path.endswith(f"/{file}")
        )

    @property
    def asked(self) -> int:
        """How often repositories were listed."""
        return sum(count for path, count in self.gets.items() if path.startswith("/api/models/"))


@contextmanager
def serving() -> Iterator[Hub]:
    """An empty hub on a free port of loopback."""
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    served: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a test's output is its own."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self.served.gets[urlparse(self.path).path] += 1
        self._answer(body=True)

    def do_PUT(self) -> None:
        oid = self.path.rpartition("/")[2]
        self.served.uploads[oid] = self._read()
        self._send(200, b"")

    def do_POST(self) -> None:
        self._note_token()
        path, content = urlparse(self.path).path, self._read()
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if name in self.served.repos:
                return self._json({"error": "exists", "url": f"{self.served.endpoint}/{name}"}, 409)
            self.served.repos[name] = Repo(private=bool(asked.get("private")))
            self.served.repos[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            return self._json({"url": f"{self.served.endpoint}/{name}", "name": name})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.served.endpoint}/upload/{each['oid']}"}}}
                for each in json.loads(content)["objects"]
            ]
            return self._json({"transfer": "basic", "objects": objects})
        if "/preupload/" in path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["size"] >= _LARGE else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(content)["files"]
            ]
            return self._json({"files": files})
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", path)
        assert found, path
        repo = self.served.repos[found[1]]
        files = dict(repo.commits[repo.branches[found[2]]])
        for line in content.splitlines():
            each = json.loads(line)
            value = each["value"]
            if each["key"] == "header":
                self.served.pushed.append(value["summary"])
            elif each["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif each["key"] == "lfsFile":
                files[value["path"]] = self.served.uploads[value["oid"]]
        oid = repo.commit(files, found[2])
        url = f"{self.served.endpoint}/{found[1]}/commit/{oid}"
        return self._json(
            {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": "", "pullRequest": None}
        )

    def _note_token(self) -> None:
        if token := self.headers.get("Authorization"):
            self.served.tokens.add(token)

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, body: bool) -> None:
        self._note_token()
        address = urlparse(self.path)
        path = unquote(address.path)
        if path == "/api/whoami-v2":
            auth = {"accessToken": {"role": self.served.role}}
            return self._json({"name": "me", "type": "user", "orgs": [{"name": "us"}], "auth": auth})
        if api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            repo, files, commit = self._found(api[1], api[3] or "main")
            if repo is None:
                return None
            if self.served.refuses is not None:
                message = {"X-Error-Message": "Invalid credentials in Authorization header"}
                return self._send(self.served.refuses, b"{}", message)
            sizes = {p: self.served.sizes.get(p, len(c)) for p, c in files.items()}
            if api[2] == "tree":
                rows = [
                    {"type": "file", "path": p, "size": sizes[p], "oid": _oid(c)} for p, c in files.items()
                ]
                return self._json(rows)
            blobs = "blobs" in parse_qs(address.query)
            siblings = [
                {
                    "rfilename": p,
                    **({"size": sizes[p], "blobId": _oid(c)} if blobs and sizes[p] is not None else {}),
                }
                for p, c in files.items()
            ]
            return self._json(
                {"id": api[1], "modelId": api[1], "sha": commit, "siblings": siblings, "tags": []}
            )
        if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, files, commit = self._found(file[1], file[2])
            if repo is None:
                return None
            if repo.gated:
                return self._refuse(403, "GatedRepo")
            if file[3] not in files:
                return self._refuse(404, "EntryNotFound")
            return self._file(files[file[3]], commit, self.served.swapped.get(file[3]), body)
        return self._refuse(404, "RepoNotFound")

    def _found(self, name: str, revision: str) -> tuple[Repo | None, dict[str, bytes], str]:
        repo = self.served.repos.get(name)
        if repo is None or (repo.private and not self.headers.get("Authorization")):
            self._refuse(401, "RepoNotFound")
            return None, {}, ""
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            self._refuse(404, "RevisionNotFound")
            return None, {}, ""
        return repo, repo.commits[commit], commit

    def _file(self, content: bytes, commit: str, swapped: bytes | None, body: bool) -> None:
        headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        sent, status = content if swapped is None or not body else swapped, 200
        if body and (ranged := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            start, whole = int(ranged[1]), len(sent)
            sent, status = sent[start : int(ranged[2]) + 1 if ranged[2] else None], 206
            headers["Content-Range"] = f"bytes {start}-{start + len(sent) - 1}/{whole}"
        self._send(status, sent, headers, body)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, content: bytes, headers: Mapping[str, str] | None = None, body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if not body or self.command == "HEAD":
            return
        speed = self.served.bytes_a_second
        piece = len(content) if speed is None else max(1, int(speed / 20))
        try:
            for start in range(0, len(content), piece or 1):
                self.wfile.write(content[start : start + piece])
                if speed is not None:
                    time.sleep(piece / speed)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
