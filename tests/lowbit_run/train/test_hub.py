"""A model on the Hub is downloaded after a yes only, and found again in the cache."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from lowbit_run.train import ConfigError, from_mapping
from lowbit_run.train.hub import check_dataset, with_model
from tests.command_line import invoke
from tests.lowbit_run.train.runs import base, tiny

NAME = "someone/small-model"


class Hub:
    """A hub of one model, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.model, self.cache, self.downloads = Path(base(folder)), folder / "cache", 0
        self.offline, self.datasets = False, set[str]()

    def snapshot_download(
        self, name: str, *, repo_type: str = "model", local_files_only: bool = False, **options: Any
    ) -> str:
        if repo_type == "dataset":
            assert local_files_only
            if name not in self.datasets:
                raise FileNotFoundError("nothing in the cache")
            return name
        if local_files_only and not self.cache.exists():
            raise FileNotFoundError("nothing in the cache")
        if not local_files_only:
            if self.offline:
                raise ConnectionError("Network is\nunreachable")
            if name != NAME:
                raise LookupError("404 Client Error")
            self.downloads += 1
            shutil.copytree(self.model, self.cache, dirs_exist_ok=True)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return made


def named(name: str = NAME) -> Any:
    return from_mapping({"model": {"pretrained": name}})


def test_a_model_is_downloaded_once_after_a_yes(hub: Hub, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigError, match="is not a folder here; allowed: a folder, or --yes, "):
        with_model(named(), agreed=False)
    assert not hub.downloads
    assert with_model(named(), agreed=True).model.pretrained == str(hub.cache)
    assert with_model(named(), agreed=False).model.pretrained == str(hub.cache), "from the cache"
    # What is not downloaded, as both formats are there, does not count as missing.
    (hub.cache / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    with_model(named(), agreed=False)
    assert hub.downloads == 1
    assert f"{NAME} is in {hub.cache}" in caplog.text
    next(hub.cache.glob("*.safetensors")).unlink()  # an interrupted download
    with_model(named(), agreed=True)
    assert hub.downloads == 2


@pytest.mark.parametrize(("answer", "downloads"), [("y\n", 1), ("\n", 0)])
def test_a_terminal_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch, answer: str, downloads: int):
    for stream in ("stdin", "stderr"):
        terminal = io.StringIO(answer if stream == "stdin" else "")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, stream, terminal)
    if downloads:
        with_model(named(), agreed=False)
    else:
        with pytest.raises(ConfigError):
            with_model(named(), agreed=False)
    assert "Download it from the Hugging Face Hub? [y/N] " in sys.stderr.getvalue()  # pyright: ignore
    assert hub.downloads == downloads


def test_what_cannot_be_downloaded_is_one_line(hub: Hub):
    with pytest.raises(ConfigError, match="'someone/other', which cannot be downloaded: LookupError: 404 Client Error"):
        with_model(named("someone/other"), agreed=True)
    hub.offline = True
    with pytest.raises(ConfigError, match="which cannot be downloaded: Network is unreachable; allowed"):
        with_model(named(), agreed=True)


def test_folders_and_other_names_stay(hub: Hub, tmp_path: Path):
    for name in (str(hub.model), "missing", "", "a/b/c"):
        config = named(name)
        assert with_model(config, agreed=True) is config
    assert not hub.downloads


@pytest.mark.parametrize("name", ["someone/texts", "wikitext"])
def test_a_dataset_is_downloaded_after_a_yes(hub: Hub, name: str):
    config = from_mapping({"data": {"dataset": name}})
    refused = invoke("train", "--data.dataset", name, "--dry-run")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert f"data.dataset is '{name}', which is not a folder here; allowed: a folder, or --yes, " in refused.stderr
    check_dataset(config, agreed=True)
    hub.datasets.add(name)  # from an earlier run
    check_dataset(config, agreed=False)
    for other in ("", str(hub.model), "a/b/c"):  # the last is refused when it is opened
        check_dataset(from_mapping({"data": {"dataset": other}}), agreed=False)


def test_the_command_takes_a_name(hub: Hub, tmp_path: Path):
    tiny(tmp_path)
    words = ["train", "--dry-run", "--model.pretrained", NAME, "--data.text", "text.txt", "--data.sequence", "16"]
    refused = invoke(*words)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    done = invoke(*words, "--yes")
    assert done.exit_code == 0, done.output
    assert f'pretrained = "{hub.cache}"' in done.stdout
