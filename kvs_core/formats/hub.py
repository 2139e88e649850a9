"""Model files from a model hub (``-hf``, ``-hff``, ``-hft``) or a plain address (``-mu``), through a local cache.

The cache is looked at first, and what is there costs no network. Hub files lie where ``huggingface_hub`` keeps them, so
that other programs find them too:

    LLAMA_CACHE, else HF_HUB_CACHE, else HF_HOME/hub, else XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub
      models--USER--MODEL/snapshots/COMMIT/FILE
      urls/HOST/FOLDER/FILE                           files fetched from a plain address

The hub's address is MODEL_ENDPOINT, else HF_ENDPOINT, else https://huggingface.co. Of split models all parts are
fetched. Tokens are handed to ``huggingface_hub`` and appear in no message.
"""

from __future__ import annotations

import http.client
import logging
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from stat import S_ISDIR, S_ISREG
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from kvs_core.errors import ModelFileError, SettingsError
from kvs_core.formats.gguf import part_names
from kvs_core.units import Progress

_REPO = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<tag>[\w.-]+))?", re.ASCII)
_SIDECAR = re.compile(r".*(mmproj|imatrix).*|(mtp|eagle3|dflash)-.*")
_DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
_TIMEOUT_S = 30.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. ``source`` is a hub repository (user/model) or an address without its scheme."""

    source: str
    file: str
    n_bytes: int
    path: Path


def cache_dir() -> Path:
    """The folder described at the top of this file; it may not exist yet."""
    env = os.environ
    if direct := env.get("LLAMA_CACHE") or env.get("HF_HUB_CACHE"):
        return Path(os.path.expanduser(direct))
    if home := env.get("HF_HOME"):
        return Path(os.path.expanduser(home)) / "hub"
    return Path(os.path.expanduser(env.get("XDG_CACHE_HOME") or "~/.cache")) / "huggingface" / "hub"


def resolve_hf(repo: str, *, file: str | None, token: str | None, offline: bool, progress: Progress | None) -> Path:
    """The local path of the model that ``-hf repo`` names, fetched if it is not in the cache.

    repo   user/model[:quant]; quant is looked for in the file names, whatever its case
    file   a file of that repository (``-hff``); quant is then not looked at
    token  for private repositories; without it huggingface_hub's own (HF_TOKEN or a saved login)

    With neither quant nor file: Q4_K_M, else Q8_0, else the first model file. A cached Q4_K_M answers that without the
    network; offline, what the cache has stands for the repository.
    Raises SettingsError for a malformed name, ModelFileError for a model that is not there or cannot be fetched.
    """
    match = _REPO.fullmatch(repo)
    if match is None or ".." in repo or "--" in match["name"]:
        raise SettingsError(f"-hf {repo}: write user/model or user/model:quant, such as user/model:Q4_K_M")
    if token and not re.fullmatch("[!-~]+", token):
        raise SettingsError("-hft: the token has a space or another character that no token has; check it")
    name, tag = match["name"], match["tag"]
    wish = _Wish(file, (tag,) if tag else _DEFAULT_TAGS, any_file=tag is None)
    # Online, a cached Q8_0 does not answer for a repository that may have Q4_K_M.
    firm = wish if offline or tag else _Wish(file, _DEFAULT_TAGS[:1], any_file=False)
    for snapshot in _snapshots(cache_dir() / f"models--{name.replace('/', '--')}"):
        chosen = firm.choose(_complete(_files(snapshot)))
        if chosen is not None:
            return snapshot / chosen
    if offline:
        raise ModelFileError(f"-hf {repo}: is not in the cache {cache_dir()}; run once without --offline to fetch it")
    return _fetch_hf(name, wish, token or None, progress)


def fetch_url(url: str, *, offline: bool, progress: Progress | None) -> Path:
    """The local path of the model at an http or https address, fetched if it is not in the cache.

    Raises SettingsError for an address of another kind, ModelFileError if it cannot be fetched.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # such as a port that is no number
        host = port = None
    folder, _, file = parts.path.rpartition("/") if host else ("", "", "")
    file = unquote(file)
    if not host or parts.scheme not in ("http", "https") or not file or file in (".", "..") or "/" in file:
        raise SettingsError(f"-mu {url}: must be http:// or https:// and end in the name of a file")
    place = [f"{host}:{port}" if port else host, *(quote(unquote(step), safe="") for step in folder.split("/") if step)]
    if parts.query:
        place.append(f"query-{sha256(parts.query.encode()).hexdigest()[:16]}")
    if ".." in place or "." in place:
        raise SettingsError(f"-mu {url}: must not contain the folders . or ..")
    target = cache_dir().joinpath("urls", *place, file)
    for name in part_names(file):
        path = target.with_name(name)
        if os.path.isfile(path):  # unlike Path.is_file, false for a name too long
            continue
        shown = f"{parts.scheme}://{place[0]}{folder}/{name}"  # neither a password nor a signed query
        if offline:
            raise ModelFileError(f"-mu {shown}: is not in the cache; run once without --offline to fetch it")
        source = parts._replace(path=f"{quote(folder, safe='/%')}/{quote(name)}", fragment="")
        _download(source.geturl(), shown, path, progress)
    return target


