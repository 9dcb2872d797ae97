"""As much of W&B's server as its own client needs to log, resume and sync a run; the real one is not free to run.

What it gets for a run's history is kept by offset, as W&B's file stream asks.
"""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class WandbServer:
    """Runs by id: each a list of history rows, a place that was never written None."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any] | None]] = {}
        self.url = ""

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Answer a GraphQL query, by its name."""
        named = {"id": "entity", "name": "entity"}
        project = {"id": "project", "name": "project", "entity": named}
        match operation:
            case "Viewer":
                return {"viewer": {"id": "viewer", "entity": "entity", "username": "user", "teams": {"edges": []}}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "RunResumeStatus":
                return {"model": {**project, "bucket": self._status(variables["name"])}}
            case "UpsertBucket":
                run = {"id": "run", "name": variables["name"], "displayName": "run", "config": "{}", "project": project}
                self.rows.setdefault(variables["name"], [])
                return {"upsertBucket": {"bucket": run, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
                return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        return {}

    def stream(self, run_id: str, offset: int, lines: list[str]) -> None:
        """Write history rows from `offset` on."""
        rows = self.rows.setdefault(run_id, [])
        rows.extend([None] * (offset + len(lines) - len(rows)))
        rows[offset : offset + len(lines)] = map(json.loads, lines)

    def _status(self, run_id: str) -> dict[str, Any] | None:
        rows = self.rows.get(run_id)
        if rows is None:
            return None
        counts = {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]), "eventsTail": "[]"}
        settings = {"config": "{}", "summaryMetrics": "{}", "wandbConfig": '{"t": 1}', "tags": []}
        return {"id": "run", "name": run_id, "displayName": "run", **counts, **tails, **settings}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """Serve on a free port of this machine."""
    state = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None: ...

        def do_GET(self) -> None:
            self._reply({})

        def do_PUT(self) -> None:
            self._body()
            self._reply({})

        def do_POST(self) -> None:
            body = self._body()
            if self.path.endswith("/graphql"):
                query = json.loads(body)
                self._reply({"data": state.answer(query["operationName"], query.get("variables") or {})})
                return
            if self.path.endswith("/file_stream"):
                history = (json.loads(body).get("files") or {}).get("wandb-history.jsonl")
                if history:
                    state.stream(self.path.split("/")[-2], history["offset"], history["content"])
            self._reply({})

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _reply(self, answer: object) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
