from __future__ import annotations

import pytest

from tpcompile import config
from tpcompile.errors import ConfigError

PRESETS = {"wan21_smoke", "wan21_14b", "cpu_smoke", "llama_smoke", "llama8b", "wan14b", "wan14b_256", "wan14b_8"}


def test_the_presets_of_the_readme_are_there() -> None:
    assert set(config.preset_paths()) >= PRESETS


@pytest.mark.parametrize("name", sorted(config.preset_paths()))
def test_every_preset_loads_and_divides_by_eight(name: str) -> None:
    loaded = config.load(name)
    assert loaded.preset == name
    loaded.check_tp(8)
    assert 2 <= loaded.resized_seq_len < loaded.block.seq_len


def test_wan14b_has_the_published_sizes() -> None:
    block = config.load("wan14b").block
    assert (block.dim, block.num_heads, block.ffn_dim, block.seq_len) == (5120, 40, 13824, 4680)
    assert (block.dtype, block.head_dim) == ("bfloat16", 128)


def test_fast_paths_are_off_as_the_page_writes_it() -> None:
    assert config.load("cpu_smoke", ["compile.fast_paths=off"]).compile.fast_paths == "off"
    with pytest.raises(ConfigError, match="fast_paths=True"):
        config.load("cpu_smoke", ["compile.fast_paths=on"])


def test_sums_by_size_are_inductors() -> None:
    with pytest.raises(ConfigError, match=r"^all_reduce=by_size .*backend=inductor, .*eager$"):
        config.load("cpu_smoke", ["compile.all_reduce=by_size", "compile.backend=eager"])
    assert config.load("cpu_smoke", ["compile.all_reduce=by_size"]).compile.all_reduce == "by_size"


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"preset 'nope'; .*cpu_smoke"):
        config.load("nope")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("block.nope=1", r"unknown config key 'nope'; block has attention_backend, batch"),
        ("nope=1", r"unknown config key 'nope'; the top level has block, compile"),
        ("nope.deep=1", r"unknown config key 'nope'"),
        ("block.dim=0", r"block\.dim=0: .*greater than 0"),
        ("block.dim=abc", r"block\.dim='abc'"),
        ("block.dim=-64", r"block\.dim=-64"),
        ("block.dim=", r"block\.dim=None"),
        ("block.dim=60", "dim=60 is not divisible by num_heads=8"),
        ("block.num_kv_heads=3", "num_heads=8 is not divisible by num_kv_heads=3"),
        ("block.dim=72", "head size 9 is odd"),
        ("block.dtype=int8", r"block\.dtype='int8'"),
        ("block=3", "valid dictionary"),
        ("gate.error_ratio=1", r"gate\.error_ratio=1: .*greater than 1"),
        ("gate.store_timeout_s=0", r"gate\.store_timeout_s=0"),
        ("compile.backend=cudagraphs", r"compile\.backend='cudagraphs'"),
        ("compile.all_reduce=one_shot", r"compile\.all_reduce='one_shot'"),
        ("block.dim", "write key=value"),
        ("=3", "write key=value"),
        ("", "write key=value"),
        ("block.dim=[1", "the value is not YAML"),
        ("preset.deep=1", "'preset' is a value, not a section"),
        ("block.dim.deep=1", "'dim' is a value, not a section"),
    ],
)
def test_a_bad_override_gets_one_clear_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        config.load("cpu_smoke", [override])
    assert "\n" not in str(error.value)


def test_overrides_are_yaml_values_applied_in_order() -> None:
    overrides = ["block.seq_len=32", "block.seq_len=64", "compile.dynamic=true", "gate.tp_aware_ops=[ns::op]"]
    loaded = config.load("cpu_smoke", overrides)
    assert (loaded.block.seq_len, loaded.compile.dynamic) == (64, True)
    assert loaded.gate.tp_aware_ops == ("ns::op",)


def test_a_value_may_contain_an_equals_sign() -> None:
    allow = "gate.allow=[{layer: graph, contains: a=b, reason: a reason long enough}]"
    assert config.load("cpu_smoke", [allow]).gate.allow[0].contains == "a=b"


def test_collectives_cannot_be_allowed() -> None:
    with pytest.raises(ConfigError, match=r"gate\.allow"):
        config.load("cpu_smoke", ["gate.allow=[{layer: collectives, contains: abc, reason: a reason long enough}]"])


def test_fields_win_over_overrides() -> None:
    assert config.load("cpu_smoke", ["train=false"], train=True).train


def test_a_config_cannot_be_changed() -> None:
    loaded = config.load("cpu_smoke")
    with pytest.raises(ValueError, match="frozen"):
        loaded.train = True  # type: ignore[misc]


def test_equal_configs_have_equal_hashes_and_any_change_shows() -> None:
    base = config.load("cpu_smoke")
    assert base.sha256 == config.load("cpu_smoke").sha256
    assert base.sha256 != config.load("cpu_smoke", ["block.eps=1e-5"]).sha256


def test_a_tp_that_does_not_divide_names_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"tp=3 .*num_heads=16, num_kv_heads=8.*\[1, 2, 4, 8, 16\]"):
        config.load("llama_smoke").block.check_tp(3)


def test_more_ranks_than_kv_heads_share_them_when_the_heads_come_out_even() -> None:
    block = config.load("llama_smoke").block
    block.check_tp(16)
    assert [block.kv_replicas(tp) for tp in (1, 8, 16)] == [1, 1, 2]
    with pytest.raises(ConfigError, match=r"tp=12 .*num_heads=16, num_kv_heads=8, ffn_dim=128"):
        block.check_tp(12)


def test_uneven_heads_are_refused_unless_padding_is_declared() -> None:
    with pytest.raises(ConfigError, match='uneven="pad"'):
        config.load("cpu_smoke", ["block.num_heads=6", "block.num_kv_heads=6", "block.head_size=8"]).check_tp(4)
    padded = ["block.num_heads=6", "block.num_kv_heads=6", "block.head_size=8", "block.uneven=pad", "block.ffn_dim=90"]
    config.load("cpu_smoke", padded).check_tp(4)
    with pytest.raises(ConfigError, match=r"tp=8 .*num_heads=6"):
        config.load("cpu_smoke", padded).check_tp(8)
    with pytest.raises(ConfigError, match=r"^tp=8 ") as refused:  # more ranks than heads: padding is no help
        config.load("cpu_smoke", padded[:3]).check_tp(8)
    assert "pad" not in str(refused.value)


def test_sequence_parallel_lengths_must_divide_and_the_default_one_does() -> None:
    for preset in ("cpu_smoke", "wan14b", "wan14b_256", "wan14b_8"):
        loaded = config.load(preset, ["block.sequence_parallel=true"])
        loaded.check_tp(4)
        assert loaded.resized_seq_len < loaded.block.seq_len
    with pytest.raises(ConfigError, match=r"gate.resized_seq_len=17 .*block.seq_len=16"):
        config.load("cpu_smoke", ["gate.resized_seq_len=17"])
    with pytest.raises(ConfigError, match=r"tp=4 .*block.seq_len=18; sequence_parallel"):
        config.load("cpu_smoke", ["block.sequence_parallel=true", "block.seq_len=18"]).check_tp(4)


def test_padding_is_not_offered_where_it_refuses_too() -> None:
    with pytest.raises(ConfigError) as refused:  # more ranks than kv heads: these are replicated, not padded
        config.load("cpu_smoke", ["block.num_heads=6", "block.num_kv_heads=6", "block.head_size=8"]).check_tp(8)
    assert "tp=8" in str(refused.value) and "pad" not in str(refused.value)