def cached_models() -> list[CachedModel]:
    """Every complete model of the cache, in alphabetical order."""
    models: dict[tuple[str, str], CachedModel] = {}
    root = cache_dir()
    for repo_dir, _ in _statuses(root, "models--*--*"):
        source = "/".join(repo_dir.name.split("--")[1:])
        for snapshot in reversed(_snapshots(repo_dir)):  # the newest last: it stands
            _add_models(models, source, snapshot)
    _add_models(models, "", root / "urls")
    return [models[key] for key in sorted(models)]


def _add_models(models: dict[tuple[str, str], CachedModel], source: str, folder: Path) -> None:
    """Those below ``folder``; without a ``source``, their own folder is it."""
    sizes = _files(folder)
    for name in _models(_complete(sizes)):
        place, file = (source, name) if source else (name.rpartition("/")[0], name.rpartition("/")[2])
        models[place, file] = CachedModel(place, file, sum(sizes[part] for part in _parts(name)), folder / name)


def _snapshots(repo_dir: Path) -> list[Path]:
    """The cached states of a repository, the newest first."""
    found = _statuses(repo_dir, "snapshots/*")
    folders = [(status.st_mtime_ns, path) for path, status in found if S_ISDIR(status.st_mode)]
    return [path for _, path in sorted(folders, reverse=True)]


def _files(folder: Path) -> dict[str, int]:
    """GGUF files below ``folder``, relative names to bytes; a link to a blob that is gone is none."""
    found = _statuses(folder, "**/*.gguf")
    return {path.relative_to(folder).as_posix(): status.st_size for path, status in found if S_ISREG(status.st_mode)}


def _statuses(folder: Path, pattern: str) -> list[tuple[Path, os.stat_result]]:
    """What matches ``pattern`` and can be looked at. Other programs use the cache too, and take away what is in it."""
    found = []
    with suppress(OSError):  # a folder that goes away, or that is not ours to read
        for path in folder.glob(pattern):
            with suppress(OSError):
                found.append((path, path.stat()))
    return found


def _parts(name: str) -> list[str]:
    """Relative names of all parts of the model that ``name`` is, or is a part of."""
    path = PurePosixPath(name)
    return [path.with_name(part).as_posix() for part in part_names(path.name)]


def _complete(names: Iterable[str]) -> list[str]:
    there = set(names)
    return [name for name in there if there.issuperset(_parts(name))]


def _models(names: Iterable[str]) -> list[str]:
    """Those that are models, sorted: no projector, no separate drafter, and of a split one the first part alone."""
    return [
        name
        for name in sorted(names)
        if not _SIDECAR.fullmatch(PurePosixPath(name).name.lower()) and _parts(name)[0] == name
    ]


@dataclass(frozen=True, slots=True)
class _Wish:
    """Which of a repository's files is asked for."""

    file: str | None
    tags: tuple[str, ...]
    any_file: bool

    def choose(self, names: list[str]) -> str | None:
        """``file`` itself; else the first model file with the first tag that any has; else, if any will do, the first.

        A tag that begins a word comes first: F16 means F16, and BF16 only where there is no other.
        """
        if self.file is not None:
            return self.file if self.file in names else None
        models = _models(names)
        for tag in self.tags:
            for start in (r"(?<![a-z0-9])", ""):
                pattern = re.compile(start + re.escape(tag) + "[.-]", re.IGNORECASE)
                for name in models:
                    if pattern.search(PurePosixPath(name).name):
                        return name
        return models[0] if models and self.any_file else None


