from pathlib import Path
import pytest
from tests.forked import torchrun


@pytest.mark.parametrize("how", ["check", "sentinel"])
@pytest.mark.parametrize("fault", ["none", "stage", "rank", "late"])
def test_try(how, fault, tmp_path):
    e = torchrun([Path(__file__).with_name("train.py"), how, fault], nproc=8, cwd=tmp_path)
    print("CODE", e.returncode)
    print(e.stdout)
    print("ERR")
    print(e.stderr[-9000:])
