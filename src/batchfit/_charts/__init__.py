"""Charts and pages of results, drawn as text and as SVG.

Pure. `figures.py` chooses marks and lines, `svg.py` and `text_charts.py` draw them. `memory_page.py`
(explain), `throughput_page.py` (profile) and `plan_page.py`, `check_page.py`, `oom_page.py` (why) lay out
terminal screens; HTML pages are made in `_report/`.
"""
