"""Environment variables: those that matter are listed, the risky ones are warnings."""

from __future__ import annotations

from tpcompile.doctor.finding import Level
from tpcompile.doctor.variables import variables


def test_what_changes_compilation_is_listed_and_the_rest_is_not() -> None:
    (listed,) = variables({"NCCL_DEBUG": "WARN", "TORCH_LOGS": "+dynamo", "HOME": "/root"})
    assert (listed.level, listed.says) == (Level.OK, "NCCL_DEBUG=WARN TORCH_LOGS=+dynamo")


def test_a_variable_that_turns_compilation_off_is_a_warning_unless_it_is_off() -> None:
    listed, warned = variables({"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "0"})
    assert (warned.level, "TORCH_COMPILE_DISABLE=1" in warned.says) == (Level.WARN, True)
    assert listed.says == "TORCHDYNAMO_DISABLE=0"
