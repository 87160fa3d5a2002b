"""What a report says, section by section, as text: the page and the Markdown are two ways to set
it, so that neither can say less than the other.
"""

from __future__ import annotations

from trtllm_kvmap.evaluate.report import sections_of_origin as origin
from trtllm_kvmap.evaluate.report import sections_of_results as results
from trtllm_kvmap.evaluate.report.report import Report
from trtllm_kvmap.evaluate.report.section import Section
from trtllm_kvmap.evaluate.report.section_of_time import time_by_step
from trtllm_kvmap.evaluate.report.sections_of_diagnosis import diagnosis


def sections(report: Report) -> list[Section]:
    """All sections that this report has something for, in the order they are read."""
    return [
        results.gates(report),
        results.arms(report),
        results.contexts(report),
        results.layers(report),
        *diagnosis(report),
        origin.layers_read(report),
        time_by_step(report),
        origin.the_map(report),
        origin.controls(report),
        origin.configuration(report),
    ]
