"""What a certificate proves, and which fast paths have none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fastpath import kernels
from tests.gpus import printed_by
from tpcompile.errors import ConfigError, FastPathError
from tpcompile.evidence.records import UserLine
from tpcompile.fastpath import certificate, registry
from tpcompile.fastpath.certificate import Certificate, Kind, Power, Survivor, Worst
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.registry import FastPath, registered, tp_region

SURVIVOR = Survivor(place="a.py:1", change="a -> b")
KNOWN = Survivor(place="a.py:2", change="b -> c", kind=Kind.EQUIVALENT, reason="the same bits")
FAR = Survivor(place="a.py:3", change="c -> d", kind=Kind.UNREACHED, reason="takes 2^31 elements")


def made(**changes: Any) -> Certificate:
    fields = {
        "name": "norm", "tp": "per_head", "source": "0123", "device": "interpreter", "machine": "x86_64",
        "torch": "2.13.0", "triton": "3.9.0", "command": "tpcompile certify norm", "tp_sizes": (1, 2),
        "dtypes": ("float32",), "num_cases": 4, "worst": Worst(ratio=1.2, case="5 tokens", tensor="output 0"),
        "power": Power(device="interpreter", num_mutations=40, survivors=(KNOWN,)),
    }  # fmt: skip
    return Certificate.model_validate(fields | changes)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FastPath:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    fast_path("norm", replaces=kernels.plain, tp="per_head")(kernels.launch)
    line = UserLine(file=str(tmp_path / "mine.py"), line=3, function="launch")
    return replace(registered()["norm"], line=line)


def source(path: FastPath) -> str:
    return path.source.sha256


def test_one_for_the_source_and_kind_of_device_certifies(path: FastPath) -> None:
    file = certificate.write(made(source=source(path)), path)
    assert file.name == "norm.interpreter.json" and certificate.read(file) == made(source=source(path))
    assert certificate.uncertified(path) == ""


def power(num_mutations: int, *survivors: Survivor) -> Power:
    return Power(device="interpreter", num_mutations=num_mutations, survivors=survivors)


WORST = Worst(ratio=2.6, case="5 tokens", tensor="output 0")


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"source": "4567"}, ["4567"]),
        ({"worst": WORST}, ["2.6", "5"]),
        ({"power": power(21, SURVIVOR, SURVIVOR, KNOWN)}, ["90.0%", "20", "90.0%", "20", "1", "95%"]),
        ({"power": power(21, FAR, FAR, KNOWN)}, ["90.0%", "20", "100.0%", "18", "1", "95%"]),
        ({"power": power(20, KNOWN)}, ["19", "20"]),
        ({"power": power(0)}, ["0", "20"]),
        ({"worst": WORST, "limit": 3.0}, ["2.6", "5"]),
    ],
    ids=["edited", "error", "power", "unreached", "few mutations", "no mutations", "limit of its own"],
)
def test_one_that_proves_less_does_not(path: FastPath, changes: dict[str, Any], numbers: list[str]) -> None:
    certificate.write(made(**{"source": source(path), **changes}), path)
    place, _, why = certificate.uncertified(path).partition("certificate ")
    assert place.startswith(f"fast path {path.name} at {path.line}: ") and numbers_in(why)[: len(numbers)] == numbers
    assert why.endswith("; run `tpcompile certify norm --import MODULE`")


def numbers_in(text: str) -> list[str]:
    return re.findall(r"\b[\d.]*\d%?", text)


def test_the_power_counts_what_changes_nothing_apart_from_what_no_case_reaches() -> None:
    found = power(104, *[KNOWN] * 4, *[FAR] * 3, SURVIVOR)
    assert (found.num_wrong, found.num_reached) == (100, 97)
    assert (found.caught, found.caught_of_reached) == (0.96, 96 / 97)
    assert made(power=found).refusal("0123") == ""


FEW = {"launches_kernels": False}
"""Of a launcher that only calls a library."""


@pytest.mark.parametrize(
    ("fields", "found", "numbers"),
    [
        (FEW, power(8), []),
        (FEW, power(8, FAR, FAR, KNOWN), []),
        (FEW, power(8, SURVIVOR), ["87.5%", "8", "87.5%", "8", "0", "20"]),
        (FEW, power(6, FAR, KNOWN), ["4", "5"]),
        (FEW, power(0), ["0", "5"]),
        (FEW, power(20, SURVIVOR), []),  # as many as others have: their rule
        (FEW, power(20, SURVIVOR, SURVIVOR), ["90.0%", "20", "90.0%", "20", "0", "95%"]),
        ({}, power(8), ["8", "20"]),
    ],
    ids=["all caught", "all reached", "one missed", "few reached", "none", "many", "many missed", "kernels"],
)
def test_a_library_call_may_have_few_mutations_if_the_cases_catch_all_that_they_reach(
    fields: dict[str, Any], found: Power, numbers: list[str]
) -> None:
    assert numbers_in(made(power=found, **fields).refusal("0123")) == numbers


def test_it_is_for_the_numbers_of_ranks_and_the_dtypes_that_its_cases_had(path: FastPath) -> None:
    certificate.write(made(source=source(path)), path)
    assert certificate.uncertified(path, tp=2, dtypes=["float32"]) == ""
    why = certificate.uncertified(path, tp=3)
    assert re.search(r"for 1, 2 ranks, .* 3;", why)
    assert why.endswith("`tpcompile certify norm --import MODULE --tp 1,2,3`")
    assert certificate.uncertified(path, tp=8).endswith("`tpcompile certify norm --import MODULE`")
    why = certificate.uncertified(path, tp=2, dtypes=["float32", "float16"])
    assert re.search(r"for float32, .* float16;", why)
    declared = replace(path, dtypes=(torch.float32, torch.bfloat16))
    assert re.search(r"for float32, .* bfloat16;", certificate.uncertified(declared))


def test_on_a_gpu_one_from_a_gpu_is_asked(path: FastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(f"no certificate; .*`tpcompile certify {path.name} ", certificate.uncertified(path))
    certificate.write(made(source=source(path)), path)
    monkeypatch.setattr(certificate, "device_kind", lambda: "sm100")
    assert re.search(f"no certificate .*GPU; .*`tpcompile certify {path.name} ", certificate.uncertified(path))
    certificate.write(made(source=source(path), device="sm90"), path)
    assert certificate.uncertified(path) == ""


def test_what_cases_see_is_known_from_a_machine_without_gpu(path: FastPath) -> None:
    certificate.write(made(source=source(path), device="sm90"), path)
    assert certificate.power_of(path) is None
    certificate.write(made(source="4567"), path)
    assert certificate.power_of(path) is None
    certificate.write(made(source=source(path)), path)
    assert certificate.power_of(path) == made().power


def test_one_of_the_older_hash_is_refused_with_what_to_do(path: FastPath) -> None:
    file = certificate.write(made(source=source(path)), path)
    old = json.loads(file.read_text()) | {"schema_version": 2}
    del old["libraries"], old["binaries"]  # as it was written then
    file.write_text(json.dumps(old))
    why = certificate.uncertified(path)
    assert re.search(r"schema 2, .* schema 3;", why) and why.endswith("`tpcompile certify norm --import MODULE`")
    assert certificate.power_of(path) is None


def with_source(path: FastPath, **changes: Any) -> FastPath:
    changed = replace(path)
    changed.__dict__["source"] = replace(path.source, **changes)
    return changed


def test_it_is_for_the_libraries_that_it_was_made_with(path: FastPath) -> None:
    certificate.write(made(source=source(path), libraries={"einops": "0.7.0"}), path)
    assert certificate.uncertified(with_source(path, libraries={"einops": "0.7.0"})) == ""
    why = certificate.uncertified(with_source(path, libraries={"einops": "0.8.0"}))
    assert re.search(r"einops 0\.7\.0, .* 0\.8\.0;", why)
    why = certificate.uncertified(with_source(path, libraries={"einops": "0.7.0", "other": "1"}))
    assert re.search(r"other no .*, .* 1;", why)


def test_it_is_for_the_versions_of_torch_that_tpcompile_is_tested_with(path: FastPath) -> None:
    certificate.write(made(source=source(path), torch="2.9.1"), path)
    assert re.search(rf"torch 2\.9\.1, .* {re.escape(torch.__version__)};", certificate.uncertified(path))
    certificate.write(made(source=source(path), torch=torch.__version__), path)
    assert certificate.uncertified(path) == ""
    certificate.write(made(source=source(path), torch="2.12.0"), path)
    assert certificate.uncertified(path) == ""


BINARIES = {"kernels.norm_kernel 01": "ptx code", "kernels.scale 02": "ptx code"}


@pytest.mark.parametrize(
    ("here", "device", "triton", "why"),
    [
        (BINARIES, "sm90", "3.9.0", ""),
        ({"kernels.norm_kernel 03": "other code"}, "sm90", "3.9.0", ""),
        ({}, "sm90", "3.9.0", ""),
        ({"kernels.scale 02": "ptx other"}, "sm90", "3.10.0", ""),
        ({"kernels.scale 02": "ptx other"}, "sm100", "3.9.0", ""),
        (
            {"kernels.scale 02": "ptx other"},
            "sm90",
            "3.9.0",
            "its certificate is for different code of kernels.scale: PTX and machine code ptx code, and this is ptx",
        ),
    ],
    ids=["the same", "other arguments", "nothing compiled", "other Triton", "other GPU", "other code"],
)
def test_it_is_for_the_code_that_was_compiled_where_the_same_is_compiled(
    path: FastPath, monkeypatch: pytest.MonkeyPatch, here: dict[str, str], device: str, triton: str, why: str
) -> None:
    certificate.write(made(source=source(path), device="sm90", binaries=BINARIES), path)
    monkeypatch.setattr(certificate, "device_kind", lambda: device)
    monkeypatch.setattr(certificate, "_triton", lambda: triton)
    monkeypatch.setattr(certificate, "binaries_of", lambda path: here)
    refusal = certificate.uncertified(path)
    assert why in refusal and bool(why) == bool(refusal)


def test_what_its_kernels_were_compiled_to_is_found_by_their_names(path: FastPath) -> None:
    variant = SimpleNamespace(
        asm={"ptx": ".visible", "cubin": b""},
        metadata=SimpleNamespace(target=SimpleNamespace(arch=90)),
        src=SimpleNamespace(signature={}, constants={}, attrs={}),
    )
    assert certificate.binaries_of(path) == {}
    fakes = {"kernels.scale": SimpleNamespace(device_caches={0: ({"key": variant},)})}
    ((name, code),) = certificate.binaries_of(with_source(path, compiled=fakes)).items()
    assert name.startswith("kernels.scale ") and len(code.split()) == 2


@pytest.mark.gpu(1)
def test_on_a_gpu_the_code_of_a_launch_is_recorded_and_checked(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
import torch
from tests.fastpath import kernels
from tests.fastpath.test_certificate import made, source
from tpcompile.fastpath import certificate, fast_path, registered

certificate.certificate_file = lambda path, device: Path({str(tmp_path)!r}, f"{{path.name}}.{{device}}.json")
fast_path("norm", replaces=kernels.plain, tp="per_head")(kernels.launch)
path = registered()["norm"]
kernels.launch(torch.ones(4, device="cuda"))
found = certificate.binaries_of(path)
print({{name.partition(" ")[0] for name in found}})
here = {{"source": source(path), "device": certificate.device_kind(), "triton": certificate._triton()}}
for code in (found, dict.fromkeys(found, "ptx other")):
    certificate.write(made(**here, binaries=code), path)
    print(certificate.uncertified(path))
"""
    names, same, other = printed_by(program, tmp_path)
    assert (names, same) == ("{'tests.fastpath.kernels.norm_kernel'}", "")
    assert "tests.fastpath.kernels.norm_kernel: PTX" in other


