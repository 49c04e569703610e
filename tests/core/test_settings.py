"""Settings from TOML files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from swapckpt import AsyncMode, CheckpointConfig, SwapConfig, load_settings
from swapckpt.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "job.toml"


def test_the_tables_of_a_trainer_give_both_configurations(file: Path) -> None:
    file.write_text(
        """
[model]
name = "llama3"

[optimizer]
name = "AdamW"
lr = 3e-4
swap_optimizer = true
swap_optimizer_times = 8
swap_optimizer_min_numel = 0
swap_optimizer_state_keys = ["exp_avg"]

[checkpoint]
async_mode = "async_with_pinned_mem"
keep_latest = 3
sync_files = false
"""
    )
    settings = load_settings(file)
    assert settings.swap == SwapConfig(swap_times=8, min_numel=0, state_keys=("exp_avg",))
    assert settings.checkpoint == CheckpointConfig(
        async_mode=AsyncMode.ASYNC_WITH_PINNED_MEM, keep_latest=3, sync_files=False
    )


def test_the_example_and_the_table_of_the_docs(file: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/saving.md").read_text()
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    settings = load_settings(file)
    assert settings.swap == SwapConfig(swap_times=16)
    assert settings.checkpoint == CheckpointConfig(
        async_mode=AsyncMode.ASYNC_WITH_PINNED_MEM, keep_latest=3, keep_every=1000
    )
    table = page.partition("## Settings\n")[2].partition("```toml")[0]
    for field in dataclasses.fields(CheckpointConfig):
        assert f"\n| `{field.name}` | " in table


def test_without_tables_nothing_is_swapped_and_defaults_hold(file: Path) -> None:
    file.write_text("")
    assert load_settings(file).swap is None
    assert load_settings(file).checkpoint == CheckpointConfig()
    file.write_text("[optimizer]\nswap_optimizer = false\nswap_optimizer_times = 8\n")
    assert load_settings(file).swap is None


def test_every_field_has_a_name_in_the_file(file: Path) -> None:
    for field in dataclasses.fields(SwapConfig):
        if isinstance(field.default, bool | int | float):
            name = "times" if field.name == "swap_times" else field.name
            file.write_text(f"[optimizer]\nswap_optimizer_{name} = {str(field.default).lower()}\n")
            load_settings(file)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            (
                "[optimizer]\nswap_optimizr = true\nswap_optimizer_time = 3\nlearning_rat = 1.0\n"
                "[checkpoint]\nkeep_lates = 3\nfolder_of_my_own_making = 'x'\n"
            ),
            [
                "  - [checkpoint] folder_of_my_own_making",
                "  - [checkpoint] keep_lates, did you mean keep_latest?",
                "  - [optimizer] swap_optimizer_time, did you mean swap_optimizer_times?",
                "  - [optimizer] swap_optimizr, did you mean swap_optimizer?",
            ],
        ),
        (
            "[optimizer]\nswap_times = 3\nswap_min_numel = 0\n",
            [
                "  - [optimizer] swap_min_numel, did you mean swap_optimizer_min_numel?",
                "  - [optimizer] swap_times, did you mean swap_optimizer_times?",
            ],
        ),
        (
            "[optimiser]\nswap_optimizer = true\n[checkpnt]\nkeep_latest = 3\n",
            [
                "  - [checkpnt], did you mean [checkpoint]?",
                "  - [optimiser], did you mean [optimizer]?",
            ],
        ),
    ],
    ids=["keys", "names of the class", "tables"],
)
def test_all_that_is_unknown_is_listed_with_the_nearest_that_exists(
    file: Path, text: str, lines: list[str]
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert str(caught.value).splitlines()[1:] == lines


def test_tables_of_the_trainer_with_similar_names_are_its_own(file: Path) -> None:
    file.write_text("[optimizers]\nlr = 0.1\n[checkpoints]\nfolder = 'x'\n")
    load_settings(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer\n", "is not TOML"),
        ("optimizer = 3\n", "optimizer must be a table"),
        ("[optimizer]\nswap_optimizer = 'yes'\n", "must be true or false, got 'yes'"),
        ("[optimizer]\nswap_optimizer_times = 0\n", "swap_times must be an integer >= 1, got 0"),
        ("[checkpoint]\nasync_mode = 'asynch'\n", "Did you mean 'async'"),
        ("[checkpoint]\nsync_files = 'false'\n", "sync_files must be True or False, got 'false'"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_a_missing_file(file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_settings(file)
