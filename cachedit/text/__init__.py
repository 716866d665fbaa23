"""Diffusion language models: one loop, one cache of keys and values, every strategy.

>>> for event in cachedit.text.stream(model, input_ids, "fast-dllm", gen_length=256, threshold=0.9):
...     show(event.sequences)
"""

from cachedit.text.decode import Event, generate, stream
from cachedit.text.probe import Probe, Trial, probe
from cachedit.text.record import TextRun, TextStep
from cachedit.text.state import DecodeState
from cachedit.text.strategy import StepPlan, TextStrategy

__all__ = [
    "DecodeState",
    "Event",
    "Probe",
    "StepPlan",
    "TextRun",
    "TextStep",
    "TextStrategy",
    "Trial",
    "generate",
    "probe",
    "stream",
]
