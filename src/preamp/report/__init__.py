# SPDX-License-Identifier: BSD-3-Clause
"""A report on the numbers of a run: records in, one HTML page out."""

from preamp.report.page import render as render
from preamp.report.page import write as write
