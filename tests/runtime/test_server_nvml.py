"""Metrics of GPUs over a library of the test's own, which fills in what it is given pointers to."""

import ctypes

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aotc.runtime.server import nvml

UNSUPPORTED = 3


class Library:
    """Two GPUs; the second one tells no energy, and fails wholly once it is `lost`."""

    lost = False

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        handle._obj.value = 100 + number
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle, rates):
        if handle.value == 101 and self.lost:
            return 15
        rates._obj.gpu, rates._obj.memory = handle.value - 60, 7
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, energy):
        if handle.value == 101:
            return UNSUPPORTED
        energy._obj.value = 2**33 + 500  # mJ
        return 0


@pytest.fixture
def library(monkeypatch):
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def lines(registry):
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_what_gpus_tell(library):
    registry = CollectorRegistry()
    assert nvml.register(registry, "aotc")
    assert lines(registry) == [
        'aotc:gpu_utilization{gpu="0"} 0.4', 'aotc:gpu_utilization{gpu="1"} 0.41',
        'aotc:gpu_memory_utilization{gpu="0"} 0.07', 'aotc:gpu_memory_utilization{gpu="1"} 0.07',
        'aotc:gpu_energy_joules_total{gpu="0"} 8.589935092e+06',
    ]  # fmt: skip
    library.lost = True
    assert not any('gpu="1"' in line for line in lines(registry))


@pytest.mark.parametrize("fault", ["missing", "old", "init", "count", "none"])
def test_without_gpus_there_are_no_metrics(library, monkeypatch, fault):
    if fault == "missing":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    elif fault == "old":
        monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    else:
        name = {"init": "nvmlInit_v2", "count": "nvmlDeviceGetCount_v2", "none": "nvmlDeviceGetHandleByIndex_v2"}[fault]
        monkeypatch.setattr(Library, name, lambda *_: 9)
    registry = CollectorRegistry()
    assert not nvml.register(registry, "aotc") and lines(registry) == []
