"""A stand-in for the Hugging Face hub on 127.0.0.1, for the real client: info, tree and files."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee00" * 5


@contextmanager
def serve(kind: str, repo: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one repository (kind "models" or "datasets"); yield (endpoint, paths asked for).

    Its one commit is COMMIT, also under the name main. Point HF_ENDPOINT, or
    huggingface_hub.constants.ENDPOINT in a running process, at the endpoint.
    """
    asked: list[str] = []
    prefix = "" if kind == "models" else f"{kind}/"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            asked.append(path)
            if path.startswith(f"api/{kind}/{repo}"):
                self.answer_info(path.removeprefix(f"api/{kind}/{repo}").strip("/"))
            elif path.startswith(f"{prefix}{repo}/resolve/"):
                revision, _, name = path.removeprefix(f"{prefix}{repo}/resolve/").partition("/")
                self.answer_file(revision, name)
            else:
                self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

        def answer_info(self, rest: str) -> None:
            parts = rest.split("/")
            revision = parts[1] if len(parts) > 1 else "main"
            if revision not in ("main", COMMIT):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            elif parts[0] == "tree":
                self.answer_json(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": _tag(data)}
                        for name, data in files.items()
                    ]
                )
            else:
                siblings = [{"rfilename": name, "size": len(files[name])} for name in files]
                self.answer_json(
                    {
                        "_id": "0",
                        "id": repo,
                        "sha": COMMIT,
                        "private": False,
                        "gated": False,
                        "disabled": False,
                        "downloads": 0,
                        "likes": 0,
                        "tags": [],
                        "siblings": siblings,
                    }
                )

        def answer_file(self, revision: str, name: str) -> None:
            if revision not in ("main", COMMIT):
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif name not in files:
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            else:
                tag = {"ETag": f'"{_tag(files[name])}"', "X-Repo-Commit": COMMIT}
                self.answer(200, files[name], tag)

        def answer_json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _tag(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()
