"""The description of the machine."""

from pathlib import Path

from slipstream.bench import machine


def test_machine_names_its_processor_cores_and_memory():
    about = machine.describe_machine()
    assert about["cpu"]
    assert about["cores"] >= 1
    assert about["memory_bytes"] > 2**28


def test_read_bandwidth_is_a_plausible_rate(monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 2**24)
    machine.read_bandwidth.cache_clear()
    assert 1e8 < machine.read_bandwidth(1) < 1e13
    machine.read_bandwidth.cache_clear()


def test_versions_leave_out_what_is_not_installed():
    found = machine.versions("numpy", "no-such-package")
    assert {"python", "numpy"} <= set(found)
    assert "no-such-package" not in found


def test_commit_is_empty_outside_a_repository(tmp_path):
    assert machine.git_commit(tmp_path) == ""
    assert machine.git_commit(Path(__file__).parent)