def _fetch_hf(name: str, wish: _Wish, token: str | None, progress: Progress | None) -> Path:
    """Fetch what is wished for from the hub, with all its parts. Foreign errors become ours here."""
    from huggingface_hub import HfApi, errors, hf_hub_download  # here, since it is slow to import

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    endpoint = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    endpoint = endpoint.rstrip("/")
    place = f"-hf {name}"
    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(name, files_metadata=True, timeout=_TIMEOUT_S)
        entries = info.siblings or []
        sizes = {entry.rfilename: entry.size or 0 for entry in entries if entry.rfilename.endswith(".gguf")}
        chosen = wish.choose(list(sizes))
        if chosen is None:
            wanted = wish.file or ("GGUF model" if wish.any_file else f"GGUF model {wish.tags[0]}")
            there = ", ".join(_models(sizes)[:8]) or "none"
            raise ModelFileError(f"{place}: has no {wanted}; its model files: {there}")
        parts = _parts(chosen)
        absent = [part for part in parts if part not in sizes]
        if absent:
            raise ModelFileError(f"{place}: lacks {absent[0]}, a part of {chosen}; choose another file with -hff")
        meter = _Meter(progress, sum(sizes[part] for part in parts))
        options: dict[str, Any] = {"cache_dir": cache_dir(), "endpoint": endpoint, "token": token}
        paths = {}
        for part in parts:
            paths[part] = hf_hub_download(name, part, tqdm_class=_bar_class(meter), **options)
            meter.finish_file(sizes[part])
        return Path(paths[chosen])
    except ModelFileError:
        raise
    except errors.GatedRepoError:
        raise ModelFileError(
            f"{place}: is gated: accept its terms at {endpoint}/{name} and give your token with -hft or HF_TOKEN"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelFileError(
            f"{place}: is not at {endpoint}, or is private: check the name, or give a token with -hft or HF_TOKEN"
        ) from None
    except Exception as error:  # the client library, and what it uses, raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = reason.replace(token, "***") if token else reason
        raise ModelFileError(
            f"{place}: cannot be fetched from {endpoint}: {reason}; with --offline a cached model is used"
        ) from None


@dataclass(slots=True)
class _Meter:
    """Adds up the bytes of the files of one model for the caller's ``progress``."""

    progress: Progress | None
    total_bytes: int
    finished_bytes: int = 0

    def show(self, file_bytes: int) -> None:
        if self.progress is not None:
            self.progress(self.finished_bytes + file_bytes, self.total_bytes)

    def finish_file(self, file_bytes: int) -> None:
        self.finished_bytes += file_bytes
        self.show(0)


def _bar_class(meter: _Meter) -> Any:
    """A class with as much of tqdm's interface as ``huggingface_hub`` uses, which draws nothing and feeds ``meter``."""

    class Bar:
        def __init__(self, *_: object, initial: int = 0, total: int | None = None, **__: object) -> None:
            self.n = initial
            self.total = total

        def update(self, n: int = 1) -> None:
            self.n += n
            meter.show(self.n)

        def ignore(self, *_: object, **__: object) -> None:
            pass

        # Having update_transfer, it gets the bytes of the file alone by update, however they travel.
        update_transfer = set_transfer_postfix_str = set_postfix_str = refresh = close = __exit__ = ignore

        def __enter__(self) -> Bar:
            return self

    return Bar


def _download(url: str, shown: str, path: Path, progress: Progress | None) -> None:
    """Fetch ``url`` to ``path``, which appears only when it is complete. ``shown`` stands for it in messages."""
    partial = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file, urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:
                expected = int(reply.headers.get("Content-Length") or 0)
                received = _copy(reply, file, _Meter(progress, expected))
            if received < expected:
                raise ModelFileError(f"-mu {shown}: broke off after {received} of {expected} bytes; try again")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except urllib.error.HTTPError as error:
        answer = f"{error.code} {error.reason}"
        raise ModelFileError(f"-mu {shown}: the server answers {answer}; check the address") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
        cause = getattr(error, "reason", None) or error
        raise ModelFileError(f"-mu {shown}: cannot be fetched: {cause}; check the address and the network") from None
    except OSError as error:
        cause = error.strerror
        raise ModelFileError(f"-mu {shown}: cannot be kept in {path.parent}: {cause}; see LLAMA_CACHE") from None


def _copy(source: http.client.HTTPResponse, target: IO[bytes], meter: _Meter) -> int:
    """Copy to the end; the number of bytes."""
    n_bytes = 0
    while chunk := source.read(_CHUNK_BYTES):
        target.write(chunk)
        n_bytes += len(chunk)
        meter.show(n_bytes)
    return n_bytes
