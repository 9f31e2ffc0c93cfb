"""What the parameter `model` may name, and what is said about a name with a typo."""

from pathlib import Path

import pytest

from paged_engine.errors import ConfigurationError
from paged_engine.models.locate import locate_checkpoint


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a checkpoint, an empty folder and two files."""
    (tmp_path / "models" / "Tiny-Llama").mkdir(parents=True)
    (tmp_path / "models" / "Tiny-Llama" / "config.json").touch()
    (tmp_path / "models" / "empty").mkdir()
    (tmp_path / "models" / "tiny-q4.gguf").touch()
    (tmp_path / "models" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(model: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        locate_checkpoint(model)
    return str(caught.value)


@pytest.mark.parametrize("name", ["models/Tiny-Llama", "./models/Tiny-Llama/", "models/tiny-q4.gguf"])
def test_what_is_there_is_a_path(here: Path, name: str) -> None:
    assert locate_checkpoint(name) == Path(name)
    assert locate_checkpoint(str(here / name)) == here / name


@pytest.mark.parametrize("name", ["gpt2", "organisation/model-1.5", "models/Tiny-Lama"])
def test_what_is_not_there_may_be_a_hub_id(name: str) -> None:
    assert locate_checkpoint(name) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("./models/tiny-lama", "models/Tiny-Llama"),
        ("./model/Tiny-Llama", "models"),
        ("./models/tiny_q4.gguf", "models/tiny-q4.gguf"),
        ("models/tiny.q4.gguf", "models/tiny-q4.gguf"),
    ],
)
def test_a_typo_is_told_what_is_probably_meant(here: Path, name: str, meant: str) -> None:
    assert refusal(name).endswith(f"{Path(name)} does not exist; did you mean {meant}?")
    assert refusal(str(here / name)).endswith(f"did you mean {here / meant}?")


def test_where_nothing_is_like_it_the_folder_is_named(here: Path) -> None:
    for name in ("./models/qwen", "./models/qwen/8b", "./models/notes.tx"):
        assert f"there is nothing like '{Path(name).parts[1]}' in {here / 'models'}" in refusal(name)
    assert refusal("/no-such-folder/x/y").endswith("there is nothing like 'no-such-folder' in /")
    assert refusal("./models/notes.txt/x").endswith("notes.txt is a file")
    assert "does not exist" in refusal("~/no-such-folder")


def test_what_is_there_and_no_checkpoint() -> None:
    assert "models/empty has no config.json" in refusal("models/empty")
    assert "got the file models/notes.txt" in refusal("models/notes.txt")
    assert "cannot: " in refusal("./" + "x" * 5000)
