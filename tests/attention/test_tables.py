"""Measured tables: the nearest entry, files, and what a broken one does."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import probjax
from probjax.attention import _triton, gpu_blocks, gpu_cudnn, tables
from probjax.attention.tables import Blocks, Entry, Key, Table

NAMES = {"forward": ("forward",), "tangent": ("tangent",), "backward": ("one", "query", "key", "bias")}


def key(kind="forward", dtype="bfloat16", head_size=64, queries=128, keys=128, pairs=64, masked=False):
    return Key(kind, dtype, head_size, queries, keys, pairs, masked)


def entry(implementation="triton", blocks=(64, 64), **fields):
    found = key(**fields)
    names = NAMES[found.kind][:1]
    return Entry(found, implementation, {name: Blocks(*blocks) for name in names}, {"triton": 1.25})


def table(*entries, device="NVIDIA Test 1"):
    return Table(device, {"jax": "0.11.2"}, entries)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PROBJAX_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget():
    """What was read of files."""
    for function in vars(tables).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


# ----------------------------------------------------------------------------------------------------------
# The nearest entry


def test_the_nearest_length():
    found = table(entry(queries=16, keys=16), entry(queries=128, keys=128), entry(queries=4096, keys=4096))
    for length, want in ((1, 16), (16, 16), (40, 16), (60, 128), (700, 128), (900, 4096), (10**6, 4096)):
        assert found.lookup(key(queries=length, keys=length)).key.queries == want, length


def test_both_lengths_count():
    found = table(entry(queries=16, keys=1024), entry(queries=1024, keys=16), entry(queries=128, keys=128))
    assert found.lookup(key(queries=10, keys=2000)).key.keys == 1024
    assert found.lookup(key(queries=2000, keys=10)).key.keys == 16
    assert found.lookup(key(queries=128, keys=100)).key.keys == 128


def test_then_the_number_of_pairs():
    found = table(entry(pairs=4), entry(pairs=512))
    assert found.lookup(key(pairs=8)).key.pairs == 4
    assert found.lookup(key(pairs=200)).key.pairs == 512
    # A length is worth more than any number of pairs.
    found = table(entry(queries=256, pairs=8), entry(queries=64, pairs=10**6))
    assert found.lookup(key(queries=250, pairs=10**6)).key.pairs == 8


def test_the_own_head_size_or_the_next_larger():
    found = table(entry(head_size=32), entry(head_size=128))
    assert found.lookup(key(head_size=16)).key.head_size == 32
    assert found.lookup(key(head_size=32)).key.head_size == 32
    assert found.lookup(key(head_size=64)).key.head_size == 128
    assert found.lookup(key(head_size=256)) is None


def test_kind_and_dtype_are_the_own():
    found = table(entry(), entry(dtype="float32_highest"), entry(kind="backward"))
    assert found.lookup(key(dtype="float16")).key.dtype == "bfloat16"
    assert found.lookup(key(dtype="float32_highest")).key.dtype == "float32_highest"
    assert found.lookup(key(dtype="float32")) is None
    assert found.lookup(key(kind="tangent")) is None
    assert found.lookup(key(kind="backward")).key.kind == "backward"
    assert table().lookup(key()) is None


def test_masked_is_the_own_where_it_was_measured():
    found = table(entry(masked=True, queries=4096), entry(masked=False))
    assert found.lookup(key(masked=True)).key.queries == 4096
    assert not found.lookup(key(masked=False)).key.masked
    assert table(entry(masked=False)).lookup(key(masked=True)) is not None


def test_the_choice_is_one_and_the_same():
    """Two entries that are as near as each other."""
    one, two = entry(queries=64), entry(queries=256)
    assert table(one, two).lookup(key(queries=128)) == table(two, one).lookup(key(queries=128))


# ----------------------------------------------------------------------------------------------------------
# Files


def test_what_is_saved_is_loaded(tmp_path):
    whole = table(
        entry(),
        Entry(
            key(kind="backward", masked=True),
            "cudnn",
            {"query": Blocks(64, 32, 8, 3), "key": Blocks(32, 64, 4, 1), "bias": Blocks(16, 16, 1, 1)},
            {"cudnn": 3.14, "triton": 4.0},
        ),
    )
    path = tmp_path / "new" / "folder" / "table.json"
    tables.save(whole, path)
    assert tables.load(path) == whole
    assert json.loads(path.read_text())["format"] == tables.FORMAT
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]  # no partial file is left
    tables.save(table(), path)
    assert tables.load(path) == table()


def test_one_entry_a_line(tmp_path):
    tables.save(table(entry(), entry(queries=64)), tmp_path / "t.json")
    lines = [x for x in (tmp_path / "t.json").read_text().splitlines() if '"kind"' in x]
    assert len(lines) == 2


def good():
    fields = {"kind": "forward", "dtype": "bfloat16", "head_size": 64, "queries": 1, "keys": 1, "pairs": 1}
    rest = {"implementation": "triton", "kernels": {"forward": [16, 16, 1, 1]}, "microseconds": {"triton": 2}}
    return fields | {"masked": False} | rest


BROKEN = {
    "no JSON": ("{", "not JSON"),
    "a list": ("[]", "got format 'list'"),
    "no format": ("{}", "got format None"),
    "another format": ('{"format": 99}', "got format 99, want 1"),
    "no entries": ('{"format": 1, "device": "x", "versions": {}}', "entries: got None"),
    "a field is missing": ([{k: v for k, v in good().items() if k != "pairs"}], "pairs: got None"),
    "another kind": ([good() | {"kind": "sideways"}], "got 'sideways', want one of forward"),
    "a size of text": ([good() | {"queries": "16"}], "queries: got '16'"),
    "a size of zero": ([good() | {"keys": 0}], "keys: got 0"),
    "another implementation": ([good() | {"implementation": "magic"}], "implementation: got 'magic'"),
    "an entry that is a list": ([[]], "entry 0: got []"),
    "a time of text": ([good() | {"microseconds": {"triton": "2"}}], "microseconds: got '2'"),
    "a cut of three": ([good() | {"kernels": {"forward": [16, 16, 1]}}], "forward: got the cut"),
    "no power of two": ([good() | {"kernels": {"forward": [48, 16, 1, 1]}}], "powers of two of 16 or more"),
    "too small": ([good() | {"kernels": {"forward": [8, 16, 1, 1]}}], "powers of two of 16 or more"),
    "no warps": ([good() | {"kernels": {"forward": [16, 16, 0, 1]}}], "a power of two of warps"),
    "too many stages": ([good() | {"kernels": {"forward": [16, 16, 1, 9]}}], "1 to 8 stages"),
    "a cut of text": ([good() | {"kernels": {"forward": ["16", 16, 1, 1]}}], "powers of two"),
}


def write(path, content):
    if isinstance(content, list):
        content = json.dumps({"format": 1, "device": "x", "versions": {}, "entries": content})
    path.write_text(content)


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_table(case, tmp_path):
    content, message = BROKEN[case]
    write(tmp_path / "t.json", content)
    with pytest.raises(ValueError) as error:
        tables.load(tmp_path / "t.json")
    assert message in str(error.value)


def test_a_good_entry_is_good(tmp_path):
    write(tmp_path / "t.json", [good()])
    assert tables.load(tmp_path / "t.json").entries[0].kernels == {"forward": Blocks(16, 16, 1, 1)}


# ----------------------------------------------------------------------------------------------------------
# Which file


def test_names_of_files():
    assert tables.file_name("NVIDIA H200") == "attention_nvidia_h200.json"
    assert tables.file_name("NVIDIA A100-SXM4-80GB") == "attention_nvidia_a100_sxm4_80gb.json"


def test_where_tables_are_kept(monkeypatch):
    for name in ("PROBJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr("sys.platform", "linux")
    assert tables.cache_directory() == Path("/home/someone/.cache/probjax")
    monkeypatch.setattr("sys.platform", "darwin")
    assert tables.cache_directory() == Path("/home/someone/Library/Caches/probjax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert tables.cache_directory() == Path("/cache/probjax")
    monkeypatch.setenv("PROBJAX_CACHE", "/tables")
    assert tables.cache_directory() == Path("/tables")
    monkeypatch.setenv("PROBJAX_CACHE", "")
    assert tables.cache_directory() == Path("/cache/probjax")


def test_the_users_table_before_the_packaged_one(cache, monkeypatch):
    packaged = cache / "packaged"
    monkeypatch.setattr(tables, "_PACKAGED", packaged)
    assert tables.table_for("NVIDIA Test 1") is None
    name = tables.file_name("NVIDIA Test 1")
    tables.save(table(entry(queries=16)), packaged / name)
    assert tables.source("NVIDIA Test 1") == packaged / name
    assert tables.table_for("NVIDIA Test 1").entries[0].key.queries == 16
    tables.save(table(entry(queries=32)), cache / name)
    assert tables.source("NVIDIA Test 1") == cache / name
    # Nothing old is remembered; what the user has not measured is still that of the package.
    assert [e.key.queries for e in tables.table_for("NVIDIA Test 1").entries] == [32, 16]
    tables.save(table(entry("cudnn", queries=16)), cache / name)
    assert [e.implementation for e in tables.table_for("NVIDIA Test 1").entries] == ["cudnn"]
    assert tables.table_for("NVIDIA Test 2") is None


@pytest.mark.parametrize("case", ["no JSON", "another format", "no power of two", "an entry that is a list"])
def test_a_broken_table_of_the_user_is_ignored_with_a_warning(case, cache, monkeypatch):
    monkeypatch.setattr(tables, "_PACKAGED", cache / "packaged")
    name = tables.file_name("NVIDIA Test 1")
    write(cache / name, BROKEN[case][0])
    with pytest.warns(UserWarning, match=f"the table .*{name} is ignored: .*probjax tune"):
        assert tables.table_for("NVIDIA Test 1") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tables.table_for("NVIDIA Test 1") is None  # said once
    tables.save(table(entry()), cache / "packaged" / name)
    with pytest.warns(UserWarning, match="is ignored"):
        assert tables.table_for("NVIDIA Test 1") == table(entry())


def test_a_table_under_the_name_of_another_device_is_ignored(cache, monkeypatch):
    monkeypatch.setattr(tables, "_PACKAGED", cache / "packaged")
    tables.save(table(entry()), cache / tables.file_name("NVIDIA Test 2"))
    with pytest.warns(UserWarning, match="measured on 'NVIDIA Test 1'"):
        assert tables.table_for("NVIDIA Test 2") is None


def test_a_user_without_a_home_directory(cache, monkeypatch):
    """Has the packaged tables."""

    def expanduser(self):
        raise RuntimeError("Could not determine home directory.")

    for name in ("PROBJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", expanduser)
    with pytest.raises(FileNotFoundError, match="set PROBJAX_CACHE"):
        tables.cache_directory()
    assert tables.table_for("NVIDIA H200") is not None


def test_a_call_is_cut_as_the_table_says(cache, monkeypatch):
    """And never longer than the call, nor larger than a program's memory."""
    monkeypatch.setattr(_triton, "device_kind", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(_triton, "capability", lambda: (9, 0))
    shape = gpu_blocks.Shape("bfloat16", _triton.HALF, 512, 512, 8, 64, 64, 4, masked=False)
    own = gpu_blocks.chosen("forward", shape)["forward"]
    assert gpu_blocks.entry_of("forward", shape) is None
    tables.save(table(entry(blocks=(128, 32, 8, 3))), cache / tables.file_name("NVIDIA Test 1"))
    assert own != Blocks(128, 32, 8, 3)
    assert gpu_blocks.chosen("forward", shape) == {"forward": Blocks(128, 32, 8, 3)}
    short = gpu_blocks.Shape("bfloat16", _triton.HALF, 20, 20, 8, 64, 64, 4, masked=False)
    assert gpu_blocks.chosen("forward", short) == {"forward": Blocks(32, 32, 8, 3)}
    monkeypatch.setattr(_triton, "capability", lambda: (8, 6))
    wide = gpu_blocks.Shape("float32", _triton.SIX, 512, 512, 8, 256, 256, 4, masked=True)
    cut = gpu_blocks.chosen("backward", wide)
    assert {"query", "key", "bias"} <= set(cut)
    for name, block in cut.items():
        assert min(block.queries, block.keys) >= 16
        if (block.queries, block.keys, block.stages) != (16, 16, 1):
            assert gpu_blocks.memory(name, block, wide) <= 99 * 1024, name


def test_a_plan_tells_why(cache, monkeypatch):
    monkeypatch.setattr(_triton, "device_kind", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(_triton, "capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_cudnn, "_version", lambda: 91900)
    arrays = [jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")] * 3

    def plan(**options):
        return probjax.attention_plan(*arrays, platform="cuda", **options)

    assert plan().implementation == "triton" and "nothing has been measured" in plan().reason
    tables.save(table(entry("cudnn")), cache / tables.file_name("NVIDIA Test 1"))
    forget()
    assert plan().implementation == "cudnn"
    assert "at 128 queries and 128 keys, the nearest measured on this GPU" in plan().reason
    assert plan().reason.endswith("backward: triton")
    capped = plan(logits_soft_cap=3.0)
    assert capped.implementation == "triton" and "cudnn is faster" in capped.reason
    assert capped.rejected["cudnn"] in capped.reason
    slopes = probjax.biases.ScoreFunction(lambda s, b, h, q, kv, a: s + a[h] * (q - kv), jnp.ones(4))
    assert "tiled" in plan(bias=slopes).reason
    assert "tiled" not in plan(bias=probjax.biases.ScoreFunction(lambda s, b, h, q, kv: s + q - kv)).reason


# ----------------------------------------------------------------------------------------------------------
# The tables that come with the package


PACKAGED = sorted(tables._PACKAGED.glob("*.json"))


def products(dtype):
    exact = {"float32": _triton.TF32, "float32_high": _triton.THREE, "float32_highest": _triton.SIX}
    return exact.get(dtype, _triton.HALF)


def test_there_is_one_for_the_h200():
    assert "attention_nvidia_h200.json" in [path.name for path in PACKAGED]


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.stem)
def test_packaged_tables(path, monkeypatch):
    found = tables.load(path)
    assert path.name == tables.file_name(found.device)
    assert found.entries
    assert {"jax", "driver", "date"} <= set(found.versions)
    keys = [e.key for e in found.entries]
    assert len(set(keys)) == len(keys)
    assert {"forward", "backward"} <= {k.kind for k in keys}
    for e in found.entries:
        k = e.key
        assert e.implementation in ("triton", "cudnn"), k
        assert e.kernels and set(e.kernels) <= set(NAMES[k.kind]), k
        if k.kind == "backward":
            assert "one" in e.kernels or {"query", "key"} <= set(e.kernels), k
        assert all(us > 0 for us in e.microseconds.values()), k
        assert k.head_size == _triton.ceil_power(k.head_size), k
        shape = gpu_blocks.Shape(
            k.dtype.split("_")[0], products(k.dtype), k.queries, k.keys, 1, k.head_size, k.head_size,
            k.pairs, k.masked,
        )  # fmt: skip
        assert shape.key(k.kind) == k
        for name, block in e.kernels.items():
            assert gpu_blocks.memory(name, block, shape) <= 227 * 1024, (k, name, block)
            if name == "one":
                assert block.keys >= k.keys, k
        assert found.lookup(k) == e
