"""Utilisation and energy of the machine's GPUs from NVIDIA's management library, where the driver brings it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_LIBRARY = "libnvidia-ml.so.1"


class Usage(NamedTuple):
    """One GPU: the share of the last moments in which it computed, and in which its memory was used (1 is all), and
    joules since the driver was loaded. None is what the GPU does not tell."""

    busy: float | None
    memory_busy: float | None
    joules: float | None


class _Rates(ctypes.Structure):
    """nvmlUtilization_t: percent."""

    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class Nvml:
    """The library, opened. `opened` is None where there is none, or no GPU that it knows."""

    def __init__(self, library: Any) -> None:
        self._library, self._handles = library, []
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return
        for number in range(count.value):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)) == 0:
                self._handles.append((number, handle))

    @staticmethod
    def opened() -> Nvml | None:
        try:
            library = ctypes.CDLL(_LIBRARY)
            if library.nvmlInit_v2() != 0:
                return None
            nvml = Nvml(library)
        except (OSError, AttributeError):  # no driver, or one too old
            return None
        return nvml if nvml._handles else None

    def usage(self) -> dict[int, Usage]:
        """By the number of the GPU."""
        return {number: self._usage(handle) for number, handle in self._handles}

    def _usage(self, handle: ctypes.c_void_p) -> Usage:
        rates, energy = _Rates(), ctypes.c_ulonglong()
        rated = self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates)) == 0
        metered = self._library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) == 0
        return Usage(
            rates.gpu / 100 if rated else None, rates.memory / 100 if rated else None,
            energy.value / 1000 if metered else None,
        )  # fmt: skip


class GpuCollector:
    """Asks the GPUs at each scrape; what they do not tell is absent."""

    def __init__(self, nvml: Nvml, prefix: str) -> None:
        self._nvml, self._prefix = nvml, prefix

    def collect(self) -> list[Metric]:
        busy = GaugeMetricFamily(f"{self._prefix}:gpu_utilization", "Share of time in which a GPU computed.", labels=["gpu"])
        memory = GaugeMetricFamily(
            f"{self._prefix}:gpu_memory_utilization", "Share of time in which a GPU's memory was used.", labels=["gpu"]
        )
        joules = CounterMetricFamily(f"{self._prefix}:gpu_energy_joules", "Energy that a GPU took.", labels=["gpu"])
        for number, usage in self._nvml.usage().items():
            for family, value in ((busy, usage.busy), (memory, usage.memory_busy), (joules, usage.joules)):
                if value is not None:
                    family.add_metric([str(number)], value)
        return [family for family in (busy, memory, joules) if family.samples]


def register(registry: CollectorRegistry, prefix: str) -> bool:
    """Adds the GPUs' metrics; False where there are none."""
    nvml = Nvml.opened()
    if nvml is not None:
        registry.register(GpuCollector(nvml, prefix))
    return nvml is not None
