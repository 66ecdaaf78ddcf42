"""Configuration: one dataclass for the command line, the JSON header and Python."""

import argparse
import dataclasses

import pytest

from probjax.bench.attention.config import AttentionConfig, configs
from probjax.bench.config import parse_bytes

# The configuration keys of the reference result file.
REFERENCE_KEYS = {
    "device", "append", "seqs", "dims", "dtypes", "variants", "modes", "batch", "heads", "impls",
    "interpret_max_seq", "no_ref", "peaks", "peak_seqs", "peak_impls", "peak_timeout", "max_fit",
    "fit_seqs", "fit_impls",
}  # fmt: skip


def parse(*words):
    parser = argparse.ArgumentParser()
    AttentionConfig.add_arguments(parser)
    return AttentionConfig.given(parser.parse_args(words))


def test_every_key_of_the_reference_file_is_a_flag_and_a_header_key():
    header = AttentionConfig().header()
    assert set(header) >= REFERENCE_KEYS
    parser = argparse.ArgumentParser()
    AttentionConfig.add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert flags >= {"--" + key.replace("_", "-") for key in REFERENCE_KEYS}


def test_command_line_header_and_python_agree():
    from_words = AttentionConfig(
        **parse("--seqs", "512,1024", "--variants", "causal", "--peaks", "--batch", "2")
    )
    from_python = AttentionConfig(seqs=(512, 1024), variants=["causal"], peaks=True, batch=2)
    assert from_words == from_python
    assert AttentionConfig.from_header(from_python.header()) == from_python
    assert from_python.header()["seqs"] == "512,1024"


def test_a_header_of_another_program_is_read():
    header = {"device": "cpu", "seqs": "128", "dims": "64", "heads": 8, "somebody_elses": [1]}
    assert AttentionConfig.from_header(header).seqs == (128,)


def test_flags_that_are_not_given_leave_nothing():
    assert parse() == {}
    assert parse("--tag", "after") == {"tag": "after"}


def test_it_is_frozen_and_duplicates_are_dropped():
    config = AttentionConfig(seqs="64,64,32", impls="jax_xla,jax_xla")
    assert config.seqs == (64, 32)
    assert config.impls == ("jax_xla",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch = 3


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("seqs", "12,x", "seqs: got '12,x'"),
        ("seqs", "", "seqs: got ''"),
        ("seqs", (0,), "not above zero"),
        ("impls", "jax_xla,nobody", "unknown nobody"),
        ("dtypes", "int8", "float32, bfloat16, float16"),
        ("modes", "bwd", "fwd, fwdbwd"),
        ("device", "toaster", "device: got 'toaster'"),
        ("batch", 0, "batch: got 0"),
        ("heads", 2.5, "not whole"),
        ("budget", float("inf"), "budget: got inf"),
        ("repeats", "many", "repeats: got 'many'"),
        ("append", "yes", "append: got 'yes'"),
        ("memory_limit", "lots", "memory_limit: got 'lots'"),
        ("preset", "huge", "quick, reference"),
    ],
)
def test_wrong_values_name_the_field_and_what_is_wanted(field, value, said):
    with pytest.raises(ValueError, match=field) as caught:
        AttentionConfig(**{field: value})
    assert said in str(caught.value)
    assert "wanted" in str(caught.value)


def test_a_wrong_flag_names_itself(capsys):
    with pytest.raises(SystemExit):
        parse("--dims", "sixty")
    text = capsys.readouterr().err
    assert "--dims" in text
    assert "'sixty'" in text
    assert "wanted" in text


def test_max_fit_and_its_limit_belong_together():
    with pytest.raises(ValueError, match="max_fit"):
        AttentionConfig(max_fit=True)
    with pytest.raises(ValueError, match="memory_limit"):
        AttentionConfig(memory_limit="1G")
    assert AttentionConfig(max_fit=True, memory_limit="1.5G").memory_limit_bytes == 3 * 2**29


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("100", 100), ("4k", 4096), ("2M", 2**21), ("1.5GiB", 3 * 2**29), ("1 GB", 2**30), ("2t", 2**41)],
)
def test_sizes(text, wanted):
    assert parse_bytes(text) == wanted


@pytest.mark.parametrize("text", ["", "G", "-1G", "0", "nan", "4X", "1e999"])
def test_wrong_sizes(text):
    with pytest.raises((ValueError, OverflowError)):
        parse_bytes(text)


def test_header_holds_no_path_of_this_machine():
    config = AttentionConfig(output="~/somewhere/x.json", torch_python="/opt/secret/bin/python")
    header = config.header()
    assert header["output"] == "x.json"
    assert "/" not in str(header["torch_python"])


def test_the_reference_preset_has_the_cells_of_the_reference_file():
    cells = [cell for config in configs({"preset": "reference"}) for cell in config.cells()]
    assert len(cells) == len(set(cells)) == 50
    f32 = {(c.variant, c.seq) for c in cells if c.dtype == "float32" and c.head_dim == 64 and c.mode == "fwd"}
    lengths = (128, 256, 512, 1024, 2048, 4096)
    wanted = {(v, s) for v in ("plain", "causal") for s in lengths}
    assert f32 == wanted | {("masked_bias", s) for s in lengths if s != 256}
    assert {(c.variant, c.seq) for c in cells if c.head_dim == 128} == {
        (v, s) for v in ("plain", "causal") for s in (256, 1024, 4096)
    }
    assert {(c.variant, c.seq) for c in cells if c.dtype == "bfloat16"} == {("causal", 512), ("causal", 2048)}
    assert {(c.batch, c.heads) for c in cells} == {(1, 8)}


def test_the_quick_preset_has_a_budget_below_three_minutes_and_flags_win_over_it():
    quick = configs({"preset": "quick"})
    assert all(config.budget < 180 for config in quick)
    cells = {(c.variant, c.seq, c.dtype) for config in quick for c in config.cells()}
    assert cells >= {(v, s, "float32") for v in ("plain", "causal", "masked_bias") for s in (512, 1024, 2048)}
    assert any(dtype == "bfloat16" for _, _, dtype in cells)
    assert {config.repeats for config in configs({"preset": "quick", "repeats": 3})} == {3}
    assert len(configs({"seqs": (64,)})) == 1
