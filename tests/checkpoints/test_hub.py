"""--push-to-hub, with a local server in the place of the Hub."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")
from huggingface_hub import constants

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import hub
from megatron_nemotron3.models import get, tiny
from tests.support.hf_folders import write_hf

ROOT = Path(__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """whoami, create, preupload and commit of the Hub, for small files."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]

    def answer(self, data: object, status: int = 200) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        good = self.headers.get("Authorization") == "Bearer hf_good"
        if "whoami" in self.path:
            return self.answer(
                {"name": "me", "type": "user"} if good else {"error": "no"}, 200 if good else 401
            )
        self.answer({"id": "me/tuned", "sha": "1", "siblings": [], "_id": "1", "private": True})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.endswith("/repos/create"):
            self.created.append(json.loads(body))
            return self.answer({"url": f"{constants.ENDPOINT}/me/tuned", "name": "me/tuned"})
        if "preupload" in self.path:
            given = json.loads(body)["files"]
            return self.answer(
                {"files": [{**one, "uploadMode": "regular", "shouldIgnore": False} for one in given]}
            )
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{constants.ENDPOINT}/me/tuned/commit/1"
            return self.answer(
                {"commitUrl": url, "commitOid": "1", "commitMessage": "", "commitDescription": ""}
            )
        self.answer({})

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    handler = type("Here", (Hub,), {"files": {}, "created": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{http.server_port}"
        api = hub_api(address)
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        yield handler
        http.shutdown()
        thread.join()


def hub_api(address: str) -> Any:
    from huggingface_hub import HfApi

    return HfApi(endpoint=address)


def test_a_folder_is_pushed_to_a_private_repository(server: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub.require_hub("me/tuned")
    assert not server.created and not server.files
    assert hub.push(tmp_path, "me/tuned").endswith("/me/tuned")
    (created,) = server.created  # older versions of the package say it by another key
    assert created["name"] == "tuned" and (created.get("visibility") == "private" or created["private"])
    assert server.files == {"config.json": b"{}"}


def test_an_interrupted_push_names_the_folder_and_the_command(
    server: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The conversion is done: it is not repeated for the upload."""
    folder = tmp_path / "hf"
    write_hf(tmp_path / "source", tiny(get("nano")))
    assert cli.main(["convert", "from-hf", str(tmp_path / "source"), str(tmp_path / "m")]) == 0

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi(), "upload_folder", interrupted)
    words = ["convert", "to-hf", str(tmp_path / "m"), str(folder), "--push-to-hub", "me/tuned"]
    assert cli.main(words) == 130
    said = capsys.readouterr().err
    assert said == f"not pushed   {folder} is complete: hf upload me/tuned {folder}\ninterrupted\n"
    assert cli.main(["convert", "verify", str(folder)]) == 0 and not server.files


def test_what_cannot_be_pushed_is_said_before_the_work(
    server: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="give OWNER/NAME"):
        hub.require_hub("a b")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    with pytest.raises(ValueError, match="does not accept the token"):
        hub.require_hub("me/tuned")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ValueError, match="hf auth login"):
        hub.require_hub("me/tuned")


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The package loads its modules on use: here nothing else has imported them."""
    code = "from megatron_nemotron3.checkpoints.hub import require_hub; require_hub('me/tuned')"
    for offline, message in (("1", "HF_HUB_OFFLINE is set"), ("0", "nobody is logged in here")):
        given = {"HF_HUB_OFFLINE": offline, "HF_HOME": str(tmp_path), "HF_TOKEN": "", "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, env=os.environ | given, capture_output=True, text=True)
        assert done.returncode == 1
        assert f"ValueError: --push-to-hub me/tuned: {message}" in done.stderr, done.stderr
