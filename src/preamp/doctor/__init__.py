# SPDX-License-Identifier: BSD-3-Clause
"""Watches a training script run and reports usage bugs of mixed precision.

A rule is data plus a small detector class in ``rules/``, and a row in ``catalogue.py``.
"""

from preamp.doctor.catalogue import RULES as RULES
from preamp.doctor.catalogue import select_rules as select_rules
from preamp.doctor.examination import Examination as Examination
from preamp.doctor.rule import Finding as Finding
from preamp.doctor.rule import Place as Place
from preamp.doctor.rule import Rule as Rule
from preamp.doctor.rule import Severity as Severity
from preamp.doctor.text import explain_text as explain_text
from preamp.doctor.text import list_text as list_text
from preamp.doctor.text import report_json as report_json
from preamp.doctor.text import report_text as report_text
from preamp.doctor.watch import EnoughSteps as EnoughSteps