def test_a_source_that_does_not_say_what_runs_is_refused(path: FastPath) -> None:
    why = "launch reads a file whose name is computed"
    certificate.write(made(source=source(path)), path)
    assert certificate.uncertified(path) == ""
    assert certificate.uncertified(with_source(path, refused=why)).endswith(f": {why}")


def test_a_damaged_one_is_one_line(path: FastPath) -> None:
    file = certificate.write(made(), path)
    file.write_text("{}")
    with pytest.raises(ConfigError, match=rf"{re.escape(str(file))}.* name: Field required") as raised:
        certificate.uncertified(path)
    assert "\n" not in str(raised.value)


def test_in_eager_it_runs_on_shards_only_with_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(certificate, "certificate_file", lambda path, device: tmp_path / f"{path.name}.{device}.json")
    call = fast_path("norm", replaces=kernels.plain, tp="per_head")(kernels.launch)
    with (
        tp_region(2),
        pytest.raises(FastPathError, match=r"certify norm .* 2 ranks; call plain "),
    ):
        call(torch.ones(4))
    certificate.write(made(source=source(registered()["norm"])), registered()["norm"])
    with tp_region(2), pytest.raises(FastPathError, match="TRITON_INTERPRET=1"):  # the next check: it may run there
        call(torch.ones(4))
    with tp_region(4), pytest.raises(FastPathError, match=r"for 1, 2 ranks, .* 4;"):
        call(torch.ones(4))
    with tp_region(2), pytest.raises(FastPathError, match=r"for float32, .* float16;"):
        call(torch.ones(4).half())
