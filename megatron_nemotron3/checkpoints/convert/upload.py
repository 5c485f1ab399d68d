"""Write a folder of planned files to a URL through fsspec: restartable, without a local copy.

Object stores cannot rename, so files get their final names at once. While `journal.jsonl` is there, the
folder is incomplete, and the same command continues it; the files that make it a checkpoint come last.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from megatron_nemotron3.checkpoints.convert.job import (
    JOURNAL,
    MANIFEST,
    Job,
    JobProgress,
    checked_manifest,
    usable,
    write_files,
)
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, OutputFile, write_parts
from megatron_nemotron3.checkpoints.remote import filesystem, root


def check_url(url: str) -> None:
    """Check that nothing is at a URL, except a conversion that was interrupted."""
    with _explained(url):
        store, place = filesystem(url), root(url)
        if store.exists(place) and store.ls(place) and not store.exists(f"{place}/{JOURNAL}"):
            raise ValueError(f"{url}: it exists: give a new place, or remove it")


def upload(job: Job, url: str, report: Callable[[JobProgress], None]) -> dict[str, Any]:
    """Write the files of a job to a URL. Returns the manifest.

    Nobody is kept from writing there at the same time: object stores have no locks.
    """
    check_url(url)
    store, place = filesystem(url), root(url)
    state, fingerprint = job.source_state(), job.fingerprint()
    done = _uploaded(store, place, url, fingerprint, job)

    def write(plan: FilePlan, count: Callable[[int], None]) -> dict[str, Any]:
        with _explained(url), _created(store, f"{place}/{plan.name}") as file, OutputFile(file, count) as out:
            entry = write_parts(plan, job.source, out, finite=job.finite)
        with _explained(url):
            if (size := store.info(f"{place}/{plan.name}")["size"]) != entry["bytes"]:
                raise ValueError(f"{url}/{plan.name}: {size:,} bytes arrived of {entry['bytes']:,}")
        return entry

    todo = [plan for plan in job.files if plan.name not in done]
    _put_journal(store, place, url, fingerprint, done)
    for name, entry in write_files(job, todo, write, 1, report):
        done[name] = entry
        _put_journal(store, place, url, fingerprint, done)
    manifest, small = checked_manifest(job, state, fingerprint, done, url)
    with _explained(url):
        for name, data in small.items():
            store.makedirs(f"{place}/{name}".rpartition("/")[0], exist_ok=True)
            store.pipe_file(f"{place}/{name}", data)
        store.pipe_file(f"{place}/{MANIFEST}", (json.dumps(manifest, indent=1) + "\n").encode())
        store.rm_file(f"{place}/{JOURNAL}")
    return manifest


def _uploaded(store: Any, place: str, url: str, fingerprint: str, job: Job) -> dict[str, dict[str, Any]]:
    """Return the files of the journal that are there in full length."""
    if not store.exists(f"{place}/{JOURNAL}"):
        return {}
    plans, done = {plan.name: plan for plan in job.files}, {}
    try:
        found = json.loads(store.cat_file(f"{place}/{JOURNAL}"))
        if found["plan"] != fingerprint:
            raise ValueError("its source or its options were others")
        for name, entry in found["files"].items():
            if name not in plans or not usable(plans[name], entry) or not store.exists(f"{place}/{name}"):
                continue
            if store.info(f"{place}/{name}")["size"] == entry["bytes"]:
                done[name] = entry
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(
            f"{url}: an interrupted conversion is there that cannot be continued ({problem}): repeat that "
            "command, or remove it"
        ) from None
    return done


def _put_journal(store: Any, place: str, url: str, fingerprint: str, done: dict[str, dict[str, Any]]) -> None:
    with _explained(url):
        store.makedirs(place, exist_ok=True)
        store.pipe_file(f"{place}/{JOURNAL}", json.dumps({"plan": fingerprint, "files": done}).encode())


@contextlib.contextmanager
def _created(store: Any, path: str) -> Iterator[Any]:
    """Open a file to write. If the block fails, what was written is dropped where the store can do that."""
    store.makedirs(path.rpartition("/")[0], exist_ok=True)
    file = store.open(path, "wb")
    try:
        yield file
    except BaseException:
        with contextlib.suppress(Exception):
            file.discard()
            file.closed = True
        raise
    file.close()


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn what a file system raises, which is of many kinds, into one line."""
    try:
        yield
    except ValueError:
        raise
    except Exception as problem:
        raise ValueError(f"{url}: it cannot be written: {problem!r:.300}") from None
